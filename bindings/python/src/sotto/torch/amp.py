"""torch.amp.GradScaler: a step whose gradients overflow on any rank is left out on all of them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedError

if TYPE_CHECKING:
    from .base import SottoOptimizer

_INSTEAD = "use loss_scale='dynamic' in its place"


def _caller() -> Any:
    """The GradScaler whose step() is among the callers; None: there is none."""
    kind: type = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    frame = sys._getframe(1)
    while frame.f_back is not None:  # torch, and others, wrap an optimizer's step()
        frame = frame.f_back
        caller = frame.f_locals.get("self")
        if isinstance(caller, kind):
            return caller
    return None


class Scaled:
    """A step that a GradScaler has called.

    torch's scaler sets "found_inf", whether gradients of this rank overflow, and "grad_scale", by
    which they are to be divided, if they are not yet. It deletes both behind a step that has ended
    well, and reads them again if they are left from another one.
    """

    def __init__(self, optimizer: SottoOptimizer, found: Any, scale: Any) -> None:
        self._optimizer = optimizer
        self._found = found
        self._scale = scale

    @classmethod
    def of(cls, optimizer: SottoOptimizer) -> Scaled | None:
        """Takes what a scaler has set."""
        scale = optimizer.__dict__.pop("grad_scale", None)
        found = optimizer.__dict__.pop("found_inf", None)
        return None if found is None else cls(optimizer, found, scale)

    def give_back(self) -> None:
        """For the scaler to delete."""
        vars(self._optimizer).update(found_inf=self._found, grad_scale=self._scale)

    def agree(self) -> bool:
        """Whether the step is to be made: its gradients are unscaled then. Collective.

        The scaler of a rank whose own gradients are finite learns of the others, so that all
        scales go down together. Errors: UnsupportedError (what a scaler cannot go with here).
        """
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in params if p.grad is not None]
        self._check(gradients)
        verdicts = self._verdicts()
        # torch gives the number 0 where no parameter has a gradient.
        overflow = torch.zeros(1, device=params[0].device) + self._found
        self._optimizer._comm.all_reduce(overflow, op="max").wait()
        if overflow.item():
            for verdict in verdicts:
                verdict.fill_(1.0)
            return False
        if self._scale is not None:
            inverse = torch.as_tensor(self._scale).double().reciprocal().float()
            for gradient in gradients:
                gradient.mul_(inverse.to(gradient.device))
        return True

    def _check(self, gradients: list[torch.Tensor]) -> None:
        optimizer = self._optimizer
        if optimizer._overlap is not None:
            raise UnsupportedError(
                "GradScaler looks at gradients when backward() has ended, and Overlap(optimizer=) "
                f"sends them before: {_INSTEAD}"
            )
        if "fp16" in optimizer._common:
            raise UnsupportedError(
                "the optimizer has a loss_scale of its own; leave GradScaler out, and multiply the "
                "loss with optimizer.loss_scale"
            )
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise UnsupportedError(
                f"GradScaler does not go with float16 parameters, as in torch: {_INSTEAD}, which "
                "unscales in float32"
            )
        if optimizer._optim is not None and optimizer._optim.info().micro_batches:
            raise UnsupportedError(
                "accumulate() has added up gradients that GradScaler has scaled; let backward() "
                f"add them up, or {_INSTEAD}"
            )

    def _verdicts(self) -> list[torch.Tensor]:
        """Where the scaler keeps what it has found in this optimizer's gradients.

        Nothing where there are no other ranks: it knows all then, perhaps of an Outer around.
        """
        if self._optimizer._comm.size == 1:
            return []
        states = getattr(_caller(), "_per_optimizer_states", {})
        if id(self._optimizer) not in states:
            raise UnsupportedError(
                f"this version of torch has another GradScaler than known: {_INSTEAD}"
            )
        return list(states[id(self._optimizer)]["found_inf_per_device"].values())
