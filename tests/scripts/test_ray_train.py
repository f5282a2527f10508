"""integration/launchers/ray_train.py on two nodes of a Ray cluster: one dies, and the job resumes from its checkpoint.

    test_ray_train.py LIBSOTTO
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from launcher_environment import ROOT, environment

PYTHON = ROOT / ".venv/bin/python"
FOLDERS = ("bindings/python/src", "bindings/python/tests", "integration/launchers")
TIMEOUT_S, END_S = 700, 30
NO_CLUSTER = 77  # exit code of ray_job.py
# What Ray does besides: reports to its makers, passwords in the home folder, and processes that nothing here asks.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
         "RAY_TRAIN_METRICS_ENABLED": "0", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0", "RAY_prestart_worker_first_driver": "0"}
# A killed raylet refuses five looks in a second; one that is slow has 50 seconds, and an actor without an answer 60.
WATCHFUL = {"RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "200",
            "RAY_health_check_timeout_ms": "10000", "RAY_health_check_failure_threshold": "5",
            "RAY_timeout_ms_task_wait_for_death_info": "60000", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}


def processes_with(variable):
    """Numbers of the processes that have this in their environment, and still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0]
        except OSError:  # it has ended meanwhile
            continue
        if variable.encode() in variables and state not in "ZX":
            found.append(int(folder.name))
    return found


def has_ray():
    probe = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ('ray', 'torch', 'pandas', 'pyarrow'))))"
    return PYTHON.exists() and subprocess.run([PYTHON, "-c", probe], check=False).returncode == 0


class RayTrain(unittest.TestCase):
    def setUp(self):
        if not has_ray():
            self.skipTest(f"{PYTHON} has no ray: integration/setup.sh test installs it")
        folder = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp")  # names of sockets have 107 characters at most
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.addCleanup(self.kill_what_is_left)

    def marker(self):
        return f"RAY_TMPDIR={self.folder}"

    def kill_what_is_left(self):
        for process in processes_with(self.marker()):
            os.kill(process, signal.SIGKILL)

    def run_job(self):
        """The output of ray_job.py, which has to end well, with all that it has started."""
        path = ":".join(str(ROOT / folder) for folder in FOLDERS)
        # Gradients are rounded as torch's threads split them: the reference has as many as a worker of one CPU.
        variables = environment(LIBRARY, PYTHONPATH=path, RAY_TMPDIR=str(self.folder), OMP_NUM_THREADS="1", **QUIET, **WATCHFUL)
        words = [PYTHON, "-B", ROOT / "tests/scripts/ray_job.py", self.folder]
        with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
            try:
                out, _ = job.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill_what_is_left()
                self.fail(f"not at its end after {TIMEOUT_S} s:\n{job.communicate()[0]}")
        if job.returncode == NO_CLUSTER:
            self.skipTest(f"Ray starts no cluster here: {out.strip().splitlines()[-1]}")
        self.assertEqual(job.returncode, 0, out)
        end = time.monotonic() + END_S
        while left := processes_with(self.marker()):
            self.assertLess(time.monotonic(), end, f"processes {left} are left {END_S} s after the job's end")
            time.sleep(0.1)
        return out

    def test_a_node_dies(self):
        out = self.run_job()
        answer = json.loads((self.folder / "answer.json").read_text(encoding="utf-8"))
        stopped = answer["stopped"]

        # The other rank has heard from Sotto which one died, long before any time limit: those are 60 s.
        self.assertEqual(len(answer["met"]), 1, out)
        met, = answer["met"]
        self.assertEqual((met["rank"], met["type"]), (1 - stopped["rank"], "PeerLostError"), out)
        self.assertIn(f"rank {stopped['rank']} (pid {stopped['process']} ", met["text"])
        self.assertLess(met["at_s"] - answer["killed_s"], 30)
        self.assertEqual(met["silence_limit_ms"], "20000")

        # Not from the start, and to the end, with the bits of a run that nothing has disturbed.
        metrics = answer["metrics"]
        self.assertIn(metrics["first_step"], (6, 12), out)
        self.assertEqual((metrics["step"], metrics["loss"]), (24, answer["reference"]), out)
        self.assertEqual(answer["different"], [])
        self.assertIn(f"24 steps, from {metrics['first_step']}, loss {metrics['loss']:.4f} in {metrics['path']}\n", out)


if __name__ == "__main__":
    LIBRARY = sys.argv.pop(1)
    unittest.main()
