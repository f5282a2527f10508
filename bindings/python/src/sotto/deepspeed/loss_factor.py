"""Whether the loss of a program was multiplied with what an engine's step() divides by."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import InvalidStateError


class _Begins:
    """Tells of forward passes. The module lives longer than the engine, and may get another one.

    In a copy of the module, also from a file, it tells nobody.
    """

    def __init__(self, told: LossFactor | None = None) -> None:
        self._told = None if told is None else weakref.ref(told)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Begins, ())

    def __call__(self, *_: Any) -> None:
        if self._told is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if (loss_factor := self._told()) is not None:
            loss_factor.forward_begins()


class LossFactor:
    """The factor of loss scale and gradient_accumulation_steps, of one engine.

    A program that calls backward() of a loss itself leaves it out. Gradients that a program has
    written by hand, without a forward pass, are taken as they are.
    """

    def __init__(self, module: torch.nn.Module, factor: Callable[[], float]) -> None:
        """factor: of now; asked where the answer matters, since a step may be in flight."""
        self._module, self._factor = module, factor
        # Since gradients were cleared: whether a loss had the factor; None: no forward pass was.
        self._multiplied: bool | None = None
        module.register_forward_pre_hook(_Begins(self))

    def forward_begins(self) -> None:
        """A forward pass whose gradients are recorded."""
        self._multiplied = self._multiplied or False

    def multiplied(self) -> None:
        """A loss has it."""
        self._multiplied = True

    def was_multiplied(self) -> bool:
        """Whether a loss of this engine is differentiated, not one of another engine behind it."""
        return self._multiplied is True

    def cleared(self) -> None:
        """Gradients are zeros or None."""
        self._multiplied = None

    def is_missing(self) -> bool:
        """Whether gradients would be divided by what their loss was not multiplied with."""
        return self._multiplied is False and self._factor() != 1.0

    def check(self) -> None:
        """Errors: InvalidStateError (the program has called backward() of a loss itself)."""
        if self.is_missing() and any(
            p.grad is not None and bool(p.grad.any()) for p in self._module.parameters()
        ):
            raise InvalidStateError(
                f"step(): there are gradients of a loss that was not multiplied with "
                f"{self._factor():g}, "
                "for the loss scale or gradient_accumulation_steps: call engine.backward(loss) or "
                "engine.scale(loss).backward() in place of loss.backward()"
            )
