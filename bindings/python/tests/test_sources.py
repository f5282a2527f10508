"""Types, style and examples of the package; a check is skipped where its program is missing."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent
STYLED = (
    ".",
    "../../integration/deepspeed/tests",
    "../../integration/torch",
    "../../integration/jax",
)


def run_module(name, *arguments):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed in this Python")
    run = subprocess.run(
        [sys.executable, "-m", name, *arguments],
        cwd=PACKAGE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_types(tmp_path):
    """Strictly typed; what is for PyTorch needs PyTorch's types."""
    without = (
        [] if importlib.util.find_spec("torch") else ["--exclude", "src/sotto/(_frameworks/)?torch"]
    )
    run_module("mypy", "--cache-dir", str(tmp_path), *without)


def test_style():
    run_module("ruff", "check", "--no-cache", *STYLED)


def test_formatting():
    run_module("ruff", "format", "--no-cache", "--check", *STYLED)


def examples():
    text = (PACKAGE / "README.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def test_examples_are_python():
    assert len(examples()) >= 4
    for i, example in enumerate(examples()):
        compile(example, f"README.md, example {i}", "exec")


def test_the_first_example_runs():
    run = subprocess.run(
        [sys.executable, "-c", examples()[0]],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"},
    )
    assert (run.returncode, run.stdout) == (0, "0\n"), run.stderr
