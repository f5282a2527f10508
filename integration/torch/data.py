"""Text as tokens, and batches of masked sequences: byte for byte those of integration/c_trainer.

All files are joined in order; the last 5 % of the bytes are held out. Each byte value is a token;
values seen fewer than 50 times in the training part share one "unknown" token. A further token
stands for a masked position. Every batch depends on seed, step and rank alone, so that a resumed
run sees what an unbroken one would have seen.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from typing import NamedTuple

import numpy as np
import torch

BYTES_MIN, SEEN_MIN = 2_000_000, 50
RNG_INIT, RNG_TRAIN, RNG_EVAL, RNG_HELD_OUT = 1, 2, 3, 4  # numbers of different purposes
U64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


class DataError(Exception):
    """The text says which file or directory, and what is wrong with it."""


# ---- random numbers: SplitMix64 on a key -------------------------------------------------------


def _mix(x: int) -> int:
    x = (x + GOLDEN) & U64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64
    return x ^ (x >> 31)


def rng_values(seed: int, purpose: int, a: int, b: int, n: int) -> np.ndarray:
    """The first n numbers of a generator that depends on this key alone, as uint64."""
    state = _mix(_mix(_mix(_mix(seed & U64) + purpose) + a) + b)
    x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(state)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# ---- finding files -----------------------------------------------------------------------------


def _list_directory(folder: str, recursive: bool) -> list[str]:
    """The .py files of a directory. Links are not followed, so no file is read twice."""
    found = []
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise DataError(f'--data: cannot open directory "{folder}": {error.strerror}') from error
    for entry in entries:
        path = f"{folder}/{entry.name}"
        if entry.name.startswith("."):
            continue
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode) and recursive:
            found += _list_directory(path, True)
        if stat.S_ISREG(mode) and len(entry.name) > 3 and entry.name.endswith(".py"):
            found.append(path)
    return sorted(found, key=os.fsencode)


def _default_directory() -> str:
    """The Python library of this machine with the largest version."""
    minors = [
        name[len("python3.") :]
        for name in (os.listdir("/usr/lib") if os.path.isdir("/usr/lib") else [])
        if name.startswith("python3.")
    ]
    best = max((int(minor) for minor in minors if minor.isdecimal()), default=-1)
    if best < 0:
        raise DataError(
            "no Python library in /usr/lib/python3.*: name text files or directories with --data"
        )
    return f"/usr/lib/python3.{best}"


def _files_of(path: str) -> list[str]:
    try:
        is_directory = stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        raise DataError(f'--data: cannot read "{path}": {error.strerror}') from error
    if not is_directory:
        return [path]
    files = _list_directory(path.rstrip("/") or "/", True)
    if not files:
        raise DataError(f'--data: no .py file in directory "{path}"')
    return files


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise DataError(f'--data: cannot open "{path}": {error.strerror}') from error


# ---- tokens ------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """What a batch looks like."""

    positions: int
    masked: int


class Batch(NamedTuple):
    """Sequences with some of their tokens masked; what the model takes."""

    tokens: torch.Tensor  # sequences x positions, after masking
    rows: torch.Tensor  # which of all positions are to be predicted, ascending
    targets: torch.Tensor  # what was there


class Data:
    """The text as tokens. paths: files, and directories for their .py files; none: this machine's
    Python library. Errors: DataError."""

    def __init__(self, paths: list[str]) -> None:
        if paths:
            files = [file for path in paths for file in _files_of(path)]
        else:
            files = _list_directory(_default_directory(), False)
        text = b"".join(_read(file) for file in files)
        if len(text) < BYTES_MIN:
            raise DataError(
                f"--data: {len(text)} bytes in {len(files)} file(s); at least {BYTES_MIN} bytes "
                "are needed to train on"
            )
        if len(text) >= 1 << 32:
            raise DataError(f"--data: {len(text)} bytes; at most {(1 << 32) - 1} can be used")
        self.files = len(files)
        self.held_out = len(text) // 20
        self.train = len(text) - self.held_out
        self.hash = hashlib.blake2b(text, digest_size=8).hexdigest()
        values = np.frombuffer(text, dtype=np.uint8)
        often = np.bincount(values[: self.train], minlength=256) >= SEEN_MIN
        self.unknown = int(often.sum())
        self.mask = self.unknown + 1
        self.vocab = self.unknown + 2
        token_of = np.where(often, np.cumsum(often) - 1, self.unknown).astype(np.int16)
        self.tokens = token_of[values]
        seen = np.bincount(self.tokens[self.train :], minlength=self.vocab)
        shares = [n / self.held_out for n in seen.tolist() if n > 0]
        self.entropy = -sum(share * math.log(share) for share in shares)

    def held_out_windows(self, shape: Shape) -> int:
        """Whole windows in the held-out part."""
        return self.held_out // shape.positions

    def train_batch(self, shape: Shape, seed: int, step: int, rank: int, sequences: int) -> Batch:
        """Training batch number `step` of `rank`: random windows, random masks."""
        draw = _Draws(seed, RNG_TRAIN, step, rank, sequences * (1 + 3 * shape.masked))
        starts = self.train - shape.positions + 1
        batch = _Building(self, shape)
        for _ in range(sequences):
            batch.place(draw.below(starts), draw)
        return batch.built()

    def eval_batch(self, shape: Shape, whole: bool, indices: range) -> Batch:
        """Fixed evaluation sequences. whole False: random windows of the held-out part, the same
        in every run; True: its consecutive windows."""
        starts = self.held_out - shape.positions + 1
        batch = _Building(self, shape)
        for i in indices:
            purpose = RNG_HELD_OUT if whole else RNG_EVAL
            draw = _Draws(0, purpose, i, 0, 1 + 3 * shape.masked)
            start = i * shape.positions if whole else draw.below(starts)
            batch.place(self.train + start, draw)
        return batch.built()


class _Draws:
    """Numbers of one generator, one after the other; at most `most` are needed."""

    def __init__(self, seed: int, purpose: int, a: int, b: int, most: int) -> None:
        numbers = rng_values(seed, purpose, a, b, most) >> np.uint64(32)
        self.next = iter(numbers.tolist()).__next__

    def below(self, n: int) -> int:
        return (self.next() * n) >> 32


class _Building:
    """A batch while sequences are placed into it."""

    def __init__(self, data: Data, shape: Shape) -> None:
        self.data, self.shape = data, shape
        self.windows: list[np.ndarray] = []
        self.rows: list[int] = []
        self.tokens: list[int] = []  # what comes into these rows; -1: stays as it is

    def place(self, start: int, draw: _Draws) -> None:
        """Adds a window and masks it: of the chosen positions 80 % become the mask token, 10 % a
        random token, 10 % stay as they are."""
        first, positions = len(self.windows) * self.shape.positions, self.shape.positions
        self.windows.append(self.data.tokens[start : start + positions])
        rows: list[int] = []
        for m in range(self.shape.masked):
            # Drawn among the positions still free, then over those already chosen.
            row = first + draw.below(positions - m)
            at = 0
            while at < m and rows[at] <= row:
                row += 1
                at += 1
            rows.insert(at, row)
        self.rows += rows
        mask = self.data.mask
        for _ in rows:
            what = draw.below(10)
            self.tokens.append(mask if what < 8 else draw.below(mask) if what == 8 else -1)

    def built(self) -> Batch:
        tokens = np.concatenate(self.windows).astype(np.int64)
        rows, put = np.array(self.rows), np.array(self.tokens)
        targets = tokens[rows]
        tokens[rows] = np.where(put < 0, targets, put)
        shaped = torch.from_numpy(tokens).view(len(self.windows), self.shape.positions)
        return Batch(shaped, torch.from_numpy(rows), torch.from_numpy(targets))
