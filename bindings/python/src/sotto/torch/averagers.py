"""Finds who else averages the gradients that an optimizer here averages itself."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidArgumentError, InvalidStateError, UnsupportedError

if TYPE_CHECKING:
    from .base import SottoOptimizer


def _ddp_class() -> Any:
    module = sys.modules.get("torch.nn.parallel.distributed")
    return None if module is None else module.DistributedDataParallel


def _objects_of(kind: type) -> list[Any]:
    """All live objects of a class. Takes some ten milliseconds in a large program."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


def ddp_modules(params: Iterable[torch.Tensor]) -> list[Any]:
    """The DistributedDataParallel modules that have one of these parameters."""
    kind = _ddp_class()
    if kind is None:
        return []
    ids = {id(p) for p in params}
    return [
        module for module in _objects_of(kind) if any(id(p) in ids for p in module.parameters())
    ]


def check_ddp(modules: Iterable[Any], *, ranks: int) -> None:
    """Errors: InvalidStateError (one of the modules has averaged the gradients already)."""
    for module in modules:
        # The second says what the last forward pass was made for: it is False inside no_sync().
        if ranks > 1 and module.require_backward_grad_sync and module.require_forward_param_sync:
            raise InvalidStateError(
                "the gradients would be all-reduced twice: DistributedDataParallel has averaged "
                "them in backward(), and step() averages them over "
                f"{ranks} ranks. Call sotto.torch.no_sync_after_warmup(model, optimizer) once "
                "before training, or leave the model unwrapped; to average in DDP alone, give the "
                "optimizer comm=comm.split(comm.rank), of one rank"
            )


def no_sync_after_warmup(model: torch.nn.Module, optimizer: SottoOptimizer) -> None:
    """Leaves the averaging of a DistributedDataParallel model's gradients to the optimizer.

    Call it once, before training. backward() then sends nothing: step() averages, in full precision
    during the warm-up and in one bit afterwards, so gradients are all-reduced once in both. DDP's
    other work ends too: buffers, such as the running statistics of batch norm, are those of each
    rank.

    model: the DistributedDataParallel module itself; optimizer: of its parameters.
    Errors: InvalidArgumentError (not such a module, or none of its parameters in the optimizer).
    """
    kind = _ddp_class()
    if kind is None or not isinstance(model, kind):
        raise InvalidArgumentError(
            f"model is of type {type(model).__qualname__}; it has to be the "
            "DistributedDataParallel module. Without one nothing averages gradients but step()"
        )
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in ids for p in model.parameters()):
        raise InvalidArgumentError("the optimizer has none of the model's parameters")
    module: Any = model
    module.require_backward_grad_sync = False


# ---- DeepSpeed's engine ----------------------------------------------------------------------


def deepspeed_engine(optimizer: SottoOptimizer) -> Any:
    """DeepSpeed's engine that was given this optimizer, or None."""
    module = sys.modules.get("deepspeed.runtime.engine")
    if module is None:
        return None
    for engine in _objects_of(module.DeepSpeedEngine):
        if getattr(engine, "basic_optimizer", None) is optimizer:
            return engine
    return None


def adopt_engine(engine: Any, optimizer: SottoOptimizer, *, ranks: int) -> float:
    """Makes DeepSpeed's engine leave averaging and clipping to the optimizer.

    Returns the limit for the gradients' norm that the engine would have used; 0: none.
    Errors: InvalidArgumentError (ZeRO, other ranks than the engine's data-parallel ones).
    """
    stage = int(engine.zero_optimization_stage())
    if stage:
        raise InvalidArgumentError(zero_reason(stage, type(optimizer).__name__))
    if engine.dp_world_size != ranks:
        raise InvalidArgumentError(
            f"the optimizer's comm has {ranks} ranks, DeepSpeed's engine {engine.dp_world_size} "
            "data-parallel ones; make a comm of exactly these, "
            "sotto.torch.comm_of_process_group(group), and pass it as comm="
        )
    engine.enable_backward_allreduce = False
    if hasattr(engine, "pipeline_enable_backward_allreduce"):
        engine.pipeline_enable_backward_allreduce = False
    # DeepSpeed would clip the gradients of each rank by a factor of its own.
    limit = float(engine.gradient_clipping())
    engine._config.gradient_clipping = 0.0
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = 0.0
    return limit


def zero_reason(stage: Any, name: str) -> str:
    """Why an optimizer here does not work below ZeRO."""
    return (
        f"zero_optimization.stage is {stage}: ZeRO gives every rank a shard of its own, and "
        f"{name} averages the same elements on all ranks and keeps their whole state on each; set "
        "stage 0"
    )


def is_rehearsal() -> bool:
    """Whether step() was called by DeepSpeed to make an optimizer allocate its state.

    Its 16-bit wrappers do that once with zero gradients, in their constructors. Here that would be
    an update: weight decay, moments and schedules would move.
    Errors: UnsupportedError (a wrapper of ZeRO).
    """
    if "deepspeed.runtime.engine" not in sys.modules:
        return False
    frame = sys._getframe(1)
    for _ in range(8):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_name == "initialize_optimizer_states":
            wrapper = type(frame.f_locals.get("self"))
            if wrapper.__name__ not in ("FP16_UnfusedOptimizer", "FP16_Optimizer"):
                raise UnsupportedError(
                    f"this optimizer was given to DeepSpeed's {wrapper.__name__}: "
                    + zero_reason("not 0", "it")
                )
            return True
    return False
