"""Finds who else averages the gradients that an optimizer here averages itself."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .._text import counted
from ..errors import InvalidArgumentError, InvalidStateError, UnsupportedError

if TYPE_CHECKING:
    from ..comm import Comm
    from .base import SottoOptimizer
    from .outer import Outer


def _ddp_class() -> Any:
    """None where no DistributedDataParallel can be: without a process group of torch."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    if module is None or not (dist.is_available() and dist.is_initialized()):
        return None
    return module.DistributedDataParallel


def _with_subclasses(kind: Any) -> list[type]:
    below = [cls for sub in kind.__subclasses__() for cls in _with_subclasses(sub)]
    return [kind, *below]


def objects_of(kind: type) -> list[Any]:
    """All live objects of a class. Takes some ten milliseconds in a large program."""
    # issubclass() for every object takes ten times as long.
    ids = {id(cls) for cls in _with_subclasses(kind)}
    return [thing for thing in gc.get_objects() if id(type(thing)) in ids]


def ddp_modules(params: Iterable[torch.Tensor]) -> list[Any]:
    """The DistributedDataParallel modules that have one of these parameters."""
    kind = _ddp_class()
    if kind is None:
        return []
    ids = {id(p) for p in params}
    return [module for module in objects_of(kind) if any(id(p) in ids for p in module.parameters())]


