#!/usr/bin/env python3
"""A rank that trains as PyTorch programs do, over TCP: step(), zero_grad(set_to_none=False), loss.item().

Whatever may wait for the device with the context's lock comes right behind a step: copies to pageable memory, new streams, pinned
memory, and kernels that are launched for the first time, a few in every step. Ranks may share a device. Started by sotto-run.
The time limit prints where each thread of Python was.
"""
import argparse
import faulthandler
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "bindings/python/src")]

import torch  # noqa: E402

import sotto  # noqa: E402
import sotto.torch  # noqa: E402

STEPS = 40
OPTIMIZERS = (("AdamW", {}), ("OnebitAdam", {"freeze_step": STEPS // 2}))
# Kernels that nothing else here launches.
FIRST_LAUNCHES = (
    torch.sort, torch.amax, torch.argmin, torch.var, torch.tril, torch.erfinv, torch.lgamma, torch.digamma, torch.sinh, torch.cosh,
    torch.atan, torch.expm1, torch.log1p, torch.rsqrt, torch.trunc, torch.frac, lambda values: torch.flip(values, (0,)),
    lambda values: torch.cumsum(values, 0), lambda values: torch.cumprod(values, 0), lambda values: torch.logsumexp(values, 0))


def launch_first(number, values):
    """A kernel that has not been launched yet, a new stream and new pinned memory."""
    FIRST_LAUNCHES[number % len(FIRST_LAUNCHES)](values)
    if values.is_cuda:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.ones(8, device=values.device)
        torch.empty(1 << (number % 20), pin_memory=True)


def batch(step, rank, device):
    """Inputs, and what a linear function makes of them."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * step + rank)).to(device)
    return x, x.sum(1, keepdim=True)


def train(kind, options, device, comm):
    """Losses and seconds."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1)).to(device)
    sotto.torch.broadcast_parameters(model)
    optimizer = getattr(sotto.torch, kind)(model.parameters(), lr=3e-3, **options)
    losses, began = [], time.monotonic()
    for step in range(STEPS):
        x, y = batch(step, comm.rank, device)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        launch_first(step, x)  # before anything waits for the step
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    sotto.torch.check_parameters(model)
    optimizer.close()
    return losses, time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to see that everything runs")
    parser.add_argument("--seconds", type=float, default=60, help="time limit")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.seconds, exit=True)
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["SOTTO_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    with sotto.init_process_group(transport="tcp", timeout=args.seconds) as comm:
        for kind, options in OPTIMIZERS:
            losses, seconds = train(kind, options, device, comm)
            print(f"{kind} on {device}: {STEPS} steps in {seconds:.1f} s, loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)
            if not losses[-1] < 0.8 * losses[0]:
                print("the loss has not fallen")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
