"""The library's log as a part of Python's."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from typing import Any

from . import _abi as abi
from ._lib import inside_callback, library
from .errors import InvalidArgumentError

LEVELS = {"error": 1, "warning": 2, "info": 3, "debug": 4, "trace": 5}
TRACE = 5  # below logging.DEBUG
_OF_LEVEL = (0, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG, TRACE)

logger = logging.getLogger("sotto")
_lock = threading.Lock()
_messages: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
_thread: threading.Thread | None = None


def _receive(_: int | None, level: int, message: bytes) -> None:
    # On a thread of the library, which may not be called from here: handlers run elsewhere.
    inside_callback.active = True
    try:
        _messages.put((level, message))
    finally:
        inside_callback.active = False


def _hand_on() -> None:
    while (item := _messages.get()) is not None:
        level, message = item
        logger.log(_OF_LEVEL[level], "%s", message.decode("utf-8", "replace"))


_sink: Any = abi.LogFn(_receive)  # never freed: a thread may be about to call it
_nobody: Any = abi.LogFn()


def capture_log(capture: bool = True, level: str | None = None) -> None:
    """Sends what the library logs to the logger "sotto" of Python's logging.

    Without it warnings and errors go to standard error. Handlers run on a thread of their own, a
    moment later; they may use sotto. It ends by itself at the end of the process; a forked child
    logs nothing.

    capture: False: to standard error again
    level:   "error", "warning", "info", "debug" or "trace" (5 in Python's numbers): the library
             drops messages below it; None: SOTTO_LOG, else "warning"
    Errors: InvalidArgumentError (level), LibraryLoadError. Threads: any.
    """
    global _thread
    if level is not None and level not in LEVELS:
        raise InvalidArgumentError(f"level is {level!r}; allowed: None, {', '.join(LEVELS)}")
    lib = library()
    with _lock:
        number = 0 if level is None else LEVELS[level]
        lib.call("sotto_set_log", _sink if capture else _nobody, None, number)
        if capture and _thread is None:
            _thread = threading.Thread(target=_hand_on, name="sotto-log", daemon=True)
            _thread.start()
        elif not capture and _thread is not None:
            time.sleep(0.01)  # for a thread that is already on its way to _receive
            _messages.put(None)
            _thread.join()
            _thread = None


@atexit.register
def _stop() -> None:
    """A thread of the library must not meet an interpreter that is being taken down."""
    if _thread is not None and _thread.is_alive():
        capture_log(False)
