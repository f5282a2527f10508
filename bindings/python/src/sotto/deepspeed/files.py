"""Checkpoint folders in the layout that DeepSpeed's engine writes without ZeRO.

SAVE_DIR/latest                            the name of the newest tag
SAVE_DIR/TAG/mp_rank_00_model_states.pt    rank 0: module, optimizer, counters, client_state
SAVE_DIR/TAG/sotto_rank_NN_optim_states.pt with "sotto": {"checkpoint": "exact"}: of each rank
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..comm import Comm
from ..errors import InvalidArgumentError, SottoError

MODEL_FILE = "mp_rank_00_model_states.pt"
RANK_FILES = "sotto_rank_*_optim_states.pt"
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.Size, torch.dtype)


def rank_file(rank: int) -> str:
    """The file of one rank's exact optimizer state."""
    return f"sotto_rank_{rank:02d}_optim_states.pt"


def check_plain(value: Any, where: str) -> None:
    """Errors: InvalidArgumentError for what torch.load would not read without running code."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple, set)):
        for i, item in enumerate(value):
            check_plain(item, f"{where}[{i}]")
    elif isinstance(value, argparse.Namespace):
        check_plain(vars(value), where)
    elif not isinstance(value, PLAIN) and not _is_numpys(value):
        raise InvalidArgumentError(
            f"{where} is of type {type(value).__qualname__}; a checkpoint holds plain Python "
            "values, lists, dicts, namespaces, arrays and tensors"
        )


def _is_numpys(value: Any) -> bool:
    """Whether a value is an array or a number of numpy's that has no objects in it."""
    dtype = getattr(value, "dtype", None)
    return type(value).__module__ == "numpy" and getattr(dtype, "hasobject", True) is False


def _readable() -> list[Any]:
    """Classes beside PyTorch's that read() makes: none of them runs code of the file."""
    known: list[Any] = [argparse.Namespace]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        core = getattr(numpy, "_core", None) or numpy.core
        kinds = [type(numpy.dtype(kind)) for kind in numpy.sctypeDict.values()]
        known += [numpy.ndarray, numpy.dtype, *kinds]
        known += [core.multiarray._reconstruct, core.multiarray.scalar]
    return known


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Writes a file that is whole or not there, also if the machine stops meanwhile."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """As write(), for text."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def read(path: Path) -> dict[str, Any]:
    """Reads a file on the CPU, without running code that it may contain."""
    with torch.serialization.safe_globals(_readable()):
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def together(comm: Comm, what: str, work: Callable[[], None]) -> None:
    """Runs work() on every rank; an error of one is one of all, so that none waits for ever.

    Errors: this rank's own; SottoError (another rank's: its number).
    """
    failure: Exception | None = None
    try:
        work()
    except Exception as error:
        failure = error
    flags = torch.zeros(comm.size, dtype=torch.uint8)
    comm.all_gather(torch.tensor([failure is not None], dtype=torch.uint8), flags).wait()
    if failure is not None:
        raise failure
    failed = flags.nonzero().flatten().tolist()
    if failed:
        raise SottoError(f"{what} failed on rank {failed[0]}; the error is told there")
