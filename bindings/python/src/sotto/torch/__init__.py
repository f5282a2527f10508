"""Sotto for PyTorch: data-parallel training whose ranks send little.

The optimizers here average gradients over the ranks inside step(), in full precision or in one bit
per element, and update the parameters; backward() sends nothing. They have the names, arguments and
defaults of DeepSpeed's, and are torch optimizers: schedulers, closures, parameter groups and
state_dict() work. A program for torchrun, sotto-run, mpirun or srun:

    import torch
    import sotto, sotto.torch

    sotto.init_process_group()  # or torch.distributed.init_process_group(), whose ranks it takes
    model = torch.nn.Linear(4, 1)
    sotto.torch.broadcast_parameters(model)  # ranks start from the same values
    optimizer = sotto.torch.OnebitAdam(model.parameters(), lr=1e-2, freeze_step=20)
    for step in range(40):
        x = torch.randn(8, 4)  # this rank's batch
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()  # collective: averages, clips, updates
    state = optimizer.state_dict()  # any rank alone; load_state_dict() on all

Adam, AdamW, Lamb, Lion        gradients in full precision, or as sotto={"gradient_codec": ...} says
OnebitAdam, ZeroOneAdam,       one bit per element after a warm-up
OnebitLamb
Outer                          outer steps around any optimizer: CO2, DiLoCo, local SGD, ...
DDPState, ddp_hook             a communication hook for DistributedDataParallel, with any optimizer
Overlap                        gradients averaged during backward(), with any optimizer of torch
no_sync_after_warmup           DistributedDataParallel around the model, averaging in step()
broadcast_parameters,          equal values on all ranks
check_parameters
comm_of_process_group          the ranks of a process group of torch

Tensors are in host memory or on one CUDA device, in float32, float16 or bfloat16. SottoOptimizer
has what all optimizers share. Nothing in ``sotto`` imports this; torch is not a dependency.
"""

from __future__ import annotations

from .averagers import no_sync_after_warmup
from .base import SottoOptimizer
from .ddp import DDPState, ddp_hook
from .groups import comm_of_process_group
from .optim import Adam, AdamW, Lamb, Lion, OnebitAdam, OnebitLamb, ZeroOneAdam
from .outer import Outer
from .overlap import Overlap
from .values import broadcast_parameters, check_parameters

__all__ = [
    "Adam",
    "AdamW",
    "DDPState",
    "Lamb",
    "Lion",
    "OnebitAdam",
    "OnebitLamb",
    "Outer",
    "Overlap",
    "SottoOptimizer",
    "ZeroOneAdam",
    "broadcast_parameters",
    "check_parameters",
    "comm_of_process_group",
    "ddp_hook",
    "no_sync_after_warmup",
]
