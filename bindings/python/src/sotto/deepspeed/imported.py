"""Checkpoints that DeepSpeed's engine wrote without ZeRO, as arrays for the library's import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ..torch.moments import array, arrays, owners

SCALER = ("cur_scale", "cur_iter", "last_overflow_iter")
# What DeepSpeed's file has beside what the program's client_state added.
ENGINE_KEYS = (
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd"),
    *("sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples"),
    *("dp_world_size", "mp_world_size", "ds_config", "ds_version"),
)


def is_deepspeeds(state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint file was written by DeepSpeed's engine."""
    return "ds_version" in state


def client_state_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the program had given to DeepSpeed's save_checkpoint()."""
    return {key: value for key, value in state.items() if key not in ENGINE_KEYS}


def arrays_of(
    state: Mapping[str, Any], names: list[list[str]], *, scaled: bool
) -> dict[str, torch.Tensor]:
    """A checkpoint's optimizer, schedule and loss scale, by the names of Optimizer.import_arrays.

    names: of the parameters of every group, in the order of the optimizer that was saved.
    scaled: whether loss scaling goes on. Errors: InvalidArgumentError (other groups, ZeRO).
    """
    optimizer = state.get("optimizer")
    if not isinstance(optimizer, Mapping):
        raise InvalidArgumentError(
            "the checkpoint has no optimizer state: it was written with ZeRO, or without one"
        )
    inner = optimizer.get("optimizer_state_dict", optimizer)
    flat = "fp32_groups_flat" in optimizer  # a wrapper that has one tensor per group
    owning = [[f"group:{g}"] for g in range(len(names))] if flat else names
    owner_of = owners(inner["param_groups"], owning, "checkpoint")
    out = arrays((owner_of[index], values) for index, values in inner["state"].items())
    if flat:
        tensors = optimizer["fp32_groups_flat"]
    else:
        tensors = [t for group in optimizer.get("fp32_groups", []) for t in group]
    masters = zip([name for group in owning for name in group], tensors)
    out.update({f"{owner}/fp32": array(tensor) for owner, tensor in masters})
    if scaled and optimizer.get("dynamic_loss_scale"):
        out.update({f"loss_scaler/{key}": array(optimizer[key]) for key in SCALER})
    schedule = state.get("lr_scheduler")
    if isinstance(schedule, Mapping) and "last_batch_iteration" in schedule:
        out["scheduler/last_batch_iteration"] = array(schedule["last_batch_iteration"])
    return out
