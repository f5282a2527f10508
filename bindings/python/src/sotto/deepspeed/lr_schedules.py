"""deepspeed.runtime.lr_schedules: the five schedules, for any optimizer of torch.

The same five of a configuration run inside libsotto.so, for the optimizers that it names: see
ConfigSchedule. These serve programs that make one themselves, and optimizers of the caller.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any, Union

import torch

from .._text import counted
from ..errors import InvalidArgumentError
from .logs import logger

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
Rates = Union[float, Sequence[float]]


def get_torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer, or that inside a wrapper. Errors: InvalidArgumentError (neither)."""
    for found in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(found, torch.optim.Optimizer):
            return found
    raise InvalidArgumentError(
        f"optimizer is of type {type(optimizer).__qualname__}; a torch.optim.Optimizer is needed"
    )


def update_lr(param_groups: list[dict[str, Any]], lrs: Sequence[float]) -> list[float]:
    """Sets the learning rates of the groups, and returns them."""
    for group, lr in zip(param_groups, lrs):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    return [group["lr"] for group in param_groups]


class _Schedule:
    """What all share: step() sets the rates of the update behind it."""

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = get_torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None

    def _begin(self) -> None:
        if self.last_batch_iteration == -1:
            self._last_lr = update_lr(self.optimizer.param_groups, self.get_lr())

    def _per_group(self, value: Rates, name: str) -> list[float]:
        n = len(self.optimizer.param_groups)
        if isinstance(value, (int, float)):
            return [value] * n
        if len(value) != n:
            found, groups = counted(len(value), "value"), counted(n, "parameter group")
            raise InvalidArgumentError(f"{name} has {found} for {groups}")
        return list(value)

    def get_lr(self) -> list[float]:
        """The rates that belong to last_batch_iteration."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rates that were set last."""
        if self._last_lr is None:
            return [group["lr"] for group in self.optimizer.param_groups]
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes on by one update, or to the number of one."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._last_lr = update_lr(self.optimizer.param_groups, self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Takes what state_dict() gave; the groups keep their rates until step()."""
        self.last_batch_iteration = sd["last_batch_iteration"]


