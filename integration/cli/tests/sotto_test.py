#!/usr/bin/python3
"""sotto info, config and bench: sotto_test.py PATH-OF-SOTTO"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

SOTTO = ""
LAMB = '{"train_batch_size": 8, "optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 5}}}'


def sotto(*args, program=None, **kwargs):
    return subprocess.run([program or SOTTO, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60,
                          check=False, **kwargs)


class Info(unittest.TestCase):
    def test_text(self):
        done = sotto("info", env={**os.environ, "SOTTO_SPIN_US": "77"})
        self.assertEqual(done.returncode, 0, done.stderr)
        for word in ("version", "ABI", "cpu", "inproc, tcp", "1bit", "OneBitLamb", "scalar"):
            self.assertIn(word, done.stdout)
        # A variable that is set is marked and has its value.
        line = [line for line in done.stdout.splitlines() if "SOTTO_SPIN_US" in line]
        self.assertEqual(line[0].split()[:3], ["*", "SOTTO_SPIN_US", "77"])

    def test_json(self):
        report = json.loads(sotto("info", "--json").stdout)
        self.assertEqual(report["build"]["version"], report["context"]["version"])
        self.assertIn("tcp", report["build"]["transports"])
        names = [parameter["name"] for parameter in report["context"]["parameters"]]
        self.assertIn("SOTTO_TIMEOUT_US", names)

    def test_bad_variable(self):
        done = sotto("info", env={**os.environ, "SOTTO_SPIN_US": "many"})
        self.assertEqual(done.returncode, 1)
        self.assertIn("SOTTO_SPIN_US", done.stderr)


class Config(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = os.path.join(folder.name, "config.json")

    def config(self, text, *args):
        with open(self.file, "w", encoding="utf-8") as f:
            f.write(text)
        return sotto("config", self.file, *args)

    def test_text(self):
        done = self.config(LAMB, "--world-size", "4", "--params", "1000000")
        self.assertEqual(done.returncode, 0, done.stderr)
        for word in ("This configuration can run here.", "Optimizer OneBitLamb", "freeze_step", "full_precision", "1 to 4", "5 to the end",
                     "compressed", "train_micro_batch_size_per_gpu", "optimizer.params.lr", "acts"):
            self.assertIn(word, done.stdout)

    def test_json_is_the_report_of_the_library(self):
        report = json.loads(self.config(LAMB, "--world-size", "4", "--params", "1000000", "--json").stdout)
        self.assertIs(report["can_run"], True)
        self.assertEqual(report["batch"]["train_micro_batch_size_per_gpu"], 2)
        full, compressed = (stage["payload_bytes_per_update"] for stage in report["stages"])
        self.assertGreater(full, 20 * compressed)

    def test_what_cannot_run(self):
        done = self.config('{"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01}}, "fp16": {"enabled": true}}')
        self.assertEqual(done.returncode, 1)
        self.assertIn("cannot run here", done.stdout)
        self.assertIn("fp16.enabled", done.stdout)

    def test_error_names_the_key(self):
        done = self.config('{"optimizer": {"type": "Lamb", "params": {"lr": 0.01, "weight_decai": 0.1}}}')
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("weight_decai", done.stderr)
        self.assertIn("weight_decay", done.stderr)
        self.assertIn(self.file, done.stderr)

    def test_standard_input_and_missing_file(self):
        self.assertEqual(sotto("config", "-", input=LAMB).returncode, 0)
        done = sotto("config", "no-such-file.json")
        self.assertEqual(done.returncode, 1)
        self.assertIn("cannot open no-such-file.json", done.stderr)


class Others(unittest.TestCase):
    def test_bench_starts_what_lies_beside(self):
        with tempfile.TemporaryDirectory() as folder:
            copy = os.path.join(folder, "sotto")
            shutil.copy(SOTTO, copy)
            library = os.path.join(os.path.dirname(SOTTO), "..", "lib")
            env = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": os.path.abspath(library)}
            done = sotto("bench", "--list", program=copy, env=env)
            self.assertEqual(done.returncode, 1)
            self.assertIn("sotto-perf is neither beside sotto nor in PATH", done.stderr)

            perf = os.path.join(folder, "sotto-perf")
            with open(perf, "w", encoding="ascii") as f:
                f.write('#!/bin/sh\necho "got: $@"\nexit 7\n')
            os.chmod(perf, 0o755)
            done = sotto("bench", "--row", "3", "--help", program=copy, env=env)
            self.assertEqual((done.returncode, done.stdout), (7, "got: --row 3 --help\n"))

    def test_usage(self):
        for args in ((), ("nothing",), ("config",), ("config", "x", "--world-size", "0"), ("info", "--yaml")):
            done = sotto(*args)
            self.assertEqual(done.returncode, 125, args)
            self.assertIn("Try sotto --help", done.stderr)
        self.assertIn("config", sotto("--help").stdout)
        self.assertRegex(sotto("--version").stdout, r"^sotto [0-9]+\.[0-9]+\.[0-9]+\n$")


if __name__ == "__main__":
    SOTTO = os.path.abspath(sys.argv.pop(1))
    unittest.main()
