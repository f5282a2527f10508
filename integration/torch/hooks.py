"""Hooks of DistributedDataParallel that count what they send."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from bert import Bert
from join import Ranks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import sotto.torch

FULL_PRECISION, COMPRESSED, LOCAL = "full precision", "compressed", "local"
OUTER, SKIPPED = "outer", "skipped"


class Sent(NamedTuple):
    """What this process has sent in steps so far."""

    payload: int
    planned: int
    header: int


def ring_bytes(elements: int, world: int) -> int:
    """What one rank sends in gloo's all-reduce of float32: a reduce-scatter and an all-gather."""
    return 2 * (world - 1) * 4 * elements // world


class GlooHook:
    """DDP's own all-reduce, with its bytes counted."""

    def __init__(self, model: Bert, ranks: Ranks, options: Any) -> None:
        self.world = ranks.size
        self.sent_numel = self.planned_numel = 0
        self.numel = sum(p.numel() for p in model.parameters())

    def stage(self) -> str:
        """Of the next step."""
        return FULL_PRECISION

    def start(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Averages a bucket."""
        self.sent_numel += bucket.buffer().numel()
        return default_hooks.allreduce_hook(None, bucket)

    def plan_step(self) -> None:
        """Adds what the model says that the next step will send."""
        self.planned_numel += self.numel

    def sent(self) -> Sent:
        """By the sizes of what was given to gloo; it does not tell its headers."""
        counted = (self.sent_numel, self.planned_numel)
        return Sent(*(ring_bytes(numel, self.world) for numel in counted), 0)

    def kernel_ns(self) -> int:
        """In Sotto's kernels so far."""
        return 0

    def rehearsed(self) -> None:
        """The first backward pass is over: counts start now."""
        self.sent_numel = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this rank."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes a state()."""

    def close(self) -> None:
        """Before the ranks leave."""


class PowerSgdHook(GlooHook):
    """PyTorch's PowerSGD: matrices as products of two thin ones."""

    MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")
    COUNTS = ("iter", "total_numel_before_compression", "total_numel_after_compression")

    def __init__(self, model: Bert, ranks: Ranks, options: Any) -> None:
        super().__init__(model, ranks, options)
        logging.getLogger(powerSGD_hook.__name__).setLevel(logging.ERROR)
        self.rank = options.powersgd_rank
        self.power = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=self.rank, start_powerSGD_iter=options.powersgd_start
        )
        self.compressed_numel = sum(self._sent_of(p.shape) for p in model.parameters())

    def _sent_of(self, shape: torch.Size) -> int:
        """Numbers sent for a tensor: two thin matrices where that is less than half of it."""
        rows, columns = shape[0], shape.numel() // shape[0]
        thin = (rows + columns) * self.rank
        worth = len(shape) > 1 and thin * self.power.min_compression_rate < rows * columns
        return thin if worth else rows * columns

    def stage(self) -> str:
        return COMPRESSED if self.power.iter >= self.power.start_powerSGD_iter else FULL_PRECISION

    def start(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        compressed = self.stage() == COMPRESSED
        before = self.power.total_numel_after_compression
        future = powerSGD_hook.powerSGD_hook(self.power, bucket)
        after = self.power.total_numel_after_compression
        self.sent_numel += after - before if compressed else bucket.buffer().numel()
        return future

    def plan_step(self) -> None:
        compressed = self.stage() == COMPRESSED
        self.planned_numel += self.compressed_numel if compressed else self.numel

    def rehearsed(self) -> None:
        super().rehearsed()
        self.power.iter = 0

    def state(self) -> dict[str, Any]:
        kind, keys, *rest = self.power.rng.get_state()
        kept = {name: getattr(self.power, name) for name in (*self.MEMORIES, *self.COUNTS)}
        return {**kept, "rng": [kind, torch.from_numpy(keys.astype("int64")), *rest]}

    def restore(self, state: dict[str, Any]) -> None:
        kind, keys, *rest = state["rng"]
        self.power.rng.set_state((kind, keys.numpy().astype("uint32"), *rest))
        for name in (*self.MEMORIES, *self.COUNTS):
            setattr(self.power, name, state[name])


class OnebitHook(GlooHook):
    """Sotto's hook: one bit per gradient, with error feedback."""

    def __init__(self, model: Bert, ranks: Ranks, options: Any) -> None:
        super().__init__(model, ranks, options)
        self.ddp_state = sotto.torch.DDPState("onebit", comm=ranks.comm)

    def stage(self) -> str:
        return COMPRESSED

    def start(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        return sotto.torch.ddp_hook(self.ddp_state, bucket)

    def plan_step(self) -> None:
        pass

    def sent(self) -> Sent:
        c = self.ddp_state.comm.counters()
        return Sent(c.payload_bytes_sent, c.payload_bytes_planned, c.header_bytes_sent)

    def kernel_ns(self) -> int:
        return self.ddp_state.comm.counters().kernel_ns

    def state(self) -> dict[str, Any]:
        return self.ddp_state.state_dict("exact")

    def restore(self, state: dict[str, Any]) -> None:
        self.ddp_state.load_state_dict(state)

    def close(self) -> None:
        self.ddp_state.close()
