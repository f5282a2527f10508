#!/usr/bin/env python3
"""sotto bench python_step: what Python costs in a step of an optimizer over many small tensors, next to torch's fused AdamW.

64 elements per tensor, so that arithmetic hardly counts, and one rank, so that nothing is sent, or as many as --ranks says. The ways
of the same step take turns:

  library           sotto_optim_step, sotto_op_wait and sotto_op_release by themselves, through ctypes
  in place          sotto.torch.AdamW.step(), gradients where they were at the step before
  in place, before  the same of other bindings: --before FOLDER, the bindings/python/src of another checkout
  new gradients     the same with a gradient tensor of its own for every step, as zero_grad() makes them
  torch, fused      torch.optim.AdamW(fused=True).step()

The overhead is the difference to the library's own time. Before, 5 steps of ours and of torch's on the same gradients have to
give the same parameters to 1e-5; if not, the exit code is 1. Needs torch (integration/setup.sh bench).
"""

import argparse
import contextlib
import ctypes as c
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE / "net"), str(ROOT / "integration/netns"), str(ROOT / "bindings/python/src")]

import command_line  # noqa: E402


def parse(arguments):
    parser = argparse.ArgumentParser(prog="sotto bench python_step", description=__doc__.split(": ", 1)[1],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=command_line.at_least(1), default=400, help="(default: 400)")
    parser.add_argument("--elements", type=command_line.at_least(1), default=64, help="of each tensor (default: 64)")
    parser.add_argument("--pairs", type=command_line.at_least(1), default=15, help="turns (default: 15)")
    parser.add_argument("--steps", type=command_line.at_least(1), default=50, help="of a turn (default: 50)")
    parser.add_argument("--ranks", type=command_line.at_least(1), default=1, help="processes, each with a thread (default: 1)")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="bindings to compare with: bindings/python/src of a checkout")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a JSON line")
    parser.add_argument("--sotto-perf", required=True, help=argparse.SUPPRESS)  # sotto-perf passes it
    options = parser.parse_args(arguments)
    if options.before and not (options.before / "sotto/__init__.py").is_file():
        parser.error(f"--before: there is no package sotto in {options.before}")
    command_line.check_lines_file(parser, options.json)
    return options


def with_torch(arguments):
    """Starts again in a Python that has torch. Errors: sides.Missing."""
    try:
        import torch  # noqa: F401
    except ImportError:
        import sides

        python = sides.python_with_torch()
        os.execv(python, [python, "-B", str(HERE / "python_step.py"), *arguments])


def package_at(folder, name):
    """The package sotto of a folder under a name of its own, beside ours."""
    root = folder / "sotto"
    spec = importlib.util.spec_from_file_location(name, root / "__init__.py", submodule_search_locations=[str(root)])
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    importlib.import_module(f"{name}.torch")
    return sys.modules[name]


class Ours:
    """AdamW of a package's sotto.torch, over tensors of its own."""

    def __init__(self, package, comm, start, gradients):
        import torch

        self.params = [torch.nn.Parameter(p.clone()) for p in start]
        self.sets = [[g.clone() for g in gradients] for _ in range(2)]
        self.give(0)
        self.optimizer = package.torch.AdamW(self.params, lr=1e-3, weight_decay=0.01, comm=comm)
        self.steps = 0

    def give(self, which):
        for p, g in zip(self.params, self.sets[which]):
            p.grad = g

    def in_place(self):
        self.optimizer.step()

    def new_gradients(self):
        self.steps += 1
        begin = time.perf_counter_ns()
        self.give(self.steps % 2)  # the loop's own time is not the optimizer's
        spent = time.perf_counter_ns() - begin
        self.optimizer.step()
        return spent

    def library(self):
        """A function that makes one step with as little Python as there can be."""
        self.optimizer.step()
        plain = self.optimizer._optim
        functions, handle, op = plain._lib.functions, plain._handle, c.c_void_p()
        place = c.byref(op)

        def step():
            functions.sotto_optim_step(handle, None, place)
            status = functions.sotto_op_wait(op, -1)
            functions.sotto_op_release(op)
            assert status == 0

        return step


class Theirs:
    """torch's own."""

    def __init__(self, start, gradients):
        import torch

        self.params = [torch.nn.Parameter(p.clone()) for p in start]
        for p, g in zip(self.params, gradients):
            p.grad = g.clone()
        self.step = torch.optim.AdamW(self.params, lr=1e-3, weight_decay=0.01, fused=True).step


