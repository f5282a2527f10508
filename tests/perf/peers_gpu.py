#!/usr/bin/env python3
"""Rows 29 and 30 next to other libraries, on a CUDA device.

gpu_codec: what one rank of four computes in a 1-bit all-reduce, against the published list of tensor operations written in torch
(compressed all-reduce of 1-bit Adam, arXiv:2102.02888, figure 3, as DeepSpeed has it; messages left out on both sides). Times
are the device's.
gpu_optim: AdamW against torch's fused one, apex's and Transformer Engine's FusedAdam, for one tensor and for 1000. Times are the
host's, from the call to the end of the work on the device. The target is for the fastest of them.

Ours and theirs take turns, a pair to warm up and then --pairs; what counts is the median of the ratios of pairs, and their
interquartile range. What is not there is skipped, with the reason; without torch or a device everything is (exit code 77).
"""
import argparse
import contextlib
import importlib
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent / "net")]

from measure import spread  # noqa: E402
from output import rows_table  # noqa: E402
from rows import Row  # noqa: E402

SMALL_ELEMENTS, SMALL_TENSORS = 10_000_000, 1000  # as sotto-perf-gpu has them
WORLD = 4
SKIPPED = 77
# What sotto-perf-gpu calls it: (row, in words, target).
CASES = {"codec": (29, "encode, serve, decode", 8), "large_step": (30, "one tensor", 1.02), "small_step": (30, "1000 tensors", 1.0)}


class OursFailed(Exception):
    """No figures can come any more."""


class Ours:
    """sotto-perf-gpu, which does something once when it is asked to."""

    def __init__(self, program, case, n):
        self._process = subprocess.Popen([program, "--n", str(n), "--turns", case], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)
        self._expect("ready")

    def _expect(self, word=None):
        answer = self._process.stdout.readline().strip()
        if not answer or word not in (None, answer):
            self.close()
            raise OursFailed(f"sotto-perf-gpu ended or was wrong: {answer!r}, exit code {self._process.returncode}")
        return answer

    def __call__(self):
        with contextlib.suppress(BrokenPipeError):  # seen by what does not come
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return float(self._expect())

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)


class Torch:
    """A device of torch and its clocks. On the processor, for a look at whether everything runs, there is the host's alone."""

    def __init__(self, name):
        import torch
        self.torch, self.name = torch, name
        self.device = torch.device("cuda", 0) if name == "cuda" else torch.device("cpu")
        self.text = torch.cuda.get_device_name(self.device) if name == "cuda" else "torch on the processor: the ratios mean nothing"

    def host_ms(self, work):
        wait = self.torch.cuda.synchronize if self.name == "cuda" else lambda: None
        wait()
        begin = time.perf_counter()
        work()
        wait()
        return 1e3 * (time.perf_counter() - begin)

    def device_ms(self, work):
        if self.name != "cuda":
            return self.host_ms(work)
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def forget(self):
        if self.name == "cuda":
            self.torch.cuda.empty_cache()


