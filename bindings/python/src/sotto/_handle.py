"""What all objects with a C handle have in common: closing, forks, pickling, last resort."""

from __future__ import annotations

import ctypes as c
import os
import sys
import warnings
import weakref
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from ._lib import Library, inside_callback, interruptible
from .errors import InvalidStateError

H = TypeVar("H", bound="HandleOwner")


class HandleOwner:
    """Owns one C handle of this process.

    Not for use by two threads at once unless a class says so.
    """

    _noun = "object"
    _destroy = ""  # the C function
    _blocks = False  # whether that may wait for other ranks
    _has_to_be_closed = True  # by its user, who is warned otherwise

    def __init__(self, lib: Library, handle: c.c_void_p) -> None:
        self._lib = lib
        self._value: int | None = handle.value
        self._pid = os.getpid()
        living.add(self)

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._value is None

    @property
    def _handle(self) -> c.c_void_p:
        """The handle, for a call of the library. Errors: InvalidStateError (closed, fork)."""
        self._check_process()
        if self._value is None:
            raise InvalidStateError(f"this {self._noun} is closed")
        return c.c_void_p(self._value)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise InvalidStateError(
                f"this {self._noun} was made in process {self._pid} and cannot be used in its "
                f"forked child {os.getpid()}; start ranks and workers by exec, sotto-run or "
                'multiprocessing\'s "spawn", or fork before the first use of sotto'
            )

    def close(self) -> None:
        """Destroys the handle. A second call does nothing.

        Errors: what the library meets, InvalidStateError (fork).
        """
        if self._value is None:
            return
        self._check_process()
        handle, self._value = c.c_void_p(self._value), None

        def destroy() -> None:
            self._lib.call(self._destroy, handle)

        if self._blocks:
            interruptible(destroy)
        else:
            destroy()

    def __enter__(self: H) -> H:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception:
            if error is None:  # else that one tells more
                raise

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {self._noun} cannot be pickled or copied: it is a connection of this process; make "
            "one in every process, and send its state with the functions that export it"
        )

    def _idle(self) -> bool:
        """Whether destroying the handle now would not wait for anything."""
        return True

    def _leave(self) -> None:
        """Of one that nobody has any more, and that cannot be destroyed now."""

    def __del__(self) -> None:
        if getattr(self, "_value", None) is None or self._pid != os.getpid():
            return
        if sys is None or sys.is_finalizing():
            return
        if self._has_to_be_closed:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)
        if self._idle() and not getattr(inside_callback, "active", False):
            getattr(self._lib.functions, self._destroy)(self._value)
        else:
            self._leave()


living: weakref.WeakSet[HandleOwner] = weakref.WeakSet()  # and those that were closed


class Context(HandleOwner):
    """What comms of one process share; the last one destroys it by letting go of it."""

    _noun = "context"
    _destroy = "sotto_context_destroy"
    _has_to_be_closed = False
