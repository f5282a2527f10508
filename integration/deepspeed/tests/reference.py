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


LOSS_SCALE = 256.0  # the first one, and the only one as long as nothing overflows


class Reference:
    """One of the optimizers, on every rank of torch's default group.

    groups: start values, lists of numpy vectors. half: the model is of 16 bits and DeepSpeed's own
    fp16 wrapper of this optimizer is around it. margin: elements that come nearer to 0 than this
    part of the scale, before their sign is taken, on any rank, are noted in `near`.
    """

    def __init__(self, kind, groups, margin, half=False, **hyper):
        dtype = torch.float16 if half else torch.float32
        self.given = [[torch.nn.Parameter(torch.tensor(t).to(dtype)) for t in g] for g in groups]
        self.params = [p for group in self.given for p in group]
        self.engine = types.SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
        inner = optimizer_classes()[kind]([{"params": g} for g in self.given], self.engine, **hyper)
        self.inner, self.half = inner, half
        self.margin = margin
        self.n = sum(p.numel() for p in self.params)
        self.near = torch.zeros(self.n, dtype=torch.bool)
        self._plain = inner.comm_backend_handle.compressed_allreduce
        # The first step allocates and exchanges zeros; it updates nothing. The wrapper makes it.
        if half:
            self.optimizer = self._wrapped(kind)
        else:
            self.optimizer = inner
            self._give([torch.zeros_like(p) for p in self.params])
            inner.step()
        inner.comm_backend_handle.compressed_allreduce = self._watched

    def _wrapped(self, kind):
        from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
        from deepspeed.runtime.fp16.loss_scaler import LossScaleConfig
        from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

        # As the engine chooses it.
        wrapper = FP16_UnfusedOptimizer if kind == "OneBitLamb" else FP16_Optimizer
        scale = LossScaleConfig(torch.float16, True, 1.0, None, initial_dynamic_scale=LOSS_SCALE)
        return wrapper(self.inner, deepspeed=self.engine, loss_scale_config=scale, verbose=False)

    def masters(self):
        """The tensors that the optimizer updates, in float32."""
        return [p for group in self.inner.param_groups for p in group["params"]]

    def _first_element(self, worker_error):
        """Where the elements begin that a compressed all-reduce is for."""
        first = 0
        for p in self.masters():
            if self.inner.state[p].get("worker_error") is worker_error:
                return first
            first += p.numel()
        return 0  # 1-bit LAMB: all in one

    def _watched(self, buffer, worker_error, server_error, local_rank):
        rank, world = dist.get_rank(), dist.get_world_size()
        first, count = self._first_element(worker_error), buffer.numel()
        c = torch.zeros_like(worker_error)
        c[:count] = buffer.flatten()
        c += worker_error
        near = c.abs() < self.margin * c.square().mean().sqrt()
        out = self._plain(buffer, worker_error, server_error, local_rank)
        mine = torch.zeros_like(c)
        mine[: out.numel()] = out.flatten()
        chunk = c.numel() // world
        part = slice(rank * chunk, (rank + 1) * chunk)
        # What the result has of this rank's chunk is sign and scale; behind the end there is none.
        a, known = mine[part] + server_error, mine[part] != 0
        scale = a.square().mean().sqrt()
        near[part] |= known & (a.abs() < self.margin * scale)
        count = min(count, self.n - first)
        self.near[first : first + count] |= near[:count]
        return out

    def _share_near(self):
        """Notes what is near 0 on any rank."""
        near = self.near.to(torch.uint8)
        dist.all_reduce(near, dist.ReduceOp.MAX)
        self.near = near.bool()

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
        if self.half:
            flat = (flat * LOSS_SCALE).half()
        sizes = [p.numel() for p in self.params]
        self._give([g.clone() for g in flat.split(sizes)])
        self.optimizer.step()
        self._share_near()
        if self.half:
            assert self.optimizer.loss_scale_config.cur_scale == LOSS_SCALE

    def flat(self):
        """All parameters as one numpy vector."""
        return torch.cat([p.detach().flatten() for p in self.masters()]).numpy()
