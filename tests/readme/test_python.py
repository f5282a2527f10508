"""The Python examples run as they stand: in the READMEs, on two pages of docs and in what help(sotto.torch) shows.

Each is a program of two ranks of its own (four with shards), started by sotto-run. SOTTO_LIBRARY names the library, PYTHON_TESTS_SOTTO_RUN the program.
"""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "bindings/python/src"
sys.path.insert(0, str(ROOT / "bindings/python/tests"))

import warm
READMES = ("README.md", "bindings/python/README.md", "docs/outer-steps.md", "docs/overlap.md")


def examples():
    """(where, code) of every Python block."""
    for name in READMES:
        text = (ROOT / name).read_text(encoding="utf-8")
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            yield f"{name}:{text[: block.start()].count(chr(10)) + 1}", block[1]
    text = (SOURCE / "sotto/torch/__init__.py").read_text(encoding="utf-8").split('"""')[1]
    block = re.search(r"\n\n(    import .*?)\n\n(?=\S)", text, re.DOTALL)
    yield "sotto.torch.__doc__", textwrap.dedent(block[1])


FOUND = dict(examples())


def missing(code):
    """Why this machine cannot run an example."""
    for name in ("numpy", "torch", "jax"):
        if name in code and importlib.util.find_spec(name) is None:
            return f"{name} is not installed in this Python"
    if '"cuda"' in code:
        import torch

        if not torch.cuda.is_available():
            return "no CUDA device"
    return None


def test_there_are_examples_everywhere():
    places = [where.split(":")[0] for where in FOUND]
    assert {*READMES, "sotto.torch.__doc__"} == set(places)
    assert len(FOUND) >= 8


@pytest.mark.parametrize("where", FOUND)
def test_example_runs(where, tmp_path):
    reason = missing(FOUND[where])
    if reason:
        pytest.skip(reason)
    program = tmp_path / "example.py"
    program.write_text(FOUND[where], encoding="utf-8")
    run = os.environ.get("PYTHON_TESTS_SOTTO_RUN", str(ROOT / "build/dev/bin/sotto-run"))
    library = os.environ.get("SOTTO_LIBRARY", str(ROOT / "build/dev/lib/libsotto.so"))
    python = warm.python("torch") if "torch" in FOUND[where] else sys.executable
    environment = {
        **os.environ, "SOTTO_LIBRARY": library, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1", "SOTTO_CPU_THREADS": "1",
        "PYTHON_EXEC": python,  # of torchrun's ranks
    }
    with_gloo = "init_process_group(\"gloo\")" in FOUND[where]
    ranks = "4" if "fully_shard" in FOUND[where] else "2"
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command = launcher if with_gloo else [run, "-n", "2", "--timeout", "200", "--", python]
    done = subprocess.run([*command, str(program)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
