"""Which ranks there are and which of them average: launcher, torch's process group, comm."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import group
from ..comm import Comm
from ..errors import InvalidArgumentError, InvalidStateError
from ..launch import detect
from ..optim import config_report
from ..torch.groups import comm_of_process_group

DEFAULT_PORT = 29500  # deepspeed.constants.TORCH_DISTRIBUTED_DEFAULT_PORT
DEFAULT_TIMEOUT = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "30")))
# Where launchers say which process of its machine this is, and how many the machine has.
LOCAL_RANKS = (
    *("LOCAL_RANK", "SOTTO_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "SLURM_LOCALID",
)
LOCAL_SIZES = (
    *("LOCAL_WORLD_SIZE", "SOTTO_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    "SLURM_NTASKS_PER_NODE",
)


def transport_in(config: Any) -> str | None:
    """sotto.transport of a configuration that is a dict; None: it names none.

    Errors: InvalidArgumentError (no transport's name).
    """
    section = config.get("sotto") if isinstance(config, Mapping) else None
    if not isinstance(section, Mapping) or section.get("transport") is None:
        return None
    report = config_report({"sotto": {"transport": section["transport"]}})
    return str(report["sotto"]["transport"])


def meet(
    comm: Comm | None, mpu: Any, timeout: float | None = None, transport: str | None = None
) -> Comm:
    """The comm of the data-parallel ranks; made, collectively, if there is none.

    transport: of the comm, if it is made; None: SOTTO_TRANSPORT.

    In this order: comm; mpu.get_data_parallel_group(), a process group of torch; the default comm;
    the ranks of torch's process group, if it is initialised; those that the launcher started
    (torchrun, sotto-run, Open MPI, MPICH, Slurm). The last two become the default comm.
    Errors: InvalidArgumentError (no launcher either: lists what was looked for).
    """
    if comm is None and mpu is not None:
        data_parallel = mpu.get_data_parallel_group()
        return comm_of_process_group(data_parallel, timeout=timeout, transport=transport)
    if comm is None and not has_comm():
        return group.init_process_group(timeout=timeout, transport=transport)
    return group.meet(comm, timeout)


def joined() -> bool:
    """Whether torch's process group is there."""
    return bool(dist.is_available() and dist.is_initialized())


def has_comm() -> bool:
    """Whether there is a default comm."""
    try:
        group.default_comm()
    except InvalidStateError:
        return False
    return True


def among_all(comm: Comm, mpu: Any) -> tuple[int, int]:
    """Rank and number of ranks; with an mpu, whose data-parallel ranks are some, those of torch."""
    if mpu is not None and joined():
        return dist.get_rank(), dist.get_world_size()
    return comm.rank, comm.size


def local_rank(rank: int = 0) -> int:
    """Which process of its machine this is, as the launcher says; else its rank."""
    found = [os.environ[name] for name in LOCAL_RANKS if name in os.environ]
    return int(found[0]) if found else rank


def _complete_environment(environ: Any, port: int) -> None:
    """MASTER_ADDR and MASTER_PORT where the launcher has none and they follow.

    All ranks on one machine meet on loopback; with MASTER_ADDR alone `port` takes MASTER_PORT's
    place.
    """
    launch = detect(environ)
    if launch is None or "SOTTO_RENDEZVOUS" in environ:
        return
    sizes = [environ[name] for name in LOCAL_SIZES if name in environ]
    if "MASTER_ADDR" not in environ and sizes and sizes[0] == str(launch.world_size):
        environ["MASTER_ADDR"] = "127.0.0.1"
    if "MASTER_ADDR" in environ:
        environ.setdefault("MASTER_PORT", str(port))


def _by_torch(environ: Mapping[str, str]) -> bool:
    """Whether torch finds everything in the environment by itself."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in environ for name in names) and "SOTTO_RANK" not in environ


def _host_of_rank_0(comm: Comm) -> str:
    """The name of its machine."""
    name = torch.zeros(256, dtype=torch.uint8)
    if comm.rank == 0:
        text = socket.gethostname().encode()
        name[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    comm.broadcast(name).wait()
    return bytes(name.tolist()).rstrip(b"\0").decode()


def _store_of(comm: Comm, timeout: timedelta) -> Any:
    """A store on rank 0, where the ranks of a comm can reach it."""
    place = os.environ.get("SOTTO_RENDEZVOUS", "").removeprefix("tcp://")
    host = os.environ.get("MASTER_ADDR") or place.rpartition(":")[0].strip("[]")
    host = host or ("127.0.0.1" if comm.size == 1 else _host_of_rank_0(comm))
    port = torch.zeros(1, dtype=torch.int64)
    store: Any = None
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    if comm.rank == 0:
        store = make(host, 0, comm.size, is_master=True, timeout=timeout, wait_for_workers=False)
        port[0] = store.port
    comm.broadcast(port).wait()
    if store is None:
        store = make(host, int(port), comm.size, is_master=False, timeout=timeout)
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", str(int(port)))
    return store


def join(
    backend: str,
    *,
    port: int = DEFAULT_PORT,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    discover: bool = True,
    transport: str | None = None,
) -> None:
    """Makes torch's process group, and the default comm of the same ranks. Collective.

    Afterwards RANK, WORLD_SIZE and LOCAL_RANK are in the environment, whichever the launcher was.
    discover: whether other launchers than torchrun are looked for. transport: as for meet().
    """
    if not dist.is_backend_available(backend):
        allowed = [name for name in dist.Backend.backend_list if dist.is_backend_available(name)]
        raise InvalidArgumentError(
            f"dist_backend is {backend!r}, which PyTorch has not; allowed: {', '.join(allowed)}"
        )
    limit = DEFAULT_TIMEOUT if timeout is None else timeout
    seconds = None if timeout is None else timeout.total_seconds()
    if discover and init_method is None:
        _complete_environment(os.environ, port)
    if init_method is not None or (_by_torch(os.environ) or not discover):
        dist.init_process_group(
            backend, init_method=init_method, timeout=limit, rank=rank, world_size=world_size
        )
    else:
        comm = meet(None, None, seconds, transport)
        dist.init_process_group(
            backend,
            store=_store_of(comm, limit),
            rank=comm.rank,
            world_size=comm.size,
            timeout=limit,
        )
    if not has_comm():
        group.init_process_group(timeout=seconds, transport=transport)
    os.environ.setdefault("RANK", str(dist.get_rank()))
    os.environ.setdefault("WORLD_SIZE", str(dist.get_world_size()))
    os.environ.setdefault("LOCAL_RANK", str(local_rank(dist.get_rank())))
