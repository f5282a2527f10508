"""The wheel, installed into an empty virtual environment: nothing of the source tree is used."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from ranks import sotto_run

for needed in ("pip", "venv"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed in this Python", allow_module_level=True)
pytest.importorskip("scikit_build_core", reason="scikit_build_core is not installed in this Python")

HERE = Path(__file__).resolve().parent
CHECK = """
import pathlib, sys
import sotto
assert pathlib.Path(sotto.__file__).is_relative_to(sys.prefix), sotto.__file__
assert pathlib.Path(sotto.library_path()).is_relative_to(sys.prefix), sotto.library_path()
assert pathlib.Path(sotto.library_path()).name == "libsotto.so.0"
import array
with sotto.init_process_group(timeout=60) as comm:
    p, g = array.array("f", [1.0] * 100), array.array("f", [float(comm.rank + 1)] * 100)
    comm.all_reduce(p, op="mean").wait()
    with sotto.optim.Optimizer([(p, g, "p")], kind="OneBitAdam", comm=comm, lr=0.1) as optimizer:
        optimizer.step().wait()
    print("stepped", comm.size, p[0] < 1)
"""


def run(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built around the library that the other tests use: building another takes minutes."""
    out = tmp_path_factory.mktemp("wheel")
    library = Path(os.environ["SOTTO_LIBRARY"]).resolve()
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"),
        *(
            "-w",
            str(out),
            f"--config-settings=cmake.define.SOTTO_PYTHON_LIBRARY={library}",
            str(HERE.parent),
        ),
        cwd=out,
    )
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = str(folder / "bin/python")
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install"),
        *("--no-deps", "--no-index", str(wheel)),
    )
    return python


def clean():
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SOTTO_", "PYTHON"))}
    return {**kept, "SOTTO_CPU_THREADS": "1"}


def test_what_is_inside(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "sotto/py.typed",
        "sotto/lib/libsotto.so.0",
        "sotto/torch/base.py",
        "sotto/deepspeed/engine.py",
        "sotto/LICENSE",
    ):
        assert wanted in names
    assert not [name for name in names if "test" in name or "__pycache__" in name]
    assert wheel.name.startswith("sotto-0.2.0-py3-none-linux")


def test_it_works_without_anything_else(python, tmp_path):
    out = run(python, "-c", CHECK, env={**clean(), "RANK": "0", "WORLD_SIZE": "1"}, cwd=tmp_path)
    assert out == "stepped 1 True\n"


def test_it_works_on_two_ranks(python, tmp_path):
    out = run(sotto_run(), "-n", "2", "--", python, "-c", CHECK, env=clean(), cwd=tmp_path)
    assert out.count("stepped 2 True") == 2
