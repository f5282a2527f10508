"""What a launcher says about this process in its environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .errors import InvalidArgumentError

# The order of the C library: the first pair that is complete counts.
LAUNCHERS = (
    ("sotto-run, or by hand", "SOTTO_RANK", "SOTTO_WORLD_SIZE"),
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH (PMI)", "PMI_RANK", "PMI_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
)


class Launch(NamedTuple):
    """Who started this process, and as which of how many."""

    launcher: str
    rank: int
    world_size: int


def detect(environ: Mapping[str, str]) -> Launch | None:
    """The launcher of this process, or None.

    Errors: InvalidArgumentError (a variable that is no number, a rank out of range).
    """
    for name, rank, size in LAUNCHERS:
        if rank in environ and size in environ:
            world = _number(environ, size, 1, 65535)
            return Launch(name, _number(environ, rank, 0, world - 1), world)
    return None


def rendezvous(environ: Mapping[str, str]) -> str | None:
    """Where ranks meet: SOTTO_RENDEZVOUS, or one port above torchrun's."""
    if environ.get("SOTTO_RENDEZVOUS"):
        return environ["SOTTO_RENDEZVOUS"]
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not host or not port:
        return None
    shown = f"[{host}]" if ":" in host else host
    return f"tcp://{shown}:{_number(environ, 'MASTER_PORT', 1, 65534) + 1}"


def looked_for() -> str:
    """For errors: every pair of variables, and what to do without a launcher."""
    pairs = "; ".join(f"{rank} and {size} ({name})" for name, rank, size in LAUNCHERS)
    return (
        f"no launcher was found. Looked for: {pairs}. Start the ranks with one of these, or pass "
        "rank and world_size with init_method='tcp://HOST:PORT' (an address of rank 0), "
        "unique_id or all_gather; world_size=1 makes a group of this process alone"
    )


def _number(environ: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = environ[name]
    if not text.isdecimal() or not low <= int(text) <= high:
        raise InvalidArgumentError(
            f'environment variable {name} is "{text}"; allowed: a whole number {low} to {high}'
        )
    return int(text)
