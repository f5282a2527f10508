#!/usr/bin/env python3
"""Runs tests of the Julia package.

usage: run_julia.py test|ranks|trainer

  test     the tests of one rank
  ranks    collectives, outer steps and overlap on 4 ranks, and a rank that dies
  trainer  the trainer runs on 4 ranks with integration/configs/onebit_lamb.json; with the gradients of the C trainer it has to come
           to the parameters that the C trainer has

Exit code: 0, 1, or 5 where something is not installed; the reason is printed. BINDINGS_JULIA names the program, else it is julia in PATH.
SOTTO_LIBRARY names the library, BINDINGS_SOTTO_RUN sotto-run, BINDINGS_C_TRAINER and BINDINGS_RECORDER the C trainer and what records
its gradients.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "tests"))

from recorded import LeftOut, exit_code_of, hash_of, launched, of_build, same_as_c_trainer  # noqa: E402

RANKS = 4


def julia():
    """The command, with the version that it says."""
    named = os.environ.get("BINDINGS_JULIA", "julia")
    words = shlex.split(named)
    if not words or not shutil.which(words[0]):
        raise LeftOut(f"there is no {named}: Julia 1.5 and later, in PATH or named by BINDINGS_JULIA, runs these tests")
    command = [*words, "--startup-file=no", "--compiled-modules=no"]
    run = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    version = tuple(map(int, re.findall(r"\d+", run.stdout)[:2]))
    if run.returncode or version < (1, 5):
        raise LeftOut(f"{named} does not work, or is older than 1.5: {run.stdout}{run.stderr}")
    print(f"{named} is {run.stdout.strip()}")
    os.environ["JULIA_LOAD_PATH"] = f"@:{HERE}:@stdlib"
    return command


def test():
    command = julia()
    of_build("SOTTO_LIBRARY")
    subprocess.run([*command, str(HERE / "test/runtests.jl")], check=True)


def ranks():
    command = julia()
    for part in ("collectives", "training"):
        said = launched(RANKS, *command, HERE / "test/ranks.jl", part, JULIA_NUM_THREADS="2")
        assert said.count("is well") == RANKS, said
    # One rank is killed, which sotto-run tells; what counts is what the others say.
    said = launched(RANKS, *command, HERE / "test/ranks.jl", "death", ends_well=False)
    assert said.count("is well") == RANKS - 1, said


def trainer():
    command = [*julia(), HERE / "examples/trainer.jl"]
    said = launched(RANKS, *command, ROOT / "integration/configs/onebit_lamb.json")
    assert "900 steps, stage 1" in said, "the compressed stage was not reached"
    assert hash_of(said)
    with tempfile.TemporaryDirectory() as folder:
        same_as_c_trainer(RANKS, Path(folder), *command)


STEPS = {step.__name__: step for step in (test, ranks, trainer)}


def main():
    if len(sys.argv) != 2 or sys.argv[1] not in STEPS:
        sys.exit(__doc__)
    return exit_code_of(STEPS[sys.argv[1]])


if __name__ == "__main__":
    sys.exit(main())
