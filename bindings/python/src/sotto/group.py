"""Setting a group up."""

from __future__ import annotations

import atexit
import contextlib
import ctypes as c
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import _abi as abi
from ._handle import HandleOwner
from ._lib import Library, interruptible, library, microseconds
from .comm import Comm
from .errors import InvalidArgumentError, InvalidStateError, SottoError
from .launch import Launch, detect, looked_for, rendezvous, torchrun_serves_a_store

AllGather = Callable[[bytes], Sequence[bytes]]

_environment = threading.Lock()
_user: int | None = None  # the process that has made contexts here
_default: Comm | None = None


@contextlib.contextmanager
def _variables(given: Mapping[str, str | None]) -> Iterator[None]:
    """Environment variables for the block; None leaves one as it is."""
    with _environment:
        new = {name: value for name, value in given.items() if value is not None}
        before = {name: os.environ.get(name) for name in new}
        os.environ.update(new)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _create_context(
    lib: Library, cpu_threads: int, max_ops: int, **variables: str | None
) -> c.c_void_p:
    """A context. The library reads its variables here, so some can be set for so long."""
    global _user
    if _user not in (None, os.getpid()):
        raise InvalidStateError(
            f"this process was forked from {_user}, which had used sotto; start ranks and workers "
            'by exec, sotto-run or multiprocessing\'s "spawn", or fork before first using sotto'
        )
    config = abi.ContextConfig(cpu_threads=cpu_threads, max_ops=max_ops)
    handle = c.c_void_p()
    with _variables(variables):
        lib.call("sotto_context_create_v", abi.SOTTO_ABI_VERSION, c.byref(config), c.byref(handle))
    _user = os.getpid()
    return handle


class UniqueId(HandleOwner):
    """An id by which the ranks of one comm find each other without a launcher.

    Make it on one rank, carry ``bytes(unique_id)``, 128 bytes, to the others by any means, and pass
    it as ``unique_id`` on every rank: the object itself on the rank that made it, which listens for
    the others. One id makes one comm; close the id afterwards. Listens on loopback unless
    SOTTO_LISTEN says otherwise.
    Errors: TransportError (cannot listen).
    """

    _noun = "unique id"
    _destroy = "sotto_context_destroy"

    def __init__(self, *, cpu_threads: int = 0, max_ops: int = 0) -> None:
        lib = library()
        super().__init__(lib, _create_context(lib, cpu_threads, max_ops))
        self._id = abi.UniqueId()
        try:
            lib.call("sotto_unique_id_create", self._handle, c.byref(self._id))
        except BaseException:
            self.close()
            raise

    def __bytes__(self) -> bytes:
        return bytes(self._id.bytes)


def _all_gather_callback(all_gather: AllGather, failure: list[BaseException]) -> Any:
    """The C callback; what Python raises in it is kept for the caller."""

    def run(user: int | None, data: int, count: int, out: int) -> int:
        try:
            parts = [bytes(part) for part in all_gather(c.string_at(data, count))]
            wrong = [len(part) for part in parts if len(part) != count]
            if wrong:
                raise InvalidArgumentError(
                    f"all_gather returned parts of {wrong} bytes; each rank gave {count}"
                )
            c.memmove(out, b"".join(parts), count * len(parts))
            return 0
        except BaseException as error:  # must not pass through the library
            failure.append(error)
            return 1

    return abi.AllGatherFn(run)


