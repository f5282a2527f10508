"""What DeepSpeed's programs log with: deepspeed.utils.logger, log_dist, see_memory_usage."""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch.distributed as dist

from ..errors import InvalidArgumentError
from .accelerator import get_accelerator, resident_bytes

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class Logger(logging.Logger):
    """A logger that can also say a thing once. Writes to standard output, as DeepSpeed's."""

    @functools.lru_cache(None)  # noqa: B019  (one logger, which lives as long as the process)
    def warning_once(self, *args: Any) -> None:
        """As warning(); every text once in a process."""
        self.warning(*args)

    def isEnabledFor(self, level: int) -> bool:
        """Without the cache, which setLevel() clears for loggers of getLogger() alone."""
        return self.manager.disable < level and level >= self.getEffectiveLevel()


class _ToStdout(logging.StreamHandler):  # type: ignore[type-arg]  # no [] in Python 3.9
    """Writes to what sys.stdout is at the time of the message."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stdout


def _make() -> Logger:
    made = Logger("sotto.deepspeed", logging.WARNING)
    made.propagate = False
    handler = _ToStdout()
    handler.setFormatter(
        logging.Formatter(
            "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
        )
    )
    made.addHandler(handler)
    return made


logger = _make()


def _is_told(ranks: Sequence[int] | None) -> tuple[bool, int]:
    """Whether this rank is one of `ranks` (-1: all), and its number, -1 without a group."""
    if not (dist.is_available() and dist.is_initialized()):
        return True, -1
    mine = dist.get_rank()
    return any(rank in (-1, mine) for rank in ranks or ()), mine


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on these ranks; -1: on all; without a process group in every process."""
    told, rank = _is_told(ranks)
    if told:
        logger.log(level, "[Rank %d] %s", rank, message)


@functools.lru_cache(None)
def _once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(
    message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO
) -> None:
    """As log_dist(); every text once in a process."""
    _once(message, None if ranks is None else tuple(ranks), level)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Prints on these ranks, whatever the level of the log."""
    told, rank = _is_told(ranks)
    if told:
        print(f"[Rank {rank}] {message}", flush=True)


def print_json_dist(
    message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | None = None
) -> None:
    """Writes a dict with the rank into the file `path`, on these ranks."""
    told, rank = _is_told(ranks)
    if told and path is not None:
        message["rank"] = rank
        with open(path, "w", encoding="utf-8") as file:
            json.dump(message, file)


def set_log_level_from_string(log_level_str: str, custom_logger: Any = None) -> None:
    """Level "debug", "info", "warning", "error" or "critical" of the logger and its handlers."""
    level = log_levels.get(str(log_level_str).lower())
    if level is None:
        raise InvalidArgumentError(
            f"log level is {log_level_str!r}; allowed: {', '.join(log_levels)}"
        )
    chosen = logger if custom_logger is None else custom_logger
    chosen.setLevel(level)
    for handler in chosen.handlers:
        handler.setLevel(level)


def get_caller_func(frame: int = 3) -> str:
    """Name of the function that called."""
    return sys._getframe(frame).f_code.co_name


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs, with force, the memory that rank 0 uses; without it nothing, as DeepSpeed's."""
    if not force or _is_told([0])[1] > 0:
        return
    device, gib = get_accelerator(), 1 << 30
    logger.warning(message)
    logger.warning(
        "MA %.2f GB  Max_MA %.2f GB  resident %.2f GB",
        device.memory_allocated() / gib,
        device.max_memory_allocated() / gib,
        resident_bytes() / gib,
    )


def instrument_w_nvtx(func: Any) -> Any:
    """The function itself: no ranges are recorded."""
    return cast("Any", func)
