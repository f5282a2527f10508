#!/usr/bin/env python3
"""sotto bench library: two builds of libsotto.so next to each other, ours and the one that --before names.

Both are loaded into the same ranks, beside each other on loopback, and take turns: series of one operation back to back, as many as
fit into --series milliseconds. A figure of a turn is the time of one operation on this rank; ratios (ours / before) are those of the
same turn, their median and interquartile range are shown, for the clock and for this rank's processor time. Results of both have to be the same bits; if not, the exit code is 1.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BINDINGS = ROOT / "bindings/python/src"
sys.path[:0] = [str(HERE / "net"), str(BINDINGS)]

import command_line  # noqa: E402

LARGE = 2_000_000
STEPS = {"step, Adam": ("Adam", {}), "step, LAMB": ("Lamb", {}), "step, 1-bit Adam": ("OneBitAdam", {"freeze_step": 2}),
         "step, 1-bit LAMB": ("OneBitLamb", {"freeze_step": 2})}


def parse(arguments):
    parser = argparse.ArgumentParser(prog="sotto bench library", description=__doc__.split(": ", 1)[1],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="FILE", required=True, help="the libsotto.so to compare with")
    parser.add_argument("--ranks", type=command_line.at_least(1), default=4, help="processes, each with a thread (default: 4)")
    parser.add_argument("--pairs", type=command_line.at_least(1), default=21, help="turns (default: 21)")
    parser.add_argument("--series", type=command_line.at_least(1), default=200, metavar="MS", help="length of a series (default: 200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a JSON line")
    parser.add_argument("--sotto-perf", required=True, help=argparse.SUPPRESS)  # sotto-perf passes it
    options = parser.parse_args(arguments)
    if not options.before.is_file():
        parser.error(f"--before: there is no file {options.before}")
    command_line.check_lines_file(parser, options.json)
    return options


def package(name, library):
    """The package sotto with a library of its own, under a name of its own."""
    os.environ["SOTTO_LIBRARY"] = str(library)
    root = BINDINGS / "sotto"
    spec = importlib.util.spec_from_file_location(name, root / "__init__.py", submodule_search_locations=[str(root)])
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    importlib.import_module(f"{name}.optim")
    return sys.modules[name]


class Side:
    """The operations that are measured, with one library. run[name]() makes one; result[name] is what it has written."""

    def __init__(self, sotto, comm, stack):
        self.run, self.result = {"barrier": lambda: comm.barrier().wait()}, {}
        random = np.random.default_rng(comm.rank)
        for n in (1, 2048, 262_144, LARGE):
            self.add_all_reduce(f"all-reduce, {n} fp32", comm, random.standard_normal(n, dtype=np.float32))
        for kind in ("onebit", "int8"):
            data = random.standard_normal(LARGE, dtype=np.float32)
            codec = stack.enter_context(comm.codec(kind, data))
            self.add_all_reduce(f"all-reduce, {LARGE} {kind}", comm, data, codec)
        for name, (kind, extra) in STEPS.items():
            p = np.random.default_rng(7).standard_normal(LARGE, dtype=np.float32)
            g = random.standard_normal(LARGE, dtype=np.float32)
            config = {"optimizer": {"type": kind, "params": {"lr": 1e-4, **extra}}}
            optimizer = stack.enter_context(sotto.optim.Optimizer([sotto.optim.Param(p, g, "p")], config, comm=comm))
            for _ in range(4):
                optimizer.step().wait()
            self.run[name], self.result[name] = (lambda o=optimizer: o.step().wait()), p

    def add_all_reduce(self, name, comm, data, codec=None):
        self.run[name], self.result[name] = (lambda: comm.all_reduce(data, op="mean", codec=codec).wait()), data


def series(run, count):
    """Microseconds of the clock and of this process's processor time, per operation."""
    begin, spent = time.perf_counter_ns(), time.process_time_ns()
    for _ in range(count):
        run()
    return np.array([time.perf_counter_ns() - begin, time.process_time_ns() - spent]) / count / 1e3


def measure(sides, comm, options):
    """{name: us, indexed by turn, side (ours, before) and clock (wall, processor)}"""
    times = {}
    for name in sides[0].run:
        one = np.array([max(series(side.run[name], 3)[0] for side in sides)], np.float32)
        comm.all_reduce(one, op="max").wait()
        count = max(1, int(options.series * 1e3 / float(one[0])))
        turns = []
        for turn in range(options.pairs):
            order = (0, 1) if turn % 2 else (1, 0)
            found = [None, None]
            for which in order:
                comm.barrier().wait()
                found[which] = series(sides[which].run[name], count)
            turns.append(found)
        times[name] = np.array(turns)
    return times


def main(arguments):
    options = parse(arguments)
    programs = Path(options.sotto_perf).resolve().parent
    if "SOTTO_RANK" not in os.environ and options.ranks > 1:
        run = str(programs / "sotto-run")
        os.execv(run, [run, "-n", str(options.ranks), "--", sys.executable, "-B", str(HERE / "library.py"), *arguments])
    from measure import spread

    with contextlib.ExitStack() as stack:
        ours = package("ours", programs.parent / "lib/libsotto.so")
        comm = stack.enter_context(ours.create_comm(world_size=options.ranks, cpu_threads=1))
        before = package("before", options.before.resolve())
        mine = stack.enter_context(before.UniqueId()) if comm.rank == 0 else None
        word = bytearray(bytes(mine) if mine else 128)
        comm.broadcast(word, root=0).wait()
        other = stack.enter_context(
            before.create_comm(rank=comm.rank, world_size=comm.size, cpu_threads=1, unique_id=mine or bytes(word)))
        sides = Side(ours, comm, stack), Side(before, other, stack)
        times = measure(sides, comm, options)
        wrong = [name for name, result in sides[0].result.items() if result.tobytes() != sides[1].result[name].tobytes()]
        if comm.rank != 0:
            return 1 if wrong else 0
    print(f"{options.ranks} ranks on loopback, {options.pairs} turns, one thread each\n")
    print(f"{'':28} {'ours us':>10} {'before us':>10} {'ours / before':>14} {'IQR %':>6} {'processor':>10} {'IQR %':>6}")
    line = {"benchmark": "library", "ranks": options.ranks, "pairs": options.pairs, "before": str(options.before)}
    for name, turns in times.items():
        us = np.median(turns[:, :, 0], axis=0)
        (wall, wall_iqr), (cpu, cpu_iqr) = ((statistics.median(r), spread(r)) for r in (turns[:, 0] / turns[:, 1]).T.tolist())
        print(f"{name:28} {us[0]:10.1f} {us[1]:10.1f} {wall:14.3f} {100 * wall_iqr:6.1f} {cpu:10.3f} {100 * cpu_iqr:6.1f}")
        line[name] = {"ours_us": us[0], "before_us": us[1], "ratio": wall, "iqr": wall_iqr, "cpu_ratio": cpu, "cpu_iqr": cpu_iqr}
    for name in wrong:
        print(f"{name}: the results differ")
    if options.json:
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
