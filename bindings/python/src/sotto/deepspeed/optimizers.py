"""deepspeed.ops.adam, .lamb, .lion, .adagrad: DeepSpeed's optimizers by their names and arguments.

FusedAdam, DeepSpeedCPUAdam, FusedLamb, FusedLion and DeepSpeedCPULion are those of libsotto.so,
which average in step(). They need ranks when they are made: init_distributed() goes first, else
the launcher's ranks meet.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import UnsupportedError
from ..torch.base import ParamsT
from ..torch.optim import Adam, Lamb, Lion, OnebitAdam, OnebitLamb, ZeroOneAdam
from .ranks import join, joined

__all__ = [
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "OnebitAdam",
    "OnebitLamb",
    "ZeroOneAdam",
]


def _meet(options: dict[str, Any]) -> None:
    """Programs may make the optimizer first: then torch's process group is made here."""
    from .accelerator import get_accelerator
    from .ranks import has_comm

    if options.get("comm") is None and not has_comm() and not joined():
        join(get_accelerator().communication_backend_name())


class FusedAdam(Adam):
    """Adam, with decoupled weight decay unless adam_w_mode is False."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        **options: Any,
    ) -> None:
        _meet(options)
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            adam_w_mode,
            weight_decay,
            amsgrad,
            set_grad_none,
            **options,
        )


class DeepSpeedCPUAdam(Adam):
    """As FusedAdam, with the order of arguments of DeepSpeed's class for the host."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        **options: Any,
    ) -> None:
        if not fp32_optimizer_states:
            raise UnsupportedError(
                "fp32_optimizer_states is False: moments are float32 here; leave it True"
            )
        _meet(options)
        super().__init__(
            model_params,
            lr,
            bias_correction,
            betas,
            eps,
            adamw_mode,
            weight_decay,
            amsgrad,
            **options,
        )


class FusedLamb(Lamb):
    """LAMB."""

    def __init__(self, params: ParamsT, *arguments: Any, **options: Any) -> None:
        _meet(options)
        super().__init__(params, *arguments, **options)

    def get_lamb_coeffs(self) -> list[float]:
        """Trust ratios of the last step, one for every parameter; empty before it.

        NaN: the parameter is frozen, has no elements, or no step has updated it.
        """
        if self._optim is None:
            return []
        tensors = self.report("tensors")["tensors"]
        ratios = [tensor.get("trust_ratio") for tensor in tensors]
        if all(ratio is None for ratio in ratios):
            return []
        return [math.nan if ratio is None else float(ratio) for ratio in ratios]


class FusedLion(Lion):
    """Lion."""

    def __init__(self, params: ParamsT, *arguments: Any, **options: Any) -> None:
        _meet(options)
        super().__init__(params, *arguments, **options)


class DeepSpeedCPULion(Lion):
    """As FusedLion, with the arguments of DeepSpeed's class for the host."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
        **options: Any,
    ) -> None:
        if not fp32_optimizer_states:
            raise UnsupportedError(
                "fp32_optimizer_states is False: moments are float32 here; leave it True"
            )
        _meet(options)
        super().__init__(model_params, lr, betas, weight_decay, **options)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """torch's Adagrad, with DeepSpeed's defaults: it runs behind the average of the gradients."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad or not fp32_optimizer_states:
            raise UnsupportedError(
                "DeepSpeedCPUAdagrad: amsgrad has to be False and fp32_optimizer_states True"
            )
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
