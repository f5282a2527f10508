#!/usr/bin/env python3
"""Rows 29 and 30 next to other libraries, on a CUDA device.

gpu_codec: what one rank computes in a 1-bit all-reduce, against the published list of tensor operations written in torch
(compressed all-reduce of 1-bit Adam, arXiv:2102.02888, figure 3, as DeepSpeed has it; messages left out on both sides).
gpu_optim: AdamW against torch's fused one, apex's and Transformer Engine's FusedAdam, for one tensor and for 1000.

The programs take turns, several rounds each, and the medians are compared. What is not there is skipped, with the
reason; without torch or a device everything is.
"""
import argparse
import importlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time

SMALL_ELEMENTS, SMALL_TENSORS = 10_000_000, 1000  # as sotto-perf-gpu has them
CODEC = ("encode", "serve, W=1", "decode")


def sotto(args, n):
    """Runs sotto-perf-gpu and returns {variant: milliseconds}."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as lines:
        subprocess.run([args.sotto_perf_gpu, "--n", str(n), "--pairs", str(args.pairs), "--json", lines.name], check=True,
                       stdout=subprocess.DEVNULL, timeout=1200)
        rows = [json.loads(line) for line in lines]
    times = {row["variant"]: row["ours_ms_p50"] for row in rows}
    return {"codec": sum(times[variant] for variant in CODEC), "one tensor": times["step, large"],
            "1000 tensors": times["step, 1000"]}


def sizes_of(n, count):
    """sizes_of of tests/perf/gpu/gpu_optim.cc: from one element to twice the average."""
    sizes, left = [], n
    for t in range(count - 1):
        sizes.append(min(left - (count - 1 - t), 1 + t * 7919 % (2 * n // count)))
        left -= sizes[-1]
    return [*sizes, left]


def packing(torch, device):
    """Bits of a bool tensor in bytes, most significant first, and back: cupy's where it is, as DeepSpeed does it."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=device)
        return (lambda bits: (bits.view(-1, 8).to(torch.uint8) * weights).sum(1, dtype=torch.uint8),
                lambda packed: ((packed.unsqueeze(1) & weights) != 0).view(-1), "torch")
    return (lambda bits: torch.as_tensor(cupy.packbits(cupy.asarray(bits))),
            lambda packed: torch.as_tensor(cupy.unpackbits(cupy.asarray(packed))), "cupy")


class OpList:
    """One rank's part of the compressed all-reduce, operation by operation, each over the whole tensor."""

    def __init__(self, torch, n, device):
        self._torch = torch
        self._pack, self._unpack, _ = packing(torch, device)
        n -= n % 8
        self._data = torch.randn(n, device=device)
        self._worker, self._server = torch.zeros(n, device=device), torch.zeros(n, device=device)

    def _compress(self, values, residual):
        values.add_(residual)
        scale = self._torch.linalg.vector_norm(values) / math.sqrt(values.numel())
        residual.copy_(values - scale * values.sign().add_(1).bool().float().add_(-0.5).mul_(2.0))
        return self._pack(values.sign().add_(1).bool()), scale

    def _signs(self, packed):
        return self._unpack(packed).float().add_(-0.5).mul_(2.0)

    def __call__(self):
        bits, scale = self._compress(self._data, self._worker)
        served = self._signs(bits).view(1, -1).mul_(scale).sum(0)
        bits, scale = self._compress(served, self._server)
        self._data.copy_(self._signs(bits).mul_(scale))


def fused_optimizers():
    """{name: constructor or reason}."""
    found = {}
    for name, module, attribute, options in (
            ("torch AdamW, fused", "torch.optim", "AdamW", {"fused": True}),
            ("apex FusedAdam", "apex.optimizers", "FusedAdam", {}),
            ("TE FusedAdam", "transformer_engine.pytorch.optimizers", "FusedAdam", {})):
        try:
            kind = getattr(importlib.import_module(module), attribute)
        except (ImportError, OSError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = lambda params, kind=kind, options=options: kind(params, lr=1e-4, **options)
    return found


def optimizer_step(torch, make, sizes, device):
    params = [torch.nn.Parameter(torch.randn(size, device=device)) for size in sizes]
    for p in params:
        p.grad = torch.randn_like(p)
    return make(params).step


def milliseconds(torch, work, pairs):
    """Median; a run ends when the device is done."""
    times = []
    for _ in range(pairs + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[1:])


def peers(torch, args, device):
    """{case: {name: function or reason}}, one at a time, since all together would not fit the device."""
    yield "codec", f"op list ({packing(torch, device)[2]} packs)", lambda: OpList(torch, args.n, device)
    for name, make in fused_optimizers().items():
        for case, sizes in (("one tensor", [args.n]), ("1000 tensors", sizes_of(min(args.n, SMALL_ELEMENTS), SMALL_TENSORS))):
            if isinstance(make, str):
                print(f"{case}: {name}: skipped, {make}")
                continue
            yield case, name, lambda make=make, sizes=sizes: optimizer_step(torch, make, sizes, device)


def report(ours, theirs, device_name, args):
    lines = []
    for (case, name), times in theirs.items():
        mine, other = statistics.median(ours[case]), statistics.median(times)
        print(f"{case:14} {name:24} {mine:10.3f} ms ours {other:10.3f} ms theirs   theirs / ours {other / mine:6.2f}")
        lines.append(json.dumps({"benchmark": "gpu_peers", "case": case, "peer": name, "n": args.n, "device": device_name,
                                 "ours_ms": mine, "theirs_ms": other, "ratio": other / mine}))
    if args.json:
        with open(args.json, "a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sotto-perf-gpu", required=True, help="the program sotto-perf-gpu")
    parser.add_argument("--n", type=int, default=340_000_000, help="elements")
    parser.add_argument("--pairs", type=int, default=21, help="timed calls per round, at least 7")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every library")
    parser.add_argument("--json", help="append one JSON line per comparison to this file")
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("SKIPPED: torch is not installed, so nothing is compared with other libraries")
        return 0
    if not torch.cuda.is_available():
        print("SKIPPED: torch sees no CUDA device, so nothing is compared with other libraries")
        return 0
    device = torch.device("cuda", 0)
    ours, theirs = {}, {}
    for _ in range(args.rounds):
        for case, ms in sotto(args, args.n).items():
            ours.setdefault(case, []).append(ms)
        for case, name, make in peers(torch, args, device):
            work = make()
            theirs.setdefault((case, name), []).append(milliseconds(torch, work, args.pairs))
            del work
            torch.cuda.empty_cache()
    report(ours, theirs, torch.cuda.get_device_name(device), args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
