"""What rank 0 tells: JSON lines, progress and the summary, in the form of integration/c_trainer.

integration/report reads them; integration/c_trainer/README.md says what every key means.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from typing import Any

PLAIN_S = 10.0  # between two lines of plain progress


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


class Progress:
    """A bar by tqdm, where that is installed, on a terminal; else a line now and then.

    how: "auto", "bar", "plain" or "off"."""

    def __init__(self, how: str, name: str, steps: int, done: int) -> None:
        self.name, self.steps, self.done = name, steps, done
        self.bar: Any = None
        self.shown = time.monotonic()
        has_tqdm = importlib.util.find_spec("tqdm") is not None
        self.plain = how == "plain" or (how == "auto" and not sys.stdout.isatty()) or not has_tqdm
        if how == "off":
            self.plain = False
        elif not self.plain:
            from tqdm import tqdm

            self.bar = tqdm(
                total=steps, initial=done, desc=name, unit="step", mininterval=0.2, file=sys.stdout
            )

    def step(self, done: int, loss: float, stage: str, mb_sent: float) -> None:
        """After a step; done: updates so far."""
        if self.bar is not None:
            text = f"loss {loss:.3f}, {mb_sent:.1f} MB sent, {stage}"
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(done - self.done)
            self.done = done
        elif self.plain and (done == self.steps or time.monotonic() - self.shown >= PLAIN_S):
            self.shown = time.monotonic()
            self.note(f"step {done}/{self.steps}, loss {loss:.3f}, {mb_sent:.1f} MB sent, {stage}")

    def note(self, text: str) -> None:
        """A line of its own."""
        if self.bar is not None:
            self.bar.write(f"{self.name}: {text}", file=sys.stdout)
        else:
            print(f"{self.name}: {text}", flush=True)

    def close(self) -> None:
        """The bar's line ends."""
        if self.bar is not None:
            self.bar.close()


class Log:
    """JSON lines; without a path, none. length: of the checkpoint that is resumed, so that what the
    file says beyond it is cut off; None: a new file."""

    def __init__(self, path: str | None, length: int | None) -> None:
        self.file = None
        if path is None:
            return
        if length is None:
            self.file = open(path, "w", encoding="utf-8")  # noqa: SIM115
            return
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        if self.file.tell() > length:
            self.file.truncate(length)

    def write(self, record: dict[str, Any]) -> None:
        """One line."""
        if self.file is not None:
            values = {k: finite(v) if isinstance(v, float) else v for k, v in record.items()}
            self.file.write(json.dumps(values) + "\n")

    def length(self) -> int:
        """In bytes, after flushing."""
        if self.file is None:
            return 0
        self.file.flush()
        return self.file.tell()

    def close(self) -> None:
        """Writes what is left."""
        if self.file is not None:
            self.file.close()


def params_hash(flat: bytes) -> str:
    """FNV-1a of the parameters, as the C trainer prints it."""
    value, prime, mask = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1
    for byte in flat:
        value = ((value ^ byte) * prime) & mask
    return f"{value:016x}"


def write_summary(path: str, summary: dict[str, Any]) -> None:
    """One JSON object."""
    values = {k: finite(v) if isinstance(v, float) else v for k, v in summary.items()}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(values, file, indent=2)
        file.write("\n")
