"""A DeepSpeed configuration, read by the library, with its "auto" values filled in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidArgumentError, UnsupportedError
from ..optim import config_report, config_resolve
from .members import value_at

WARMUP = "scheduler.params.warmup_num_steps"
# What an engine does, this one or DeepSpeed's: of no concern to the library.
OF_THE_ENGINE = (
    "comms_logger",
    "csv_monitor",
    "dataloader_drop_last",
    "tensorboard",
    "torch_autocast",
)
BFLOAT16 = ("bf16", "bfloat16", "torch.bfloat16")


def auto_from_training_arguments(args: Any, world_size: int) -> dict[str, Any]:
    """What Hugging Face's integration puts in place of "auto", from its TrainingArguments.

    args: an object with the attributes of transformers.TrainingArguments; those that are absent
    give no value. Returns values by path, as ``auto=`` takes them. total_num_steps is max_steps,
    if that is above 0. A warm-up that is a share of the steps needs max_steps too.
    """
    values: dict[str, Any] = {}

    def put(path: str, *names: str) -> None:
        found = [getattr(args, name, None) for name in names]
        if all(value is not None for value in found):
            values[path] = found[0] if len(found) == 1 else found

    put("train_micro_batch_size_per_gpu", "per_device_train_batch_size")
    put("gradient_accumulation_steps", "gradient_accumulation_steps")
    micro = values.get("train_micro_batch_size_per_gpu")
    accumulated = values.get("gradient_accumulation_steps")
    if micro is not None and accumulated is not None:
        values["train_batch_size"] = micro * accumulated * world_size
    put("gradient_clipping", "max_grad_norm")
    put("optimizer.params.lr", "learning_rate")
    put("optimizer.params.betas", "adam_beta1", "adam_beta2")
    put("optimizer.params.eps", "adam_epsilon")
    put("optimizer.params.weight_decay", "weight_decay")
    put("scheduler.params.warmup_max_lr", "learning_rate")
    values["scheduler.params.warmup_min_lr"] = 0
    share, known = _warmup_share(args), getattr(args, "max_steps", -1) > 0
    if share is None:
        put(WARMUP, "warmup_steps")
    elif known:
        values[WARMUP] = math.ceil(args.max_steps * share[1])
    if known:
        values["scheduler.params.total_num_steps"] = args.max_steps
    put("fp16.enabled", "fp16")
    put("bf16.enabled", "bf16")
    return values


def _warmup_share(args: Any) -> tuple[str, float] | None:
    """The argument that makes the warm-up a share of the steps, and the share."""
    steps, ratio = getattr(args, "warmup_steps", None), getattr(args, "warmup_ratio", None)
    if steps:
        return ("warmup_steps", steps) if steps < 1 else None
    return ("warmup_ratio", ratio) if ratio else None


class Settings:
    """A configuration after all "auto" were filled in.

    file: the configuration as a dict. report: what the library says about it (config_report).
    torch_optimizer, torch_schedule: type and params of an optimizer or a scheduler that is one of
    PyTorch's and not of the library; they are not in `file` and `report` any more.
    """

    def __init__(self, config: Any, auto: Any, world_size: int) -> None:
        self._world_size = world_size
        config = source_of(config)
        share = None
        if auto is not None and not isinstance(auto, Mapping):
            share = _warmup_share(auto)
            auto = auto_from_training_arguments(auto, world_size)
        self.file = config_resolve(config, auto)
        if share is not None and value_at(self.file, WARMUP, None) == "auto":
            raise InvalidArgumentError(
                f'{WARMUP} is "auto", and {share[0]} is {share[1]} in the training arguments, a '
                "share of the steps, whose number is not known: set max_steps above 0, or put the "
                "number of steps into the configuration"
            )
        self.torch_optimizer = self._take("optimizer", _is_torchs_optimizer)
        self.torch_schedule = self._take("scheduler", _is_torchs_schedule)
        changed = self.torch_optimizer or self.torch_schedule or self._complete_torch_adam()
        # The file itself and not its plain form: errors then have its lines.
        source = config if not (auto or changed) else self.file
        self.report = config_report(source, world_size=world_size)

    def _complete_torch_adam(self) -> bool:
        """With torch_adam DeepSpeed makes torch.optim.AdamW, whose weight decay is not 0."""
        optimizer = self.section("optimizer")
        params, kind = optimizer.get("params"), str(optimizer.get("type")).lower()
        if not isinstance(params, Mapping) or kind not in ("adam", "adamw"):
            return False
        decoupled = kind == "adamw" or params.get("adam_w_mode", True)
        if params.get("torch_adam") is not True or not decoupled or "weight_decay" in params:
            return False
        self.file["optimizer"] = {**optimizer, "params": {**params, "weight_decay": 0.01}}
        return True

    def _take(self, name: str, of_torch: Any) -> tuple[str, dict[str, Any]] | None:
        kind, params = self.section(name).get("type"), self.section(name).get("params") or {}
        if not isinstance(kind, str) or not isinstance(params, Mapping):
            return None
        if not of_torch(kind, params):
            return None
        del self.file[name]
        return kind, dict(params)

    def without(self, name: str) -> Settings:
        """The same without a section."""
        file = {key: value for key, value in self.file.items() if key != name}
        kept = Settings(file, None, self._world_size)
        kept.torch_optimizer = self.torch_optimizer
        kept.torch_schedule = None if name == "scheduler" else self.torch_schedule
        return kept

    def check(self) -> None:
        """Errors: UnsupportedError with every key that stands in the way."""
        if not self.report["can_run"]:
            raise UnsupportedError("; ".join(self.report["reasons"]))

    def check_without_optimizer(self) -> None:
        """As check(), for an engine that only evaluates."""
        inert = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
        report = config_report({**self.file, **inert})
        if not report["can_run"]:
            raise UnsupportedError("; ".join(report["reasons"]))

    def section(self, name: str) -> dict[str, Any]:
        """An object of the file; empty if it is absent or null."""
        value = self.file.get(name) or {}
        return dict(value) if isinstance(value, Mapping) else {}

    def sections(self) -> dict[str, Any]:
        """What the library is told beside "optimizer" and "sotto"."""
        left_out = ("optimizer", "sotto", *OF_THE_ENGINE)
        return {key: value for key, value in self.file.items() if key not in left_out}

    @property
    def autocast(self) -> torch.dtype | None:
        """In which type torch.autocast runs the forward pass; None: not at all.

        Errors: UnsupportedError (another than bfloat16).
        """
        section = self.section("torch_autocast")
        if not section.get("enabled"):
            return None
        if str(section.get("dtype")).lower() not in BFLOAT16:
            raise UnsupportedError(
                f"torch_autocast.dtype is {section.get('dtype')!r}; allowed: 'bfloat16': for "
                "float16, which needs a loss scale, use the section fp16"
            )
        return torch.bfloat16

    @property
    def fp16(self) -> bool:
        """fp16.enabled."""
        return bool(self.section("fp16").get("enabled"))

    @property
    def bf16(self) -> bool:
        """bf16.enabled, or its old name."""
        return bool({**self.section("bfloat16"), **self.section("bf16")}.get("enabled"))

    def check_groups(self, chosen: bool) -> None:
        """Errors: InvalidArgumentError (model-parallel ranks without a word on which average).

        chosen: whether the caller has named the ranks of one pipeline stage or shard.
        """
        sizes = {
            "pipeline.stages": self.section("pipeline").get("stages"),
            "tensor_parallel.autotp_size": self.section("tensor_parallel").get("autotp_size"),
            "tensor_parallel.tp_size": self.section("tensor_parallel").get("tp_size"),
        }
        for path, size in sizes.items():
            if isinstance(size, int) and size > 1 and not chosen:
                raise InvalidArgumentError(
                    f"{path} is {size}: ranks with other parameters must not be averaged; pass "
                    "comm= of the data-parallel ranks of this rank's stage or shard, or mpu="
                )


# Of torch.optim.SGD alone: the library's has lr and weight_decay.
MOMENTUM = ("momentum", "dampening", "nesterov")
# Names that are not torch.optim's: the library's, and DeepSpeed's Muon, which is another one.
NOT_TORCHS = ("adam", "adamw", "lamb", "onebitadam", "zerooneadam", "onebitlamb", "muon")


def _is_torchs_optimizer(kind: str, params: Mapping[str, Any]) -> bool:
    """Whether an optimizer is one of torch.optim that runs behind the average."""
    if kind.lower() == "sgd":
        return any(params.get(key) for key in MOMENTUM)
    found = getattr(torch.optim, kind, None)
    known = isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    return known and kind.lower() not in NOT_TORCHS


def _is_torchs_schedule(kind: str, _: Mapping[str, Any]) -> bool:
    """Whether a schedule is one of torch.optim.lr_scheduler."""
    schedules = torch.optim.lr_scheduler
    found = getattr(schedules, kind, None)
    return isinstance(found, type) and issubclass(found, schedules.LRScheduler)


def source_of(config: Any) -> Any:
    """A configuration as config_resolve() takes it: text that is a file's path becomes one.

    Accelerate's steps_per_print, float("inf"), which JSON does not have, is never: no key.
    """
    if isinstance(config, Mapping) and config.get("steps_per_print") == math.inf:
        config = {key: value for key, value in config.items() if key != "steps_per_print"}
    if not isinstance(config, str) or config.lstrip().startswith("{"):
        return config
    is_file = "\n" not in config and len(config) < 4096 and Path(config).exists()
    return Path(config) if is_file else config
