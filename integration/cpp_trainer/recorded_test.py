#!/usr/bin/python3
"""A trainer that repeats what the C trainer has recorded ends with the C trainer's parameters, bit for bit.

    recorded_test.py SOTTO-RUN C-TRAINER CONFIG TRAINER...

TRAINER... is started with a configuration and the prefix of the record as further words, and prints the hash of its weights.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

RANKS = "4"
SMALL = ("--width", "16", "--layers", "1", "--mlp", "32", "--positions", "16", "--masked", "4",
         "--eval-sequences", "4", "--progress", "off")


def run(*command):
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False)
    return done.returncode, done.stdout


def run_well(*command):
    code, out = run(*command)
    if code != 0:
        sys.exit(f"{' '.join(map(str, command))}\nended with {code}:\n{out}")
    return out


def record(launch, c_trainer, config, folder, steps):
    """The prefix of the record, the C trainer's hash, and the stages of its steps."""
    text, prefix, log, summary = (folder / name for name in ("text", "record", "log", "summary"))
    text.write_text("\n".join(map(str, range(400000))), encoding="ascii")
    run_well(*launch, c_trainer, "--config", config, "--data", text, "--steps", steps, "--record", prefix, "--log", log,
             "--summary", summary, *SMALL)
    stages = set(re.findall(r'"stage": "([a-z ]*)"', log.read_text(encoding="utf-8")))
    return prefix, json.loads(summary.read_text(encoding="utf-8"))["params_hash"], stages


def same_hash(launch, c_trainer, config, trainer, folder, expected_stages):
    prefix, c_hash, stages = record(launch, c_trainer, config, folder, 30)
    if stages != expected_stages:
        sys.exit(f"{config}: the C trainer's stages are {stages}, expected {expected_stages}")
    out = run_well(*launch, *trainer, config, prefix)
    found = re.findall(r"hash of the weights: ([0-9a-f]{16})", out)
    if found != [c_hash]:
        sys.exit(f"{config}: the hash should be {c_hash}:\n{out}")
    return prefix


def damaged(launch, config, trainer, prefix):
    """A rank whose record ends in the middle of a step says so, and the run ends."""
    file = Path(f"{prefix}.rank1")
    file.write_bytes(file.read_bytes()[:-2])
    code, out = run(*launch, *trainer, config, prefix)
    if code == 0 or f"{file} ends too early" not in out:
        sys.exit(f"a record that is cut short ended with {code}:\n{out}")


def main(sotto_run, c_trainer, config, *trainer):
    launch = (sotto_run, "-n", RANKS, "--timeout", "100", "--")
    text = Path(config).read_text(encoding="utf-8")
    early = text.replace('"freeze_step": 720', '"freeze_step": 12')
    if early == text:
        sys.exit(f"{config} has no \"freeze_step\": 720")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        same_hash(launch, c_trainer, config, trainer, folder, {"full precision"})
        compressed = folder / "early.json"
        compressed.write_text(early, encoding="utf-8")
        prefix = same_hash(launch, c_trainer, compressed, trainer, folder, {"full precision", "compressed"})
        damaged(launch, compressed, trainer, prefix)


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
