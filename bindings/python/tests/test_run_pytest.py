"""Which Python runs a test file."""

import importlib.util
import sys

import pytest
from ranks import ROOT

spec = importlib.util.spec_from_file_location("run_pytest", ROOT / "bindings/run_pytest.py")
run_pytest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run_pytest)
TORCH_TEST = ROOT / "bindings/python/tests/test_torch_ddp.py"
PLAIN_TEST = ROOT / "bindings/python/tests/test_log.py"


@pytest.fixture
def without_torch(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "torch" else find(n))


@pytest.fixture
def venv(tmp_path):
    """A program that says, as exit code, whether it has everything."""

    def make(code):
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\nexit {code}\n")
        python.chmod(0o755)
        return python

    return make


@pytest.mark.usefixtures("without_torch")
def test_what_needs_torch_runs_where_torch_is(venv):
    python = venv(0)
    assert run_pytest.interpreter(TORCH_TEST, python) == str(python)
    assert run_pytest.interpreter(PLAIN_TEST, python) == sys.executable


def test_every_module_that_a_file_is_skipped_without_counts(venv, tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text('pytest.importorskip("not_a_module_here", reason="it is not installed")\n')
    assert run_pytest.needs(file) == {"not_a_module_here"}
    python = venv(0)
    assert run_pytest.interpreter(file, python) == str(python)
    assert run_pytest.interpreter(file, venv(1)) == sys.executable


@pytest.mark.usefixtures("without_torch")
def test_without_torch_anywhere_the_test_is_skipped_by_this_one(venv, tmp_path):
    assert run_pytest.interpreter(TORCH_TEST, venv(1)) == sys.executable
    assert run_pytest.interpreter(TORCH_TEST, tmp_path / "absent") == sys.executable


def test_a_python_that_has_torch_is_taken_itself(venv, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    assert run_pytest.interpreter(TORCH_TEST, venv(0)) == sys.executable


def test_every_test_of_torch_is_recognised():
    files = [*ROOT.glob("bindings/python/tests/test_*.py"), *ROOT.glob("integration/*/tests/*.py")]
    for file in files:
        text = file.read_text(encoding="utf-8")
        imports = "\nimport torch" in text or "\nimport sotto.torch" in text
        skips = "torch" in run_pytest.needs(file)
        assert skips or not imports or not file.name.startswith("test_"), file
