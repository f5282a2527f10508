"""Callers of step() and of states that mean something else than a program does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from ..errors import UnsupportedError
from .averagers import zero_reason

_DCP = "torch.distributed.checkpoint.state_dict"


def _callers() -> Iterator[FrameType]:
    """The nearest: of the function that asks, of the optimizer's, and of what wraps that."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(12):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _called_by_dcp(function: str = "") -> bool:
    """Whether torch.distributed.checkpoint, or a function of it, calls the optimizer."""
    return _DCP in sys.modules and any(
        frame.f_globals.get("__name__") == _DCP and function in ("", frame.f_code.co_name)
        for frame in _callers()
    )


def is_dcp_rehearsal() -> bool:
    """Whether step() was called by torch.distributed.checkpoint to make an optimizer allocate its
    state: with gradients of zero and learning rate 0."""
    return _called_by_dcp("_init_optim_state")


def check_keeps_states() -> None:
    """Errors: UnsupportedError (torch.distributed.checkpoint calls, which keeps torch's entries of
    a state alone)."""
    if _called_by_dcp():
        raise UnsupportedError(
            "get_state_dict() and set_state_dict() of torch.distributed.checkpoint leave out what "
            'this optimizer keeps, the entry "sotto" of its state: save state_dict() itself, and '
            "give it to load_state_dict()"
        )


def is_rehearsal() -> bool:
    """Whether step() was called by DeepSpeed to make an optimizer allocate its state.

    Its 16-bit wrappers do that once with zero gradients, in their constructors. Here that would be
    an update: weight decay, moments and schedules would move.
    Errors: UnsupportedError (a wrapper of ZeRO).
    """
    if "deepspeed.runtime.engine" not in sys.modules:
        return False
    for frame in _callers():
        if frame.f_code.co_name == "initialize_optimizer_states":
            wrapper = type(frame.f_locals.get("self"))
            if wrapper.__name__ not in ("FP16_UnfusedOptimizer", "FP16_Optimizer"):
                raise UnsupportedError(
                    f"this optimizer was given to DeepSpeed's {wrapper.__name__}: "
                    + zero_reason("not 0", "it")
                )
            return True
    return False
