"""States of optimizers: what state_dict() and gather_state() give and load_state_dict() takes.

A state is what torch's optimizers give, with an empty "state" and an entry "sotto", of plain values
and tensors. Its "form" says what a load does:

rank     made by one rank alone, any rank can load it: parameters, moments and counters become all
         ranks'; error feedback is that rank's, used by the same rank of as many, else zero
exact    the same, for that rank alone
reset    without error feedback
mean     error feedback averaged over the ranks
whole    the exact state of every rank; on another number of ranks that of rank 0, as form rank
moments  of another optimizer (moments.py): arrays; parameters stay, error feedback is zero
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..errors import InvalidArgumentError, UnsupportedError
from ..outer import what_is_lost
from . import moments

if TYPE_CHECKING:
    from .. import optim as plain
    from ..comm import Comm
    from .base import SottoOptimizer

FORMAT = 2
KNOWN = (1, FORMAT)  # 1 has "checkpoint" in place of "form"
WHOLE = 'its own state_dict(), or what gather_state("whole") gives'
LOADED = {"mean": "mean", "exact": "exact", "reset": "common"}  # the library's mode, by form


class Described(Protocol):
    """An optimizer or outer optimizer whose state is described."""

    _kind: str

    def _registered(self) -> list[tuple[str, int, torch.Tensor]]: ...


def tensor_of(blob: bytearray) -> torch.Tensor:
    """Bytes as states have them."""
    return torch.frombuffer(blob, dtype=torch.uint8)


def bytes_of(blob: torch.Tensor) -> Any:
    """What the library takes of a tensor_of()."""
    return blob.cpu().contiguous().numpy()


def gather(comm: Comm, blob: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of all ranks, of any lengths. Collective."""
    lengths = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(torch.tensor([blob.numel()]), lengths).wait()
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
    padded[: blob.numel()] = blob
    rows = torch.empty(comm.size * padded.numel(), dtype=torch.uint8)
    comm.all_gather(padded, rows).wait()
    return [row[:n].clone() for row, n in zip(rows.view(comm.size, -1), lengths.tolist())]


def description(optimizer: Described) -> dict[str, Any]:
    """The entry "sotto" without a state of the library."""
    trained = optimizer._registered()
    return {
        "format": FORMAT,
        "kind": optimizer._kind,
        "form": "reset",
        "names": [name for name, _, _ in trained],
        "shapes": [list(p.shape) for _, _, p in trained],
        "blob": None,
    }


def own_state(optimizer: SottoOptimizer, optim: plain.Optimizer, policy: str) -> dict[str, Any]:
    """What this rank makes alone. policy: the "checkpoint" of the constructor."""
    comm = optimizer._comm
    form = {"mean": "rank", "exact": "exact", "reset": "reset"}[policy]
    return {
        "form": form,
        "rank": comm.rank,
        "world_size": comm.size,
        "error_feedback": _has_error_feedback(optimizer, optim),
        "frozen": optimizer.standing_still(),
        "blob": tensor_of(optim.export_state("common")),
    }


def _has_error_feedback(optimizer: SottoOptimizer, optim: plain.Optimizer) -> bool:
    """Whether there is any that a load without it would lose."""
    info = optim.info()
    if optimizer._comm.size == 1 or info.step == 0:
        return False
    if "gradient_codec" in optimizer._section or optimizer._kind == "ZeroOneAdam":
        return True
    return info.stage == 1


def mean_state(optimizer: SottoOptimizer, optim: plain.Optimizer, policy: str) -> dict[str, Any]:
    """The same on all ranks. policy: as above; "reset": without error feedback. Collective."""
    form = "reset" if policy == "reset" else "mean"
    try:
        blob = optim.export_state(form)
    except UnsupportedError as error:  # some error feedback has no mean
        remedy = 'checkpoint="exact" or "reset" here, "sotto": {"checkpoint": ...} in a file'
        if policy == "exact":
            remedy = 'gather_state("whole") has that of every rank, and so has its own state_dict()'
        raise UnsupportedError(f"{error}: {remedy}") from None
    return {
        "form": form,
        "frozen": optimizer.standing_still(),
        "blob": tensor_of(blob),
    }


def whole_state(optimizer: SottoOptimizer, optim: plain.Optimizer) -> dict[str, Any]:
    """The states of all ranks. Collective."""
    mine = own_state(optimizer, optim, "mean")
    blobs = gather(optimizer._comm, mine["blob"])
    return {**mine, "form": "whole", "rank": 0, "blob": blobs[0], "blobs": blobs}


