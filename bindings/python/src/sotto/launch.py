"""What a launcher says about this process in its environment."""

from __future__ import annotations

import socket
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

NO_LIMIT_S = 10 * 366 * 86400.0  # 10 years, which torch's time limits can express


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
        if rank in environ and size in environ and not _inherited(name, environ):
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


def torchrun_serves_a_store(environ: Mapping[str, str]) -> bool:
    """Whether ranks can meet over the store of torchrun's agent, at MASTER_ADDR and MASTER_PORT."""
    found = detect(environ)
    return (
        found is not None
        and found.launcher == "torchrun"
        and found.world_size > 1
        and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and bool(environ.get("MASTER_ADDR"))
        and environ.get("MASTER_PORT", "").isdecimal()
        and not environ.get("SOTTO_RENDEZVOUS")
    )


def default_timeout(environ: Mapping[str, str]) -> float:
    """Seconds of SOTTO_TIMEOUT_US; 0 or none: 300; -1: no limit."""
    if environ.get("SOTTO_TIMEOUT_US") == "-1":
        return NO_LIMIT_S
    given = environ.get("SOTTO_TIMEOUT_US") or "0"
    return (_number({"SOTTO_TIMEOUT_US": given}, "SOTTO_TIMEOUT_US", 0, 2**63 // 1000) or 3e8) / 1e6


def looked_for() -> str:
    """For errors: every pair of variables, and what to do without a launcher."""
    pairs = "; ".join(f"{rank} and {size} ({name})" for name, rank, size in LAUNCHERS)
    return (
        f"no launcher was found. Looked for: {pairs}. Start the ranks with one of these, or pass "
        "rank and world_size with init_method='tcp://HOST:PORT' (an address of rank 0), "
        "unique_id or all_gather; world_size=1 makes a group of this process alone"
    )


def _inherited(launcher: str, environ: Mapping[str, str]) -> bool:
    """mpiexec of MPICH in a job of Open MPI, whose variables are there too: it gives ranks a
    connection, which Open MPI closes in what it starts."""
    if launcher != "Open MPI" or not {"PMI_RANK", "PMI_SIZE", "PMI_FD"} <= environ.keys():
        return False
    try:
        number = int(environ["PMI_FD"])
        with socket.fromfd(number, socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.getpeername()
    except (OSError, ValueError):
        return False
    return True


def _number(environ: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = environ[name]
    if not text.isdecimal() or not low <= int(text) <= high:
        raise InvalidArgumentError(
            f'environment variable {name} is "{text}"; allowed: a whole number {low} to {high}'
        )
    return int(text)
