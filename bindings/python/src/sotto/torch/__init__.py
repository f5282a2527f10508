"""Sotto for PyTorch: optimizers, a hook for DistributedDataParallel, helpers.

    import sotto, sotto.torch
    sotto.init_process_group()
    sotto.torch.broadcast_parameters(model)
    optimizer = sotto.torch.OnebitAdam(model.parameters(), lr=1e-3, freeze_step=1000)

Tensors in host memory alone. Nothing in ``sotto`` imports this; torch is not a dependency.
"""

from __future__ import annotations

from .averagers import no_sync_after_warmup
from .base import SottoOptimizer
from .ddp import DDPState, ddp_hook
from .groups import broadcast_parameters, check_parameters, comm_of_process_group
from .optim import Adam, AdamW, Lamb, OnebitAdam, OnebitLamb, ZeroOneAdam

__all__ = [
    "Adam",
    "AdamW",
    "DDPState",
    "Lamb",
    "OnebitAdam",
    "OnebitLamb",
    "SottoOptimizer",
    "ZeroOneAdam",
    "broadcast_parameters",
    "check_parameters",
    "comm_of_process_group",
    "ddp_hook",
    "no_sync_after_warmup",
]
