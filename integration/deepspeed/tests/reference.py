"""DeepSpeed's own 1-bit optimizers on the CPU: their classes, without their engine.

They are written for GPUs and pack signs with cupy; numpy stands in for the few functions of it that
they call. Averages in full precision, which the engine makes while enable_backward_allreduce is on,
are made here, in rank order.
"""

import sys
import types

import numpy as np
import torch
import torch.distributed as dist
from torch.utils import dlpack


def numpy_as_cupy():
    """A module with the functions of cupy that DeepSpeed's compressed all-reduce uses."""
    nothing = types.SimpleNamespace(use=lambda: None, synchronize=lambda: None)
    module = types.ModuleType("cupy")
    module.cuda = types.SimpleNamespace(
        Device=lambda _: nothing, get_current_stream=lambda: nothing
    )
    module.from_dlpack = lambda capsule: dlpack.from_dlpack(capsule).numpy()
    for name in ("packbits", "unpackbits", "split", "zeros"):
        setattr(module, name, getattr(np, name))
    return module


def join_deepspeed():
    """DeepSpeed's collectives over torch's default process group, without compiling its own."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", dist_init_required=False)
    return deepspeed


def optimizer_classes():
    """OnebitAdam, ZeroOneAdam and OnebitLamb of the installed DeepSpeed.

    Errors: ImportError (not installed, or a release that has them no more).
    """
    sys.modules.setdefault("cupy", numpy_as_cupy())
    from deepspeed.runtime.comm import nccl
    from deepspeed.runtime.fp16.onebit.adam import OnebitAdam
    from deepspeed.runtime.fp16.onebit.lamb import OnebitLamb
    from deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam

    nccl.dist = Collectives()
    return {"OneBitAdam": OnebitAdam, "ZeroOneAdam": ZeroOneAdam, "OneBitLamb": OnebitLamb}


class Collectives:
    """deepspeed.comm; gloo gathers a number only if it is a vector of one element."""

    def __getattr__(self, name):
        import deepspeed.comm

        return getattr(deepspeed.comm, name)

    def all_gather(self, outputs, tensor, group=None):
        import deepspeed.comm

        return deepspeed.comm.all_gather(outputs, tensor.reshape(-1), group=group)


class Reference:
    """One of the optimizers over float32 tensors, on every rank of torch's default group.

    tensors: start values, as numpy vectors. margin: elements that come nearer to 0 than this part
    of the scale, before their sign is taken, on any rank, are noted in `near`.
    """

    def __init__(self, kind, tensors, margin, **hyper):
        self.params = [torch.nn.Parameter(torch.tensor(t)) for t in tensors]
        self.engine = types.SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
        self.optimizer = optimizer_classes()[kind](self.params, self.engine, **hyper)
        self.margin = margin
        self.n = sum(p.numel() for p in self.params)
        self.near = torch.zeros(self.n, dtype=torch.bool)
        self._plain = self.optimizer.comm_backend_handle.compressed_allreduce
        # The first step allocates and exchanges zeros; it updates nothing.
        self._give([torch.zeros_like(p) for p in self.params])
        self.optimizer.step()
        self.optimizer.comm_backend_handle.compressed_allreduce = self._watched

    def _watched(self, buffer, worker_error, server_error, local_rank):
        rank, world = dist.get_rank(), dist.get_world_size()
        c = torch.zeros_like(worker_error)
        c[: buffer.numel()] = buffer.flatten()
        c += worker_error
        near = torch.zeros(c.numel(), dtype=torch.int32)
        near |= c.abs() < self.margin * c.square().mean().sqrt()
        out = self._plain(buffer, worker_error, server_error, local_rank)
        mine = torch.zeros_like(c)
        mine[: out.numel()] = out.flatten()
        chunk = c.numel() // world
        part = slice(rank * chunk, (rank + 1) * chunk)
        # What the result has of this rank's chunk is sign and scale; behind the end there is none.
        a, known = mine[part] + server_error, mine[part] != 0
        scale = a.square().mean().sqrt()
        near[part] |= known & (a.abs() < self.margin * scale)
        dist.all_reduce(near, dist.ReduceOp.MAX)
        self.near |= near[: self.n].bool()
        return out

    def _give(self, gradients):
        for p, g in zip(self.params, gradients):
            p.grad = g

    def step(self, gradients):
        """gradients: of all ranks, numpy vectors over all parameters."""
        if self.engine.enable_backward_allreduce:
            total = gradients[0].copy()
            for g in gradients[1:]:
                total += g
            flat = torch.from_numpy(total / np.float32(len(gradients)))
        else:
            flat = torch.from_numpy(gradients[dist.get_rank()].copy())
        sizes = [p.numel() for p in self.params]
        self._give([g.clone() for g in flat.split(sizes)])
        self.optimizer.step()

    def flat(self):
        """All parameters as one numpy vector."""
        return torch.cat([p.detach() for p in self.params]).numpy()
