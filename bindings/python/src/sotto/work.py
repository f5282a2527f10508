"""Operations in flight."""

from __future__ import annotations

import ctypes as c
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from . import _abi as abi
from ._frameworks import current_stream
from ._lib import SLICE_US, Library, inside_callback, text_of
from ._text import counted
from ._view import HOST
from .errors import InvalidArgumentError, InvalidStateError, SottoError, error_of

if TYPE_CHECKING:
    from .comm import Comm


class OpStats(NamedTuple):
    """Times (monotonic clock) and bytes of one operation, as sent by this rank."""

    launch_ns: int
    start_ns: int  # 0: not started
    end_ns: int  # 0: not completed
    kernel_ns: int
    payload_bytes_planned: int
    header_bytes_planned: int
    exposed_ns: int  # threads have stood still for it; -1: a stream waits, for an unknown time


# What operations in flight read and write. They end after the process does if no thread waits for
# them, so the interpreter must not free this when it takes itself apart.
_in_flight: dict[int, Any] = {}
c.pythonapi.Py_IncRef(c.py_object(_in_flight))


class _Orphans:
    """Operations that no thread waits for any more: they go on, and their memory stays in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[int] = []

    def add(self, op: int) -> None:
        # May run inside a garbage collection that began in reap(), so it takes no lock.
        self._entries.append(op)

    def reap(self, lib: Library) -> None:
        if not self._entries or not self._lock.acquire(blocking=False):
            return
        try:
            entries, self._entries = self._entries, []
            for op in entries:
                if lib.functions.sotto_op_test(op) == abi.SOTTO_IN_PROGRESS:
                    self._entries.append(op)
                else:
                    _release(lib, op)
        finally:
            self._lock.release()

    def __len__(self) -> int:
        return len(self._entries)


orphans = _Orphans()


def _release(lib: Library, op: int) -> None:
    """Gives an operation that has ended back, and what it worked on."""
    _in_flight.pop(op, None)  # first: the next operation may get the same number
    lib.functions.sotto_op_release(op)


class _Deadline:
    """A time limit that is waited for in slices, so that Python sees signals in between."""

    def __init__(self, timeout: float | None) -> None:
        self._end = math.inf if timeout is None else time.monotonic() + max(0.0, timeout)

    def over(self) -> bool:
        return time.monotonic() >= self._end

    def slice_us(self) -> int:
        return max(0, int(min(SLICE_US, (self._end - time.monotonic()) * 1e6)))


class Work:
    """A collective, a group of them, or an optimizer step in flight.

    It holds references to all arrays of the operation until that has completed, also if the Work
    itself is dropped before. Until then the arrays must not be written, and outputs not be read.
    On a CUDA device the operation starts after what was queued on the current stream, PyTorch's if
    the program uses it and else the default one, and wait_stream() puts a stream behind it.
    Threads: any.
    """

    def __init__(
        self, comm: Comm, op: c.c_void_p | None, keep: Any, what: str, cuda: int = HOST
    ) -> None:
        self._comm = comm
        self._lib = comm._lib
        self._op: int | None = None  # calls of a group that is still open, or that failed to start
        self._keep = keep
        self._what = what
        self._cuda = cuda  # number of the arrays' CUDA device
        self._pid = os.getpid()
        self._outcome: SottoError | None = None
        self._done = False
        if op is not None:
            self._start(op)

    def _start(self, op: c.c_void_p) -> None:
        assert op.value is not None
        self._op = op.value
        _in_flight[op.value] = self._keep

    def _again(self, keep: Any) -> None:
        """A recorded step is in flight once more."""
        assert self._op is not None
        self._done, self._outcome, self._keep = False, None, keep
        _in_flight[self._op] = keep

    def __repr__(self) -> str:
        state = "failed" if self._outcome else "completed" if self._done else "in flight"
        return f"<sotto.Work {self._what}, {state}>"

    @property
    def on_cuda(self) -> bool:
        """Whether the arrays are on a CUDA device: there is a stream to order."""
        return self._cuda != HOST

    def _started(self) -> c.c_void_p:
        if self._pid != os.getpid():
            raise InvalidStateError(
                f"this operation belongs to process {self._pid}; its forked child {os.getpid()} "
                "cannot use it"
            )
        if self._op is None:
            raise InvalidStateError(
                "the group of this call has not been started: leave its `with` block first"
            )
        return c.c_void_p(self._op)

    def _ended(self, status: int) -> None:
        """Takes the outcome and lets go of the arrays."""
        if status < 0 and self._outcome is None:
            text = c.c_char_p()
            self._lib.functions.sotto_op_error(self._op, c.byref(text))
            self._outcome = error_of(status, text_of(text.value) or self._lib.last_error())
            self._comm._told = True
        self._done = True
        self._keep = None
        if self._op is not None:
            _in_flight.pop(self._op, None)

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not. Makes some progress itself.

        Errors: InvalidStateError (fork, open group).
        """
        if not self._done:
            status = self._lib.functions.sotto_op_test(self._started())
            if status != abi.SOTTO_IN_PROGRESS:
                self._ended(status)
        return self._done

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the operation has completed; this thread does part of its work.

        timeout: seconds; None waits until the operation ends, which its own deadline guarantees
        (the ``timeout`` of the call, else that of the comm). The GIL is released meanwhile and
        Ctrl-C is answered within 0.1 s; the operation then goes on and can be waited for again.
        Errors: builtin TimeoutError (time over: the operation goes on), the operation's own,
        InvalidStateError (fork, open group).
        """
        deadline = _Deadline(timeout)
        while not self._done:
            status = self._lib.functions.sotto_op_wait(self._started(), deadline.slice_us())
            if status != abi.SOTTO_IN_PROGRESS:
                self._ended(status)
            elif deadline.over():
                raise TimeoutError(f"{self._what} is still in flight after {timeout} s; it goes on")
        if self._outcome is not None:
            raise self._outcome

    def wait_stream(self, stream: Any = None) -> None:
        """Puts what is queued on a CUDA stream from now on behind the operation, also if it fails.

        Returns when all of the operation is queued on the device: over NCCL soon, over TCP when
        its messages have come (SOTTO_STREAM_BLOCK=1: the stream waits for that, not the host). The
        operation stays in flight: wait() or error() tell its end.
        stream: a torch.cuda.Stream, or the number of a cudaStream_t; None: the current stream on
        the arrays' device. Errors: UnsupportedError (arrays in host memory: there is no stream),
        InvalidStateError (the stream is being captured into a graph; fork, open group).
        """
        op = self._started()
        if stream is None and self.on_cuda:
            stream = current_stream(self._cuda)
        number = getattr(stream, "cuda_stream", stream)
        self._lib.call("sotto_op_stream_wait", op, number or None)

    def error(self) -> SottoError | None:
        """The operation's error; None while it is in flight and if it ended well."""
        return self._outcome if self.is_completed() else None

    def stats(self) -> OpStats:
        """Times and predicted bytes. Errors: InvalidStateError (fork, open group)."""
        out = abi.OpStats()
        self._lib.call("sotto_op_get_stats", self._started(), c.byref(out))
        return OpStats(*(getattr(out, name) for name in OpStats._fields))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an operation in flight cannot be pickled or copied: wait() for it")

    def __del__(self) -> None:
        op = getattr(self, "_op", None)
        if op is None or self._pid != os.getpid():
            return
        if sys is None or sys.is_finalizing():
            return
        functions, may_call = self._lib.functions, not getattr(inside_callback, "active", False)
        if may_call and (self._done or functions.sotto_op_test(op) != abi.SOTTO_IN_PROGRESS):
            _release(self._lib, op)
        else:
            orphans.add(op)


