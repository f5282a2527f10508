"""Setting a group up: contexts, unique ids and comms."""

from __future__ import annotations

import contextlib
import ctypes as c
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import _abi as abi
from ._handle import Context, HandleOwner
from ._lib import Library, interruptible, library, microseconds
from ._text import counted
from .comm import Comm
from .errors import InvalidArgumentError, InvalidStateError
from .launch import Launch, detect, looked_for, rendezvous

AllGather = Callable[[bytes], Sequence[bytes]]

_environment = threading.Lock()
_user: int | None = None  # the process that has made contexts here


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
    """As :func:`sotto.init_process_group`, without making the comm the default one.

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
    # The library itself finds where the ranks of its launchers meet.
    launched = rank is None and world_size is None and ways in ([], ["env://"])
    rank, world_size = _resolve(rank, world_size)
    lib = library()
    config = abi.CommConfig(timeout_us=microseconds(timeout))
    if not launched:
        config.rank, config.size = rank, world_size
    if transport is not None:
        config.transport = transport.encode()
    address = None
    if not launched and world_size > 1 and (not ways or init_method is not None):
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
                f"unique_id has {counted(len(text), 'byte')}; it needs {abi.SOTTO_UNIQUE_ID_BYTES}"
            )
        struct = abi.UniqueId.from_buffer_copy(text)
        config.id = c.pointer(struct)
        shared = unique_id if isinstance(unique_id, UniqueId) else None
    context: HandleOwner | None = shared
    if context is None:
        made = _create_context(
            lib, cpu_threads, max_ops, SOTTO_RENDEZVOUS=address, SOTTO_LISTEN=listen
        )
        context = Context(lib, made)
    try:
        return _create(lib, context, config, all_gather)
    except KeyboardInterrupt:
        if isinstance(unique_id, UniqueId):
            unique_id._value = None  # the call that goes on without us still needs it
        raise


def _create(
    lib: Library,
    context: HandleOwner,
    config: abi.CommConfig,
    all_gather: AllGather | None,
) -> Comm:
    out = c.c_void_p()

    def work() -> None:
        try:
            lib.call("sotto_comm_create", context._handle, c.byref(config), c.byref(out))
        except BaseException:
            if isinstance(context, Context):  # now: the error's frames keep it
                context.close()
            raise

    if all_gather is None:
        interruptible(work, lambda: lib.functions.sotto_comm_destroy(out))
        return Comm(lib, out, context)
    failure: list[BaseException] = []
    callback = _all_gather_callback(all_gather, failure)
    config.all_gather = callback
    try:
        work()  # on this thread: it may be the only one that the caller's all_gather allows
    except Exception:
        if failure:
            raise failure[0] from None
        raise
    return Comm(lib, out, context)
