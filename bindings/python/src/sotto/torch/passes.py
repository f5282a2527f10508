"""What torch is doing while it calls: backward passes, and compiling."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType

import torch
from torch.nn.utils import stateless

# The frame of a torch.autograd.Function that is being differentiated.
_NODE = torch.autograd.function.BackwardCFunction.apply.__code__
# That of torch.func.functional_call().
_FUNCTIONAL: CodeType = stateless._functional_call.__code__

# torch 2.1 has none.
is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)


def in_backward() -> bool:
    """Whether a backward pass is under way on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def _is_called_by(code: CodeType) -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is code:
            return True
    return False


def inside_backward() -> bool:
    """Whether the backward pass that calls is a part of another one.

    As those of activation checkpoints are, with use_reentrant=True and in DeepSpeed.
    """
    return _is_called_by(_NODE)


def in_functional_call() -> bool:
    """Whether a module computes with tensors in the place of its parameters, for this call."""
    return _is_called_by(_FUNCTIONAL)
