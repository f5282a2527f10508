"""Checkpoint folders in the layout that DeepSpeed's engine writes without ZeRO.

SAVE_DIR/latest                            the name of the newest tag
SAVE_DIR/TAG/mp_rank_00_model_states.pt    rank 0: module, optimizer, counters, client_state
SAVE_DIR/TAG/sotto_rank_NN_optim_states.pt with "sotto": {"checkpoint": "exact"}: of each rank

The 00 is the model-parallel rank of a program with an mpu, whose shards have a file each; shards
but the first add it to the names of their ranks' files too.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..comm import Comm
from ..errors import InvalidArgumentError, SottoError

MODEL_FILE = "mp_rank_00_model_states.pt"
RANK_FILES = "sotto_rank_*_optim_states.pt"


def model_file(shard: int) -> str:
    """The file of one model-parallel rank."""
    return f"mp_rank_{shard:02d}_model_states.pt"


def rank_file(rank: int, shard: int) -> str:
    """The file of one rank's exact optimizer state."""
    of_shard = f"_mp_rank_{shard:02d}" if shard else ""
    return f"sotto_rank_{rank:02d}{of_shard}_optim_states.pt"


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


class _Pickler(pickle.Pickler):
    """Leaves plain tensors out: whether torch.load() reads a state is a question of the rest."""

    def reducer_override(self, value: Any) -> Any:
        """An empty torch.Size takes a tensor's place."""
        if type(value) in (torch.Tensor, torch.nn.Parameter) and not vars(value):
            return torch.Size, ()
        return NotImplemented


_WITHOUT_TENSORS = types.SimpleNamespace(__name__=__name__, Pickler=_Pickler)


def _can_be_read(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file, pickle_module=_WITHOUT_TENSORS)
        file.seek(0)
        _load(file)
    except Exception:  # whatever the pickling of somebody's class may raise
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value is made of, and where that is in it."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        yield from ((f" key {key!r}", key) for key in value)
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))


def check_readable(value: Any, where: str = "") -> None:
    """Errors: InvalidArgumentError (read() would refuse the file: names the innermost part)."""
    if _can_be_read(value):
        return
    for name, part in _parts(value):
        check_readable(part, where + name)
    raise InvalidArgumentError(
        f"{where or 'the state'} is of type {type(value).__qualname__}, which load_checkpoint() "
        "does not read, since it runs no code of a file; allowed: plain Python values, lists, "
        "tuples, dicts, argparse.Namespace, numpy arrays, tensors, and what the program passes to "
        "torch.serialization.add_safe_globals()"
    )


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Writes a file that is whole or not there, also if the machine stops meanwhile.

    Errors: InvalidArgumentError (read() would not read it), OSError.
    """
    for name, part in state.items():
        check_readable(part, name)
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


def _load(file: Any) -> Any:
    with torch.serialization.safe_globals(_readable()):
        return torch.load(file, map_location="cpu", weights_only=True)


def read(path: Path) -> dict[str, Any]:
    """Reads a file on the CPU, without running code that it may contain."""
    state: dict[str, Any] = _load(path)
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
