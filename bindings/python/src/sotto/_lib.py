"""Finds, loads and checks the shared library; calls into it.

The first that is there: the file that ``SOTTO_LIBRARY`` names (and then no other), the one that the
wheel carries, the system's. It is loaded on first use, with local symbols, once per process.
"""

from __future__ import annotations

import ctypes as c
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import _abi as abi
from .errors import InvalidArgumentError, LibraryLoadError, error_of

SONAME = f"libsotto.so.{abi.SOTTO_ABI_MAJOR}"
CARRIED = Path(__file__).resolve().parent / "lib" / SONAME

# Longest time that a call waits before Python looks for signals.
SLICE_US = 100_000

# Its `active` is true where the library has called Python, and must not be called in turn.
inside_callback = threading.local()

_lock = threading.Lock()
_loaded: Library | None = None


class Library:
    """The loaded library: functions by their C names, with errors as exceptions."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.functions: Any = c.CDLL(path, mode=c.RTLD_LOCAL)
        except OSError as error:
            raise LibraryLoadError(f"{path}: cannot be loaded: {error}") from error
        self._check_version()
        for name, (result, arguments) in abi.FUNCTIONS.items():
            try:
                function = getattr(self.functions, name)
            except AttributeError:
                raise LibraryLoadError(
                    f"{path}: has no function {name}, which ABI "
                    f"{abi.SOTTO_ABI_MAJOR}.{abi.SOTTO_ABI_MINOR} has"
                ) from None
            function.restype = result
            function.argtypes = arguments

    def _check_version(self) -> None:
        try:
            version = self.functions.sotto_abi_version
        except AttributeError:
            raise LibraryLoadError(
                f"{self.path}: has no function sotto_abi_version, so it is not libsotto"
            ) from None
        version.restype = c.c_uint32
        version.argtypes = []
        found = int(version())
        major, minor = found >> 16, found & 0xFFFF
        if major != abi.SOTTO_ABI_MAJOR or minor < abi.SOTTO_ABI_MINOR:
            raise LibraryLoadError(
                f"{self.path}: has ABI {major}.{minor}, this package was written for "
                f"{abi.SOTTO_ABI_MAJOR}.{abi.SOTTO_ABI_MINOR}; the major version has to be equal "
                "and the library's minor version not lower"
            )

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function that returns a status; raises what is below zero."""
        status = getattr(self.functions, name)(*arguments)
        if status < 0:
            raise error_of(status, self.last_error())

    def last_error(self) -> str:
        return text_of(self.functions.sotto_last_error())

    def text(self, name: str, *arguments: Any) -> str:
        """A report: `name(*arguments, buf, cap, out_len)`, asked again while it grows."""
        need = c.c_uint64()
        self.call(name, *arguments, None, 0, c.byref(need))
        while True:
            room = need.value + 1
            buffer = c.create_string_buffer(room)
            self.call(name, *arguments, buffer, room, c.byref(need))
            if need.value < room:
                return text_of(buffer.value)


def text_of(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "replace")


def _load() -> Library:
    named = os.environ.get("SOTTO_LIBRARY")
    if named:
        try:
            return Library(named)
        except LibraryLoadError as error:
            raise LibraryLoadError(f"SOTTO_LIBRARY is set: {error}") from error
    if CARRIED.exists():
        return Library(str(CARRIED))
    try:
        return Library(SONAME)
    except LibraryLoadError as error:
        raise LibraryLoadError(
            "libsotto was not found. Looked for: the file that the environment variable "
            f"SOTTO_LIBRARY names (not set), {CARRIED} (absent: this is not an installed wheel), "
            f"and {SONAME} where the system's loader looks: {error}"
        ) from error


def library() -> Library:
    """The library, loaded on the first call.

    Errors: LibraryLoadError (not found, cannot be loaded, other ABI version).
    """
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = _load()
    return _loaded


class _Call:
    """A call on a thread of its own, which its caller may leave before it ends."""

    def __init__(self, work: Callable[[], None], undo: Callable[[], None] | None) -> None:
        self.work = work
        self.undo = undo
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._left = False

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # carried to the caller's thread
            self.failure = error
        with self._lock:
            self._ended = True
            orphan = self._left and self.failure is None
        if orphan and self.undo is not None:
            self.undo()

    def leave(self) -> None:
        with self._lock:
            self._left = True
            orphan = self._ended and self.failure is None
        if orphan and self.undo is not None:
            self.undo()


def interruptible(work: Callable[[], None], undo: Callable[[], None] | None = None) -> None:
    """Runs a call that may wait for other ranks so that Ctrl-C is answered meanwhile.

    Python handles signals on the main thread alone, and not while that is inside the library, so
    there the call runs on another thread. After an interrupt it goes on, at most to its deadline;
    `undo` then gives back what it made. Raises what `work` raises.
    """
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    call = _Call(work, undo)
    thread = threading.Thread(target=call.run, name="sotto-call", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(SLICE_US / 1e6)
    except BaseException:
        call.leave()
        raise
    if call.failure is not None:
        raise call.failure


def microseconds(seconds: float | None, unset: int = 0) -> int:
    """Seconds as the C interface's microseconds; None means `unset`, infinity no limit (-1)."""
    if seconds is None:
        return unset
    if not seconds >= 0:
        raise InvalidArgumentError(
            f"timeout is {seconds}; allowed: None, seconds from 0, or math.inf"
        )
    return -1 if seconds > 9e12 else max(1, int(seconds * 1e6))
