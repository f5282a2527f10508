"""The examples of integration/launchers start their program, each as its launcher does, or as a stand-in for it does.

    test_launchers.py LIBSOTTO

Stand-ins for mpirun and srun start the processes of a job here, with the variables that those set.
"""

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from launcher_environment import MPI, ROOT, TORCHRUN, environment, free_job, free_port

FOLDER = ROOT / "integration/launchers"
TIMEOUT_S = 200

# Starts RANKS processes of its last words, with what RANK_NAME and SIZE_NAME say in their environments.
STAND_IN = """#!{python}
import os, subprocess, sys
words, dropped = sys.argv[1:], {dropped}
while words and words[0].startswith("-"):
    word = words.pop(0)
    if word.split("=")[0] in dropped:
        del words[:dropped[word.split("=")[0]]]
    else:
        sys.exit(f"the stand-in does not know {{word}}")
processes = [subprocess.Popen(words, env={{**os.environ, "{rank}": str(i), "{size}": "2"}}) for i in range(2)]
sys.exit(max(p.wait() for p in processes))
"""


class Launchers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.bin = Path(folder.name)

    def program(self, name, text):
        path = self.bin / name
        path.write_text(text, encoding="ascii")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def stand_in(self, name, rank, size, dropped):
        self.program(name, STAND_IN.format(python=sys.executable, rank=rank, size=size, dropped=repr(dropped)))

    def run_it(self, *command, ranks=2, **variables):
        path = f"{self.bin}:{variables.pop('PATH', os.environ['PATH'])}"
        done = subprocess.run([str(word) for word in command], env=environment(LIBRARY, PATH=path, **variables),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False)
        self.assertEqual(done.returncode, 0, done.stdout)
        for rank in range(ranks):
            self.assertIn(f"rank {rank} of {ranks}: 20 steps", done.stdout)

    def test_torchrun(self):
        if not TORCHRUN.exists():
            self.skipTest(f"{TORCHRUN} is not there: integration/setup.sh test installs it")
        self.run_it(FOLDER / "torchrun.sh", PORT=str(free_port()), RANKS="2", PATH=f"{TORCHRUN.parent}:{os.environ['PATH']}")

    def test_mpi(self):
        """Open MPI, MPICH, and for want of both a stand-in, whose ranks have an address."""
        found = [name for name in MPI if shutil.which(name)]
        for name in found:
            self.program("mpirun", f'#!/bin/sh\nexec {" ".join(MPI[name])} "$@"\n')
            self.run_it(FOLDER / "mpi.sh", "-n", "2")
            self.run_it(FOLDER / "mpi.sh", "-n", "2", "--", sys.executable, FOLDER / "train.py")
        if not found:
            self.stand_in("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", {"-n": 1})
            self.run_it(FOLDER / "mpi.sh", "-n", "2", SOTTO_RENDEZVOUS=f"tcp://127.0.0.1:{free_port()}")

    def test_slurm(self):
        script = FOLDER / "slurm.sbatch"
        self.assertEqual(script.read_text(encoding="ascii").splitlines()[0], "#!/bin/bash")  # sbatch asks for it
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", "-S", "warning", str(script)], check=True)
        self.stand_in("srun", "SLURM_PROCID", "SLURM_NTASKS", {"--kill-on-bad-exit": 0})
        job = {"SLURM_STEP_NODELIST": "127.0.0.[1-2],other", "SLURM_JOB_ID": free_job(), "SLURM_SUBMIT_DIR": str(ROOT)}
        self.run_it("bash", script, **job)

    def test_kubernetes(self):
        if importlib.util.find_spec("yaml") is None:
            self.skipTest("this Python has no yaml")
        import yaml
        job = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text(encoding="ascii"))
        self.assertEqual((job["apiVersion"], job["kind"]), ("kubeflow.org/v1", "PyTorchJob"))
        replicas = job["spec"]["pytorchReplicaSpecs"]
        self.assertEqual((sorted(replicas), replicas["Master"]["replicas"]), (["Master", "Worker"], 1))
        size = sum(kind["replicas"] for kind in replicas.values())
        pods = [kind["template"]["spec"]["containers"] for kind in replicas.values()]
        for containers in pods:
            self.assertEqual([container["name"] for container in containers], ["pytorch"])  # the operator asks for this name
        container, = pods[0]
        own = {variable["name"]: variable["value"] for variable in container["env"]}
        port = str(free_port())
        own |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes = [
            subprocess.Popen(container["command"], cwd=FOLDER, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             env=environment(LIBRARY, RANK=str(rank), **own))
            for rank in range(size)]
        for rank, process in enumerate(processes):
            out, _ = process.communicate(timeout=TIMEOUT_S)
            self.assertEqual(process.returncode, 0, out)
            self.assertIn(f"rank {rank} of {size}: 20 steps", out)


if __name__ == "__main__":
    LIBRARY = sys.argv.pop(1)
    unittest.main()
