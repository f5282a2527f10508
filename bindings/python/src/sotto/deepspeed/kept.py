"""An optimizer that goes on while the parameters become those of a checkpoint."""

from __future__ import annotations

from typing import Any

from .client import ClientOptimizer


def keeps_state(optimizer: Any) -> bool:
    """Whether moments, step number and loss scale stay.

    Not those of outer steps, which would lead parameters back to their anchor, and of 0/1 Adam with
    a frozen variance, which makes parameters of what its last synchronisation left.
    """
    if isinstance(optimizer, ClientOptimizer) or optimizer._optim is None:
        return True
    if "outer" in optimizer._section:
        return False
    return bool(optimizer._kind != "ZeroOneAdam" or optimizer.info().stage == 0)


def drop_micro_batches(optimizer: Any) -> None:
    """Those of the next update. Collective for 0/1 Adam."""
    optimizer.load_state_dict(optimizer.state_dict())  # states have none


def follow(optimizer: Any) -> None:
    """The model's parameters have been written: masters follow, also writes past autograd.

    Where state cannot stay it begins anew, and a schedule of the configuration goes on. Collective.
    """
    if isinstance(optimizer, ClientOptimizer):
        optimizer.refresh_fp32_params()
    elif keeps_state(optimizer):
        _refresh_masters(optimizer)
    else:
        _begin_anew(optimizer)


def _refresh_masters(optimizer: Any) -> None:
    optimizer._follow_groups()
    if optimizer._optim is None:
        return
    optimizer._gradients.follow(optimizer._optim)
    for tensor in optimizer._tensors:
        if tensor.copy is not None:
            tensor.adopt()


def _begin_anew(optimizer: Any) -> None:
    iteration = optimizer.schedule_iteration
    optimizer.close()
    if iteration >= 0:
        optim = optimizer._build()
        optim.set("scheduler_iteration", iteration)
        optimizer._show_schedule(optim)
