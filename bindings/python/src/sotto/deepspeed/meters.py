"""What DeepSpeed's engine times and counts beside training."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .accelerator import get_accelerator
from .logs import print_dist


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


class _Timer:
    """Adds up the milliseconds between start() and stop()."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._records: list[float] = []
        self._begun = 0.0

    def start(self) -> None:
        """Begins; what is queued on a device is waited for first."""
        assert not self.started_, f"{self.name_} timer has already been started"
        _settle()
        self.started_, self._begun = True, time.perf_counter()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Ends, and what is queued on a device with it. Arguments: as in DeepSpeed, unused."""
        assert self.started_, "timer is not started"
        _settle()
        self._records.append(1e3 * (time.perf_counter() - self._begun))
        self.started_ = False

    def reset(self) -> None:
        """Forgets everything."""
        self.started_ = False
        self._records.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds so far, of what is under way too."""
        running = self.started_
        if running:
            self.stop()
        total = sum(self._records)
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Of the records without the largest and the smallest tenth."""
        records = sorted(self._records)
        cut = round(len(records) * 0.1)
        kept = records[cut : len(records) - cut]
        return sum(kept) / len(kept) if kept else 0.0


def _settle() -> None:
    device = get_accelerator()
    if device.device_name() != "cpu":
        device.synchronize()


class SynchronizedWallClockTimer:
    """Timers by name: engine.timers."""

    Timer = _Timer

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def __call__(self, name: str) -> _Timer:
        """The timer of a name, made with its first use."""
        return self.timers.setdefault(name, _Timer(name))

    def get_timers(self) -> dict[str, _Timer]:
        """All of them."""
        return self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Prints the timers that were used, on rank 0 or `ranks`."""
        text = "time (ms)"
        for name in names:
            if name in self.timers:
                text += f" | {name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}"
        print_dist(text, ranks=ranks or [0])

    def get_mean(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True
    ) -> dict[str, float]:
        """A thousand times their means, as DeepSpeed's."""
        return {n: self.timers[n].mean() * 1e3 / normalizer for n in names if n in self.timers}
