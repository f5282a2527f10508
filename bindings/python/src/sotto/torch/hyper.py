"""The numbers of parameter groups and the configuration that the library gets of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from .. import optim as plain
from ..comm import Comm
from ..errors import InvalidArgumentError, InvalidStateError, UnsupportedError
from .parameters import Parameters

# Schedules of a configuration that start from the optimizer's lr; the others have their own rates.
RELATIVE_SCHEDULES = ("WarmupCosineLR",)
BETA_SCHEDULES = ("OneCycle",)
POLICIES = ("exact", "mean", "reset")
# What a group of torch's optimizers may have, with what it is here.
CONSTANTS = MappingProxyType(
    {
        "amsgrad": False,
        "maximize": False,
        "differentiable": False,
        "momentum": 0,
        "dampening": 0,
        "nesterov": False,
    }
)


class Groups(Parameters):
    """What an optimizer here does with its parameter groups; the rest is in SottoOptimizer."""

    _kind = ""
    _comm: Comm
    _optim: plain.Optimizer | None
    _common: dict[str, Any]  # sections of the configuration that no group has
    _section: dict[str, Any]  # "sotto"
    _fixed: dict[str, Any]  # of the constructor alone, for the configuration
    _constants: dict[str, Any]  # the same with all that torch has: groups cannot differ in it
    _group_keys: tuple[str, ...]  # torch adds some of its own to self.defaults
    _sent: list[dict[str, Any]]  # what the library has of every group
    _checkpoint: str  # of the constructor
    _held: int | None  # the step at which rates stand still for the next update

    @property
    def _compresses(self) -> bool:
        return self._kind in ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")

    def _section_of(self, mode: str, checkpoint: str, more: Mapping[str, Any]) -> dict[str, Any]:
        """ "sotto" of the configuration, with the arguments that act there and are not the default.

        Errors: InvalidArgumentError (an argument is none of the words).
        """
        section: dict[str, Any] = {}
        for key, value, default, words, acts in (
            ("mode", mode, "strict", ("strict", "compat"), self._compresses),
            ("checkpoint", checkpoint, "mean", POLICIES, self._ranks_differ(more)),
        ):
            if value not in words:
                raise InvalidArgumentError(f"{key} is {value!r}; allowed: {', '.join(words)}")
            if acts and value != default:
                section[key] = value
        self._checkpoint = checkpoint
        return {**section, **more}

    def _ranks_differ(self, section: Mapping[str, Any]) -> bool:
        """Whether states have what belongs to one rank, which "checkpoint" is about."""
        return self._compresses or not section.keys().isdisjoint(("gradient_codec", "outer"))

    @property
    def _policy(self) -> str:
        """The "checkpoint" of states."""
        acts = self._ranks_differ(self._section)
        return str(self._section.get("checkpoint", "mean")) if acts else "mean"

    def _check_config(self) -> dict[str, Any]:
        """The report on the configuration: wrong values are told now, not at the first step."""
        report = plain.config_report(self._config(), world_size=self._comm.size)
        if not report["can_run"]:
            raise UnsupportedError("; ".join(report["reasons"]))
        return report

    def _hyper(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a parameter group, as plain numbers.

        Errors: InvalidArgumentError (names the key).
        """
        values = {key: group[key] for key in self._group_keys}
        for key, value in values.items():
            try:
                if key == "betas":
                    values[key] = [float(beta) for beta in value]
                elif key != "non_freeze":
                    values[key] = float(value)
            except (TypeError, ValueError):
                allowed = "two numbers" if key == "betas" else "a number"
                raise InvalidArgumentError(
                    f"{key} of a parameter group is {value!r}; allowed: {allowed}"
                ) from None
        return values

    @property
    def _schedule(self) -> str | None:
        """Which schedule of the configuration steers lr; None: torch's, or none."""
        kind: str | None = (self._common.get("scheduler") or {}).get("type")
        return kind

    def _group_settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What a group has for itself."""
        values, common = self._hyper(group), self._hyper(self.defaults)
        if self._schedule in RELATIVE_SCHEDULES:
            values["lr"] = float(group["initial_lr"])
        elif self._schedule:
            del values["lr"]
        return {key: value for key, value in values.items() if value != common[key]}

    def _config(self) -> dict[str, Any]:
        """The whole configuration, for the library."""
        common = self._hyper(self.defaults)
        common.pop("non_freeze", None)  # of groups alone
        groups = [self._group_settings(group) for group in self.param_groups]
        return {
            **self._common,
            "optimizer": {"type": self._kind, "params": {**common, **self._fixed}},
            "sotto": {**self._section, "param_groups": groups},
        }

    def use_sections(
        self, sections: Mapping[str, Any], sotto: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Takes what a DeepSpeed configuration has beside "optimizer"; of "sotto" what is given.

        What the constructor was given wins. With a "scheduler" the groups show the learning rate of
        the next step; setting it there overrides the schedule. For sotto.deepspeed; before the
        first step. Errors: InvalidStateError (after it), InvalidArgumentError (names the key).
        """
        if self._optim is not None:
            raise InvalidStateError("the optimizer has been used: its configuration is fixed")
        own = {key: value for key, value in self._common.items() if value}
        self._common = {**sections, **own}
        self._section = {**sotto, **self._section}
        if self._checkpoint != "mean" and self._ranks_differ(self._section):
            self._section["checkpoint"] = self._checkpoint
        for group in self.param_groups:
            group.setdefault("initial_lr", group["lr"])
        report = self._check_config()
        if self._schedule:
            for group, lr in zip(self.param_groups, report["schedule"]["lr"][0]["groups"]):
                group["lr"] = lr

    # ---- the configuration's schedule ------------------------------------------------------------

    def _build(self) -> plain.Optimizer:
        raise NotImplementedError

    def _show_schedule(self, optim: plain.Optimizer) -> None:
        """Groups show rates and betas of the next step, if the library's schedule makes them."""
        if not self._schedule:
            return
        self._release(optim)
        keys = ("lr", "betas") if self._schedule in BETA_SCHEDULES else ("lr",)
        if len(self.param_groups) == 1 and keys == ("lr",):
            shown = [{"lr": optim.info().lr}]
        else:
            shown = optim.report("groups")["groups"]
        for group, sent, values in zip(self.param_groups, self._sent, shown):
            for key in keys:
                group[key] = sent[key] = values[key]

    @property
    def schedule_iteration(self) -> int:
        """Updates that the configuration's schedule has seen, less one. Without one: -1."""
        if self._optim is None or not self._schedule:
            return -1
        return int(self._optim.report("config")["scheduler_iteration"])

    def continue_schedule(self, iteration: int) -> None:
        """The configuration's schedule goes on behind `iteration`; -1: it starts again.

        The next update keeps the rates and betas that it would have had, as with a schedule of
        Python's, which steps behind an update. Collective if no step was made yet.
        """
        optim = self._build()
        groups = optim.report("groups")["groups"]
        optim.set("scheduler_iteration", iteration)
        for index, group in enumerate(groups):
            optim.set("lr", group["lr"], index)
            if self._schedule in BETA_SCHEDULES:
                optim.set("beta1", group["betas"][0], index)
                optim.set("beta2", group["betas"][1], index)
        self._held = optim.info().step

    def _release(self, optim: plain.Optimizer) -> None:
        """Behind the update that continue_schedule() held rates for, the schedule has them."""
        if self._held is not None and optim.info().step != self._held:
            self._give_to_schedule(optim)

    def _give_to_schedule(self, optim: plain.Optimizer) -> None:
        """The schedule has rates and betas again, whatever was set before."""
        self._held = None
        for name in ("lr", "beta1", "beta2") if self._schedule in BETA_SCHEDULES else ("lr",):
            optim.set(name, math.nan)

    # ---- numbers of groups -----------------------------------------------------------------------

    def _check_constants(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Errors: InvalidArgumentError (a group has something else than the constructor)."""
        for index, group in enumerate(groups):
            for key, value in self._constants.items():
                if key in group and group[key] != value:
                    raise InvalidArgumentError(
                        f"{key} of group {index} is {group[key]}; it is one for all groups and all "
                        f"steps, {value}: an argument of the constructor, if there is one"
                    )

    def _send_hyper(self, optim: plain.Optimizer) -> None:
        """Tells the library what schedulers have changed in the parameter groups."""
        self._check_constants(self.param_groups)
        for index, (group, sent) in enumerate(zip(self.param_groups, self._sent)):
            changed = {k: v for k, v in self._hyper(group).items() if v != sent[k]}
            # Neither bound may pass the other's old value.
            first = "max_coeff" if changed.get("max_coeff", 0) > sent.get("max_coeff", 0) else ""
            for key in sorted(changed, key=lambda key: (key != first, key == "max_coeff")):
                self._send(optim, index, key, changed[key])
                sent[key] = changed[key]

    def _send(self, optim: plain.Optimizer, index: int, key: str, value: Any) -> None:
        if key == "non_freeze":
            raise InvalidStateError(
                f"non_freeze of group {index} was changed to {value} after the first step; make a "
                "new optimizer and load this one's state_dict()"
            )
        if key == "betas":
            for name, beta in zip(("beta1", "beta2"), value):
                optim.set(name, beta, index)
        else:
            optim.set(key, value, index)

    def _needs_another(self) -> bool:
        """Whether groups have what the library's optimizer cannot change to."""
        return any(
            value != sent[key] and key in ("eps", "non_freeze")
            for group, sent in zip(self.param_groups, self._sent)
            for key, value in self._hyper(group).items()
        )