class LRRangeTest(_Schedule):
    """Grows from lr_range_test_min_lr by step_rate in every step_size updates."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._begin()

    def get_lr(self) -> list[float]:
        """See the class."""
        interval = (self.last_batch_iteration + 1) / self.step_size
        interval = math.floor(interval) if self.staircase else interval
        return [lr * (1 + self.step_rate * interval) for lr in self.min_lr]


def _warm_up(kind: str, iteration: int, steps: int) -> float:
    """The share of the warm-up that is done."""
    if kind == "linear":
        return iteration / steps
    return math.log(iteration + 1) / math.log(steps)


def _warm_up_type(kind: str) -> str:
    if kind not in ("log", "linear"):
        logger.warning("warmup_type is %r: log is taken; known are log, linear", kind)
        return "log"
    return kind


class WarmupLR(_Schedule):
    """From warmup_min_lr to warmup_max_lr in warmup_num_steps updates, then constant."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = float(self.optimizer.param_groups[0]["lr"])
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._per_group(warmup_max_lr, "warmup_max_lr")
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = _warm_up_type(warmup_type)
        self._begin()

    def get_lr(self) -> list[float]:
        """See the class."""
        if self.last_batch_iteration < 0:
            return self.min_lrs
        gamma = self._get_gamma()
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs)]

    def _get_gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return _warm_up(self.warmup_type, self.last_batch_iteration, self.warmup_num_steps)
        return self._behind()

    def _behind(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As WarmupLR, then down to 0 at total_num_steps."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def _behind(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Schedule):
    """Up to the optimizer's own rates, then down by a cosine to cos_min_ratio of them, which it
    stays at behind total_num_steps; in DeepSpeed it rises again."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.cos_min_ratio, self.warmup_min_ratio = cos_min_ratio, warmup_min_ratio
        self.warmup_type = _warm_up_type(warmup_type)
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.org_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._begin()

    def get_lr_ratio(self) -> float:
        """The part of the optimizer's own rates."""
        now, warm = self.last_batch_iteration, self.warmup_num_steps
        if now < 0:
            return 0.0
        if now < warm:
            done = _warm_up(self.warmup_type, now, warm)
            return self.warmup_min_ratio + done * (1.0 - self.warmup_min_ratio)
        done = min(1.0, (now - warm + 1) / max(1, self.total_num_steps - warm))
        share = (1 + math.cos(math.pi * done)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * share)

    def get_lr(self) -> list[float]:
        """See the class."""
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


class OneCycle(_Schedule):
    """Up from cycle_min_lr to cycle_max_lr and down again, then decay; betas[0] the other way."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        first = float(cycle_first_step_size)
        second = first if cycle_second_step_size is None else float(cycle_second_step_size)
        self.total_size, self.step_ratio = first + second, first / (first + second)
        self.decay_step_size = decay_step_size
        self.lrs, self.decay_lr_rate = (cycle_min_lr, cycle_max_lr), decay_lr_rate
        self.moms, self.decay_mom_rate = (cycle_min_mom, cycle_max_mom), decay_mom_rate
        self.cycle_momentum = cycle_momentum and "betas" in self.optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            kind = type(self.optimizer).__name__
            logger.warning("cycle_momentum has no effect: %s has no betas", kind)
        if last_batch_iteration == -1:
            n = len(self.optimizer.param_groups)
            update_lr(self.optimizer.param_groups, [cycle_min_lr] * n)
            self._set_momentum(cycle_min_mom)

    def _set_momentum(self, momentum: float) -> None:
        if self.cycle_momentum:
            for group in self.optimizer.param_groups:
                group["betas"] = (momentum, 0.99)

    def _height(self) -> float:
        """From 0 at the ends of the cycle to 1 at its top."""
        done = (self.last_batch_iteration + 1) / self.total_size
        x = done - math.floor(done)
        return x / self.step_ratio if x <= self.step_ratio else (x - 1) / (self.step_ratio - 1)

    def _decays(self, rate: float) -> float:
        """What the decay behind the cycle has come to: 1 and more."""
        if self.decay_step_size == 0 or rate == 0:
            return 1.0
        behind = self.last_batch_iteration - self.total_size + 1
        return 1 + rate * behind / self.decay_step_size

    def get_lr(self) -> list[float]:
        """See the class."""
        low, high = self.lrs
        if self.last_batch_iteration < self.total_size:
            lr = low + (high - low) * self._height()
        else:
            lr = low / self._decays(self.decay_lr_rate)
        return [lr] * len(self.optimizer.param_groups)

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The groups' betas; None without cycle_momentum."""
        if not self.cycle_momentum:
            return None
        low, high = self.moms
        if self.last_batch_iteration < self.total_size:
            momentum = high - (high - low) * self._height()
        else:
            momentum = high * self._decays(self.decay_mom_rate)
        return [(momentum, 0.99)] * len(self.optimizer.param_groups)

    def step(self, batch_iteration: int | None = None) -> None:
        """Goes on by one update, or to the number of one."""
        super().step(batch_iteration)
        for betas in (self.get_mom() or [])[:1]:
            self._set_momentum(betas[0])


# ---- command lines -----------------------------------------------------------------------------

# Name, default, help: of deepspeed.add_tuning_arguments.
TUNING: tuple[tuple[str, Any, str], ...] = (
    ("lr_range_test_min_lr", 0.001, "Starting lr value."),
    ("lr_range_test_step_rate", 1.0, "scaling rate for LR range test."),
    ("lr_range_test_step_size", 1000, "training steps per LR change."),
    ("lr_range_test_staircase", False, "use staircase scaling for LR range test."),
    ("cycle_first_step_size", 1000, "size of first step of 1Cycle schedule (training steps)."),
    ("cycle_first_stair_count", -1, "first stair count for 1Cycle schedule."),
    ("cycle_second_step_size", -1, "size of second step of 1Cycle schedule."),
    ("cycle_second_stair_count", -1, "second stair count for 1Cycle schedule."),
    ("decay_step_size", 1000, "size of intervals for applying post cycle decay."),
    ("cycle_min_lr", 0.01, "1Cycle LR lower bound."),
    ("cycle_max_lr", 0.1, "1Cycle LR upper bound."),
    ("decay_lr_rate", 0.0, "post cycle LR decay rate."),
    ("cycle_min_mom", 0.8, "1Cycle momentum lower bound."),
    ("cycle_max_mom", 0.9, "1Cycle momentum upper bound."),
    ("decay_mom_rate", 0.0, "post cycle momentum decay rate."),
    ("warmup_min_lr", 0.0, "WarmupLR minimum/initial LR value"),
    ("warmup_max_lr", 0.001, "WarmupLR maximum LR value."),
    ("warmup_num_steps", 1000, "WarmupLR step count for LR warmup."),
    ("warmup_type", "log", "WarmupLR increasing function during warmup"),
    ("warmup_min_ratio", 0.01, "Cosine LR lower bound."),
    ("cos_min_ratio", 0.01, "Cosine LR lower bound."),
)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --lr_schedule and the arguments of the schedules. Returns the parser."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", type=str, default=None, help="LR schedule for training.")
    group.add_argument(
        "--cycle_momentum",
        default=False,
        action="store_true",
        help="Enable 1Cycle momentum schedule.",
    )
    for name, default, text in TUNING:
        group.add_argument(f"--{name}", type=type(default), default=default, help=text)
    return parser


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """The largest rate of a "scheduler" section, or None and why."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    keys = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}
    if config["type"] not in VALID_LR_SCHEDULES:
        return None, f"{config['type']} is not a valid LR schedule"
    return config["params"][keys.get(config["type"], "warmup_max_lr")], ""