def _resolve(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Explicit numbers win; what is missing is the launcher's."""
    found: Launch | None = detect(os.environ)
    if world_size is None:
        if found is None:
            raise InvalidArgumentError(looked_for())
        world_size = found.world_size
    if rank is None:
        if world_size == 1:
            return 0, 1
        if found is None:
            raise InvalidArgumentError(
                f"world_size is {world_size}, but rank is not given and " + looked_for()
            )
        rank = found.rank
    if world_size < 1 or not 0 <= rank < world_size:
        raise InvalidArgumentError(
            f"rank is {rank} of {world_size}; allowed: world_size from 1, rank 0 to world_size - 1"
        )
    return rank, world_size


def create_comm(
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
    """As :func:`init_process_group`, without making the comm the default one.

    For several groups in one process, and for ranks that are threads.
    """
    ways = [way for way in (init_method, unique_id, all_gather) if way is not None]
    if len(ways) > 1:
        raise InvalidArgumentError(
            "more than one of init_method, unique_id and all_gather is given; ranks meet by one"
        )
    if init_method is not None and init_method != "env://" and not init_method.startswith("tcp://"):
        raise InvalidArgumentError(
            f"init_method is {init_method!r}; allowed: 'tcp://HOST:PORT', 'env://' or None"
        )
    rank, world_size = _resolve(rank, world_size)
    lib = library()
    config = abi.CommConfig(rank=rank, size=world_size, timeout_us=microseconds(timeout))
    if transport is not None:
        config.transport = transport.encode()
    address = None
    if world_size > 1 and (not ways or init_method is not None):
        address = rendezvous(os.environ) if init_method in (None, "env://") else init_method
        if address is None:
            raise InvalidArgumentError(
                f"rank {rank} of {world_size}: it is not known where the ranks meet. Looked for: "
                "init_method='tcp://HOST:PORT', unique_id, all_gather, SOTTO_RENDEZVOUS, "
                "MASTER_ADDR with MASTER_PORT"
            )
    shared = None
    if unique_id is not None:
        text = bytes(unique_id)
        if len(text) != abi.SOTTO_UNIQUE_ID_BYTES:
            raise InvalidArgumentError(
                f"unique_id has {len(text)} bytes; it needs {abi.SOTTO_UNIQUE_ID_BYTES}"
            )
        struct = abi.UniqueId.from_buffer_copy(text)
        config.id = c.pointer(struct)
        shared = unique_id._handle if isinstance(unique_id, UniqueId) else None
    context = shared or _create_context(
        lib, cpu_threads, max_ops, SOTTO_RENDEZVOUS=address, SOTTO_LISTEN=listen
    )
    try:
        return _create(lib, context, config, all_gather, own_context=shared is None)
    except KeyboardInterrupt:
        if isinstance(unique_id, UniqueId):
            unique_id._value = None  # the call that goes on without us still needs it
        raise


def _create(
    lib: Library,
    context: c.c_void_p,
    config: abi.CommConfig,
    all_gather: AllGather | None,
    *,
    own_context: bool,
) -> Comm:
    out = c.c_void_p()

    def work() -> None:
        try:
            lib.call("sotto_comm_create", context, c.byref(config), c.byref(out))
        finally:
            if own_context:  # the comm keeps it working
                lib.call("sotto_context_destroy", context)

    if all_gather is None:
        interruptible(work, lambda: lib.functions.sotto_comm_destroy(out))
        return Comm(lib, out)
    failure: list[BaseException] = []
    callback = _all_gather_callback(all_gather, failure)
    config.all_gather = callback
    try:
        work()  # on this thread: it may be the only one that the caller's all_gather allows
    except Exception:
        if failure:
            raise failure[0] from None
        raise
    return Comm(lib, out)


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
    free on rank 0). init_method="env://": the environment alone.

    init_method: "tcp://HOST:PORT", an address of rank 0, which listens there; "env://" or None: the
                 environment's. unique_id, all_gather: in place of it
    unique_id:   UniqueId on the rank that made it, its 128 bytes elsewhere
    all_gather:  a function that gathers bytes over another library: takes this rank's, returns
                 those of all ranks in rank order (mpi4py: MPI.COMM_WORLD.allgather)
    listen:      where this rank accepts connections: an address, an interface or "any"; None:
                 SOTTO_LISTEN, else where the rendezvous leads
    transport:   "auto" (None: SOTTO_TRANSPORT), "tcp", "inproc"
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
    if any(value is not None for value in given.values()):
        _default = create_comm(**given, **options)
    elif torch_has_a_group():
        from .torch.groups import comm_of_process_group

        _default = comm_of_process_group(**options)
    elif "sotto.torch" in sys.modules and torchrun_serves_a_store(os.environ):
        from .torch.groups import comm_of_torchrun

        _default = comm_of_torchrun(**options)
    else:
        _default = create_comm(**options)
    return _default


def torch_has_a_group() -> bool:
    """Whether torch.distributed is initialised in this process; torch is not imported for that."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


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
    if not torch_has_a_group() and detect(os.environ) is None:
        return default_comm()  # which says what to do
    return init_process_group(timeout=timeout)


@atexit.register
def _leave() -> None:
    """A process that just ends may cut off what the other ranks have not read yet."""
    comm = _default
    if comm is None or comm.closed or comm._pid != os.getpid():
        return
    with contextlib.suppress(SottoError):
        if comm.report("waiting")["operations_in_flight"] == 0:
            comm.close()
