"""Optimizers for PyTorch with the names, arguments and defaults of DeepSpeed's.

Gradients are averaged over the ranks of a comm inside step(), compressed where the algorithm says
so: backward() stays local. With DistributedDataParallel see no_sync_after_warmup(). Keywords in
``shared`` are those of :class:`SottoOptimizer`, the same for all.

``deepspeed``, DeepSpeed's engine, has to be None: this library averages by itself.
``max_grad_norm`` has to be 0: use gradient_clipping. amsgrad has to be False.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError
from .base import ParamsT, SottoOptimizer
from .shared import Shared, shows_shared

if TYPE_CHECKING:
    from typing_extensions import Unpack

# What the 1-bit optimizers of DeepSpeed accept and do not use, with the defaults there.
_UNUSED = MappingProxyType(
    {
        "bias_correction": True,
        "eps_inside_sqrt": False,
        "amsgrad": False,
        "cuda_aware": False,
        "comm_backend_name": "nccl",
    }
)


def _no_engine(deepspeed: Any) -> None:
    if deepspeed is not None:
        raise InvalidArgumentError(
            f"deepspeed is of type {type(deepspeed).__qualname__}; it has to be None: the ranks of "
            "comm average here"
        )


class Adam(SottoOptimizer):
    """Adam on averaged gradients; decoupled weight decay (AdamW) unless adam_w_mode is False."""

    _kind = "Adam"
    _quiet = MappingProxyType({"amsgrad": False, "set_grad_none": True})

    @shows_shared
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
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            {
                "bias_correction": bias_correction,
                "adam_w_mode": adam_w_mode,
                "amsgrad": amsgrad,
                "set_grad_none": set_grad_none,
            },
            **shared,
        )


class AdamW(Adam):
    """Adam with decoupled weight decay."""

    _kind = "AdamW"


class Lamb(SottoOptimizer):
    """LAMB on averaged gradients: DeepSpeed's FusedLamb."""

    _kind = "Lamb"
    _quiet = MappingProxyType({"amsgrad": False})

    @shows_shared
    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "max_coeff": max_coeff,
                "min_coeff": min_coeff,
            },
            {
                "bias_correction": bias_correction,
                "eps_inside_sqrt": eps_inside_sqrt,
                "amsgrad": amsgrad,
            },
            max_grad_norm=max_grad_norm,
            **shared,
        )


class Lion(SottoOptimizer):
    """Lion on averaged gradients: the sign of an interpolated momentum, decoupled weight decay.
    DeepSpeed's FusedLion; the paper (arXiv 2302.06675) advises betas of (0.9, 0.99)."""

    _kind = "Lion"
    _quiet = MappingProxyType({"set_grad_none": True})

    @shows_shared
    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay},
            {"set_grad_none": set_grad_none},
            **shared,
        )


class OnebitAdam(SottoOptimizer):
    """1-bit Adam: full precision up to freeze_step, then the variance is frozen and momentum
    travels in one bit per element. A group with ``"non_freeze": True`` is never compressed."""

    _kind = "OneBitAdam"
    _quiet = _UNUSED

    @shows_shared
    def __init__(
        self,
        params: ParamsT,
        deepspeed: None = None,
        lr: float = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        **shared: Unpack[Shared],
    ) -> None:
        _no_engine(deepspeed)
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "non_freeze": False,
            },
            {
                "freeze_step": freeze_step,
                "bias_correction": bias_correction,
                "eps_inside_sqrt": eps_inside_sqrt,
                "amsgrad": amsgrad,
                "cuda_aware": cuda_aware,
                "comm_backend_name": comm_backend_name,
            },
            max_grad_norm=max_grad_norm,
            **shared,
        )


class ZeroOneAdam(SottoOptimizer):
    """0/1 Adam: gradients in one bit between variance updates, then local steps between
    synchronisations. With frozen variance parameters differ between ranks until the next one."""

    _kind = "ZeroOneAdam"
    _quiet = _UNUSED

    @shows_shared
    def __init__(
        self,
        params: ParamsT,
        deepspeed: None = None,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        **shared: Unpack[Shared],
    ) -> None:
        _no_engine(deepspeed)
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            {
                "var_freeze_step": var_freeze_step,
                "var_update_scaler": var_update_scaler,
                "local_step_scaler": local_step_scaler,
                "local_step_clipper": local_step_clipper,
                "bias_correction": bias_correction,
                "eps_inside_sqrt": eps_inside_sqrt,
                "amsgrad": amsgrad,
                "cuda_aware": cuda_aware,
                "comm_backend_name": comm_backend_name,
            },
            max_grad_norm=max_grad_norm,
            **shared,
        )


class OnebitLamb(SottoOptimizer):
    """1-bit LAMB: full precision up to freeze_step, then momentum in one bit per element with
    trust ratios that follow a reconstructed variance."""

    _kind = "OneBitLamb"
    _quiet = _UNUSED

    @shows_shared
    def __init__(
        self,
        params: ParamsT,
        deepspeed: None = None,
        lr: float = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        **shared: Unpack[Shared],
    ) -> None:
        _no_engine(deepspeed)
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "max_coeff": max_coeff,
                "min_coeff": min_coeff,
            },
            {
                "freeze_step": freeze_step,
                "coeff_beta": coeff_beta,
                "factor_max": factor_max,
                "factor_min": factor_min,
                "factor_threshold": factor_threshold,
                "bias_correction": bias_correction,
                "eps_inside_sqrt": eps_inside_sqrt,
                "amsgrad": amsgrad,
                "cuda_aware": cuda_aware,
                "comm_backend_name": comm_backend_name,
            },
            max_grad_norm=max_grad_norm,
            **shared,
        )
