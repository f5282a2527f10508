#!/usr/bin/env python3
"""Trains a small masked language model on several ranks: integration/c_trainer in PyTorch.

torchrun --nproc-per-node 4 integration/torch/train_bert.py \\
    --deepspeed_config integration/configs/onebit_lamb.json --log-file run.jsonl --summary run.json

README.md here says what the variants are, and what they reached.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [
    str(HERE),
    str(HERE.parent / "netns"),
    str(HERE.parents[1] / "bindings/python/src"),
]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores

import checkpoint  # noqa: E402
import log as logs  # noqa: E402
import torch  # noqa: E402
from bert import Bert, ModelShape  # noqa: E402
from data import Data, DataError, Shape  # noqa: E402
from hooks import SKIPPED  # noqa: E402
from join import Ranks, join  # noqa: E402
from lab import LabError, interface_bytes  # noqa: E402
from lamb import ConfigError  # noqa: E402
from options import parse  # noqa: E402
from variants import VARIANTS, Configuration, DdpLamb, SottoEngine  # noqa: E402

import sotto  # noqa: E402

EVAL_SEQUENCES = 64  # in a forward pass


@dataclasses.dataclass
class Totals:
    """What a rank counts over a run; part of a checkpoint. Times: of the clock, which stands still
    during evaluations and checkpoints."""

    step: int = 0  # updates done
    skipped: int = 0  # steps that updated nothing; each had a batch of its own
    running_ns: int = 0
    calls_ns: int = 0  # of it in averaging
    kernel_ns: int = 0  # of that in Sotto's kernels
    payload: int = 0
    planned: int = 0
    header: int = 0
    interface: int = 0
    stages: dict[str, list[int]] = dataclasses.field(default_factory=dict)  # steps, ns
    log_bytes: int = 0
    eval_loss: float | None = None

    @property
    def batches(self) -> int:
        """Drawn so far."""
        return self.step + self.skipped


class Trainer:
    """The run of one rank."""

    def __init__(self, options: Any, configuration: Configuration, data: Data, ranks: Ranks):
        self.options, self.data, self.ranks = options, data, ranks
        self.micro_batch, self.accumulation = configuration.micro_batch, configuration.accumulation
        self.shape = Shape(options.positions, options.masked)
        sizes = (options.width, options.layers, options.heads, options.mlp, options.positions)
        self.model = Bert(ModelShape(data.vocab, *sizes), options.seed)
        self.variant = self._variant(configuration)
        self.totals = Totals()
        self.eval_batches: list[Any] = []
        self.last_ns = self.interface = 0
        self.before = self.variant.sent()
        if options.resume:
            self._resume(Path(options.resume))
            self.before = self.variant.sent()
        if options.save:
            ranks.together("making the directory of --save", self._make_save_directory)
        self.log = logs.Log(None, None)
        self.progress = logs.Progress("off", options.name, options.steps, 0)

    def _variant(self, configuration: Configuration) -> SottoEngine | DdpLamb:
        made = VARIANTS[self.options.variant]
        variant = made(self.model, configuration, self.ranks, self.options)
        variant.rehearse(self._train_batch(0))
        return variant

    def _make_save_directory(self) -> None:
        Path(self.options.save).mkdir(parents=True, exist_ok=True)

    @property
    def batch_size(self) -> int:
        """Samples of a step over all ranks."""
        return self.ranks.size * self.micro_batch * self.accumulation

    # ---- the clock -----------------------------------------------------------------------------

    def clock_start(self) -> None:
        """Behind a barrier."""
        self.ranks.barrier()
        if not self.variant.has_outer:  # whose averages travel meanwhile
            self.before = self.variant.sent()
        if self.options.interface:
            self.interface = interface_bytes("self", self.options.interface)
        self.last_ns = time.monotonic_ns()

    def clock_stop(self) -> None:
        """Ends behind a barrier too, which counts as waiting for the others."""
        before = time.monotonic_ns()
        self.ranks.barrier()
        end = time.monotonic_ns()
        self.totals.running_ns += end - self.last_ns
        self.totals.calls_ns += end - before
        if self.options.interface:
            now = interface_bytes("self", self.options.interface)
            self.totals.interface += now - self.interface

    # ---- training ------------------------------------------------------------------------------

    def _train_batch(self, number: int) -> Any:
        return self.data.train_batch(
            self.shape, self.options.seed, number, self.ranks.rank, self.micro_batch
        )

    def _count_bytes(self) -> int:
        """Adds what was sent since the last time; the payload."""
        totals, sent, before = self.totals, self.variant.sent(), self.before
        totals.payload += sent.payload - before.payload
        totals.planned += sent.planned - before.planned
        totals.header += sent.header - before.header
        self.before = sent
        return sent.payload - before.payload

    def flush(self) -> None:
        """Behind the last step, on the clock as a part of it."""
        if not self.variant.has_outer:
            return
        self.variant.flush()
        self._count_bytes()
        now = time.monotonic_ns()
        self.totals.running_ns += now - self.last_ns
        self.totals.calls_ns += now - self.last_ns
        self.last_ns = now

    def train_step(self) -> bool:
        """Whether the parameters were updated."""
        totals, variant = self.totals, self.variant
        stage, lr, scale = variant.next_stage(), variant.lr(), variant.loss_scale()
        first = totals.batches * self.accumulation
        result = variant.step(self._train_batch(first + i) for i in range(self.accumulation))
        stage = stage if result.applied else SKIPPED
        totals.step += result.applied
        totals.skipped += not result.applied
        payload = self._count_bytes()
        end = time.monotonic_ns()
        step_ns, self.last_ns = end - self.last_ns, end
        totals.running_ns += step_ns
        totals.calls_ns += result.calls_ns
        totals.kernel_ns += result.kernel_ns
        steps, ns = totals.stages.get(stage, (0, 0))
        totals.stages[stage] = [steps + 1, ns + step_ns]
        if self.ranks.rank == 0:
            record = {"step": totals.step, "samples": totals.batches * self.batch_size}
            record.update(loss=result.loss, lr=lr, stage=stage)
            if not result.applied:
                record["skipped"] = True
            record.update(
                loss_scale=scale,
                clock_s=totals.running_ns / 1e9,
                step_ms=step_ns / 1e6,
                compute_ms=(step_ns - result.calls_ns) / 1e6,
                codec_ms=result.kernel_ns / 1e6,
                comm_ms=(result.calls_ns - result.kernel_ns) / 1e6,
                payload_bytes=payload,
                grad_norm=variant.grad_norm(),
            )
            self.log.write(record)
            self.progress.step(totals.step, result.loss, stage, totals.payload / 1e6)
        return result.applied

    def train(self) -> None:
        """Up to --steps."""
        options, totals = self.options, self.totals
        outer = self.variant.has_outer
        if totals.step < options.steps or outer:
            self.clock_start()
        if totals.step == options.steps and outer:  # the checkpoint is that of before the flush
            self.flush()
            self.clock_stop()
        while totals.step < options.steps:
            if not self.train_step():
                continue
            last = totals.step == options.steps
            due = last or totals.step % options.eval_every == 0
            every = options.save_every
            save = options.save and (last or (every and totals.step % every == 0))
            if not due and not save:
                continue
            if last and save and outer:  # with averages under way: the run can be made longer
                self.clock_stop()
                self.save(Path(options.save))
                self.clock_start()
            if last:
                self.flush()
            self.clock_stop()
            if due:
                self.evaluate_subset()
            if save and not (last and outer):
                self.save(Path(options.save))
            if not last:
                self.clock_start()

    # ---- evaluation ----------------------------------------------------------------------------

    def _eval_batches(self, whole: bool, n: int) -> list[Any]:
        """This rank's share of n fixed sequences."""
        mine = range(self.ranks.rank, n, self.ranks.size)
        pieces = [mine[i : i + EVAL_SEQUENCES] for i in range(0, len(mine), EVAL_SEQUENCES)]
        return [self.data.eval_batch(self.shape, whole, piece) for piece in pieces]

    @torch.no_grad()
    def evaluate(self, batches: list[Any]) -> float:
        """Mean loss over the batches of all ranks."""
        count = sum(len(batch.targets) for batch in batches)
        loss = sum(self.model(*batch).item() * len(batch.targets) for batch in batches)
        sums = self.ranks.gather([loss, count])
        return sum(one for one, _ in sums) / sum(n for _, n in sums)

    def evaluate_subset(self) -> None:
        """On the sequences that are the same in every run."""
        if not self.eval_batches:
            self.eval_batches = self._eval_batches(False, self.options.eval_sequences)
        totals = self.totals
        with self.variant.evaluation():
            totals.eval_loss = self.evaluate(self.eval_batches)
        record = {"step": totals.step, "samples": totals.batches * self.batch_size}
        self.log.write(
            {**record, "clock_s": totals.running_ns / 1e9, "eval_loss": totals.eval_loss}
        )

    # ---- checkpoints ---------------------------------------------------------------------------

    def _key(self) -> dict[str, Any]:
        """What has to be equal for a checkpoint to fit a run."""
        options = self.options
        names = ["variant", "seed", "width", "layers", "heads", "mlp", "positions", "masked"]
        if options.variant == "ddp-powersgd":
            names += ["powersgd_rank", "powersgd_start"]
        return {
            "number of ranks": self.ranks.size,
            **{f"--{name.replace('_', '-')}": getattr(options, name) for name in names},
            "micro-batch": self.micro_batch,
            "accumulation": self.accumulation,
            "hash of the data": self.data.hash,
        }

    def save(self, folder: Path) -> None:
        """Collective. An error on one rank ends all; the last complete checkpoint stays."""
        ranks, found = self.ranks, {}
        self.totals.log_bytes = self.log.length()
        totals = ranks.gather(dataclasses.asdict(self.totals))

        def begin() -> None:
            if ranks.rank == 0:
                found["slot"] = checkpoint.next_slot(folder)
                checkpoint.write_run(folder, found["slot"], self._key(), totals)

        ranks.together("the checkpoint", begin)
        slot = ranks.gather(found.get("slot"))[0]
        ranks.together("the checkpoint", lambda: self.variant.save(folder, slot))
        if ranks.rank == 0:
            checkpoint.complete(folder, slot)
        ranks.barrier()

    def _resume(self, folder: Path) -> None:
        ranks, found = self.ranks, {}

        def read() -> None:
            found["slot"], totals = checkpoint.read_run(folder, self._key(), ranks)
            self.totals = Totals(**totals)
            if self.totals.step > self.options.steps:
                raise checkpoint.CheckpointError(
                    f"--resume: the checkpoint is of step {self.totals.step}, --steps is "
                    f"{self.options.steps}"
                )

        ranks.together("reading the checkpoint", read)
        ranks.together("reading the checkpoint", lambda: self.variant.load(folder, found["slot"]))

    # ---- the run -------------------------------------------------------------------------------

    def open_outputs(self) -> None:
        """Rank 0's log and progress."""
        if self.ranks.rank != 0:
            return
        options, totals = self.options, self.totals
        if options.summary:
            with open(options.summary, "a", encoding="utf-8"):
                pass  # what cannot be written is told before the training
        self.log = logs.Log(options.log_file, totals.log_bytes if options.resume else None)
        self.progress = logs.Progress(options.progress, options.name, options.steps, totals.step)
        numel = sum(p.numel() for p in self.model.parameters())
        self.progress.note(
            f"{numel} parameters, {self.ranks.size} ranks, {self.batch_size} samples a step, from "
            f"step {totals.step}, variant {options.variant}, torch {torch.__version__}"
        )

    def report(self) -> None:
        """The whole held-out part, and the summary."""
        windows = self.data.held_out_windows(self.shape)
        val_loss = self.evaluate(self._eval_batches(True, windows))
        t = self.totals
        parts = (t.running_ns - t.calls_ns, t.kernel_ns, t.calls_ns - t.kernel_ns, t.running_ns)
        bytes_of = (t.payload, t.planned, t.header, t.interface)
        rows = self.ranks.gather([parts, bytes_of])
        if self.ranks.rank != 0:
            return
        means = [sum(row[0][i] for row in rows) / len(rows) / 1e9 for i in range(3)]
        counts = [[row[1][i] for row in rows] for i in range(4)]
        flat = torch.cat([p.detach().flatten().float() for p in self.model.parameters()])
        summary = {
            "name": self.options.name,
            "variant": self.options.variant,
            "seed": self.options.seed,
            "steps": t.step,
            "skipped_steps": t.skipped,
            "ranks": self.ranks.size,
            "parameters": flat.numel(),
            "samples_per_step": self.batch_size,
            "val_loss": val_loss,
            "held_out_sequences": windows,
            "eval_loss": t.eval_loss,
            "unigram_entropy": self.data.entropy,
            "clock": "monotonic, rank 0; evaluation and checkpoints left out",
            "wall_s": t.running_ns / 1e9,
            "rank_wall_s": [row[0][3] / 1e9 for row in rows],
            "compute_s": means[0],
            "codec_s": means[1],
            "exposed_comm_s": means[2],
            "stages": [
                {"stage": s, "steps": n, "wall_s": ns / 1e9} for s, (n, ns) in t.stages.items()
            ],
            "payload_bytes_sent": counts[0],
            "payload_bytes_planned": counts[1],
            "header_bytes_sent": counts[2],
            "interface_bytes_sent": counts[3] if self.options.interface else None,
            "torch": torch.__version__,
            "params_hash": logs.params_hash(flat.numpy().tobytes()),
        }
        self.progress.note(
            f"held-out loss {val_loss:.4f} nats (unigram entropy {self.data.entropy:.3f}) after "
            f"{summary['wall_s']:.1f} s on the clock"
        )
        if self.options.summary:
            logs.write_summary(self.options.summary, summary)

    def close(self) -> None:
        """Before the ranks leave."""
        self.progress.close()
        self.log.close()
        self.variant.close()