def check_whole(params: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Errors: UnsupportedError (a parameter of which every rank has another shard)."""
    reason = (
        "every rank has a shard of it, but the optimizers here average the same elements on all "
        "ranks; use DistributedDataParallel, or no wrapper at all"
    )
    named = list(params)
    for name, p in named:
        if hasattr(p, "device_mesh"):
            raise UnsupportedError(f'parameter "{name}" is a DTensor: {reason}')
    check_not_flat(named, reason)


def check_not_flat(named: Sequence[tuple[str, torch.Tensor]], reason: str) -> None:
    """Errors: UnsupportedError (a parameter of FullyShardedDataParallel, with the reason)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not named or not (dist.is_available() and dist.is_initialized()):
        return
    of_fsdp = {id(p) for m in objects_of(fsdp.FullyShardedDataParallel) for p in m.parameters()}
    for name, p in named:
        if id(p) in of_fsdp:
            raise UnsupportedError(f'parameter "{name}" belongs to FSDP: {reason}')


def ddp_averages(module: Any) -> bool:
    """Whether a backward pass that is under way averages; of one that has ended the best guess."""
    # The second says what the last forward pass was made for: it is False inside no_sync().
    return bool(module.require_backward_grad_sync and module.require_forward_param_sync)


def _other_ranks(module: Any, comm: Comm) -> str | None:
    """What differs between the ranks of DistributedDataParallel and those of a comm, if known."""
    ranks = dist.get_process_group_ranks(module.process_group)
    theirs = f"DistributedDataParallel's process group has {counted(len(ranks), 'rank')}"
    if comm._framework_ranks is not None and set(comm._framework_ranks) != set(ranks):
        return f"{theirs}, {sorted(ranks)}, the comm {sorted(comm._framework_ranks)}"
    return None if comm.size == len(ranks) else f"{theirs}, the comm {comm.size}"


REMEDY = (
    "make a comm of exactly DDP's ranks, sotto.torch.comm_of_process_group(ddp.process_group), and "
    "pass it as comm="
)


def check_same_ranks(module: Any, comm: Comm) -> None:
    """Errors: InvalidArgumentError (gradients would be averaged over other ranks than DDP's)."""
    differ = _other_ranks(module, comm)
    if differ is not None:
        raise InvalidArgumentError(f"{differ}; {REMEDY}")


def check_ddp(modules: Sequence[Any], averaged: Sequence[bool] | None, comm: Comm) -> None:
    """Whether gradients are averaged once, over the right ranks, by the modules or the comm.

    averaged: what ddp_averages() said of the modules in the last backward pass; None: unknown.
    Errors: InvalidStateError.
    """
    for i, module in enumerate(modules):
        if dist.get_world_size(module.process_group) == 1:
            continue  # which averages nothing
        if averaged[i] if averaged else ddp_averages(module):
            if comm.size > 1:
                raise InvalidStateError(
                    "the gradients would be all-reduced twice: DistributedDataParallel has "
                    "averaged them in backward(), and step() averages them over "
                    f"{comm.size} ranks. Call sotto.torch.no_sync_after_warmup(model, optimizer) "
                    "once before training, or leave the model unwrapped; to average in DDP alone, "
                    "give the optimizer comm=comm.split(comm.rank), of one rank"
                )
        elif averaged or not module.require_backward_grad_sync:
            differ = _other_ranks(module, comm)
            if comm.size == 1:
                raise InvalidStateError(
                    "nobody would average the gradients: DistributedDataParallel has not, inside "
                    "no_sync() or after no_sync_after_warmup(), and the optimizer's comm has one "
                    f"rank; let DDP average, or {REMEDY}"
                )
            if differ is not None:
                raise InvalidStateError(
                    f"the gradients would not be averaged over the ranks of the model: {differ}; "
                    + REMEDY
                )


def share_ranks(these: Comm, those: Comm) -> bool:
    """Whether two comms have several ranks in common, or may have: it is not known of all comms."""
    if these.size == 1 or those.size == 1:
        return False
    mine, theirs = these._framework_ranks, those._framework_ranks
    return mine is None or theirs is None or len(set(mine) & set(theirs)) > 1


def ddp_over_ranks_of(comm: Comm, params: Iterable[torch.Tensor]) -> list[Any]:
    """The DistributedDataParallel modules of parameters that average over several ranks of a comm.

    All that average at all, if it is not known which ranks of torch's world the comm has.
    """
    if comm.size == 1:
        return []
    mine = None if comm._framework_ranks is None else set(comm._framework_ranks)
    found = []
    for module in ddp_modules(params):
        ranks = set(dist.get_process_group_ranks(module.process_group))
        if len(ranks if mine is None else ranks & mine) > 1:
            found.append(module)
    return found


def check_local(modules: Iterable[Any]) -> None:
    """Whether inner steps are each rank's own: modules of ddp_over_ranks_of().

    Errors: InvalidStateError (one has averaged the gradients).
    """
    if any(ddp_averages(module) for module in modules):
        raise InvalidStateError(
            "DistributedDataParallel has averaged the gradients in backward(): inner steps are the "
            "same on all ranks then, and outer steps have nothing to average. Leave the model "
            "unwrapped, or call sotto.torch.no_sync_after_warmup(model, optimizer) once before "
            "training; where DDP is meant to average too, give the outer optimizer ddp=True"
        )


def _first_of(kind: Any, model: Any) -> Any:
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return next((module for module in modules if isinstance(module, kind)), None)


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer itself: frameworks keep it as the `optimizer` of theirs."""
    found = optimizer
    while not hasattr(found, "_comm"):
        found = getattr(found, "optimizer", None)
        if found is None:
            raise InvalidArgumentError(
                f"optimizer is of type {type(optimizer).__qualname__}; it has to be one of "
                "sotto.torch"
            )
    return found


def no_sync_after_warmup(model: torch.nn.Module, optimizer: SottoOptimizer | Outer) -> None:
    """Leaves the averaging of a DistributedDataParallel model's gradients to the optimizer.

    Call it once, before training. backward() then sends nothing: step() averages, in full precision
    during the warm-up and in one bit afterwards, so gradients are all-reduced once in both; Outer
    averages what a period of steps has changed. DDP's other work ends too: buffers, such as the
    running statistics of batch norm, are those of each rank.

    model: the DistributedDataParallel module, or what a framework has put around it; optimizer: of
    its parameters, with a comm of the ranks of its process group, also as Accelerate, Lightning and
    Fabric wrap it.
    Errors: InvalidArgumentError (not such a module, none of its parameters in the optimizer, a comm
    of other ranks: nobody would average over those of the model).
    """
    kind = _ddp_class()
    module: Any = model if kind is None else _first_of(kind, model)
    if module is None or kind is None:
        raise InvalidArgumentError(
            f"model is of type {type(model).__qualname__}; it has to be the "
            "DistributedDataParallel module. Without one nothing averages gradients but step()"
        )
    optimizer = _unwrapped(optimizer)
    optimizer._follow_replaced()
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in ids for p in model.parameters()):
        raise InvalidArgumentError("the optimizer has none of the model's parameters")
    check_same_ranks(module, optimizer._comm)
    module.require_backward_grad_sync = False


# ---- DeepSpeed's engine ----------------------------------------------------------------------


def deepspeed_engine(optimizer: torch.optim.Optimizer) -> Any:
    """DeepSpeed's engine that was given this optimizer, or None."""
    module = sys.modules.get("deepspeed.runtime.engine")
    if module is None:
        return None
    for engine in objects_of(module.DeepSpeedEngine):
        if getattr(engine, "basic_optimizer", None) is optimizer:
            return engine
    return None


def adopt_engine(engine: Any, optimizer: SottoOptimizer, *, ranks: int) -> float:
    """Makes DeepSpeed's engine leave averaging and clipping to the optimizer.

    Returns the limit for the gradients' norm that the engine would have used; 0: none.
    Errors: InvalidArgumentError (ZeRO, other ranks than the engine's data-parallel ones),
    UnsupportedError (experts; an engine that has no switch for its averaging).
    """
    stage = int(engine.zero_optimization_stage())
    if stage:
        raise InvalidArgumentError(zero_reason(stage, type(optimizer).__name__))
    if getattr(engine, "has_moe_layers", False):
        raise UnsupportedError(
            "the model has experts, whose gradients are averaged over other ranks than the rest; "
            f"{type(optimizer).__name__} averages all over the same"
        )
    # With sequence parallelism gradients are averaged over its ranks too.
    averaged = getattr(engine, "seq_dp_world_size", engine.dp_world_size)
    if averaged != ranks:
        raise InvalidArgumentError(
            f"the optimizer's comm has {counted(ranks, 'rank')}, DeepSpeed's engine {averaged} "
            "data-parallel ones; make a comm of exactly these, "
            "sotto.torch.comm_of_process_group(group), and pass it as comm="
        )
    if not hasattr(engine, "enable_backward_allreduce"):
        raise UnsupportedError(
            "DeepSpeed's engine has no enable_backward_allreduce: the gradients would be "
            "all-reduced twice. Use sotto.deepspeed.initialize"
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
