"""One adapter per framework, imported where the program has imported the framework itself."""

import ast
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import sotto
from sotto import _frameworks
from sotto._buffers import view_of
from sotto._view import View

SOURCE = Path(sotto.__file__).resolve().parent
OWNERS = {"torch": ("torch", "deepspeed"), "jax": ("jax",), "numpy": ("deepspeed", "jax")}


def test_the_package_imports_no_framework():
    program = (
        "import array, sys, sotto\n"
        "with sotto.init_process_group(world_size=1) as comm:\n"
        "    x = array.array('f', [1.0, 2.0])\n"
        "    comm.all_reduce(x).wait()\n"
        f"print(sorted(set({list(OWNERS)}) & set(sys.modules)))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr


@pytest.mark.parametrize("name", _frameworks.NAMES)
def test_only_its_own_files_know_a_framework(name):
    own = {SOURCE / "_frameworks" / f"{name}.py"}
    own.update(file for folder in OWNERS[name] for file in (SOURCE / folder).rglob("*.py"))
    looked_up = re.compile(rf"sys\.modules(\.get\(|\[)[\"']{name}")
    for file in set(SOURCE.rglob("*.py")) - own:
        text = file.read_text()
        assert not looked_up.search(text), file
        for node in ast.walk(ast.parse(text)):
            imported = [
                alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")
            ]
            if isinstance(node, ast.ImportFrom):
                imported = [node.module or ""] if node.level == 0 else []
            assert name not in {module.split(".")[0] for module in imported}, file


class Column:
    """An array of a framework of this test."""

    def __init__(self, values):
        self.values = values


@pytest.fixture
def framework(monkeypatch):
    """A framework "columns", whose adapter stands in a file and a row as the others do."""
    module = types.ModuleType("columns")
    module.__spec__ = types.SimpleNamespace(_initializing=True)
    adapter = types.ModuleType("sotto._frameworks.columns")

    class Columns(_frameworks.Framework):
        def view(self, x, what):
            return view_of(x.values, what) if isinstance(x, Column) else None

        def meeting(self, environ):
            return lambda **options: sotto.create_comm(world_size=1, **options)

    adapter.FRAMEWORK = Columns()
    monkeypatch.setitem(sys.modules, "columns", module)
    monkeypatch.setitem(sys.modules, adapter.__name__, adapter)
    monkeypatch.setattr(_frameworks, "NAMES", (*_frameworks.NAMES, "columns"))
    yield module
    _frameworks._found.pop("columns", None)


def test_a_new_framework_is_a_file_and_a_row(framework, monkeypatch):
    x = Column(np.full(3, 2, np.float32))
    with pytest.raises(sotto.InvalidArgumentError, match="x is of type Column"):
        view_of(x, "x")  # its own import is still under way
    framework.__spec__._initializing = False
    assert isinstance(view_of(x, "x"), View)
    assert view_of(x, "x").data == x.values.ctypes.data
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with sotto.init_process_group(timeout=10) as comm:
        assert comm.size == 1
        comm.all_reduce([x, x.values + 1], op="max").wait()


def test_masks_of_booleans_are_bytes_without_a_copy():
    mask = np.array([True, False, True])
    found = _frameworks.bytes_of_bools(mask)
    assert (found.dtype, found.ctypes.data) == (np.uint8, mask.ctypes.data)
    numbers = np.ones(2, np.uint8)
    assert _frameworks.bytes_of_bools(numbers) is numbers
