"""engine.monitor: figures of the training in CSV files and for TensorBoard, as in DeepSpeed."""

from __future__ import annotations

import csv
import importlib.util
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError

Event = tuple[str, Any, int]  # name, value, samples so far
ELSEWHERE = ("wandb", "comet")


def _folder(section: Mapping[str, Any]) -> Path:
    path = Path(section.get("output_path") or "") / (section.get("job_name") or "DeepSpeedJobName")
    path.mkdir(parents=True, exist_ok=True)
    return path


class csvMonitor:
    """A file for every name, with the columns step and value."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.log_dir = _folder(section)
        self.filenames: list[str] = []

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Appends; the first event of a name in this process writes its header."""
        for name, value, step in event_list:
            plain = name.replace("/", "_").replace(" ", "_")
            with open(self.log_dir / f"{plain}.csv", "a", encoding="utf-8", newline="") as file:
                rows = csv.writer(file, lineterminator=os.linesep)
                if plain not in self.filenames:
                    self.filenames.append(plain)
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([step, value])


class TensorBoardMonitor:
    """Scalars for TensorBoard."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make: Any = SummaryWriter
        self.summary_writer = make(log_dir=str(_folder(section)))

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        """Adds scalars."""
        for event in event_list:
            self.summary_writer.add_scalar(*event)
        if flush:
            self.summary_writer.flush()


class MonitorMaster:
    """Rank 0 writes what sections "csv_monitor" and "tensorboard" of the configuration ask for.

    Errors: UnsupportedError on all ranks (wandb, comet; no package tensorboard).
    """

    def __init__(self, file: Mapping[str, Any], rank: int) -> None:
        def asked(name: str) -> Mapping[str, Any] | None:
            section = file.get(name) or {}
            return section if section.get("enabled") else None

        for name in ELSEWHERE:
            if asked(name) is not None:
                raise UnsupportedError(
                    f"{name}.enabled is true: this engine writes csv_monitor and tensorboard; call "
                    f"{name}'s own functions with get_lr(), the loss and get_global_grad_norm()"
                )
        csv_section, board = asked("csv_monitor"), asked("tensorboard")
        if board is not None and importlib.util.find_spec("tensorboard") is None:
            raise UnsupportedError(
                "tensorboard.enabled is true, but the package is not installed: pip install "
                "tensorboard, or use csv_monitor"
            )
        self.enabled = csv_section is not None or board is not None
        self.csv_monitor: csvMonitor | None = None
        self.tb_monitor: TensorBoardMonitor | None = None
        if rank == 0:
            self.csv_monitor = None if csv_section is None else csvMonitor(csv_section)
            self.tb_monitor = None if board is None else TensorBoardMonitor(board)

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Events are (name, value, samples so far); on ranks but 0 nothing."""
        events = list(event_list)
        for monitor in (self.tb_monitor, self.csv_monitor):
            if monitor is not None:
                monitor.write_events(events)