def microseconds(step, steps):
    """Of one call, without what the call says it has spent on something else."""
    begin, spent = time.perf_counter_ns(), 0
    for _ in range(steps):
        spent += step() or 0
    return (time.perf_counter_ns() - begin - spent) / steps / 1e3


def comm_like(package, comm, stack):
    """A comm of another package of the same ranks."""
    mine = stack.enter_context(package.UniqueId()) if comm.rank == 0 else None
    word = bytearray(bytes(mine) if mine else 128)
    comm.broadcast(word, root=0).wait()
    return stack.enter_context(package.create_comm(rank=comm.rank, world_size=comm.size, cpu_threads=1, unique_id=mine or bytes(word)))


def check(ours, theirs):
    for _ in range(5):
        ours.in_place()
        theirs.step()
    worst = max((p - q).abs().max().item() for p, q in zip(ours.params, theirs.params))
    return None if worst <= 1e-5 else f"parameters differ by {worst} after 5 steps"


def measure_all(options):
    """Text of what was wrong, and microseconds of every turn by name."""
    import torch

    import sotto.torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    start, gradients = ([torch.randn(options.elements, generator=generator) for _ in range(options.tensors)] for _ in range(2))
    with contextlib.ExitStack() as stack:
        comm = stack.enter_context(sotto.create_comm(world_size=options.ranks, cpu_threads=1))
        ours, theirs = Ours(sotto, comm, start, gradients), Theirs(start, gradients)
        wrong = check(ours, theirs)
        ways = {"library": ours.library(), "in place": ours.in_place}
        if options.before:
            package = package_at(options.before.resolve(), "before")
            before = Ours(package, comm_like(package, comm, stack), start, gradients)
            stack.callback(before.optimizer.close)
            ways["in place, before"] = before.in_place
        ways.update({"new gradients": ours.new_gradients, "torch, fused": theirs.step})
        times = {name: [] for name in ways}
        for turn in range(options.pairs + 1):
            for name, step in ways.items():
                us = microseconds(step, options.steps)
                if turn:  # the first one warms up
                    times[name].append(us)
        ours.optimizer.close()
    return wrong, times


def main(arguments):
    options = parse(arguments)
    import sides
    from measure import spread

    try:
        with_torch(arguments)
    except sides.Missing as reason:
        print(f"skipped: {reason}")
        return 77
    programs = Path(options.sotto_perf).resolve().parent
    os.environ.setdefault("SOTTO_LIBRARY", str(programs.parent / "lib/libsotto.so"))
    if options.ranks > 1 and "SOTTO_RANK" not in os.environ:
        run = str(programs / "sotto-run")
        os.execv(run, [run, "-n", str(options.ranks), "--", sys.executable, "-B", str(HERE / "python_step.py"), *arguments])
    wrong, times = measure_all(options)
    if os.environ.get("SOTTO_RANK", "0") != "0":
        return 1 if wrong else 0
    print(f"{options.ranks} rank{'s'[:options.ranks > 1]}, {options.tensors} tensors of {options.elements} elements, {options.pairs} turns "
          f"of {options.steps} steps, one thread\n")
    print(f"{'':16} {'us':>8} {'IQR %':>6} {'overhead us':>12} {'IQR %':>6} {'/ torch':>8}")
    line = {"benchmark": "python_step", "ranks": options.ranks, "tensors": options.tensors, "elements": options.elements, "pairs": options.pairs}
    for name, all_us in times.items():
        us = statistics.median(all_us)
        text = f"{name:16} {us:8.1f} {100 * spread(all_us):6.1f}"
        line[name] = us
        if name in ("in place", "in place, before", "new gradients"):
            over = [a - b for a, b in zip(all_us, times["library"])]
            shares = [o / t for o, t in zip(over, times["torch, fused"])]
            text += f" {statistics.median(over):12.1f} {100 * spread(over):6.1f} {statistics.median(shares):8.2f}"
            line[f"overhead, {name}"], line[f"overhead / torch, {name}"] = statistics.median(over), statistics.median(shares)
        print(text)
    if options.before:
        line["in place / before"] = statistics.median(a / b for a, b in zip(times["in place"], times["in place, before"]))
        print(f"\nin place / before: {line['in place / before']:.3f}")
    if options.json:
        with open(options.json, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    if wrong:
        print(f"wrong: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
