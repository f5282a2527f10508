#!/usr/bin/env python3
"""Rows 5 and 6 next to other libraries: Adam with float32, bfloat16 and 8-bit state against DeepSpeed's CPUAdam and torch.

One thread, float32 parameters and gradients, milliseconds per step. The programs take turns, several rounds each, and
the medians of all rounds are compared. Libraries that are not there are skipped, with the reason.

DeepSpeed's CPUAdam is compiled from its source distribution (pip download deepspeed --no-deps --no-binary :all:, then
unpacked) with the flags that its own build uses for this processor; torch has to be installed for it.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

from peers_blocks import median_seconds


def sotto(args):
    """Runs sotto-perf and returns {variant: seconds}."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as lines:
        command = [args.sotto_perf, "optim_adam", "optim_adam_low_precision", "--n", str(args.n), "--pairs", str(args.pairs),
                   "--json", lines.name]
        if args.cpu_clock:
            command.append("--cpu-clock")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
        rows = [json.loads(line) for line in lines]
    return {f"sotto, {row['variant']}": row["ours_ms_p50"] / 1e3 for row in rows if "bf16 g" not in row["variant"]}


def cpu_vector_flag():
    flags = pathlib.Path("/proc/cpuinfo").read_text()
    return "-D__AVX512__" if "avx512f" in flags else "-D__AVX256__"


def deepspeed(args):
    """A function that makes one step, or None and the reason."""
    if not args.deepspeed:
        return None, "no sources (--deepspeed)"
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:
        return None, "torch is not installed"
    torch.set_num_threads(1)
    csrc = pathlib.Path(args.deepspeed) / "csrc"
    op = cpp_extension.load(
        "peer_cpu_adam", [str(csrc / "adam" / name) for name in ("cpu_adam.cpp", "cpu_adam_impl.cpp")],
        extra_include_paths=[str(csrc / "includes")],
        extra_cflags=["-O3", "-march=native", "-fopenmp", cpu_vector_flag(), "-D__DISABLE_CUDA__"],
        extra_ldflags=["-fopenmp"])
    op.create_adam(0, 1e-4, 0.9, 0.999, 1e-8, 0.01, True, False)
    p, g = torch.randn(args.n), torch.randn(args.n)
    m, v = torch.zeros(args.n), torch.zeros(args.n)
    steps = [0]

    def step():
        steps[0] += 1
        op.adam_update(0, steps[0], 1e-4, 0.9, 0.999, 1e-8, 0.01, True, p, g, m, v)

    return step, ""


def torch_adamw(args):
    """The same for torch.optim.AdamW, fused."""
    try:
        import torch
    except ImportError:
        return None, "torch is not installed"
    torch.set_num_threads(1)
    p = torch.nn.Parameter(torch.randn(args.n))
    p.grad = torch.randn(args.n)
    return torch.optim.AdamW([p], lr=1e-4, weight_decay=0.01, fused=True).step, ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sotto-perf", required=True, help="the program sotto-perf")
    parser.add_argument("--deepspeed", help="folder of DeepSpeed's unpacked sources")
    parser.add_argument("--n", type=int, default=25_000_000, help="elements")
    parser.add_argument("--pairs", type=int, default=7, help="timed calls per round, at least 7")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every library")
    parser.add_argument("--cpu-clock", action="store_true", help="processor time, for busy machines")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_clock else time.perf_counter
    peers = {}
    for name, prepare in (("DeepSpeed CPUAdam", deepspeed), ("torch AdamW, fused", torch_adamw)):
        step, reason = prepare(args)
        if step is None:
            print(f"{name}: skipped, {reason}")
        else:
            peers[name] = step
    times = {}
    for _ in range(args.rounds):
        for name, seconds in sotto(args).items():
            times.setdefault(name, []).append(seconds)
        for name, step in peers.items():
            times.setdefault(name, []).append(median_seconds(clock, args.pairs, step))
    medians = {name: statistics.median(rounds) for name, rounds in times.items()}
    print(f"{'':24} {'ms':>8} {'least':>8} {'most':>8}" + "".join(f" {name + ' / it':>24}" for name in peers))
    for name, rounds in times.items():
        print(f"{name:24} {1e3 * medians[name]:8.2f} {1e3 * min(rounds):8.2f} {1e3 * max(rounds):8.2f}" +
              "".join(f" {medians[peer] / medians[name]:24.2f}" for peer in peers))


if __name__ == "__main__":
    main()
