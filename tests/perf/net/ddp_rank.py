#!/usr/bin/env python3
"""One rank of step_ddp.py: the same model several times, each with an optimizer of its own. Argument: the control socket.

Commands, one a line (see sides.py):
  model NAME MIB METHOD...  makes one for each, whose averages in float32 have buckets of so many MiB. {"parameters": how many}
  losses METHOD N  N steps on the same words. {"losses": [before each update, of this rank]}
  series METHOD D C  D steps, a barrier, C steps. {"ns": time of the C}
  digest METHOD    {"digest": of all parameters}
"""

import hashlib
import json
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sotto
import sotto.torch as st

MODELS = {"tiny": (64, 2, 512), "25m": (512, 8, 512), "110m": (768, 12, 16000)}  # width, layers, words
LENGTH, RATE, FREEZE_STEP = 32, 3e-4, 4
BUCKET = 1 << 21  # elements that share a scale, and are sent together
# Of steps that are timed: variances that were frozen after so few steps let a longer training diverge.
TIMED_RATE = 1e-8
ZERO_STAGE = 2  # of DeepSpeed, whose engine reduces during backward in stages 1 to 3


class Words(torch.nn.Module):
    """A transformer that predicts the next word."""

    def __init__(self, width, layers, words):
        super().__init__()
        self.embedding = torch.nn.Embedding(words, width)
        layer = torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = torch.nn.Linear(width, words)

    def forward(self, words):
        scores = self.out(self.layers(self.embedding(words[:, :-1])))
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


def deepspeed_engine(model, optimizer, bucket_mb):
    """DeepSpeed's engine around both, which reduces buckets while backward runs."""
    import deepspeed  # it takes seconds

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # collectives of its own, which it would compile
    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.init_distributed("gloo", dist_init_required=False)
    elements = bucket_mb * 2**20 // 4
    zero = {"stage": ZERO_STAGE, "overlap_comm": True, "reduce_bucket_size": elements, "allgather_bucket_size": elements}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "zero_optimization": zero,
              "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


class Trainee:
    """A model and its optimizer."""

    def __init__(self, method, sizes, bucket_mb):
        torch.manual_seed(1)
        self.words = sizes[2]
        self.model = Words(*sizes)
        params = self.model.parameters()
        self.engine = None
        if method in ("ddp", "deepspeed", "alone"):
            self.optimizer = torch.optim.AdamW(params, lr=RATE, fused=True)
            if method == "ddp":
                self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
            elif method == "deepspeed":
                self.engine = deepspeed_engine(self.model, self.optimizer, bucket_mb)
        elif method.startswith("fp32"):
            self.optimizer = st.AdamW(params, lr=RATE, weight_decay=0.01)
        else:
            # After so few steps some variances are nearly 0: eps bounds what these elements are moved by.
            self.optimizer = st.OnebitAdam(params, lr=RATE, eps=1e-4, weight_decay=0.01, freeze_step=FREEZE_STEP,
                                           sotto={"granularity": "bucket", "bucket_elements": BUCKET})
        self.overlap = None
        if method.endswith("_overlap"):
            # Buckets of 1 bit are those that share a scale.
            buckets = {"bucket_mb": bucket_mb} if method.startswith("fp32") else {}
            self.overlap = st.Overlap(self.model, optimizer=self.optimizer, **buckets)

    def batch(self, number):
        """Words that count upwards from a random start: the same for all."""
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        start = torch.randint(0, self.words, (1, 1), generator=generator)
        return (start + torch.arange(LENGTH + 1)) % self.words

    def step(self, number=0):
        words = self.batch(number)
        if self.engine is not None:
            loss = self.engine(words)
            self.engine.backward(loss)
            with torch.no_grad():  # gloo gathers into views of one tensor
                self.engine.step()
            return loss
        self.optimizer.zero_grad()
        loss = self.model(words)
        loss.backward()
        self.optimizer.step()
        return loss


class Rank:
    def __init__(self):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method="env://")
        sotto.init_process_group()  # of the same ranks
        self.trainees = {}

    def model(self, name, bucket_mb, *methods):
        self.trainees = {method: Trainee(method, MODELS[name], int(bucket_mb)) for method in methods}
        return {"parameters": sum(p.numel() for p in self.trainees[methods[0]].model.parameters())}

    def losses(self, method, count):
        return {"losses": [self.trainees[method].step().item() for _ in range(int(count))]}

    def series(self, method, dropped, counted):
        trainee = self.trainees[method]
        for group in trainee.optimizer.param_groups:
            group["lr"] = TIMED_RATE
        for number in range(int(dropped)):
            trainee.step(number)
        dist.barrier()
        start = time.perf_counter_ns()
        for number in range(int(counted)):
            trainee.step(number)
        return {"ns": time.perf_counter_ns() - start}

    def digest(self, method):
        digest = hashlib.blake2b(digest_size=8)
        for p in self.trainees[method].model.parameters():
            digest.update(p.detach().numpy().tobytes())
        return {"digest": digest.hexdigest()}

    def obey(self, line):
        command, *words = line.split()
        if command not in ("model", "losses", "series", "digest"):
            raise ValueError(f"a command that this rank does not know: {line}")
        return getattr(self, command)(*words)


def main():
    control = socket.socket(socket.AF_UNIX)
    control.connect(sys.argv[1])

    def write(reply):
        control.sendall(json.dumps(reply).encode() + b"\n")

    try:
        rank = Rank()
        write({"rank": dist.get_rank(), "pid": os.getpid(), "version": sotto.library_version()})
        for line in control.makefile("r", encoding="utf-8"):
            write(rank.obey(line.strip()))
    except Exception as error:  # whatever it is, it is the answer
        write({"error": f"{type(error).__name__}: {error}"})
        raise
    for trainee in rank.trainees.values():
        if trainee.overlap is not None:
            trainee.overlap.close()
        if isinstance(trainee.optimizer, st.SottoOptimizer):
            trainee.optimizer.close()
    sotto.default_comm().close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
