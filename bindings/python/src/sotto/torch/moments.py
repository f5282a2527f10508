"""States of optimizers that are not of this package, as arrays for the library's import.

That is what torch.optim.Adam, AdamW and RAdam, apex's and DeepSpeed's optimizers have in "state":
moments and step numbers by the numbers of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidArgumentError
from .hyper import CONSTANTS

if TYPE_CHECKING:
    from .. import optim as plain
    from .base import SottoOptimizer

# Of rank 0 alone, or sizes of its buffers: the library starts error feedback anew.
OF_RANK_0 = (
    "worker_error",
    "server_error",
    "tensor_size",
    "corrected_tensor_size",
    "server_chunk_size",
)
# Keys of a group that say how torch computes, or what a state or an optimizer here has elsewhere.
NOT_OF_A_GROUP = (
    *("params", "step", "foreach", "fused", "capturable", "decoupled_weight_decay"),
    *CONSTANTS,
)


def array(value: Any) -> torch.Tensor:
    """A contiguous vector; numbers have one element."""
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().view(-1)
    return torch.tensor([value], dtype=torch.int64 if isinstance(value, int) else torch.float64)


def owners(
    saved: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], what: str
) -> dict[Any, str]:
    """The names of the parameters that have a number in a state.

    names: of every group. what: has the state. Errors: InvalidArgumentError (other groups).
    """
    sizes, mine = [len(group["params"]) for group in saved], [len(group) for group in names]
    if sizes != mine:
        raise InvalidArgumentError(
            f"the {what}'s groups have {sizes} tensors, this optimizer's {mine}; make the same "
            "groups of parameters, in the same order"
        )
    numbers = (index for group in saved for index in group["params"])
    return dict(zip(numbers, (name for group in names for name in group)))


def arrays(owned: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, torch.Tensor]:
    """What states have, with their owners, by the names of Optimizer.import_arrays."""
    return {
        f"{owner}/{key}": array(value)
        for owner, values in owned
        for key, value in values.items()
        if key not in OF_RANK_0
    }


def converted(optimizer: SottoOptimizer, other: Mapping[str, Any]) -> dict[str, Any]:
    """The state_dict() of another optimizer as a state of this one, of form "moments".

    Parameters without a state there have never had a gradient: their moments are zero. Errors:
    InvalidArgumentError (no such state; other groups or shapes; what this one has not, as amsgrad).
    """
    if not _is_of_torch(other):
        raise InvalidArgumentError(
            'the state has no entry "sotto", and not "state" and "param_groups" as torch has them '
            "either: it was made by an optimizer neither of sotto.torch nor of torch.optim"
        )
    state, groups = other["state"], other["param_groups"]
    names = owners(groups, optimizer._names(), "state")
    optimizer._check_constants(groups)
    owned: dict[str, dict[str, Any]] = {}
    for index, group in enumerate(groups):
        _check_decay(optimizer, index, group)
        common = {"step": group["step"]} if "step" in group else {}  # as apex has it
        owned.update({names[i]: {**common, **state[i]} for i in group["params"] if state.get(i)})
    for name, _, p in optimizer._named():
        _check_shapes(name, p, owned.get(name, {}))
    some: dict[str, Any] = next(iter(owned.values()), {})
    for name, _, p in optimizer._registered() if owned else ():
        zeros = {key: torch.zeros(p.shape) for key in some if key not in (*OF_RANK_0, "step")}
        steps = {"step": some["step"]} if "step" in some else {}
        owned.setdefault(name, {**zeros, **steps})
    return {
        "param_groups": [_group(*both) for both in zip(optimizer.param_groups, groups)],
        "sotto": {
            "form": "moments",
            "names": list(owned),
            "onebit": any(key in values for values in owned.values() for key in OF_RANK_0),
            "blob": arrays(owned.items()) or None,
        },
    }


def load(optimizer: SottoOptimizer, optim: plain.Optimizer, saved: Mapping[str, Any]) -> None:
    """Takes what converted() has made. Collective.

    Steps there are updates; those of DeepSpeed's 1-bit types, whose first one updates nothing, are
    what the library's state_step is. Errors: InvalidArgumentError (what the state lacks here).
    """
    found = saved["blob"]
    if not saved["onebit"]:
        info = optim.info()
        extra = info.state_step - info.step
        steps = {name: t + extra for name, t in found.items() if name.endswith("/step")}
        _check_stage(optimizer, steps)
        found = {**found, **steps}
    optim.import_arrays(found)


def _check_stage(optimizer: SottoOptimizer, steps: Mapping[str, torch.Tensor]) -> None:
    """Stages need more than moments, which their own warm-up collects."""
    if optimizer._kind == "ZeroOneAdam":
        raise InvalidArgumentError(
            "the state has no intervals and counters of 0/1 Adam, which goes on from its own "
            "states and DeepSpeed's alone"
        )
    freeze = optimizer._fixed.get("freeze_step", math.inf)
    step = max((int(t) for t in steps.values()), default=0)
    if optimizer._kind == "OneBitLamb" and step >= freeze:
        raise InvalidArgumentError(
            f"freeze_step is {freeze}, and the state's next step is {step}: compression needs the "
            "trust ratios of a warm-up with 1-bit LAMB, which this state does not have; make "
            "freeze_step some hundred steps larger than that"
        )


def _is_of_torch(other: Any) -> bool:
    if not isinstance(other, Mapping):
        return False
    state, groups = other.get("state"), other.get("param_groups")
    return (
        isinstance(state, Mapping)
        and all(isinstance(values, Mapping) for values in state.values())
        and isinstance(groups, Sequence)
        and all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups)
    )


def _group(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    taken = {key: value for key, value in theirs.items() if key not in NOT_OF_A_GROUP}
    return {**mine, **taken, "params": theirs["params"]}


def _check_shapes(name: str, p: torch.Tensor, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        one = key == "step" or not isinstance(value, torch.Tensor) or value.ndim == 0
        if not one and value.shape != p.shape:
            raise InvalidArgumentError(
                f'{key} of parameter "{name}" has shape {list(value.shape)} in the state, the '
                f"parameter {list(p.shape)}: the state is of another model"
            )


def _check_decay(optimizer: SottoOptimizer, index: int, group: Mapping[str, Any]) -> None:
    theirs, mine = group.get("decoupled_weight_decay"), optimizer._fixed.get("adam_w_mode", True)
    if theirs in (None, mine) or not group.get("weight_decay"):
        return
    remedy = f"; give it adam_w_mode={theirs}" if "adam_w_mode" in optimizer._fixed else ""
    raise InvalidArgumentError(
        f"decoupled_weight_decay of group {index} is {theirs} in the state, with weight_decay "
        f"{group['weight_decay']}; this optimizer's decay is {'' if mine else 'not '}decoupled"
        f"{remedy}"
    )
