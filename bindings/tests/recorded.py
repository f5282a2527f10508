"""What tests of several languages share: starting ranks, and repeating what the C trainer's optimizer was given.

BINDINGS_SOTTO_RUN names sotto-run, BINDINGS_C_TRAINER the C trainer, BINDINGS_RECORDER the library of record.c.
"""

import json
import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 5  # exit code of a test that cannot run here


class LeftOut(Exception):
    """Something that is needed is not installed."""


def exit_code_of(step):
    """Runs a step of tests: 0, 1 if a program that it has started has failed, SKIPPED where something is not installed."""
    try:
        step()
    except LeftOut as reason:
        print(f"skipped: {reason}")  # as tests/junit_summary.py reads it
        return SKIPPED
    except subprocess.CalledProcessError as error:
        print(error)
        return 1
    return 0


def of_build(name):
    value = os.environ.get(name)
    if not value:
        raise LeftOut(f"{name} is not set: this build does not make what it names")
    assert Path(value).exists(), f"{name} is {value}, which is not there"
    return value


def launched(ranks, *words, ends_well=True, **more):
    """What ranks have said."""
    command = [of_build("BINDINGS_SOTTO_RUN"), "-n", str(ranks), "--timeout", "300", "--", *map(str, words)]
    environment = {**os.environ, "SOTTO_CPU_THREADS": "1", **more}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=ends_well, timeout=400)
    print(run.stdout, end="")
    return run.stdout


def hash_of(text):
    return re.search(r"params_hash\W+([0-9a-f]{16})\b", text)[1]


def same_as_c_trainer(ranks, folder, *trainer):
    """`trainer CONFIG RECORDING` has to end with the parameters of the C trainer whose gradients are recorded."""
    config = json.loads((ROOT / "integration/configs/onebit_lamb.json").read_text(encoding="utf-8"))
    c_trainer, recorder = of_build("BINDINGS_C_TRAINER"), of_build("BINDINGS_RECORDER")
    config["optimizer"]["params"]["freeze_step"] = 6  # both stages in a few steps
    recorded, summary = folder / "recorded", folder / "summary.json"
    frozen, text = folder / "config.json", folder / "text"
    frozen.write_text(json.dumps(config), encoding="utf-8")
    text.write_text("".join(f"{n * n} of {n % 97}\n" for n in range(180_000)), encoding="utf-8")
    small = "--width 32 --layers 2 --heads 2 --mlp 64 --eval-sequences 32 --steps 12 --progress off".split()
    launched(ranks, "env", f"LD_PRELOAD={recorder}", f"RECORD_GRADIENTS={recorded}", c_trainer, "--config", frozen, *small,
             "--data", text, "--summary", summary)
    wanted = hash_of(summary.read_text(encoding="utf-8"))
    said = launched(ranks, *trainer, frozen, recorded)
    assert "12 steps, stage 1" in said, said
    assert hash_of(said) == wanted, f"the C trainer has {wanted}"
    print(f"the C trainer and this one have the same parameters: {wanted}")
