#!/usr/bin/env python3
"""sotto bench step_ddp: training steps of one model in PyTorch over links of a given rate, ours next to torch's own and DeepSpeed's."""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(ROOT / "integration/netns")]

import command_line  # noqa: E402
import lab as labs  # noqa: E402
import measure  # noqa: E402
import sides  # noqa: E402

METHODS = ("ddp", "deepspeed", "alone", "fp32", "fp32_overlap", "1bit", "1bit_overlap")
MODELS = ("tiny", "25m", "110m")
SERIES_S, MAX_STEPS = 4.0, 10
# (method, rate in 10^6 bit/s)
TARGETS = {("fp32_overlap", 1000): 1.0, ("1bit", 1000): 10, ("1bit_overlap", 100): 20, ("1bit", 100): 20}
BOUND = 1.10  # of a 1-bit step, in times of what it cannot do without
CLOSE = 2e-3  # of the losses of AdamW here, in torch and in DeepSpeed, relative

EPILOG = """\
Row 20 of the table of targets. Each rank, a process in a network namespace of its own, trains the same transformer on the same
sequences once for each method, in turns: ddp is torch's DistributedDataParallel over gloo with torch's fused AdamW, deepspeed is
DeepSpeed's engine over gloo with the same optimizer, ZeRO stage 2 and overlap_comm (left out, with the reason, where it cannot be
imported; on processors it has no streams, so backward() begins a bucket's reduction and waits for it), fp32 is
sotto.torch.AdamW, 1bit is sotto.torch.OnebitAdam behind its warm-up, with a scale for every 2 Mi elements, both of them adopting
torch's process group; fp32_overlap and 1bit_overlap are the same with sotto.torch.Overlap, so that backward() begins the step. alone is the
model with torch's fused AdamW and no average. A step is forward, backward, average and update of one sequence of 32 tokens per rank.
it / bound is a step next to what none can do without, the longer one of alone and the time of its bytes on the link; target 1.10 at
1 bit. A figure of a turn is one step of a series, on the slowest rank, after a barrier and a step that does not count; a ratio is one of the same turn; median and interquartile range of
all turns are shown, and a target counts as reached if the range is below 10 %. Before that, 6 steps of all on the same words: the losses of
ddp, deepspeed and fp32 have to be equal to 2e-3, those with and without overlap to the bit, all have to fall, and at the end parameters have to
be equal on all ranks, bit by bit; if not, the exit code is 1. --methods takes some of them, the first being what others are compared with.

Memory: about 20 bytes per parameter and rank for ddp and deepspeed, 24 and 28 for ours, 32 for 1bit_overlap: 13 GB for 25m on 4 ranks.
Time: 25m on 4 ranks at 100mbit: 7 minutes, and with deepspeed more, whose steps send 1.5 times the bytes of ddp's. torch has to be installed (integration/setup.sh bench).

Examples:
  sotto bench step_ddp --rate 100mbit
  sotto bench step_ddp --rate 1gbit --model 110m --ranks 2 --json ddp.jsonl
"""


def say(text):
    print(text, flush=True)


@dataclass
class Figure:
    """One of the methods. ms: per turn, of one step on the slowest rank."""

    method: str
    dropped: int = 1
    steps: int = 1
    ms: list = field(default_factory=list)
    losses: list = field(default_factory=list)  # of the steps before the turns
    interface: float = None  # bytes per step, of the rank that sends most


def methods(text):
    names = text.split(",")
    unknown = [name for name in names if name not in METHODS]
    if unknown or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of different ones of {', '.join(METHODS)}")
    return names


def parse(arguments):
    parser = argparse.ArgumentParser(prog="sotto bench step_ddp", description=__doc__.split(": ", 1)[1], epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=labs.a_rate, default="100mbit", help="of every link, both directions (default: 100mbit)")
    parser.add_argument("--ranks", type=command_line.at_least(2), default=4, help="(default: 4)")
    parser.add_argument("--model", choices=MODELS, default="25m", help="(default: 25m)")
    parser.add_argument("--methods", type=methods, default=METHODS, metavar="LIST",
                        help=f"with commas between (default: {','.join(METHODS)})")
    parser.add_argument("--bucket-mb", type=command_line.at_least(1), default=25, metavar="N",
                        help="MiB of gradients that ddp and fp32_overlap send together (default: 25, torch's own)")
    parser.add_argument("--pairs", type=command_line.at_least(1), default=7, help="turns that count (default: 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a JSON line per method")
    parser.add_argument("--sotto-perf", required=True, help=argparse.SUPPRESS)  # sotto-perf passes it
    options = parser.parse_args(arguments)
    command_line.check_lines_file(parser, options.json)
    return options


