"""A torch optimizer that does what a DeepSpeed configuration says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._text import counted
from ..comm import Comm
from ..errors import InvalidArgumentError, UnsupportedError
from ..optim import config_resolve
from ..torch.averagers import zero_reason
from ..torch.base import SottoOptimizer
from .config import Settings, source_of
from .ranks import meet, transport_in

# What a parameter group may have for itself, of the keys that its type has.
GROUP_KEYS = ("lr", "betas", "eps", "weight_decay", "max_coeff", "min_coeff")


class ConfiguredOptimizer(SottoOptimizer):
    """The optimizer of a configuration, with its schedule, clipping and loss scale.

    groups: as named_groups() gives them; what a group says wins over the file's
    "sotto": {"param_groups"}, that over optimizer.params. settings: checked. After each step the
    groups show the learning rate of the next one; setting it there overrides the schedule.
    """

    def __init__(self, groups: list[dict[str, Any]], settings: Settings, comm: Comm) -> None:
        optimizer = settings.report["optimizer"]
        self._kind = optimizer["type"]
        keys = [key for key in GROUP_KEYS if key in optimizer["params"]]
        if self._kind == "OneBitAdam":
            keys.append("non_freeze")
        in_file = settings.section("optimizer").get("params") or {}
        section = settings.section("sotto")
        in_force = {"non_freeze": False, **optimizer["params"]}
        super().__init__(
            _groups(groups, section.pop("param_groups", [])),
            {key: in_force[key] for key in keys},
            {key: value for key, value in in_file.items() if key not in keys},
            comm=comm,
            mode="strict",
            gradient_clipping=0.0,
            loss_scale=None,
            checkpoint="mean",
            sotto=section,
            max_grad_norm=0.0,
        )
        self.use_sections(settings.sections())


def _groups(groups: list[dict[str, Any]], in_file: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups with what the file says about group 0, 1, ...; empty ones are left out."""
    if len(in_file) > len(groups):
        raise InvalidArgumentError(
            f"sotto.param_groups describes {counted(len(in_file), 'group')}, but the parameters "
            f"have {len(groups)}"
        )
    merged = [{**mine, **group} for mine, group in zip(in_file + [{}] * len(groups), groups)]
    return [group for group in merged if group["params"]] or merged[:1]


def named_groups(model: torch.nn.Module, params: Iterable[Any] | None) -> list[dict[str, Any]]:
    """Groups of (name, tensor) pairs, so that errors and states have the model's names.

    Without names, in all groups, if a tensor is none of the model.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    given = list(model.parameters() if params is None else params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    groups = [{**group, "params": _listed(group["params"])} for group in groups]
    tensors = [p for group in groups for p in group["params"]]
    if all(isinstance(p, torch.Tensor) and id(p) in names for p in tensors):
        for group in groups:
            group["params"] = [(names[id(p)], p) for p in group["params"]]
    return groups


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def optimizer_from_config(
    model: torch.nn.Module,
    config: Any,
    *,
    model_parameters: Iterable[Any] | None = None,
    comm: Comm | None = None,
    auto: Any = None,
) -> ConfiguredOptimizer:
    """The optimizer that a DeepSpeed file names, for DeepSpeed's own engine or a loop of yours.

        optimizer = sotto.deepspeed.optimizer_from_config(model, "ds_config.json")
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config="ds_config.json")

    It averages gradients itself, and clips them as gradient_clipping says; DeepSpeed's engine is
    made to leave both to it. Schedule, loss scale and accumulation stay the engine's.

    config: a dict, JSON text or path. model_parameters: None: all of the model's; tensors or
    groups. comm: None: the default comm, else one of torch's process group or of the launcher's
    ranks. auto: as in :func:`initialize`.
    Errors: InvalidArgumentError (names the key; ZeRO stages with a 1-bit type), UnsupportedError
    (names what is not built), those of the comm.
    """
    if comm is None:
        comm = meet(None, None, transport=transport_in(config_resolve(source_of(config))))
    settings = Settings(config, auto, comm.size)
    if settings.report["optimizer"] is not None:
        _check_stage(settings)
    settings.check()
    for key in ("scheduler", "fp16", "bf16", "bfloat16", "data_types", *BATCH_KEYS):
        settings.file.pop(key, None)
    reduced = Settings(settings.file, None, comm.size)
    return ConfiguredOptimizer(named_groups(model, model_parameters), reduced, comm)


BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _check_stage(settings: Settings) -> None:
    stage = settings.section("zero_optimization").get("stage", 0)
    if stage:
        kind = settings.report["optimizer"]["type"]
        raise UnsupportedError(zero_reason(stage, kind))
