"""The default comm, and how ranks meet in it."""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import Any

from ._frameworks import has_process_group, meeting
from ._handle import Context, HandleOwner, living
from .comm import Comm
from .create import AllGather, UniqueId, create_comm
from .errors import InvalidStateError, SottoError
from .launch import detect

_default: Comm | None = None


def init_process_group(
    init_method: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    unique_id: UniqueId | bytes | None = None,
    all_gather: AllGather | None = None,
    listen: str | None = None,
    transport: str | None = None,
    timeout: float | None = None,
    cpu_threads: int = 0,
    max_ops: int = 0,
) -> Comm:
    """Joins the other ranks; every rank calls it. The comm is also the default one from then on.

    close() it at the end. At the end of the process it is closed if nothing is in flight then.

    Explicit arguments win. Without any of the first five, where torch.distributed is initialised,
    its ranks meet over its store: see sotto.torch.comm_of_process_group(). Else, where torchrun has
    started the ranks and they have imported sotto.torch, they meet over the store of its agent.
    Else what is missing comes from the environment: rank and world_size from SOTTO_RANK and
    SOTTO_WORLD_SIZE (sotto-run), or torchrun's, Open MPI's, MPICH's or Slurm's variables; the place
    to meet from SOTTO_RENDEZVOUS, or MASTER_ADDR and MASTER_PORT (one port higher, which has to be
    free on rank 0), or, where rank and world_size are not given either, the launcher itself: Open
    MPI, MPICH or Slurm. init_method="env://": the environment alone.

    init_method: "tcp://HOST:PORT", an address of rank 0, which listens there; "env://" or None: the
                 environment's. unique_id, all_gather: in place of it
    unique_id:   UniqueId on the rank that made it, its 128 bytes elsewhere
    all_gather:  a function that gathers bytes over another library: takes this rank's, returns
                 those of all ranks in rank order (mpi4py: MPI.COMM_WORLD.allgather)
    listen:      where this rank accepts connections: an address, an interface or "any"; None:
                 SOTTO_LISTEN, else where the rendezvous leads
    transport:   "auto" (None: SOTTO_TRANSPORT), "tcp" or another one that `sotto info` lists
    timeout:     seconds; of the set-up, and default of all operations; None: SOTTO_TIMEOUT_US,
                 300 s
    cpu_threads: for kernels; 0: SOTTO_CPU_THREADS, else cores per rank
    max_ops:     operations in flight at most; 0: 1024
    Errors: InvalidArgumentError (nothing found: lists what was looked for; ranks that do not fit),
    OperationTimeoutError (names who is missing), TransportError (address not reachable),
    InvalidStateError (there is a default comm already; fork), LibraryLoadError.
    """
    global _default
    if _default is not None and not _default.closed and _default._pid == os.getpid():
        raise InvalidStateError(
            "there is a default comm already: close() it first, or use create_comm()"
        )
    options: dict[str, Any] = {
        "listen": listen,
        "transport": transport,
        "timeout": timeout,
        "cpu_threads": cpu_threads,
        "max_ops": max_ops,
    }
    given: dict[str, Any] = {
        "init_method": init_method,
        "rank": rank,
        "world_size": world_size,
        "unique_id": unique_id,
        "all_gather": all_gather,
    }
    explicit = any(value is not None for value in given.values())
    make = None if explicit else meeting(os.environ)
    _default = create_comm(**given, **options) if make is None else make(**options)
    return _default


def default_comm() -> Comm:
    """What init_process_group() made last. Errors: InvalidStateError (nothing, or closed)."""
    if _default is None or _default.closed:
        raise InvalidStateError(
            "there is no default comm: call sotto.init_process_group() first, or pass comm="
        )
    _default._check_process()
    return _default


def meet(comm: Comm | None, timeout: float | None = None) -> Comm:
    """comm, or the default comm, or a new default comm from init_process_group().

    The last is collective. Errors: InvalidStateError (no process group of torch and no launcher
    either), those of init_process_group().
    """
    if comm is not None:
        return comm
    if _default is not None and not _default.closed and _default._pid == os.getpid():
        return _default
    if not has_process_group() and detect(os.environ) is None:
        return default_comm()  # which says what to do
    return init_process_group(timeout=timeout)


@atexit.register
def _leave() -> None:
    """A process that just ends may cut off what the other ranks have not read yet, and is lost to
    ranks that go on in other comms. Codecs and optimizers keep connections open, so they go too."""
    mine = [owner for owner in living if owner._pid == os.getpid() and not owner.closed]
    with contextlib.suppress(SottoError):
        if not all(owner._idle() for owner in mine):
            return
    for owner in sorted(mine, key=lambda owner: isinstance(owner, Comm)):
        with contextlib.suppress(SottoError):
            if isinstance(owner, Comm):
                owner.close()
            elif not isinstance(owner, Context):
                HandleOwner.close(owner)  # not what a class does besides