def sizes_of(n, count):
    """sizes_of of tests/perf/gpu/gpu_optim.cc: from one element to twice the average."""
    sizes, left = [], n
    for t in range(count - 1):
        sizes.append(min(left - (count - 1 - t), 1 + t * 7919 % (2 * n // count)))
        left -= sizes[-1]
    return [*sizes, left]


def imported(module):
    """The module, or why there is none: a broken installation fails in many ways."""
    try:
        return importlib.import_module(module), ""
    except Exception as error:  # noqa: BLE001
        return None, f"{type(error).__name__}: {error}"


def packing(torch, device):
    """Bits of a bool tensor in bytes, most significant first, and back: cupy's where it is, as DeepSpeed does it."""
    cupy = imported("cupy")[0] if device.type == "cuda" else None
    if cupy is None:
        weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=device)
        return (lambda bits: (bits.view(-1, 8).to(torch.uint8) * weights).sum(1, dtype=torch.uint8),
                lambda packed: ((packed.unsqueeze(1) & weights) != 0).view(-1), "torch")
    return (lambda bits: torch.as_tensor(cupy.packbits(cupy.asarray(bits))),
            lambda packed: torch.as_tensor(cupy.unpackbits(cupy.asarray(packed))), "cupy")


class OpList:
    """One rank's part of the compressed all-reduce, operation by operation, each over the whole tensor. The other ranks'
    messages are its own: the chunks that it would have sent them, and its own result for those of the other servers."""

    def __init__(self, torch, n, device):
        self._torch = torch
        self._pack, self._unpack, _ = packing(torch, device)
        n -= n % (8 * WORLD)
        self._data = torch.randn(n, device=device)
        self._worker, self._server = torch.zeros(n, device=device), torch.zeros(n // WORLD, device=device)

    def _compress(self, values, residual):
        values.add_(residual)
        scale = self._torch.linalg.vector_norm(values) / math.sqrt(values.numel())
        residual.copy_(values - scale * values.sign().add_(1).bool().float().add_(-0.5).mul_(2.0))
        return self._pack(values.sign().add_(1).bool()), scale

    def _values(self, packed, scales):
        """Of one message per rank."""
        return self._unpack(packed).float().add_(-0.5).mul_(2.0).view(WORLD, -1).mul_(scales.view(-1, 1) / scales.numel())

    def __call__(self):
        bits, scale = self._compress(self._data, self._worker)
        served = self._values(bits, scale.repeat(WORLD)).sum(0)
        bits, scale = self._compress(served, self._server)
        self._data.copy_(self._values(bits.repeat(WORLD), scale).view(-1))


def fused_optimizers():
    """Name, constructor or None, reason."""
    for name, module, attribute, options in (
            ("torch AdamW, fused", "torch.optim", "AdamW", {"fused": True}),
            ("apex FusedAdam", "apex.optimizers", "FusedAdam", {}),
            ("TE FusedAdam", "transformer_engine.pytorch.optimizers", "FusedAdam", {})):
        found, reason = imported(module)
        kind = getattr(found, attribute, None)
        if kind is None:
            yield name, None, reason or f"{module} has no {attribute}"
        else:
            yield name, lambda params, kind=kind, options=options: kind(params, lr=1e-4, **options), ""


def optimizer_step(torch, make, sizes, device):
    params = [torch.nn.Parameter(torch.randn(size, device=device)) for size in sizes]
    for p in params:
        p.grad = torch.randn_like(p)
    return make(params).step


def peers(case, on, n):
    """{name: function that makes the work}."""
    if case == "codec":
        return {f"op list ({packing(on.torch, on.device)[2]} packs)": lambda: OpList(on.torch, n, on.device)}
    sizes = [n] if case == "large_step" else sizes_of(min(n, SMALL_ELEMENTS), SMALL_TENSORS)
    found = {}
    for name, make, reason in fused_optimizers():
        if make is None:
            print(f"{CASES[case][1]}: {name}: skipped, {reason}")
        else:
            found[name] = lambda make=make: optimizer_step(on.torch, make, sizes, on.device)
    return found


def in_turn(ours, theirs, pairs):
    """Milliseconds of both, pair by pair."""
    times = [(ours(), theirs()) for _ in range(pairs + 1)][1:]
    return [list(side) for side in zip(*times)]


def compare(case, on, args):
    """{peer: (our times, its times)}, one peer at a time, since all together would not fit a device."""
    figures = {}
    clock = on.device_ms if case == "codec" else on.host_ms
    ours = Ours(args.sotto_perf_gpu, case, args.n)
    try:
        for name, make in peers(case, on, args.n).items():
            try:
                work = make()
                figures[name] = in_turn(ours, lambda work=work: clock(work), args.pairs)
            except OursFailed:
                raise
            except Exception as error:  # noqa: BLE001  # theirs, of whatever kind
                print(f"{CASES[case][1]}: {name}: skipped, {type(error).__name__}: {error}")
            work = None
            on.forget()
    finally:
        ours.close()
    return figures


def rows_of(case, figures):
    """A row for each peer; of optimizers, the target is for the one that is fastest next to ours."""
    row, words, target = CASES[case]
    rows = {}
    for name, (ours, theirs) in figures.items():
        if case == "codec":
            ratios, what = [t / o for o, t in zip(ours, theirs)], f"{words}: {name} / ours"
        else:
            ratios, what = [o / t for o, t in zip(ours, theirs)], f"{words}: ours / {name}"
        rows[name] = Row(row, what, statistics.median(ratios), spread(ratios), less_is_better=case != "codec")
    if rows:
        max(rows.values(), key=lambda r: r.ratio if r.less_is_better else -r.ratio).target = target
    return rows


def json_line(row, name, case, times, on, args):
    ours, theirs = times
    return json.dumps({
        "benchmark": "gpu_peers", "row": row.row, "case": CASES[case][1], "peer": name, "n": args.n, "device": on.text,
        "clock": "device" if case == "codec" and on.name == "cuda" else "host", "pairs": len(ours),
        "ours_ms_p50": statistics.median(ours), "theirs_ms_p50": statistics.median(theirs), "what": row.what,
        "ratio": row.ratio, "ratio_iqr": row.iqr, "target": row.target, "verdict": row.verdict})


def report(measured, on, args):
    all_rows, lines = [], []
    for case, figures in measured.items():
        for name, row in rows_of(case, figures).items():
            all_rows.append(row)
            lines.append(json_line(row, name, case, figures[name], on, args))
            ours, theirs = map(statistics.median, figures[name])
            print(f"{CASES[case][1]:22} {name:24} {ours:10.3f} ms ours {theirs:10.3f} ms theirs")
    print(f"\n{on.text}, n = {args.n}, median of {args.pairs} pairs\n\n{rows_table(all_rows)}", end="")
    if args.json:
        with open(args.json, "a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sotto-perf-gpu", required=True, help="the program sotto-perf-gpu")
    parser.add_argument("--n", type=int, default=340_000_000, help="elements")
    parser.add_argument("--pairs", type=int, default=21, help="timed pairs, at least 7")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="where torch works; cpu: only to see that everything runs")
    parser.add_argument("--json", help="append one JSON line per comparison to this file")
    args = parser.parse_args()
    if args.pairs < 7:
        parser.error("--pairs has to be at least 7")
    torch, reason = imported("torch")
    if torch is None or args.device == "cuda" and not torch.cuda.is_available():
        print(f"SKIPPED: {reason or 'torch sees no CUDA device'}: nothing is compared with other libraries")
        return SKIPPED
    on = Torch(args.device)
    report({case: compare(case, on, args) for case in CASES}, on, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