def check_saved(optimizer: Described, saved: Mapping[str, Any]) -> None:
    """Errors: InvalidArgumentError (another optimizer or model: names what differs)."""
    if saved["format"] not in KNOWN:
        raise InvalidArgumentError(
            f"the state has format {saved['format']}, this version knows {FORMAT}"
        )
    if saved["kind"] != optimizer._kind:
        raise InvalidArgumentError(
            f"the state is of {saved['kind']}, this optimizer is {optimizer._kind}"
        )
    mine = [(name, list(p.shape)) for name, _, p in optimizer._registered()]
    theirs = list(zip(saved["names"], saved["shapes"]))
    differ = [
        f'"{here[0]}" {here[1]} here, "{there[0]}" {list(there[1])} in the state'
        for here, there in zip(mine, theirs)
        if here[0] != there[0] or here[1] != list(there[1])
    ]
    if len(mine) != len(theirs):
        longer, where = (
            (mine, "only here") if len(mine) > len(theirs) else (theirs, "only in the state")
        )
        extra = longer[min(len(mine), len(theirs)) :]
        differ += [f'"{name}" {list(shape)} {where}' for name, shape in extra]
    if differ:
        more = f"; and {len(differ) - 5} more" if len(differ) > 5 else ""
        raise InvalidArgumentError("the state is of another model: " + "; ".join(differ[:5]) + more)


def load(optimizer: SottoOptimizer, optim: plain.Optimizer, saved: Mapping[str, Any]) -> None:
    """Takes the library's state, as its form says; without error feedback where "checkpoint" of
    this optimizer is "reset". Collective for 0/1 Adam, else local.

    Errors: InvalidArgumentError (damaged; exact: another rank; 0/1 Adam: ranks have states of
    different ranks that do not fit). Nothing changes on error.
    """
    form = saved.get("form") or saved["checkpoint"]
    if form == "moments":
        moments.load(optimizer, optim, saved)
        return
    reset = optimizer._policy == "reset"
    if form in ("mean", "exact", "reset"):
        optim.import_state(bytes_of(saved["blob"]), "common" if reset else LOADED[form])
        return
    comm, rank, world = optimizer._comm, saved["rank"], saved["world_size"]
    whole = form == "whole" and world == comm.size
    blob = bytes_of(saved["blobs"][comm.rank] if whole else saved["blob"])
    fits = whole or (rank == comm.rank and world == comm.size)
    if optimizer._kind == "ZeroOneAdam" and comm.size > 1:
        _check_common(comm, blob, fits)
    reason = f"it was made by rank {rank} of {world}, and this is rank {comm.rank} of {comm.size}"
    if fits and not reset:
        try:
            optim.import_state(blob, "exact")
            return
        except InvalidArgumentError as error:  # of other chunks, for one; or damaged
            reason = str(error)
    optim.import_state(blob, "common")
    lost = "outer" in optimizer._section and what_is_lost(world, rank, comm, WHOLE)
    if lost and not reset:
        warnings.warn(lost, stacklevel=4)
    elif saved["error_feedback"] and not reset:
        warnings.warn(
            f"the state's error feedback is not used and starts at zero: {reason}. For all of it "
            "save what gather_state() gives, which every rank has to call",
            stacklevel=4,
        )


def _check_common(comm: Comm, blob: Any, fits: bool) -> None:
    """What 0/1 Adam has added up since a synchronisation differs from rank to rank. Collective."""
    mine = torch.zeros(2, dtype=torch.int64)
    mine[0] = int(fits)
    digest = hashlib.blake2b(blob.tobytes(), digest_size=8).digest()
    mine[1] = int.from_bytes(digest, "little", signed=True)
    everybody = torch.empty(2 * comm.size, dtype=torch.int64)
    comm.all_gather(mine, everybody).wait()
    fit, digests = everybody.view(-1, 2).T
    if not bool(fit.all()) and len(set(digests.tolist())) > 1:
        strangers = [rank for rank, value in enumerate(fit.tolist()) if not value]
        raise InvalidArgumentError(
            f"ranks have states of different ranks, and those of ranks {strangers} are not their "
            "own: give all ranks the same state, or one that gather_state() made"
        )
