#!/usr/bin/env python3
"""The variants of train_bert.py in turn, each rank behind a slow link: a table and a report.

Every rank has a network namespace of its own (integration/netns). Each run has the same text,
batches, start and number of steps; the schedules of the configurations are scaled to --steps. What
is written into --out: table.md, report.html, and of each run its log (NAME.jsonl), summary
(NAME.summary.json) and configuration (NAME.json).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HAS_TORCH = importlib.util.find_spec("torch") is not None
# Behind the others: the folder integration has a folder torch, which is not the library.
sys.path += [str(ROOT / "integration/netns"), str(ROOT / "integration")]

import lab as labs  # noqa: E402

try:
    from report import config, several
    from report.logs import ReportError, read_run
except ModuleNotFoundError as missing:
    sys.exit(
        f"compare: {sys.executable} has no {missing.name}: start this with a Python that has it"
    )

ABOUT = (
    "Clock: rank 0's monotonic clock, started at a barrier before the first step, stopped between "
    "barriers during evaluations.",
    "Held-out loss: over all held-out data, once at the end. It differs by a few percent from seed "
    "to seed: one seed is an example, not a proof.",
    "Payload: of Sotto counted at the transport; of gloo by the sizes of what is given to its "
    "all-reduce, 2 (W - 1) / W of them. On its interface: what the host's network interface sent "
    "during steps, headers and acknowledgements included, before packets are cut to their size on "
    "the link.",
    "The ranks share this machine's cores, so compute is slower than on a machine of their own.",
)


class Variant(NamedTuple):
    """One run of the comparison."""

    title: str
    variant: str  # of train_bert.py
    configuration: str  # in integration/configs


VARIANTS = {
    "lamb-gloo": Variant("LAMB, gloo DDP", "ddp", "lamb"),
    "lamb-sotto": Variant("LAMB, Sotto", "sotto", "lamb"),
    "onebit-lamb": Variant("1-bit LAMB, Sotto", "sotto", "onebit_lamb"),
    "powersgd": Variant("LAMB, DDP with PowerSGD", "ddp-powersgd", "lamb"),
    "onebit-hook": Variant("LAMB, DDP with Sotto's 1-bit hook", "ddp-onebit", "lamb"),
}


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def rate(text: str) -> str:
    """A rate as lab.sh takes it."""
    try:
        labs.bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def names(text: str) -> list[str]:
    """Variants, the first of which is what the others are compared with."""
    chosen = text.split(",")
    wrong = [name for name in chosen if name not in VARIANTS]
    if wrong or len(set(chosen)) != len(chosen):
        raise argparse.ArgumentTypeError(
            f"'{text}': allowed are {','.join(VARIANTS)}, each at most once"
        )
    return chosen


def parse(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="compare.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Behind -- come options for every train_bert.py: -- --seed 2 --powersgd-rank 2",
    )
    add = parser.add_argument
    add("--steps", type=positive, default=3600, help="optimizer steps of each run (3600)")
    add(
        "--rate", type=rate, default="100mbit", help="of every link: 100mbit, 1gbit, none (100mbit)"
    )
    add("--ranks", type=positive, default=4, help="(4)")
    add("--build", type=Path, default=ROOT / "build/dev", help="folder of a build (build/dev)")
    add("--out", type=Path, default=Path("torch-out"), help="where the results go (./torch-out)")
    add("--variants", type=names, default=list(VARIANTS), metavar="A,B", help="which, in this "
        "order; the others are compared with the first (" + ",".join(VARIANTS) + ")")  # fmt: skip
    add("train_options", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def network(options: argparse.Namespace) -> labs.Lab | labs.Loopback:
    """Hosts with links of the rate. gloo knows no limit of its own, so that without hosts only runs
    without a limit can be compared."""
    how, reason = labs.enter()
    if how:
        return labs.Lab(options.ranks, options.rate, options.build / "bin", prefix="sotto-torch")
    if options.rate == "none":
        return labs.Loopback(options.rate)
    raise labs.LabError(
        f"--rate {options.rate} needs network namespaces, which are not possible here: {reason}"
    )


def train(
    name: str, number: int, options: argparse.Namespace, lab: labs.Lab | labs.Loopback
) -> None:
    """One run. Errors: subprocess.CalledProcessError."""
    variant, out = VARIANTS[name], options.out
    file = out / f"{name}.json"
    content = config.read_config(ROOT / f"integration/configs/{variant.configuration}.json")
    scaled = config.scale_config(content, options.steps)
    file.write_text(json.dumps(scaled, indent=2) + "\n", encoding="utf-8")
    launch = [str(options.build / "bin/sotto-run"), "-n", str(options.ranks)]
    program = [sys.executable, "-B", str(HERE / "train_bert.py"), "--deepspeed_config", str(file)]
    program += ["--variant", variant.variant, "--name", name, "--steps", str(options.steps)]
    program += [
        "--log-file",
        str(out / f"{name}.jsonl"),
        "--summary",
        str(out / f"{name}.summary.json"),
    ]
    environment = {**lab.environment, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["SOTTO_LIBRARY"] = str(options.build / "lib/libsotto.so")
    environment["GLOO_SOCKET_IFNAME"] = lab.interface
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hosts of the lab have no names
    if isinstance(lab, labs.Lab):
        program += ["--interface", lab.interface]
    command = [*launch, *lab.launch_words(29400 + number), "--", *program, *options.train_options]
    print(f"compare: {name}: {variant.title}", flush=True)
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL) as run:
        try:
            code = run.wait()
        except BaseException:
            run.terminate()  # sotto-run ends its ranks
            raise
    if code:
        raise subprocess.CalledProcessError(code, name)


def finish(options: argparse.Namespace, description: str, command: str) -> int:
    """table.md, report.html, and the exit code."""
    out = options.out
    runs = [
        read_run(VARIANTS[name].title, out / f"{name}.jsonl", out / f"{name}.summary.json")
        for name in options.variants
    ]
    table = several.markdown(runs)
    (out / "table.md").write_text(table, encoding="utf-8")
    problems = several.write(
        out / "report.html",
        runs,
        title="A language model on a slow network, in PyTorch",
        about=ABOUT,
        network=description,
        command=command,
        configs=[(VARIANTS[name].title, out / f"{name}.json") for name in options.variants],
        root=ROOT,
    )
    print(f"\n{table}\nReport: {out / 'report.html'}")
    for problem in problems:
        print(f"CHECK FAILED: {problem}")
    return 3 if problems else 0


def main() -> int:
    """Exit codes: 1 something did not work, 3 a check of the figures failed."""
    options = parse(sys.argv[1:])
    command = f"integration/torch/compare.py {shlex.join(sys.argv[1:])}"
    options.build, options.out = options.build.resolve(), options.out.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    lab = None
    try:
        if not (options.build / "bin/sotto-run").is_file():
            raise OSError(f"--build: there is no bin/sotto-run in {options.build}; build it first")
        if not HAS_TORCH:
            raise OSError(f"{sys.executable} has no torch: start this with a Python that has it")
        lab = network(options)
        options.out.mkdir(parents=True, exist_ok=True)
        for number, name in enumerate(options.variants):
            train(name, number, options, lab)
        return finish(options, lab.description, command)
    except subprocess.CalledProcessError as error:
        print(f"compare: run {error.cmd} ended with exit code {error.returncode}; the message of "
              "the rank that failed first is above", file=sys.stderr)  # fmt: skip
    except (labs.LabError, ReportError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("compare: interrupted", file=sys.stderr)
    finally:
        if lab is not None:
            lab.close()
    return 1


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    sys.exit(main())
