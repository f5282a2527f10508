"""How gradients become updates: what the runs of a comparison differ in.

sotto         the configuration's optimizer, by sotto.deepspeed.initialize: LAMB, 1-bit LAMB, ..
ddp           DistributedDataParallel over gloo, 32 bits
ddp-powersgd  the same with PyTorch's PowerSGD hook
ddp-onebit    the same with Sotto's hook, 1 bit per gradient

The last three end in LAMB without Sotto (lamb.py), with the configuration's hyper-parameters.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bert import Bert
from data import Batch
from hooks import (
    COMPRESSED,
    FULL_PRECISION,
    LOCAL,
    OUTER,
    GlooHook,
    OnebitHook,
    PowerSgdHook,
    Sent,
)
from join import Ranks
from lamb import ConfigError, Lamb, Schedule
from torch.nn.parallel import DistributedDataParallel

import sotto
import sotto.deepspeed
from sotto.deepspeed import files


class Result(NamedTuple):
    """One step as this rank saw it."""

    loss: float  # mean over this rank's samples
    applied: bool  # False: a dynamic loss scale left it out
    calls_ns: int  # in averaging: all of Sotto's calls, or from the last gradient to its average
    kernel_ns: int  # of that in Sotto's kernels


class Configuration:
    """A DeepSpeed file as the library reads it, for `world` ranks. Errors: OSError, SottoError."""

    def __init__(self, path: str, world: int) -> None:
        self.report = sotto.config_report(Path(path), world_size=world)
        self.file = sotto.config_resolve(Path(path))
        batch = self.report["batch"] or {}
        self.micro_batch = int(batch.get("train_micro_batch_size_per_gpu", 6))
        self.accumulation = int(batch.get("gradient_accumulation_steps", 1))


class SottoEngine:
    """DeepSpeed's loop on Sotto's engine."""

    uses_sotto, uses_gloo = True, False

    def __init__(
        self, model: Bert, configuration: Configuration, ranks: Ranks, options: Any
    ) -> None:
        assert ranks.comm is not None
        config, self.has_outer = configuration.file, configuration.report["outer"] is not None
        # A checkpoint continues bit for bit, unless the file wants one of another kind.
        config = {**config, "sotto": {"checkpoint": "exact", **(config.get("sotto") or {})}}
        self.comm = ranks.comm
        self.engine, self.optimizer, _, _ = sotto.deepspeed.initialize(
            model=model, model_parameters=model.groups(), config=config, comm=self.comm
        )
        self.parameters = sum(p.numel() for p in model.parameters())

    def rehearse(self, batch: Batch) -> None:
        """What only the first step would do, before the clock starts: one backward pass whose
        result is thrown away, and the library's optimizer."""
        self.engine(*batch).backward()
        self.engine.zero_grad()
        self.optimizer.info()

    def next_stage(self) -> str:
        """Told by what the next step sends: full precision is at least 2 bytes per parameter, each
        way to W - 1 of W ranks; compressed is one bit; between two synchronisations 0/1 Adam sends
        nothing, or a few bytes."""
        info, world = self.optimizer.info(), self.comm.size
        if self.has_outer:
            return OUTER if info.payload_bytes_next_step else LOCAL
        if world == 1:
            return FULL_PRECISION if info.stage == 0 else COMPRESSED
        ways = 2.0 * (world - 1) / world
        each = info.payload_bytes_next_step / (ways * self.parameters)
        if info.stage != 0 and each < 1 / 16:
            return LOCAL
        return COMPRESSED if info.stage != 0 or each < 1.5 else FULL_PRECISION

    def lr(self) -> float:
        """Of the next step."""
        return float(self.engine.get_lr()[0])

    def loss_scale(self) -> float:
        """Of the next step; 1 without fp16."""
        return float(self.engine.cur_scale)

    def grad_norm(self) -> float:
        """Of the last step, before clipping."""
        return self.engine.get_global_grad_norm()

    def step(self, batches: Iterable[Batch]) -> Result:
        """Gradients of all micro-batches, and an update."""
        losses, calls_ns = [], 0
        kernels = self.comm.counters().kernel_ns
        for batch in batches:
            with self.comm.span("forward and backward"):
                loss = self.engine(*batch)
                self.engine.backward(loss)
            losses.append(loss.item())
            start = time.monotonic_ns()
            self.engine.step()
            calls_ns += time.monotonic_ns() - start
        kernel_ns = min(self.comm.counters().kernel_ns - kernels, calls_ns)
        mean = sum(losses) / len(losses)
        return Result(mean, self.engine.was_step_applied(), calls_ns, kernel_ns)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside, parameters are what all ranks have alike: with outer steps the anchor."""
        if not self.has_outer:
            yield
            return
        with contextlib.closing(self.optimizer.outer()) as outer, outer.evaluation():
            yield

    def flush(self) -> None:
        """The end of a training with outer steps: what was not averaged yet is, and the anchor
        becomes the parameters. Collective."""
        if self.has_outer:
            with contextlib.closing(self.optimizer.outer()) as outer:
                outer.flush().wait()

    def sent(self) -> Sent:
        """Counted at the transport, and as the plans said before."""
        c = self.comm.counters()
        return Sent(c.payload_bytes_sent, c.payload_bytes_planned, c.header_bytes_sent)

    def save(self, folder: Path, slot: str) -> None:
        """Collective."""
        self.engine.save_checkpoint(folder, tag=slot, save_latest=False)

    def load(self, folder: Path, slot: str) -> None:
        """Collective."""
        self.engine.load_checkpoint(folder, tag=slot)

    def close(self) -> None:
        """Before the ranks leave."""
        self.engine.close()


class DdpLamb:
    """DistributedDataParallel with a hook, and LAMB without Sotto."""

    uses_sotto, uses_gloo, has_outer = False, True, False
    hook_class: type[GlooHook] = GlooHook

    def __init__(
        self, model: Bert, configuration: Configuration, ranks: Ranks, options: Any
    ) -> None:
        report = configuration.report
        if report["optimizer"] is None or report["optimizer"]["type"] != "Lamb":
            kind = report["optimizer"] and report["optimizer"]["type"]
            raise ConfigError(f"optimizer.type is {kind}; --variant ddp.. need Lamb")
        if report["loss_scale"] is not None or report["sotto"]["gradient_codec"] is not None:
            raise ConfigError("--variant ddp.. know neither fp16 nor sotto.gradient_codec")
        if report["outer"] is not None:
            raise ConfigError("--variant ddp.. have no sotto.outer, they average in every step")
        lr = report["optimizer"]["params"]["lr"]
        self.lamb = Lamb(model.groups(), report, Schedule(configuration.file.get("scheduler"), lr))
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.hook = self.hook_class(model, ranks, options)
        self.gradients_done_ns = 0
        self.ddp.register_comm_hook(None, self._averaged)

    def _averaged(self, _: None, bucket):  # DDP compares annotations
        self.gradients_done_ns = time.monotonic_ns()
        return self.hook.start(bucket)

    def rehearse(self, batch: Batch) -> None:
        """A backward pass whose result is thrown away: after the first one DDP arranges its buckets
        anew. A resumed run then has the buckets of an unbroken one from its first step."""
        self.ddp(*batch).backward()
        self.lamb.zero_grad()
        self.hook.rehearsed()

    def next_stage(self) -> str:
        """Of the next step."""
        return self.hook.stage()

    def lr(self) -> float:
        """Of the next step."""
        return self.lamb.lr

    def loss_scale(self) -> float:
        """There is none."""
        return 1.0

    def grad_norm(self) -> float:
        """Of the last step, before clipping."""
        return self.lamb.grad_norm

    def step(self, batches: Iterable[Batch]) -> Result:
        """Gradients of all micro-batches, averaged behind the last, and an update."""
        batches = list(batches)
        kernels = self.hook.kernel_ns()
        self.hook.plan_step()
        losses, end = [], 0
        self.lamb.zero_grad()
        for i, batch in enumerate(batches, 1):
            with self.ddp.no_sync() if i < len(batches) else contextlib.nullcontext():
                loss = self.ddp(*batch)
                (loss / len(batches) if len(batches) > 1 else loss).backward()
                end = time.monotonic_ns()
            losses.append(loss.item())
        self.lamb.step()
        calls_ns = end - self.gradients_done_ns
        kernel_ns = min(self.hook.kernel_ns() - kernels, calls_ns)
        return Result(sum(losses) / len(losses), True, calls_ns, kernel_ns)

    def evaluation(self) -> contextlib.AbstractContextManager[None]:
        """Parameters are alike on all ranks after any step."""
        return contextlib.nullcontext()

    def flush(self) -> None:
        """Every step has its average."""

    def sent(self) -> Sent:
        """In steps so far."""
        return self.hook.sent()

    def save(self, folder: Path, slot: str) -> None:
        """This rank's file."""
        state = {
            "module": self.ddp.module.state_dict(),
            "lamb": self.lamb.state_dict(),
            "hook": self.hook.state(),
        }
        files.write(folder / slot / self._file(), state)

    def load(self, folder: Path, slot: str) -> None:
        """Takes what save() wrote."""
        state = files.read(folder / slot / self._file())
        self.ddp.module.load_state_dict(state["module"])
        self.lamb.load_state_dict(state["lamb"])
        self.hook.restore(state["hook"])

    @staticmethod
    def _file() -> str:
        return f"rank{torch.distributed.get_rank()}.pt"

    def close(self) -> None:
        """Before the ranks leave."""
        self.hook.close()


class DdpPowerSgd(DdpLamb):
    """With PyTorch's PowerSGD hook."""

    hook_class = PowerSgdHook


class DdpOnebit(DdpLamb):
    """With Sotto's 1-bit hook."""

    uses_sotto = True
    hook_class = OnebitHook


VARIANTS = {
    "sotto": SottoEngine,
    "ddp": DdpLamb,
    "ddp-powersgd": DdpPowerSgd,
    "ddp-onebit": DdpOnebit,
}