def enter(arguments):
    how, reason = labs.enter(["-B", str(HERE / "step_ddp.py"), *arguments])
    if not how:
        raise labs.LabError(f"network namespaces are not possible here: {reason}")


def without_deepspeed(python):
    """Why there is none in this Python; None if there is."""
    asked = subprocess.run([python, "-c", "import deepspeed"], capture_output=True, text=True, check=False)
    return None if asked.returncode == 0 else (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]


def present(names, python):
    """The methods that can run; those that cannot are told. Raises Missing where none is left."""
    reason = without_deepspeed(python) if "deepspeed" in names else None
    if reason is None:
        return list(names)
    left = [name for name in names if name != "deepspeed"]
    if not left:
        raise sides.Missing(f"deepspeed cannot be imported by {python}: {reason}")
    say(f"deepspeed is left out, since {python} cannot import it: {reason}")
    return left


def start(lab, ranks, programs, python):
    """All ranks, each with a model for each method."""
    library = os.environ.get("SOTTO_LIBRARY") or str(programs.parent / "lib/libsotto.so")
    common = {**lab.environment, "WORLD_SIZE": str(ranks), "MASTER_ADDR": lab.address(0), "MASTER_PORT": str(sides.free_port()),
              "GLOO_SOCKET_IFNAME": lab.interface, "OMP_NUM_THREADS": "1", "SOTTO_CPU_THREADS": "1", "SOTTO_LIBRARY": library,
              "PYTHONPATH": str(ROOT / "bindings/python/src")}
    side = sides.Side("step_ddp", ranks, [
        ([*lab.inside(r), python, "-B", str(HERE / "ddp_rank.py"), "CONTROL"], {**common, "RANK": str(r)})
        for r in range(ranks)])
    side.start()
    return side


def warm_up(side, model, bucket_mb, figures):
    """6 steps of each; what is wrong with their losses."""
    names = [figure.method for figure in figures]
    parameters = side.tell(f"model {model} {bucket_mb} {' '.join(names)}", 600)[0]["parameters"]
    wrong = []
    for figure in figures:
        replies = side.tell(f"losses {figure.method} 6", 3600)
        figure.losses = [statistics.mean(reply["losses"][i] for reply in replies) for i in range(6)]
        if not figure.losses[-1] < figure.losses[0]:
            wrong.append(f"{figure.method}: the loss went from {figure.losses[0]:.4f} to {figure.losses[-1]:.4f}")
    of = {figure.method: figure.losses for figure in figures}
    for name, where in (("fp32", "here"), ("deepspeed", "in DeepSpeed")):
        theirs, ours = of.get("ddp"), of.get(name)
        if theirs and ours and any(abs(a - b) > CLOSE * abs(a) for a, b in zip(theirs, ours)):
            wrong.append(f"the losses of AdamW differ: {theirs} in torch, {ours} {where}")
    for name in ("fp32", "1bit"):
        overlapped = of.get(name + "_overlap")
        if overlapped and name in of and overlapped != of[name]:
            wrong.append(f"the losses of {name} differ with overlap: {of[name]} without, {overlapped} with it")
    return parameters, wrong


def sent(lab, side):
    return [lab.sent_bytes(pid) for pid in side.pids]


def turn(lab, side, figure):
    """Milliseconds of one step."""
    before = sent(lab, side)
    replies = side.tell(f"series {figure.method} {figure.dropped} {figure.steps}", 3600)
    if before[0] is not None:
        steps = figure.dropped + figure.steps
        figure.interface = max(b - a for a, b in zip(before, sent(lab, side))) / steps
    return max(reply["ns"] for reply in replies) / figure.steps * 1e-6


def compare(side, figures):
    """What is wrong at the end: parameters that differ between ranks."""
    wrong = []
    for figure in figures:
        if figure.method == "alone":
            continue
        digests = {reply["digest"] for reply in side.tell(f"digest {figure.method}", 600)}
        if len(digests) != 1:
            wrong.append(f"{figure.method}: parameters differ between ranks")
    return wrong


def verdict(target, ratio, iqr, at_most=False):
    """at_most: the target is the largest ratio, not the smallest."""
    if target is None:
        return "no target"
    if ratio > target if at_most else ratio < target:
        return "not reached"
    return "reached" if iqr < 0.10 else "not settled: the spread is too large"