def wait_any(works: Sequence[Work], timeout: float | None = None) -> int:
    """Waits until one of several operations of one comm or its splits has ended; its index.

    timeout: seconds; None: no limit of its own. The operation's own error is not raised: ask it
    with wait() or error(). Errors: TimeoutError (time over), InvalidArgumentError (no operation,
    several contexts), InvalidStateError (fork, open group).
    """
    if not works:
        raise InvalidArgumentError("works is empty; allowed: one operation and more")
    for i, work in enumerate(works):
        if work._done:
            return i
    handles = (c.c_void_p * len(works))(*(work._started().value for work in works))
    index = c.c_uint64()
    deadline, lib = _Deadline(timeout), works[0]._lib
    while True:
        status = lib.functions.sotto_op_wait_any(
            handles, len(works), deadline.slice_us(), c.byref(index)
        )
        if status < 0:
            raise error_of(status, lib.last_error())
        if status == abi.SOTTO_OK:
            works[index.value].is_completed()
            return index.value
        if deadline.over():
            raise TimeoutError(
                f"none of {counted(len(works), 'operation')} ended within {timeout} s; they go on"
            )


def wait_all(works: Sequence[Work], timeout: float | None = None) -> None:
    """Waits until all of several operations of one comm or its splits have ended, well or not.

    timeout: seconds, of all together; None: no limit of its own. Errors: that of the first of them
    that has failed, TimeoutError (time over: they go on), InvalidArgumentError (several contexts),
    InvalidStateError (fork, open group).
    """
    if not works:
        return
    handles = (c.c_void_p * len(works))(*(work._started().value for work in works))
    deadline, lib = _Deadline(timeout), works[0]._lib
    while True:
        status = lib.functions.sotto_op_wait_all(handles, len(works), deadline.slice_us())
        if status != abi.SOTTO_IN_PROGRESS:
            break
        if deadline.over():
            raise TimeoutError(
                f"not all of {counted(len(works), 'operation')} ended within {timeout} s"
            )
    text = lib.last_error()
    if not all([work.is_completed() for work in works]):
        raise error_of(status, text)  # refused: nothing was waited for
    for work in works:
        work.wait()
