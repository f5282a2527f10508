"""tests/gpu.sh with stand-ins for cmake, the programs that it builds and Python: what fails hides nothing, and is said at the end."""

import json
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("sotto-test-cuda_device", "sotto-test-kernels_cuda", "sotto-test-cuda", "sotto-test-conformance",
            "sotto-test-nccl_ranks", "sotto-run", "sotto-perf-gpu")
# Notes its name and words, and ends as the file beside it says.
PROGRAM = """#!/bin/bash
printf '%s\\n' "${0##*/} $*" >>"$CALLS"
[ ! -e "$0.does" ] || . "$0.does"
"""
DEVICE = "cuda:0 (Stand-in)"


class Checkout:
    """What gpu.sh needs of a checkout, with everything built already."""

    def __init__(self, folder, devices):
        self.root = Path(folder) / "checkout"
        self.bin = self.root / "build/cuda/bin"
        self.calls = Path(folder) / "calls"
        self.bin.mkdir(parents=True)
        self.calls.touch()
        for name in ("tests/gpu.sh", "integration/common.sh"):
            (self.root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        with open(self.root / "integration/common.sh", "a", encoding="utf-8") as file:
            file.write(f'find_cmake() {{ echo "{self.bin}/cmake"; }}\nfind_ninja() {{ echo ninja; }}\n')
        for name in ("cmake", "python", *PROGRAMS):
            self.program(name)
        self.program("sotto", f"echo 'other devices   {devices}'")
        self.program("sotto-run", 'shift 3; exec "$@"')
        self.python("")

    def program(self, name, does=None):
        path = self.bin / name
        path.write_text(PROGRAM, encoding="utf-8")
        path.chmod(0o755)
        if does is not None:
            Path(f"{path}.does").write_text(does + "\n", encoding="utf-8")

    def python(self, reason):
        """--python: what it answers when it is asked what it lacks."""
        self.program("python", f"[ \"$1\" != - ] || echo '{reason}'")

    def run(self, *words, where=None, **environment):
        answer = subprocess.run(
            ["/bin/bash", str(self.root / "tests/gpu.sh"), *words], cwd=where or self.root, capture_output=True, text=True,
            timeout=60, check=False,
            env={**os.environ, "CALLS": str(self.calls), "SOTTO_NCCL_LIBRARY": "/no/such/libnccl.so.2", **environment})
        answer.calls = self.calls.read_text(encoding="utf-8").splitlines()
        answer.names = [call.split()[0] for call in answer.calls]
        return answer


class Gpu(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def checkout(self, devices=DEVICE):
        return Checkout(self.folder, devices)

    def test_usage(self):
        answer = self.checkout().run("--python")
        self.assertEqual(answer.returncode, 2)
        self.assertEqual(answer.calls, [])

    def test_without_a_device_nothing_runs(self):
        answer = self.checkout("no CUDA device: there is no driver").run()
        self.assertEqual(answer.returncode, 77, answer.stderr)
        self.assertIn("there is no driver", answer.stdout)
        self.assertEqual(answer.names, ["cmake", "cmake", "sotto"])

    def test_what_cannot_be_built(self):
        checkout = self.checkout()
        checkout.program("cmake", "exit 1")
        answer = checkout.run()
        self.assertEqual(answer.returncode, 1)
        self.assertIn("integration/setup.sh", answer.stderr)
        self.assertEqual(answer.names, ["cmake"])

    def test_everything_passes(self):
        answer = self.checkout().run("--n", "1000", "--python", "build/cuda/bin/python", "--arch", "90-real")
        self.assertEqual(answer.returncode, 0, answer.stdout + answer.stderr)
        self.assertIn("7 suites passed, 0 failed, 1 skipped", answer.stdout)
        self.assertIn("SKIPPED: two ranks over NCCL, since /no/such/libnccl.so.2 cannot be opened", answer.stdout)
        self.assertIn("SOTTO_CUDA_ARCHITECTURES=90-real", answer.calls[0])
        python = [call for call in answer.calls if call.startswith("python -B")]
        self.assertIn("bindings/python/tests/test_cuda.py", python[0])
        self.assertIn("peers_gpu.py", python[1])

    def test_a_failure_hides_nothing(self):
        checkout = self.checkout()
        checkout.program("sotto-test-kernels_cuda", "kill -SEGV $$")
        checkout.program("sotto-perf-gpu", "exit 2")
        checkout.program("timeout", "shift 2\n[ \"${1##*/}\" != sotto-test-cuda ] || exit 124\nexec \"$@\"")
        answer = checkout.run("--python", str(checkout.bin / "python"), PATH=f"{checkout.bin}:{os.environ['PATH']}")
        self.assertEqual(answer.returncode, 1)
        for name in ("sotto-test-cuda_device", "sotto-test-conformance", "python"):
            self.assertIn(name, answer.names)
        self.assertIn("FAILED: kernels: exit code 139", answer.stdout)
        self.assertIn("FAILED: the C API: ended after 30 minutes", answer.stdout)
        self.assertIn("FAILED: benchmarks: exit code 2", answer.stdout)
        self.assertIn("4 suites passed, 3 failed, 1 skipped", answer.stdout)

    def test_a_python_without_torch(self):
        checkout = self.checkout()
        checkout.python("torch cannot be imported: there is none")
        answer = checkout.run("--no-bench", "--python", str(checkout.bin / "python"))
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertIn("SKIPPED: the Python package, since torch cannot be imported: there is none", answer.stdout)
        answer = checkout.run("--no-bench", "--python", "no/such/python")
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertIn("no/such/python cannot be run", answer.stdout)

    def test_paths_are_those_of_the_caller(self):
        checkout = self.checkout()
        where = Path(self.folder) / "elsewhere"
        (where / "bin").mkdir(parents=True)
        (where / "bin/python").symlink_to(checkout.bin / "python")
        Path(f"{where}/bin/python.does").symlink_to(f"{checkout.bin}/python.does")
        checkout.program("sotto-perf-gpu", "echo '{}' >>\"${@: -1}\"")
        answer = checkout.run("--json", "figures.json", "--python", "bin/python", where=where,
                              SOTTO_NCCL_LIBRARY="lib/libnccl.so.2")
        self.assertEqual(answer.returncode, 0, answer.stdout + answer.stderr)
        self.assertIn(f"{where.resolve()}/lib/libnccl.so.2 cannot be opened", answer.stdout)
        self.assertIn("python", answer.names)
        self.assertEqual(json.loads((where / "figures.json").read_text(encoding="utf-8")), {})


if __name__ == "__main__":
    unittest.main()
