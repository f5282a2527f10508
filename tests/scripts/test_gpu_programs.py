"""The Python programs of tests/gpu.sh where there is no GPU: what a Python is asked, and the training loop on the processor.

test_gpu_programs.py SOTTO_RUN LIBSOTTO
"""

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/gpu"), str(ROOT / "bindings/python/tests")]

import ask  # noqa: E402
import warm  # noqa: E402

TORCH_PYTHON = ROOT / ".venv/bin/python"
SOTTO_RUN = LIBSOTTO = ""


def answer(*words):
    """Exit code and what is printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = ask.main(words)
    return code, out.getvalue().strip()


class Nccl:
    """A library of this version, if it is opened from the path."""

    def __init__(self, path, version=22809):
        self.path, self.version, self.asked = path, version, []

    def __call__(self, path):
        self.asked.append(path)
        if path != self.path:
            raise OSError(f"{path}: no\nsuch file")
        return types.SimpleNamespace(ncclGetVersion=lambda at: setattr(at._obj, "value", self.version))


class Ask(unittest.TestCase):
    def with_wheel(self, file):
        """The folder of a package nvidia.nccl, in this Python's path."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        lib = Path(folder.name) / "nvidia/nccl/lib"
        lib.mkdir(parents=True)
        if file:
            (lib / "libnccl.so.2").touch()
        modules = mock.patch.dict(sys.modules)
        modules.start()
        self.addCleanup(modules.stop)
        for name in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
            del sys.modules[name]
        path = mock.patch.object(sys, "path", [folder.name])
        path.start()
        self.addCleanup(path.stop)
        return str(lib / "libnccl.so.2")

    def test_the_nccl_of_this_python_comes_before_the_systems(self):
        wheel = self.with_wheel(True)
        with mock.patch.object(ask.ctypes, "CDLL", Nccl(wheel)):
            self.assertEqual(answer("nccl"), (0, f"22809 {wheel}"))

    def test_without_one_it_is_the_systems(self):
        self.with_wheel(False)
        with mock.patch.object(ask.ctypes, "CDLL", Nccl("libnccl.so.2", 23001)):
            self.assertEqual(answer("nccl"), (0, "23001 libnccl.so.2"))

    def test_the_one_that_is_named_comes_first(self):
        self.with_wheel(True)
        with mock.patch.object(ask.ctypes, "CDLL", Nccl("/mine/libnccl.so.2")) as named:
            self.assertEqual(answer("nccl", "/mine/libnccl.so.2"), (0, "22809 /mine/libnccl.so.2"))
            code, text = answer("nccl", "/other/libnccl.so.2")
        self.assertEqual(named.asked, ["/mine/libnccl.so.2", "/other/libnccl.so.2"])
        self.assertEqual((code, text.count("\n")), (77, 0))
        self.assertIn("/other/libnccl.so.2: no such file", text)

    def test_modules(self):
        self.assertEqual(answer("modules", "json", "sys"), (0, ""))
        code, text = answer("modules", "json", "no_such_module")
        self.assertEqual(code, 77)
        self.assertIn("no_such_module cannot be imported", text)

    def test_a_torch_that_sees_no_device(self):
        for seen, code in ((False, 77), (True, 0)):
            torch = types.SimpleNamespace(__version__="2.0", cuda=types.SimpleNamespace(is_available=lambda seen=seen: seen))
            with mock.patch.dict(sys.modules, {"torch": torch}):
                self.assertEqual(answer("modules", "torch")[0], code)


class TorchLoop(unittest.TestCase):
    def loop(self, *words):
        find = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
        try:
            subprocess.run([TORCH_PYTHON, "-c", find], capture_output=True, timeout=300, check=True)
        except (OSError, subprocess.CalledProcessError):
            self.skipTest(f"{TORCH_PYTHON} has no torch")
        python = warm.python("torch", interpreter=str(TORCH_PYTHON))
        return subprocess.run(
            [SOTTO_RUN, "-n", "2", "--", python, "-B", ROOT / "tests/gpu/torch_loop.py", "--device", "cpu", *words],
            env={**os.environ, "SOTTO_LIBRARY": LIBSOTTO, "SOTTO_CPU_THREADS": "1", "OMP_NUM_THREADS": "1"}, capture_output=True,
            text=True, timeout=400, check=False)

    def test_two_ranks_train(self):
        run = self.loop("--seconds", "300")
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        for kind in ("AdamW", "OnebitAdam"):
            self.assertEqual(run.stdout.count(f"{kind} on cpu: 40 steps"), 2, run.stdout)

    def test_the_time_limit_says_where_it_was(self):
        for _ in range(3):  # a dump of threads that go on meanwhile may itself fall over
            run = self.loop("--seconds", "0.01")
            if run.returncode != 128 + signal.SIGSEGV:
                break
        self.assertEqual(run.returncode, 1, run.stdout + run.stderr)
        self.assertIn("Timeout", run.stderr)
        self.assertIn("torch_loop.py", run.stderr)


if __name__ == "__main__":
    SOTTO_RUN, LIBSOTTO = sys.argv[1:3]
    del sys.argv[1:3]
    unittest.main()
