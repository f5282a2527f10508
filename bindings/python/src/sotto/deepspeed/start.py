"""initialize(): an engine for a model and a configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..comm import Comm
from ..errors import InvalidArgumentError, UnsupportedError
from ..optim import config_resolve
from ..torch.base import SottoOptimizer
from ..torch.values import broadcast_parameters, check_parameters
from . import lr_schedules, ranks
from .arguments import pick
from .client import ClientOptimizer
from .comm import configure, get_world_group, init_distributed
from .config import Settings, source_of
from .engine import Engine
from .logs import log_dist
from .members import check_sections
from .optimizer import ConfiguredOptimizer, named_groups
from .ranks import meet
from .schedule import ConfigSchedule

INITIAL = ("broadcast", "check", "trust")


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(
            f"model is of type {type(model).__qualname__}; a torch.nn.Module is needed"
        )
    kinds = [kind.__name__ for kind in type(model).__mro__]
    if "PipelineModule" in kinds:
        raise UnsupportedError(
            "model is a PipelineModule: this engine runs no pipeline. Let DeepSpeed's run it, with "
            "optimizer_from_config(stage, config, comm=...) on the data-parallel ranks of each "
            "stage"
        )
    if "DistributedDataParallel" in kinds:
        raise InvalidArgumentError(
            "model is wrapped in DistributedDataParallel, which would average the gradients a "
            "second time; pass the module inside, model.module"
        )


def _make(section: str, kind: Any, first: Any, params: Any) -> Any:
    """What a section names, of its params. Errors: InvalidArgumentError (those do not fit)."""
    try:
        return kind(first, **params)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"configuration: {section}.params of {kind.__name__}: {error}"
        ) from error


def _optimizer_of(
    given: Any, model: torch.nn.Module, params: Any, settings: Settings, comm: Comm
) -> SottoOptimizer | ClientOptimizer | None:
    """The file's optimizer, or the caller's with what else the file says; None: there is none."""
    if given is None and settings.torch_optimizer is None:
        if "optimizer" not in settings.file:
            return None
        return ConfiguredOptimizer(named_groups(model, params), settings, comm)
    chosen = list(model.parameters()) if params is None else params
    if given is None:
        assert settings.torch_optimizer is not None
        kind, hyper = settings.torch_optimizer
        given = _make("optimizer", getattr(torch.optim, kind), chosen, hyper)
    elif not isinstance(given, torch.optim.Optimizer) and callable(given):
        given = given(chosen)
    if not isinstance(given, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"optimizer is of type {type(given).__qualname__}; it has to be a torch.optim."
            "Optimizer, one of sotto.torch, or a function that makes one of the parameters"
        )
    if settings.section("sotto").get("param_groups"):
        raise InvalidArgumentError(
            "sotto.param_groups describes groups of an optimizer of the library that the file "
            f"names, and this one is {type(given).__name__}: give its own groups what the key says"
        )
    given.param_groups[:] = [group for group in given.param_groups if group["params"]]
    if not isinstance(given, SottoOptimizer):
        names = {id(p): name for name, p in model.named_parameters()}
        return ClientOptimizer(given, names, settings, comm)
    if given._comm is not comm:
        raise InvalidArgumentError("optimizer was made with another comm than the engine's")
    given.use_sections(settings.sections(), settings.section("sotto"))
    return given


def _schedule_of(given: Any, optimizer: Any, settings: Settings) -> Any:
    """The caller's schedule, or the file's: inside the library, or of PyTorch or lr_schedules."""
    client = getattr(optimizer, "optimizer", optimizer)
    if given is not None:
        made = given(client) if callable(given) else given
        if not hasattr(made, "step"):
            raise InvalidArgumentError(
                f"lr_scheduler is of type {type(made).__qualname__}; it has to be a scheduler with "
                "step(), or a function or class that makes one of the optimizer"
            )
        return made
    if optimizer is None:
        return None
    if settings.torch_schedule is not None:
        kind, params = settings.torch_schedule
        return _make("scheduler", getattr(torch.optim.lr_scheduler, kind), client, params)
    kind = settings.report["schedule"]["type"]
    if kind == "none":
        return None
    if isinstance(optimizer, ClientOptimizer):
        params = settings.section("scheduler").get("params") or {}
        return _make("scheduler", getattr(lr_schedules, kind), client, params)
    return ConfigSchedule(optimizer, kind)


def _join(comm: Comm | None, mpu: Any, port: int, required: bool | None, config: Any) -> Comm:
    """The comm of the ranks that average, with the configuration's transport if it is made here.

    torch's process group is made too, as in DeepSpeed, unless the caller says which ranks average.
    """
    if comm is not None:
        return comm
    file = config_resolve(source_of(config))
    if mpu is None and not ranks.has_comm():
        init_distributed(distributed_port=port, dist_init_required=required, config=file)
    return meet(comm, mpu, transport=ranks.transport_in(file))


def _args_of(args: Any, engine: Engine) -> None:
    """Programs read args.local_rank behind initialize()."""
    if hasattr(args, "local_rank"):
        args.local_rank = engine.local_rank


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = ranks.DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    comm: Comm | None = None,
    auto: Any = None,
    initial_parameters: str = "broadcast",
) -> tuple[Engine, Any, DataLoader[Any] | None, Any]:
    """An engine for a model and a DeepSpeed configuration. Collective.

    Returns (engine, optimizer, dataloader, lr_scheduler), as deepspeed.initialize does.

    args:               an object whose deepspeed_config is the configuration's path; in place of
                        config
    model:              a module; becomes float16 or bfloat16 as the file says
    optimizer:          None: the file's; one of sotto.torch, any of torch.optim, which then runs
                        behind the average of the gradients, or a function of the parameters that
                        makes one, in place of it. Without any the engine only evaluates
    model_parameters:   None: all; tensors, or groups with values of their own
    training_data:      a dataset; its loader is the third result
    lr_scheduler:       a scheduler of `optimizer`, or a function or class that makes one of the
                        optimizer; in place of the file's
    distributed_port:   as for init_distributed()
    mpu:                get_data_parallel_group() names the ranks that average
    dist_init_required: as for init_distributed()
    collate_fn:         of training_data, and of deepspeed_io()
    config:             a dict, a path, or JSON text; config_params is its old name
    mesh_param:         refused: sequence parallelism
    comm:               the ranks that average; None: mpu's, else the default comm, else those of
                        torch's process group, if it is initialised, else the launcher's, which then
                        make torch's process group too. A comm that is made here has the transport
                        of "sotto": {"transport"}
    auto:               what takes the place of values "auto": a dict by path,
                        {"optimizer.params.lr": 1e-3}, or an object with the attributes of
                        transformers.TrainingArguments
    initial_parameters: "broadcast": those of rank 0, and buffers, become everybody's; "check":
                        they are compared by hash, a difference is an error; "trust": neither

    Errors: InvalidArgumentError (names the key; ranks that contradict the batch keys),
    UnsupportedError (ZeRO stages above 0, pipelines), InvalidStateError (other parameters on other
    ranks), those of the comm.
    """
    _check_model(model)
    assert model is not None
    if initial_parameters not in INITIAL:
        raise InvalidArgumentError(
            f"initial_parameters is {initial_parameters!r}; allowed: {', '.join(INITIAL)}"
        )
    if mesh_param is not None:
        raise UnsupportedError(
            f"mesh_param is {mesh_param!r}: sequence parallelism is not here; leave it out, or "
            "keep DeepSpeed and pass it an optimizer of optimizer_from_config()"
        )
    config = pick(args, config, config_params)
    chosen = comm is not None or mpu is not None
    comm = _join(comm, mpu, distributed_port, dist_init_required, config)
    settings = Settings(config, auto, comm.size)
    settings.check_groups(chosen)
    for warning in check_sections(settings.file):
        log_dist(warning, ranks=[0], level=logging.WARNING)
    if lr_scheduler is not None:
        settings = settings.without("scheduler")
    if optimizer is None and "optimizer" in settings.file:
        settings.check()
    elif optimizer is None and settings.torch_optimizer is None:
        settings.check_without_optimizer()
    configure(settings.file)
    if settings.fp16 or settings.bf16:
        model.to(torch.float16 if settings.fp16 else torch.bfloat16)
    if initial_parameters == "broadcast":
        broadcast_parameters(model, comm=comm)
    elif initial_parameters == "check":
        check_parameters(model, comm=comm)
    made = _optimizer_of(optimizer, model, model_parameters, settings, comm)
    schedule = _schedule_of(lr_scheduler, made, settings)
    engine = Engine(
        model,
        made,
        schedule,
        settings,
        comm,
        client_optimizer=optimizer,
        client_lr_scheduler=lr_scheduler,
        training_data=training_data,
        collate_fn=collate_fn,
        mpu=mpu,
        data_parallel_group=_group_of(mpu, chosen),
    )
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    _args_of(args, engine)
    return engine, made, engine.training_dataloader, schedule


def _group_of(mpu: Any, chosen: bool) -> Any:
    """The process group of torch of the ranks that average, if there is one."""
    if mpu is not None:
        return mpu.get_data_parallel_group()
    return get_world_group() if ranks.joined() and not chosen else None
