"""What the engine records beside training: times of its phases, events for monitors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .meters import SynchronizedWallClockTimer, ThroughputTimer
from .monitors import Event, MonitorMaster

# Timers of the phases. DeepSpeed averages in backward(), this engine in step(): one of them is 0.
PHASES = {
    "forward": "fwd",
    "backward": "bwd",
    "backward_inner": "bwd_inner",
    "backward_allreduce": "bwd_allreduce",
    "step": "step",
}


class Recording:
    """The part of Engine that times and writes."""

    if TYPE_CHECKING:
        global_rank: int
        global_samples: int

        @property
        def cur_scale(self) -> float:  # noqa: D102
            ...

        def fp16_enabled(self) -> bool:  # noqa: D102
            ...

        def get_lr(self) -> list[float]:  # noqa: D102
            ...

    def _start_recording(self, file: Mapping[str, Any], batch_size: int) -> None:
        self.monitor = MonitorMaster(file, self.global_rank)
        self.tput_timer = ThroughputTimer(batch_size)
        self.timers = SynchronizedWallClockTimer()
        self.engine_timers_cache: dict[str, float] = {}
        self.summary_events: list[Event] = []
        self._times = bool(file.get("wall_clock_breakdown"))
        names = list(PHASES.values()) if self._times else []
        self.engine_timers = SimpleNamespace(
            micro_timers=[f"{name}_microstep" for name in names], global_timers=names
        )

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        names = (PHASES[phase], f"{PHASES[phase]}_microstep") if self._times else ()
        for name in names:
            self.timers(name).start()
        try:
            yield
        finally:
            for name in names:
                self.timers(name).stop()

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the phases, as of the last step(); empty without wall_clock_breakdown."""
        return self.engine_timers_cache

    def _record_step(self, boundary: bool) -> None:
        """Behind a step(). boundary: it was to update."""
        if boundary:
            figures = {"lr": self.get_lr()[0]}
            if self.fp16_enabled():
                figures["loss_scale"] = self.cur_scale
            self._write(figures)
        if not self._times:
            return
        timers, named = self.timers, self.engine_timers
        names = [*named.micro_timers, *named.global_timers]
        times = {name: timers(name).elapsed(reset=False) for name in names}
        self.engine_timers_cache = times
        self._print_times(named.micro_timers)
        if boundary:
            self._write({f"elapsed_time_ms_{k}": times[name] for k, name in PHASES.items()})
            self._print_times(named.global_timers)

    def _print_times(self, names: list[str]) -> None:
        if self.global_rank == 0:
            self.timers.log(names)
        for name in names:
            self.timers(name).reset()

    def _write(self, figures: Mapping[str, float]) -> None:
        if self.monitor.enabled:
            samples = self.global_samples
            self.summary_events = [(f"Train/Samples/{k}", v, samples) for k, v in figures.items()]
            self.monitor.write_events(self.summary_events)
