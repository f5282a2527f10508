"""Checkpoints from which a run continues bit for bit.

DIR/latest     the name of the folder that is complete: slot0 or slot1, which take turns
DIR/SLOT/run.json            what the run is, and the counts of every rank
DIR/SLOT/...                 what the variant keeps: model and optimizer, see variants.py

Every file is written under a temporary name, synced and renamed, and "latest" last.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from join import Ranks

from sotto.deepspeed.files import write_text

SLOTS = ("slot0", "slot1")


class CheckpointError(Exception):
    """The text says which file, and in what it differs from this run."""


def latest(folder: Path) -> str | None:
    """The complete slot; None: there is none."""
    path = folder / "latest"
    if not path.exists():
        return None
    name = path.read_text(encoding="utf-8").strip()
    if name not in SLOTS:
        raise CheckpointError(f'"{path}" is damaged')
    return name


def next_slot(folder: Path) -> str:
    """Where the next checkpoint goes: the other slot than the complete one."""
    return SLOTS[1] if latest(folder) == SLOTS[0] else SLOTS[0]


def write_run(folder: Path, slot: str, key: dict[str, Any], totals: list[Any]) -> None:
    """Rank 0, before the variant's files. The slot's old content is no checkpoint any more."""
    (folder / slot).mkdir(parents=True, exist_ok=True)
    write_text(folder / slot / "run.json", json.dumps({"run": key, "totals": totals}, indent=1))


def complete(folder: Path, slot: str) -> None:
    """Rank 0, when every rank has written its files."""
    write_text(folder / "latest", slot)


def read_run(folder: Path, key: dict[str, Any], ranks: Ranks) -> tuple[str, dict[str, Any]]:
    """Slot of the latest checkpoint and this rank's counts. Errors: CheckpointError (none there,
    damaged, or of another run: names the first difference)."""
    slot = latest(folder)
    if slot is None:
        raise CheckpointError(f'--resume: no complete checkpoint in "{folder}"')
    path = folder / slot / "run.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        saved, totals = content["run"], content["totals"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f'--resume: "{path}" cannot be read: {error}') from error
    for name, now in key.items():
        if saved.get(name) != now:
            raise CheckpointError(
                f'--resume: "{path}" is of another run: {name} was {saved.get(name)}, now it is '
                f"{now}"
            )
    return slot, totals[ranks.rank]
