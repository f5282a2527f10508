"""Ranks of MPICH, Open MPI, Slurm and torchrun find each other with no variable of Sotto's own, and train as under sotto-run.

    test_meeting.py SOTTO_RUN SOTTO_C_TRAINER LIBSOTTO

Slurm's srun is no program of a single machine: its variables are set here.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from launcher_environment import MPI, TORCHRUN, environment, free_job, free_port, without_launchers

RANKS = 4
STEPS = 20
CONFIG = {"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 10}}}
TIMEOUT_S = 200
# Two groups after each other, as a program makes them that starts anew after a failure.
TWICE = """
import sotto
for i in range(2):
    with sotto.init_process_group(timeout=60) as comm:
        comm.barrier().wait()
        print(f"group {i}: {comm.rank} of {comm.size}", flush=True)
"""


def needs(program):
    return unittest.skipUnless(shutil.which(program), f"{program} is not there: integration/setup.sh test installs it")


class Meeting(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        (cls.folder / "text").write_text("".join(f"{i}\n" for i in range(400000)), encoding="ascii")
        (cls.folder / "config.json").write_text(json.dumps(CONFIG), encoding="ascii")
        done = cls.train([RUN, "-n", str(RANKS), "--"], "expected")
        assert done.returncode == 0, done.stdout
        cls.expected = cls.figures("expected")

    @classmethod
    def words(cls, name):
        return [TRAINER, "--config", str(cls.folder / "config.json"), "--data", str(cls.folder / "text"), "--steps", str(STEPS),
                *"--width 32 --layers 2 --mlp 64 --eval-every 10 --eval-sequences 32 --progress off".split(),
                "--log", str(cls.folder / f"{name}.jsonl"), "--summary", str(cls.folder / f"{name}.json")]

    @classmethod
    def train(cls, start, name, **variables):
        """No variable begins with SOTTO_, unless a test gives it."""
        return subprocess.run([*start, *cls.words(name)], env={**without_launchers(), "OPENBLAS_NUM_THREADS": "1", **variables},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False)

    @classmethod
    def figures(cls, name):
        """Losses of every step, and the parameters' hash."""
        steps = [json.loads(line) for line in (cls.folder / f"{name}.jsonl").read_text(encoding="ascii").splitlines()]
        kept = [{key: step[key] for key in ("step", "loss", "eval_loss") if key in step} for step in steps]
        return kept, json.loads((cls.folder / f"{name}.json").read_text(encoding="ascii"))["params_hash"]

    def check(self, start, **variables):
        name = self.id().rpartition(".")[2]
        done = self.train(start, name, **variables)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(len(self.expected[0]), STEPS + 2)
        self.assertEqual(self.figures(name), self.expected)

    def check_two_groups(self, start):
        done = subprocess.run([*start, "-n", "2", sys.executable, "-c", TWICE], env=environment(LIBRARY), stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False)
        self.assertEqual(done.returncode, 0, done.stdout)
        for line in ("group 0: 0 of 2", "group 0: 1 of 2", "group 1: 0 of 2", "group 1: 1 of 2"):
            self.assertIn(line, done.stdout)

    @needs("mpiexec.openmpi")
    def test_openmpi(self):
        self.check([*MPI["mpiexec.openmpi"], "-n", str(RANKS)])

    @needs("mpiexec.openmpi")
    def test_two_groups_of_openmpi(self):
        self.check_two_groups(MPI["mpiexec.openmpi"])

    @needs("mpiexec.hydra")
    def test_mpich(self):
        self.check([*MPI["mpiexec.hydra"], "-n", str(RANKS)])

    @needs("mpiexec.hydra")
    def test_two_groups_of_mpich(self):
        self.check_two_groups(MPI["mpiexec.hydra"])

    @needs("mpiexec.openmpi")
    @needs("mpiexec.hydra")
    def test_mpich_in_a_job_of_openmpi(self):
        """The variables of both are there."""
        self.check([*MPI["mpiexec.openmpi"], "-n", "1", "mpiexec.hydra", "-n", str(RANKS)])

    @needs("mpiexec.hydra")
    def test_mpich_at_a_port(self):
        """Ranks have a number, as from other launchers that give a port."""
        named = 'export PMI_RANK=$PMI_ID PMI_SIZE=$0 && exec "$@"'
        self.check(["mpiexec.hydra", "-pmi-port", "-n", str(RANKS), "sh", "-c", named, str(RANKS)])

    @needs("mpiexec.hydra")
    def test_mpich_at_a_port_of_another_job(self):
        named = 'export PMI_RANK=$PMI_ID PMI_SIZE=3 && exec "$@"'
        done = self.train(["mpiexec.hydra", "-pmi-port", "-n", "2", "sh", "-c", named, "sh"], "other")
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stdout, r"PMI_PORT=.*: the server says size=2, the environment 3; it is that of another job")

    @needs("mpiexec.hydra")
    def test_mpich_with_a_closed_descriptor(self):
        closed = 'eval "exec $PMI_FD>&-" && exec "$@"'
        start = ["mpiexec.hydra", "-n", "2", "bash", "-c", closed, "bash"]
        done = self.train(start, "closed")
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stdout, r"rank [01]: PMI_FD=\d+: descriptor \d+ of this process is no connection \(.*\); a program between")

    @needs("mpiexec.hydra")
    def test_an_address_wins_over_mpich(self):
        """With it the descriptor is not touched."""
        closed = 'eval "exec $PMI_FD>&-" && exec "$@"'
        start = ["mpiexec.hydra", "-n", str(RANKS), "bash", "-c", closed, "bash"]
        port = 20000 + 16 * int(free_job())
        self.check(start, SOTTO_RENDEZVOUS=f"tcp://127.0.0.1:{port}")

    @unittest.skipUnless(TORCHRUN.exists(), f"{TORCHRUN} is not there: integration/setup.sh test installs it")
    def test_torchrun(self):
        self.check([str(TORCHRUN), "--nproc-per-node", str(RANKS), "--master-port", str(free_port()), "--no-python", "--"])

    def test_slurm(self):
        job = {"SLURM_NTASKS": str(RANKS), "SLURM_JOB_ID": free_job(), "SLURM_STEP_ID": "0", "OPENBLAS_NUM_THREADS": "1"}
        for number, nodes in enumerate(("localhost", "127.0.0.[1-2],other5")):
            with self.subTest(nodes=nodes):
                name = f"slurm{number}"
                ranks = [
                    subprocess.Popen(self.words(name), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                     env={**without_launchers(), **job, "SLURM_STEP_NODELIST": nodes, "SLURM_PROCID": str(rank)})
                    for rank in range(RANKS)]
                for rank in ranks:
                    out, _ = rank.communicate(timeout=TIMEOUT_S)
                    self.assertEqual(rank.returncode, 0, out)
                self.assertEqual(self.figures(name), self.expected)

    def test_slurm_batch_script_without_srun(self):
        """It is one process with the variables of rank 0."""
        job = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": free_job(), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
        done = self.train([], "alone", SOTTO_TIMEOUT_US="1000000", **job)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("rank 1 did not come; the environment says that the group has 2 ranks (SLURM_PROCID=0, SLURM_NTASKS=2)", done.stdout)


if __name__ == "__main__":
    RUN, TRAINER, LIBRARY = sys.argv[1:4]
    del sys.argv[1:4]
    unittest.main()