def run(options: Any) -> None:
    """One rank, from start to end."""
    torch.set_num_threads(1)
    made = VARIANTS[options.variant]
    data = Data(options.data)
    with open(options.deepspeed_config, encoding="utf-8"):
        pass  # a missing file is told before the ranks meet
    ranks = join(made.uses_sotto, made.uses_gloo)
    configuration = Configuration(options.deepspeed_config, ranks.size)
    for rank, other in enumerate(ranks.gather(data.hash)):
        if other != data.hash:
            raise DataError(f"--data: the files of rank {rank} differ from those of this rank")
    trainer = Trainer(options, configuration, data, ranks)
    trainer.open_outputs()
    trainer.train()
    trainer.report()
    trainer.close()
    ranks.leave()


def main() -> int:
    """Exit code 1 with a line on standard error where something is wrong."""
    options = parse()
    try:
        run(options)
    except (
        sotto.SottoError,
        checkpoint.CheckpointError,
        ConfigError,
        DataError,
        LabError,
        OSError,
        RuntimeError,  # of torch.distributed, when a rank is lost
        ValueError,
    ) as error:
        rank = os.environ.get("SOTTO_RANK", os.environ.get("RANK", "?"))
        print(f"train_bert: rank {rank}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without taking the interpreter apart: gloo's threads go on, give tensors back to it, and abort
    # the process if that is too late.
    os._exit(exit_code)
