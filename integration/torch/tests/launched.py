"""Runs of train_bert.py for tests: a small model, two ranks, real processes."""

import json
import os
import subprocess
import time
from pathlib import Path

import warm
from ranks import ROOT, sotto_run

import sotto

TRAINER = ROOT / "integration/torch/train_bert.py"
IN_TURN = TRAINER.with_name("tests") / "in_turn.py"
CONFIGS = ROOT / "integration/configs"
SMALL = ["--width", "32", "--layers", "2", "--heads", "2", "--mlp", "64", "--eval-sequences", "32"]
VARIANTS = {  # of the comparison: variant and configuration
    "lamb-gloo": ("ddp", "lamb"),
    "lamb-sotto": ("sotto", "lamb"),
    "onebit-lamb": ("sotto", "onebit_lamb"),
    "powersgd": ("ddp-powersgd", "lamb"),
    "onebit-hook": ("ddp-onebit", "lamb"),
}
LIMIT_S = 600


def write_text(folder):
    """2.9 MB of text of its own: tests do not depend on what the machine has."""
    path = folder / "text"
    path.write_text("".join(f"{n * n} of {n % 97}\n" for n in range(180_000)), encoding="utf-8")
    return path


def write_config(folder, name, **changes):
    """A configuration of integration/configs on a schedule of 20 steps, frozen after 4."""
    config = sotto.config_resolve(CONFIGS / f"{name}.json")
    config["scheduler"]["params"].update(warmup_num_steps=3, total_num_steps=200)
    if "freeze_step" in config["optimizer"]["params"]:
        config["optimizer"]["params"]["freeze_step"] = 4
    config.update(changes)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def environment():
    return {
        **os.environ,
        "SOTTO_CPU_THREADS": "1",
        "SOTTO_TIMEOUT_US": "100000000",
        "OMP_NUM_THREADS": "1",
        "PYTHON_EXEC": warm.python("torch"),  # of torchrun's ranks
    }


def command(*words, ranks=2, program=None, launcher=()):
    """program: train_bert.py. launcher: sotto-run."""
    program = program or (warm.python("torch"), "-B", TRAINER)
    launcher = launcher or (sotto_run(), "-n", str(ranks), "--timeout", str(LIMIT_S), "--")
    return [str(word) for word in (*launcher, *program, *words)]


def train(*words, **more):
    """A run to its end, with its output."""
    return subprocess.run(
        command(*words, **more),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S + 30,
        check=False,
    )


def train_well(*words, **more):
    run = train(*words, **more)
    assert run.returncode == 0, f"exit code {run.returncode}\n{run.stdout}{run.stderr}"
    return run.stdout


def train_in_turn(*runs):
    """Runs on two ranks, in the same processes: importing PyTorch takes seconds."""
    words = json.dumps([[str(word) for word in run] for run in runs])
    train_well(words, program=(warm.python("torch"), "-B", IN_TURN))


def read_log(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def read_json(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def processes_with(word):
    """Processes that have this word in their command line, this one aside."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            state = (folder / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if word.encode() in words and state not in "ZX" and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def wait_until(condition, what, limit_s=LIMIT_S):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not in {limit_s} s"
        time.sleep(0.02)