def against_bound(figure, figures, bits):
    """Of every turn, its time next to the longer one of the model alone and of its bytes on the link; empty if unknown."""
    alone = next((f for f in figures if f.method == "alone"), None)
    if alone is None or figure is alone or not bits or figure.interface is None:
        return []
    wire_ms = figure.interface * 8e3 / bits
    return [ms / max(compute_ms, wire_ms) for ms, compute_ms in zip(figure.ms, alone.ms)]


def line_of(figure, figures, parameters, options, bits):
    """What is known of a method, as a line of JSON: beside the first one, and beside its bound."""
    ratios = [a / b for a, b in zip(figures[0].ms, figure.ms)]
    ratio, iqr = statistics.median(ratios), measure.spread(ratios)
    sized = options.model != "tiny"
    target = TARGETS.get((figure.method, bits and bits / 1e6)) if sized else None
    bounds = against_bound(figure, figures, bits)
    bound, bound_iqr = (statistics.median(bounds), measure.spread(bounds)) if bounds else (None, None)
    bound_target = BOUND if sized and bounds and figure.method.startswith("1bit") else None
    return {"benchmark": "step_ddp", "row": 20, "method": figure.method, "model": options.model,
            "bucket_mb": options.bucket_mb, "parameters": parameters, "rate": options.rate,
            "ranks": options.ranks, "pairs": options.pairs,
            "steps": figure.steps, "ms_p50": statistics.median(figure.ms), "ms_iqr": measure.spread(figure.ms),
            "interface_bytes": figure.interface, "losses": figure.losses, "ratio": ratio, "ratio_iqr": iqr,
            "target": target, "verdict": verdict(target, ratio, iqr), "bound_ratio": bound, "bound_ratio_iqr": bound_iqr,
            "bound_target": bound_target, "bound_verdict": verdict(bound_target, bound, bound_iqr, at_most=True)}


def row_of(line):
    """The same as a row of the table."""
    target, bound, bound_target = line["target"], line["bound_ratio"], line["bound_target"]
    return (f"{line['method']:12} {line['ms_p50']:10.1f} {100 * line['ms_iqr']:6.1f} "
            f"{line['interface_bytes'] or 0:12.0f} {line['losses'][0]:8.4f} {line['losses'][-1]:8.4f} "
            f"{line['ratio']:9.2f} {100 * line['ratio_iqr']:6.1f}  "
            f"{'-' if target is None else f'>= {target}: ' + line['verdict']:24} "
            + (f"{'-':>10} {'-':>6}  " if bound is None else f"{bound:10.2f} {100 * line['bound_ratio_iqr']:6.1f}  ")
            + ("-" if bound_target is None else f"<= {bound_target}: {line['bound_verdict']}"))


def report(figures, parameters, options, bits):
    """The table, and JSON lines."""
    say(f"\n{'':12} {'ms':>10} {'IQR %':>6} {'interface B':>12} {'loss 1':>8} {'loss 6':>8} "
        f"{figures[0].method + ' / it':>9} {'IQR %':>6}  {'target':24} {'it / bound':>10} {'IQR %':>6}  target")
    lines = [line_of(figure, figures, parameters, options, bits) for figure in figures]
    for line in lines:
        say(row_of(line))
    if options.json:
        with open(options.json, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def run(options):
    """Texts of what was wrong."""
    programs = Path(options.sotto_perf).resolve().parent
    lab = labs.Lab(options.ranks, options.rate, programs)
    try:
        python = sides.python_with_torch()
        figures = [Figure(method) for method in present(options.methods, python)]
        say(f"links of {options.rate}, {options.ranks} ranks on {len(os.sched_getaffinity(0))} cores; {lab.description}")
        side = start(lab, options.ranks, programs, python)
        try:
            parameters, wrong = warm_up(side, options.model, options.bucket_mb, figures)
            for figure in figures:
                one_ms = turn(lab, side, figure)
                figure.steps = min(MAX_STEPS, max(1, round(SERIES_S * 1e3 / one_ms)))
            seconds = sum((f.dropped + f.steps) * turn(lab, side, f) for f in figures) / 1e3
            say(f"{parameters} parameters; {options.pairs} turns take about {measure.duration(options.pairs * seconds)}")
            for _ in range(options.pairs):
                for figure in figures:
                    figure.ms.append(turn(lab, side, figure))
            wrong += compare(side, figures)
        finally:
            side.stop()
    finally:
        lab.close()
    report(figures, parameters, options, lab.bits_per_second)
    return wrong


def main(arguments):
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        enter(arguments)
        wrong = run(options)
    except sides.Missing as reason:
        say(f"skipped: {reason}")
        return 77
    except (labs.LabError, sides.SideError) as error:
        say(f"sotto bench step_ddp: {error}")
        return 2
    for text in wrong:
        say(f"wrong: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
