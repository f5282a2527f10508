#!/usr/bin/python3
"""sotto info, config, plan and bench: sotto_test.py PATH-OF-SOTTO"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOTTO = ""
ZERO_ONE = """{"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4,
  "optimizer": {"type": "ZeroOneAdam", "params": {"lr": 1.5e-4, "var_freeze_step": 3000, "var_update_scaler": 16,
    "local_step_scaler": 20000, "local_step_clipper": 8}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 300000, "warmup_num_steps": 3000, "cos_min_ratio": 0.1}},
  "pipeline": {"stages": 2}}"""
LAMB = '{"train_batch_size": 8, "optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 5}}}'


def sotto(*args, program=None, **kwargs):
    kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60, **kwargs}
    return subprocess.run([program or SOTTO, *args], text=True, check=False, **kwargs)


class Info(unittest.TestCase):
    def test_text(self):
        done = sotto("info", env={**os.environ, "SOTTO_SPIN_US": "77"})
        self.assertEqual(done.returncode, 0, done.stderr)
        for word in ("version", "ABI", "cpu", "inproc, shm, tcp", "onebit", "OneBitLamb", "scalar"):
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

    def test_local_rank_outside_of_local_size(self):
        for rank, size, code in (("9", "7", 1), ("7", "7", 1), ("6", "7", 0), ("9", "0", 0), ("-1", "7", 0)):
            done = sotto("info", env={**os.environ, "SOTTO_LOCAL_RANK": rank, "SOTTO_LOCAL_SIZE": size})
            self.assertEqual(done.returncode, code, done.stderr)
            told = f'environment variable SOTTO_LOCAL_RANK is "{rank}", allowed is a whole number from 0 to 6 (SOTTO_LOCAL_SIZE is 7)\n'
            self.assertEqual(told in done.stderr, code == 1, done.stderr)

    def test_a_rate_of_another_transport(self):
        for transport, rate, told in (("shm", "5", 1), ("inproc", "5", 1), ("tcp", "5", 0), ("auto", "5", 0), ("shm", "0", 0)):
            done = sotto("info", env={**os.environ, "SOTTO_TRANSPORT": transport, "SOTTO_RATE_LIMIT_MBIT": rate})
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stderr.count("SOTTO_RATE_LIMIT_MBIT is for transport tcp and has no effect on messages over "
                                               f"{transport}, which SOTTO_TRANSPORT names\n"), told, done.stderr)


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
        done = self.config('{"optimizer": {"type": "Adam", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 1}}')
        self.assertEqual(done.returncode, 1)
        self.assertIn("cannot run here", done.stdout)
        self.assertIn("zero_optimization.stage 1", done.stdout)
        self.assertIn("zero_optimization.stage 1", done.stderr)

    def test_schedule_stages_memory_and_host(self):
        done = self.config(ZERO_ONE, "--world-size", "4", "--params", "1048576")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
        for line in ("update 1 0", "update 3001 0.00015 (peak)", "update 300000 1.50000", "(end)",
                     "full_precision_updates 120", "compressed_updates 67505", "silent_updates 232375",
                     "updates of stage variance: other 2880, variance 120",
                     "updates of stage local: other 232375, synchronisation 64625",
                     "variance 1 to 3000 other_update 196608, variance_update 6291456",
                     "m 4194304 4", "anchor 4194304 4", "residuals 6291456 6",
                     "train_batch_size 128"):
            self.assertTrue(any(line in found for found in lines), f"{line}\nin\n{done.stdout}")
        self.assertIn("Left to the host framework:\n  pipeline", done.stdout)

    def test_one_cycle_shows_betas(self):
        done = self.config('{"optimizer": {"type": "Adam"}, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, '
                           '"cycle_max_lr": 1, "cycle_first_step_size": 99}}}')
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"update 100 +1\.0 +\(peak\) betas 0\.8, 0\.99\n")

    def test_outer_steps_and_overlap(self):
        done = self.config('{"optimizer": {"type": "AdamW"}, "sotto": {"hierarchy": "auto", "outer": {"preset": "co2", "codec": "int8"}}}')
        self.assertEqual(done.returncode, 0, done.stderr)
        for line in (r"Outer steps:\n", r"  penalty +gap_ema\n", r"  codec +block 256, .*type int8\n", r"  period +48\n", r"  hierarchy +auto\n"):
            self.assertRegex(done.stdout, line)
        done = self.config('{"optimizer": {"type": "AdamW"}, "sotto": {"overlap": {}}}')
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"\nOverlap:\n(  .*\n)*  unused +error\n")

    def test_levels_have_bytes_that_the_file_does_not_tell(self):
        done = self.config(LAMB[:-1] + ', "sotto": {"hierarchy": "sharded"}}', "--world-size", "4", "--params", "1000000")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"full_precision +1 to 4 +-")
        self.assertIn("they depend on how many ranks share a host", done.stdout)
        self.assertNotIn("share a host", self.config(LAMB, "--world-size", "4", "--params", "1000000").stdout)

    def test_batch_equation(self):
        self.assertEqual(self.config('{"train_batch_size": 8, "optimizer": {"type": "Adam"}}', "--world-size", "4").returncode, 0)
        done = self.config('{"train_batch_size": 9, "optimizer": {"type": "Adam"}}', "--world-size", "4")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("train_batch_size 8 would fit", done.stderr)

    def test_numbers(self):
        for name, value, allowed in (
            ("--params", "-5", "a whole number >= 0"),
            ("--params", "18446744073709551617", "a whole number >= 0"),
            ("--world-size", "-1", "a whole number from 1 to 1048576"),
        ):
            done = self.config(LAMB, name, value)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertIn(f"{name}: found {value}, allowed is {allowed}\n", done.stderr)
        self.assertEqual(json.loads(self.config(LAMB, "--params", "010", "--json").stdout)["n_params"], 10)

    def test_base64(self):
        word = base64.urlsafe_b64encode(LAMB.encode()).decode()
        for done in (sotto("config", word), self.config(word)):
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("Optimizer OneBitLamb", done.stdout)
        bad = base64.urlsafe_b64encode(LAMB.replace("freeze_step", "freeze_stop").encode()).decode()
        done = sotto("config", bad)
        self.assertEqual(done.returncode, 1)
        self.assertIn("decoded from base64url", done.stderr)
        self.assertIn("freeze_step", done.stderr)

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
        self.assertIn("cannot open no-such-file.json: No such file or directory", done.stderr)
        folder = os.path.dirname(self.file)
        done = sotto("config", folder)
        self.assertEqual((done.returncode, done.stderr), (1, f"sotto: cannot read {folder}: Is a directory\n"))
        with open(self.file, "w", encoding="utf-8"):
            pass
        done = sotto("config", self.file)
        self.assertEqual((done.returncode, done.stderr), (1, f"sotto: {self.file} is empty\n"))
        with open(self.file, encoding="utf-8") as empty:
            done = sotto("config", "-", stdin=empty)
        self.assertEqual((done.returncode, done.stderr), (1, "sotto: standard input is empty\n"))
        done = sotto("config", "")
        self.assertEqual((done.returncode, done.stderr), (1, "sotto: cannot open '': No such file or directory\n"))

    def test_a_byte_that_ends_texts(self):
        plan = ("--ranks", "4", "--bandwidth", "1gbit", "--latency", "1ms", "--step-time", "20ms", "--params", "1000000")
        Path(self.file).write_bytes(b'{"optimizer": {"type": "AdamW"}}\0{"sotto": 1}')
        for args in (("config", self.file), ("plan", self.file, *plan)):
            done = sotto(*args)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertEqual(done.stderr, f"sotto: {self.file}: byte 32 is 0, which no JSON has\n")


CO2 = '{"optimizer": {"type": "AdamW"}, "sotto": {"outer": {"preset": "co2", "codec": "onebit", "period": %d}}}  // a file'


class Plan(unittest.TestCase):
    def plan(self, text, *changed):
        args = {"--ranks": "4", "--bandwidth": "100mbit", "--latency": "0.1ms", "--step-time": "20ms", "--params": "1000000"}
        args.update(changed[i : i + 2] for i in range(0, len(changed) - 1, 2))
        words = [word for pair in args.items() for word in pair if word]
        return sotto("plan", "-", *words, input=text)

    def test_text(self):
        done = self.plan(CO2 % 1)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
        self.assertIn("1000000 parameters, 4 ranks, 100 Mbit/s of which 95.6 % carry messages, latency 0.1 ms, steps of 20 ms", lines)
        for method in ("co2", "co2_paper", "diloco", "streaming_diloco", "slowmo", "cocod"):
            self.assertTrue(any(line.startswith(f"{method} fp32 ") for line in lines), method)
        for codec in ("onebit", "bf16", "int8", "int4"):
            self.assertTrue(any(line.startswith(f"co2 {codec} ") for line in lines), codec)
        self.assertTrue(any(line.startswith("Take: ") for line in lines))
        self.assertTrue(any(line.startswith("configuration onebit 1 1 ") for line in lines), done.stdout)

    def test_counts_have_their_unit(self):
        self.assertTrue(self.plan('{}', "--params", "1").stdout.startswith("1 parameter, 4 ranks, "))

    def test_late_and_hidden(self):
        # 375 kB of 4 million parameters' bits twice 3/4, 63 ms of 100 Mbit/s; kernels as they are here now.
        late = self.plan(CO2 % 1, "--params", "4000000")
        self.assertRegex(late.stdout, r"A delay of ([0-9]+) steps and a period of \1(, or [0-9.]{3,} Mbit/s,)? would hide its averages")
        self.assertIn("Its averages are hidden.", self.plan(CO2 % 1000, "--params", "4000000").stdout)
        blocking = self.plan('{"preset": "diloco"}')
        self.assertIn("It waits for every average: its delay is 0.", blocking.stdout)

    def test_json(self):
        done = self.plan('{"preset": "streaming_diloco", "period": 8, "delay": 2, "fragments": 2}', "--params", "1000000,3000000", "--json", "")
        self.assertEqual(done.returncode, 0, done.stderr)
        report = json.loads(done.stdout)
        self.assertEqual((report["params"], report["tensors"], report["ranks"]), (4000000, 2, 4))
        self.assertEqual(report["configuration"]["fragments"], 2)
        self.assertEqual(report["configuration"]["payload_bytes_per_launch"], 6000000)
        self.assertAlmostEqual(report["link"]["latency_ms"], 0.1)
        gbit = json.loads(self.plan('{}', "--bandwidth", "2.5gbit", "--step-time", "1.5s", "--latency", "7us", "--json", "").stdout)
        self.assertEqual((gbit["link"]["bandwidth_mbit"], gbit["step_ms"]), (2500, 1500))
        self.assertAlmostEqual(gbit["link"]["latency_ms"], 0.007)

    def test_errors(self):
        done = self.plan('{}', "--params", "0")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("params: found 0, allowed is a whole number >= 1 and <= 17179869184 (elements)", done.stderr)
        done = self.plan(LAMB)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("sotto.outer: missing", done.stderr)
        done = self.plan('{"fragments": 3, "period": 3}')
        self.assertIn("sotto.outer.fragments: found 3 fragments, allowed is at most the number of tensors, 1", done.stderr)
        done = sotto("plan", "-", "--ranks", "4", "--bandwidth", "1gbit", "--latency", "1ms", "--step-time", "20ms", "--params", "1000",
                     input='{"preset": "co\udcff2"}', errors="surrogateescape")
        self.assertEqual((done.returncode, done.stderr), (1, "sotto: -: invalid UTF-8 byte at index 14: 0xFF\n"))
        for name, value, allowed in (
            ("--bandwidth", "100", "a number > 0 and one of bit, kbit, mbit, gbit behind it: 2.5mbit"),
            ("--bandwidth", "0mbit", "a number > 0 and one of bit, kbit, mbit, gbit behind it: 2.5mbit"),
            ("--latency", "1 ms", "a number >= 0 and one of ns, us, ms, s behind it: 2.5ms"),
            ("--latency", "-1ms", "a number >= 0 and one of ns, us, ms, s behind it: 2.5ms"),
            ("--step-time", "fast", "a number > 0 and one of ns, us, ms, s behind it: 2.5ms"),
            ("--step-time", "0ms", "a number > 0 and one of ns, us, ms, s behind it: 2.5ms"),
            ("--latency", "infms", "a number >= 0 and one of ns, us, ms, s behind it: 2.5ms"),
            ("--bandwidth", "1e306gbit", "a number > 0 and one of bit, kbit, mbit, gbit behind it: 2.5mbit"),
            ("--bandwidth", "1e-322bit", "a number > 0 and one of bit, kbit, mbit, gbit behind it: 2.5mbit"),
            ("--ranks", "0", "a whole number from 1 to 1024"),
            ("--params", "-3", "a whole number >= 0"),
            ("--params", "5,-3", "a whole number >= 0"),
            ("--params", "1e6", "a whole number >= 0"),
            ("--contention", "nan", "a number from 0 to 1000"),
        ):
            done = self.plan('{}', name, value)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertIn(f"{name}: found {value.rpartition(',')[2]}, allowed is {allowed}\n", done.stderr)


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

            os.remove(perf)
            os.symlink("/bin/sh", perf)
            self.assertEqual(sotto("bench", "-c", 'echo "$0"', program=copy, env=env).stdout, "sotto bench\n")

    def test_what_cannot_be_written(self):
        plan = ("--ranks", "4", "--bandwidth", "1gbit", "--latency", "1ms", "--step-time", "20ms", "--params", "1000000")
        with open("/dev/full", "w", encoding="ascii") as full:
            for args in (("info",), ("info", "--json"), ("config", "-"), ("config", "-", "--json"), ("plan", "-", *plan), ("--help",),
                         ("--version",)):
                done = sotto(*args, input="{}", stdout=full)
                self.assertEqual((done.returncode, done.stderr),
                                 (1, "sotto: cannot write standard output: No space left on device\n"), args)

    def test_usage(self):
        for args in ((), ("nothing",), ("config",), ("config", "x", "--world-size", "0"), ("plan", "x", "--ranks", "4"), ("info", "--yaml")):
            done = sotto(*args)
            self.assertEqual(done.returncode, 2, args)
            self.assertIn("Try sotto --help", done.stderr)
        for args, text in (
            ((), "A subcommand is required; commands are info, config, plan, bench"),
            (("nosuch", "info.json"), "unknown command nosuch; commands are info, config, plan, bench"),
            (("--nosuch",), "unknown option --nosuch; commands are info, config, plan, bench"),
            (("info", "nosuch"), "The following argument was not expected: nosuch"),
            (("config", "x", "--world-size", "2", "--world-size", "3"), "--world-size: found 2 times, allowed is once"),
        ):
            done = sotto(*args)
            self.assertEqual((done.returncode, done.stderr), (2, f"sotto: {text}\nTry sotto --help.\n"))
        self.assertIn("config", sotto("--help").stdout)
        self.assertRegex(sotto("--version").stdout, r"^sotto [0-9]+\.[0-9]+\.[0-9]+\n$")


    def test_standard_streams_that_are_closed(self):
        for closed in ((1,), (0, 1)):
            done = sotto("info", preexec_fn=lambda fds=closed: [os.close(fd) for fd in fds])
            self.assertEqual((done.returncode, done.stderr), (1, "sotto: cannot write standard output: Bad file descriptor\n"))
        done = sotto("config", "-", preexec_fn=lambda: os.close(0))
        self.assertEqual((done.returncode, done.stderr), (1, "sotto: standard input is empty\n"))


class Documents(unittest.TestCase):
    def test_options_on_all_pages_exist(self):
        helps = {command: sotto(command, "--help").stdout for command in ("info", "config", "plan")}
        pages = [*ROOT.glob("*.md"), *(page for room in ("docs", "integration", "bindings", "core") for page in (ROOT / room).rglob("*.md"))]
        found = 0
        for page in pages:
            for command, words in re.findall(r"\bsotto (info|config|plan)\b([^`\n]*)", page.read_text(encoding="utf-8")):
                for option in re.findall(r"(?<!\S)--[\w-]+", words):
                    self.assertIn(f"{option} ", helps[command], f"{page}: sotto {command}{words}")
                    found += 1
        self.assertGreater(found, 5)


if __name__ == "__main__":
    SOTTO = os.path.abspath(sys.argv.pop(1))
    unittest.main()
