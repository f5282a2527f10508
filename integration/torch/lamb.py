"""LAMB on gradients that are averaged already, without Sotto: what its figures are compared with.

The arithmetic of DeepSpeed's FusedLamb without bias correction, in PyTorch's own operations, with
the clipping and the schedule of the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class ConfigError(Exception):
    """What a configuration asks for and this optimizer does not do."""


class Schedule:
    """WarmupLR and WarmupDecayLR of a configuration; none: the optimizer's own rate."""

    def __init__(self, section: Mapping[str, Any] | None, lr: float) -> None:
        section = section or {}
        kind, params = section.get("type"), section.get("params") or {}
        if kind not in (None, "WarmupLR", "WarmupDecayLR"):
            raise ConfigError(
                f"scheduler.type is {kind}; LAMB without Sotto knows WarmupLR and WarmupDecayLR"
            )
        if kind and params.get("warmup_type", "log") != "linear":
            raise ConfigError(
                "scheduler.params.warmup_type has to be linear for LAMB without Sotto"
            )
        self.kind, self.lr = kind, lr
        self.low = params.get("warmup_min_lr", 0.0)
        self.high = params.get("warmup_max_lr", 0.001)
        self.warmup = max(2, params.get("warmup_num_steps", 1000))
        self.total = params.get("total_num_steps", 0)
        if isinstance(self.low, list) or isinstance(self.high, list):
            raise ConfigError(
                "scheduler.params: a rate per group is not known to LAMB without Sotto"
            )

    def rate(self, update: int) -> float:
        """Of update number 1, 2, ..; the first two have the lowest rate, as in DeepSpeed."""
        if self.kind is None:
            return self.lr
        if update < 2:
            return self.low
        at = update - 2
        if at < self.warmup:
            share = at / self.warmup
        elif self.kind == "WarmupLR":
            share = 1.0
        else:
            share = max(0.0, (self.total - at) / max(1.0, self.total - self.warmup))
        return self.low + (self.high - self.low) * share


class Lamb(torch.optim.Optimizer):
    """LAMB with clipping by the norm of all gradients. groups: of parameters; report: of the
    library on the configuration, whose groups they are."""

    def __init__(
        self, groups: list[dict[str, Any]], report: Mapping[str, Any], schedule: Schedule
    ) -> None:
        said = report["optimizer"]["param_groups"]
        if len(said) == 1:
            said = said * len(groups)
        if len(said) != len(groups):
            raise ConfigError(
                f"sotto.param_groups describes {len(said)} groups, the model has {len(groups)}"
            )
        if any(group["bias_correction"] for group in said):
            raise ConfigError(
                "optimizer.params.bias_correction has to be false for LAMB without Sotto"
            )
        super().__init__([{**group, **values} for group, values in zip(groups, said)], {})
        self.clipping = float(report["gradient_clipping"])
        self.schedule = schedule
        self.updates = 0
        self.grad_norm = float("nan")  # before clipping, of the last update

    @property
    def lr(self) -> float:
        """Of the next update."""
        return self.schedule.rate(self.updates + 1)

    def _moments(self, params: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        for p in params:
            if not self.state[p]:
                self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
        return [self.state[p]["m"] for p in params], [self.state[p]["v"] for p in params]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update with the gradients that are there."""
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norms = torch.stack(torch._foreach_norm(grads)).double()
        self.grad_norm = float(norms.square().sum().sqrt())
        if self.clipping and self.grad_norm + 1e-6 > self.clipping:
            torch._foreach_mul_(grads, self.clipping / (self.grad_norm + 1e-6))
        lr = self.lr
        for group in self.param_groups:
            self._update(group, lr)
        self.updates += 1

    def _update(self, group: dict[str, Any], lr: float) -> None:
        params = group["params"]
        grads = [p.grad for p in params]
        m, v = self._moments(params)
        beta1, beta2 = group["betas"]
        torch._foreach_mul_(m, beta1)
        torch._foreach_add_(m, grads, alpha=1.0 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1.0 - beta2)
        roots = torch._foreach_sqrt(v)
        torch._foreach_add_(roots, group["eps"])
        update = torch._foreach_div(m, roots)
        if group["weight_decay"]:
            torch._foreach_add_(update, params, alpha=group["weight_decay"])
        p_norms, u_norms = torch._foreach_norm(params), torch._foreach_norm(update)
        ratios = torch.stack(p_norms) / torch.stack(u_norms)
        usable = (torch.stack(p_norms) > 0) & (torch.stack(u_norms) > 0)
        ratios = ratios.clamp(group["min_coeff"], group["max_coeff"]).where(usable, 1.0)
        torch._foreach_mul_(update, (-lr * ratios).tolist())
        torch._foreach_add_(params, update)

    def state_dict(self) -> dict[str, Any]:
        """Moments and the number of updates."""
        return {"updates": self.updates, "state": super().state_dict()["state"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state_dict(); hyper-parameters stay those of the configuration."""
        groups = super().state_dict()["param_groups"]
        super().load_state_dict({"state": state_dict["state"], "param_groups": groups})
        self.updates = int(state_dict["updates"])
