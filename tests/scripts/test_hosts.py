"""The C trainer's first steps on two hosts, which sotto-run --hosts starts: in the network lab, and by a remote shell that
stays here. In the lab mpirun and mpiexec start them too.

test_hosts.py SOTTO_RUN SOTTO_C_TRAINER
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import netlab
from launcher_environment import MPI, without_launchers
from netlab import LAB, NAME, LabCase

STEPS = 20
CONFIG = {"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 10}}}
# As ssh: HOST STRING. Nothing that sotto-run's environment has arrives, but what finds the lab.
ENVIRONMENT = 'env -i PATH="$PATH"'
HERE = f'#!/bin/sh\nexec {ENVIRONMENT} sh -c "$2"\n'
# A host of its own has a name of its own: else its ranks would share memory with the others. MPI's words are many.
IN_LAB = f"""#!/bin/bash
while [[ $1 == -* ]]; do shift; done
case $1 in one | 10.79.0.1) host=1;; two | 10.79.0.2) host=2;; *) echo "no host $1" >&2; exit 255;; esac
exec '{LAB}' exec $host unshare --uts {ENVIRONMENT} NETLAB="$NETLAB" SSH_CONNECTION="10.79.0.9 7 10.79.0.$host 22" \\
  sh -c 'hostname lab$0 && exec sh -c "$1"' $host "${{*:2}}"
"""
# By the program that is looked for: its words for a remote shell, hosts, and a variable that ranks get.
ON_HOSTS = {"mpiexec.openmpi": ("-mca plm_rsh_agent {} --host {}", "-x {0}"),
            "mpiexec.hydra": ("-launcher ssh -launcher-exec {} -hosts {}", "-genv {0} {1}")}
SOTTO_RUN = C_TRAINER = ""


class Trainer:
    """What the two ways to two hosts share."""

    here = []  # what four ranks of one host give

    def make_files(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.files = Path(folder.name)
        (self.files / "text").write_text("".join(f"{i}\n" for i in range(400000)), encoding="ascii")
        (self.files / "config.json").write_text(json.dumps(CONFIG), encoding="ascii")

    def remote_shell(self, text):
        path = self.files / "rsh"
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return ["--rsh", shlex.quote(str(path))]

    def train(self, name, *options):
        blas = [word for k in os.environ if k.startswith("OPENBLAS_") for word in ("-x", k)]  # they decide about the last bits
        out = self.train_by(name, SOTTO_RUN, *options, *blas, "--")
        for line in out.splitlines():
            self.assertTrue(line.startswith("[0] "), line)
        return self.figures(name)

    def train_by(self, name, *start):
        """What ranks print that start by these words."""
        done = subprocess.run(
            [*start, C_TRAINER, "--config", "config.json", "--data", "text", "--steps", str(STEPS),
             "--eval-every", str(STEPS), "--eval-sequences", "32", "--progress", "off", "--log", f"{name}.jsonl",
             "--summary", f"{name}.json"],
            cwd=self.files, env={**without_launchers(), "NETLAB": NAME}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def figures(self, name):
        """Records of the log without times, and the summary."""
        log = [json.loads(line) for line in (self.files / f"{name}.jsonl").read_text(encoding="ascii").splitlines()]
        figures = [{key: record.get(key) for key in ("step", "loss", "eval_loss", "lr", "stage")} for record in log]
        self.assertEqual(len(figures), STEPS + 1)
        return figures, json.loads((self.files / f"{name}.json").read_text(encoding="ascii"))

    def assert_same_training(self, there, ends_there):
        if not Trainer.here:
            Trainer.here.append(self.train("here", "-n", "4"))
        here, ends_here = Trainer.here[0]
        self.assertEqual({record["stage"] for record in here}, {"full precision", "compressed", None})
        self.assertEqual(there, here)
        for key in ("params_hash", "payload_bytes_sent", "payload_bytes_planned"):
            self.assertEqual(ends_there[key], ends_here[key], key)


class OnThisMachine(Trainer, unittest.TestCase):
    def test_two_hosts_have_the_losses_of_one(self):
        self.make_files()
        self.assert_same_training(*self.train("there", "--hosts", "127.0.0.1:2,two:2", *self.remote_shell(HERE)))


class InTheLab(Trainer, LabCase):
    def setUp(self):
        super().setUp()
        self.make_files()
        self.up("2", "1gbit")

    def sent(self, host):
        """Bytes by the network interface of a host."""
        lines = self.do("exec", str(host), "cat", "/proc/net/dev").splitlines()
        return next(int(line.partition(":")[2].split()[8]) for line in lines if line.strip().startswith("eth0:"))

    def test_two_hosts_have_the_losses_of_one(self):
        """The first host by a name that means nothing there: it is known where sshd was connected to."""
        self.assert_same_training(*self.train("there", "--hosts", "one:2,two:2", *self.remote_shell(IN_LAB)))
        for host in (1, 2):
            self.assertGreater(self.sent(host), 1_000_000, f"host {host}")

    def test_mpi(self):
        shell = self.remote_shell(IN_LAB)[1]
        there = [LAB, "exec", "1", "unshare", "--uts", "sh", "-c", 'hostname lab1 && exec "$@"', "sh"]
        for program, (hosts, variable) in ON_HOSTS.items():
            with self.subTest(program):
                if not shutil.which(program):
                    self.skipTest(f"{program} is not there: integration/setup.sh test installs it")
                words = [hosts.format(shell, "10.79.0.1:2,10.79.0.2:2")]
                words += [variable.format(k, v) for k, v in os.environ.items() if k.startswith("OPENBLAS_")]
                before = self.sent(2)
                self.train_by(program, *there, *MPI[program], *" ".join(words).split(), "-n", "4")
                self.assert_same_training(*self.figures(program))
                self.assertGreater(self.sent(2) - before, 1_000_000)

    def test_rendezvous(self):
        for first in ("one", "10.79.0.1"):
            done = subprocess.run([SOTTO_RUN, "--hosts", f"{first}:1,two:1", *self.remote_shell(IN_LAB), "--", "sh", "-c",
                                   "hostname; echo $SOTTO_RENDEZVOUS"], env={**os.environ, "NETLAB": NAME},
                                  stdout=subprocess.PIPE, text=True, timeout=60, check=False)
            lines = sorted(done.stdout.splitlines())
            self.assertEqual((lines[0], lines[2]), ("[0] lab1", "[1] lab2"))
            for line in (lines[1], lines[3]):
                self.assertRegex(line, r"tcp://10\.79\.0\.1:[0-9]+$")

    def test_unknown_host(self):
        done = subprocess.run([SOTTO_RUN, "--hosts", "one:2,three:2", *self.remote_shell(IN_LAB), "--", "true"],
                              env={**os.environ, "NETLAB": NAME}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              timeout=60, check=False)
        self.assertEqual(done.returncode, 125)
        self.assertEqual(done.stderr, "[three] no host three\nsotto-run: host three: the remote shell ended with exit code 255 "
                                      "before sotto-run answered there\n")


if __name__ == "__main__":
    netlab.enter()
    SOTTO_RUN, C_TRAINER = (str(Path(word).resolve()) for word in sys.argv[1:3])
    del sys.argv[1:3]
    unittest.main()
