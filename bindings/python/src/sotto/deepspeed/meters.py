"""What DeepSpeed's engine counts and reports beside training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .logs import logger

MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")


class ThroughputTimer:
    """Samples per second over the updates since the first."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size  # of an update over all ranks; 0: not known
        self.epoch_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._begun: float | None = None
        self._last: float | None = None

    def update_epoch_count(self) -> None:
        """Counts an epoch."""
        self.epoch_count += 1

    def start(self) -> None:
        """The forward pass of a micro-batch begins."""
        if self._begun is None:
            self._begun = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A step() has ended; global_step: it updated."""
        if not global_step:
            return
        now = time.perf_counter()
        if self._last is not None:  # the first update also sets things up
            self.total_elapsed_time += now - self._last
        self._last = now
        self.global_step_count += 1

    def avg_samples_per_sec(self) -> float:
        """Over all updates but the first; 0 before there are two, or without batch keys."""
        if self.global_step_count < 2 or self.total_elapsed_time == 0:
            return 0.0
        return self.batch_size * (self.global_step_count - 1) / self.total_elapsed_time


class Monitor:
    """engine.monitor: no event leaves the process; it says so once where a file asks for that."""

    enabled = False

    def __init__(self, file: Mapping[str, Any]) -> None:
        named = [name for name in MONITORS if (file.get(name) or {}).get("enabled")]
        if named:
            logger.warning_once(
                f"{', '.join(named)}: nothing is written by this engine; write get_lr(), the loss "
                "and get_global_grad_norm() with a writer of your own"
            )

    def write_events(self, event_list: Any, flush: bool = True) -> None:
        """Nothing: enabled is False."""
