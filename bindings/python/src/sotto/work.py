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
from ._lib import SLICE_US, Library, text_of
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


class _Orphans:
    """Operations that nobody waits for any more: they go on, and their memory stays in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[tuple[int, Any]] = []

    def add(self, op: int, keep: Any) -> None:
        # May run inside a garbage collection that began in reap(), so it takes no lock.
        self._entries.append((op, keep))

    def reap(self, lib: Library) -> None:
        if not self._entries or not self._lock.acquire(blocking=False):
            return
        try:
            entries, self._entries = self._entries, []
            for op, keep in entries:
                if lib.functions.sotto_op_test(op) == abi.SOTTO_IN_PROGRESS:
                    self._entries.append((op, keep))
                else:
                    lib.functions.sotto_op_release(op)
        finally:
            self._lock.release()

    def __len__(self) -> int:
        return len(self._entries)


orphans = _Orphans()


class _Deadline:
    """A time limit that is waited for in slices, so that Python sees signals in between."""

    def __init__(self, timeout: float | None) -> None:
        self._end = math.inf if timeout is None else time.monotonic() + max(0.0, timeout)

    def over(self) -> bool:
        return time.monotonic() >= self._end

    def slice_us(self) -> int:
        return max(0, int(min(SLICE_US, (self._end - time.monotonic()) * 1e6)))


def _never_free(keep: Any) -> None:
    """At the end of the process: the library may still write where these arrays lie."""
    c.pythonapi.Py_IncRef(c.py_object(keep))


class Work:
    """A collective, a group of them, or an optimizer step in flight.

    It holds references to all arrays of the operation until that has completed, also if the Work
    itself is dropped before. Until then the arrays must not be written, and outputs not be read.
    Threads: any.
    """

    def __init__(self, comm: Comm, op: int | None, keep: Any, what: str) -> None:
        self._comm = comm
        self._lib = comm._lib
        self._op = op  # None: calls of a group that is still open, or a group that failed to start
        self._keep = keep
        self._what = what
        self._pid = os.getpid()
        self._outcome: SottoError | None = None
        self._done = False

    def __repr__(self) -> str:
        state = "failed" if self._outcome else "completed" if self._done else "in flight"
        return f"<sotto.Work {self._what}, {state}>"

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

    def error(self) -> SottoError | None:
        """The operation's error; None while it is in flight and if it ended well."""
        return self._outcome if self.is_completed() else None

    def stats(self) -> OpStats:
        """Times and predicted bytes. Errors: InvalidStateError (fork, open group)."""
        out = abi.OpStats()
        self._lib.call("sotto_op_report", self._started(), c.byref(out))
        return OpStats(*(getattr(out, name) for name in OpStats._fields))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an operation in flight cannot be pickled or copied: wait() for it")

    def __del__(self) -> None:
        op = getattr(self, "_op", None)
        if op is None or self._pid != os.getpid():
            return
        if sys is None or sys.is_finalizing():
            if not self._done:
                _never_free(self._keep)
        elif self._done or self._lib.functions.sotto_op_test(op) != abi.SOTTO_IN_PROGRESS:
            self._lib.functions.sotto_op_release(op)
        else:
            orphans.add(op, self._keep)


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
                f"none of {len(works)} operations ended within {timeout} s; they go on"
            )
