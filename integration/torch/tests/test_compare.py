"""The comparison: all variants in one network lab, and its options."""

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed in this Python")
pytest.importorskip("matplotlib", reason="matplotlib is not installed in this Python")

import lab as labs
from launched import SMALL, VARIANTS, environment, write_text
from ranks import ROOT, sotto_run

COMPARE = ROOT / "integration/torch/compare.py"


def compare(*words):
    """Runs the comparison; its lab does not stay."""
    with subprocess.Popen(
        [sys.executable, "-B", str(COMPARE), *map(str, words)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=900)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert not labs.namespaces(f"sotto-torch-{process.pid}-")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_all_variants(tmp_path):
    how, reason = labs.permitted()
    rate = "100mbit" if how else "none"
    build = sotto_run().rpartition("/bin/")[0]
    out = tmp_path / "out"
    run = compare(
        *("--steps", 8, "--rate", rate, "--ranks", 2, "--build", build, "--out", out),
        *("--", *SMALL, "--data", write_text(tmp_path), "--powersgd-start", 2),
    )
    assert run.returncode == 0, reason + run.stdout + run.stderr
    table = (out / "table.md").read_text(encoding="utf-8").splitlines()
    assert len(table) == 2 + len(VARIANTS)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    assert cells[0][2] == "+0.0 %"
    assert cells[0][4] == cells[0][7] == "1.00"
    for row in cells:
        assert ("B" in row[6]) == bool(how), row  # measured where a rank has its own interface
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 4
    assert "Something is wrong" not in page


def test_a_python_without_the_packages():
    words = [sys.executable, "-S", "-B", str(COMPARE), "--help"]
    run = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith("compare: ")
    assert "has no" in run.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--variants", "lamb-gloo,magic"], "allowed are lamb-gloo"),
        (["--variants", "powersgd,powersgd"], "at most once"),
        (["--rate", "fast"], "'fast' is no rate"),
        (["--steps", "0"], "not a whole number above 0"),
    ],
)
def test_options(words, text):
    run = compare(*words)
    assert run.returncode == 2
    assert text in run.stderr


def test_a_build_that_is_not_there(tmp_path):
    run = compare("--build", tmp_path)
    assert run.returncode == 1
    assert "there is no bin/sotto-run" in run.stderr


def test_a_run_that_fails_ends_the_comparison(tmp_path):
    build = sotto_run().rpartition("/bin/")[0]
    words = ("--build", build, "--out", tmp_path, "--ranks", 1, "--rate", "none")
    run = compare(*words, "--", "--data", tmp_path / "missing")
    assert run.returncode == 1
    assert 'cannot read "' in run.stderr + run.stdout
    assert "run lamb-gloo ended with exit code 1" in run.stderr
