"""integration/quickstart.sh around stand-ins for the launcher and the trainer: options, results, failure, interruption."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60

# Starts the ranks as sotto-run does: environment, wrapper, exit code, everything ends on SIGTERM.
LAUNCHER = """#!/usr/bin/env python3
import os, shlex, signal, subprocess, sys
words = sys.argv[1:]
split = words.index("--")
options, program = words[:split], words[split + 1:]
ranks = int(options[options.index("-n") + 1])
wrapper = shlex.split(options[options.index("--wrapper") + 1]) if "--wrapper" in options else []
started = [subprocess.Popen(wrapper + program, env={**os.environ, "SOTTO_RANK": str(r)}) for r in range(ranks)]
def stop(*_):
    for rank in started: rank.kill()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
sys.exit(max(rank.wait() for rank in started))
"""

# Writes the files of a run whose figures are known.
TRAINER = """#!/usr/bin/env python3
import json, os, pathlib, sys, time
sys.dont_write_bytecode = True
sys.path.insert(0, os.environ["TEST_SYNTHETIC"])
import synthetic
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
rank = os.environ["SOTTO_RANK"]
pathlib.Path(os.environ["TEST_SEEN"], value("--name") + "-" + rank).write_text(json.dumps(
    {"words": words, "listen": os.environ.get("SOTTO_LISTEN"), "limit": os.environ.get("SOTTO_RATE_LIMIT_MBIT"),
     "config": json.loads(pathlib.Path(value("--config")).read_text())}))
time.sleep(float(os.environ.get("TEST_SLEEP", "0")))
if rank != "0": sys.exit(0)
if os.environ.get("TEST_FAIL") == value("--name"): sys.exit("the disk is full")
log, steps = pathlib.Path(value("--log")), int(value("--steps"))
onebit = "onebit" in value("--name")
synthetic.write_run(log.parent, log.stem, steps=steps, floor=1.25 if onebit else 1.2,
                    freeze=steps // 5 if onebit else None, sent_off_by=int(os.environ.get("TEST_OFF", "0")))
"""


def lab_reason():
    """None where network namespaces can be made, else why not."""
    check = subprocess.run([str(ROOT / "integration/netns/lab.sh"), "check"], capture_output=True, text=True, check=False)
    if check.returncode != 0:
        return check.stdout.strip()
    return None if check.stdout.strip() == "root" else "only inside a user namespace"


class Quickstart(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="sotto test ")  # a blank in every path
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.root = self.folder / "checkout"
        shutil.copytree(ROOT / "integration", self.root / "integration", ignore=shutil.ignore_patterns("__pycache__"))
        programs = self.root / "build/quickstart/bin"
        programs.mkdir(parents=True)
        for name, text in (("sotto-run", LAUNCHER), ("sotto-c-trainer", TRAINER)):
            (programs / name).write_text(text, encoding="utf-8")
            (programs / name).chmod(0o755)
        self.seen = self.folder / "seen"
        self.seen.mkdir()
        self.out = self.folder / "out"

    def environment(self, **more):
        # QUICKSTART_INSIDE: setup and build are done already, which is what the script itself says inside a namespace.
        return {**os.environ, "QUICKSTART_INSIDE": "yes", "TEST_SYNTHETIC": str(ROOT / "tests/report"),
                "TEST_SEEN": str(self.seen), **more}

    def command(self, *options):
        return [str(self.root / "integration/quickstart.sh"), "--out", str(self.out), *options]

    def run_it(self, *options, isolation="rate_limiter", **environment):
        return subprocess.run(self.command("--isolation", isolation, *options), env=self.environment(**environment),
                              capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    def what_rank_saw(self, name, rank=0):
        return json.loads((self.seen / f"{name}-{rank}").read_text(encoding="utf-8"))

    def left_behind(self):
        return sorted(p.name for p in self.folder.iterdir() if p.name not in ("checkout", "seen", "out"))

    def test_results_and_what_the_trainer_is_told(self):
        run = self.run_it("--steps", "360", "--links", "50")
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertEqual(sorted(p.name for p in self.out.iterdir()),
                         ["lamb.jsonl", "onebit_lamb.jsonl", "report.html", "summary.json"])
        summary = json.loads((self.out / "summary.json").read_text(encoding="utf-8"))
        self.assertEqual((summary["links_mbit"], summary["isolation"]), (50, "rate_limiter"))
        self.assertNotIn("seeds", summary)
        seen = self.what_rank_saw("onebit_lamb", 3)
        self.assertEqual(seen["limit"], "50")
        self.assertEqual(seen["config"]["optimizer"]["params"]["freeze_step"], 72)
        self.assertIn("isolation rate_limiter", run.stdout)
        self.assertIn("report.html", run.stdout)
        self.assertEqual(self.left_behind(), [])

    def test_seeds_replace_earlier_results(self):
        self.assertEqual(self.run_it("--steps", "40").returncode, 0)
        run = self.run_it("--steps", "80", "--seeds", "5,6")
        self.assertEqual(run.returncode, 0, run.stderr)
        summary = json.loads((self.out / "summary.json").read_text(encoding="utf-8"))
        self.assertEqual([one["seed"] for one in summary["seeds"]], [5, 6])
        self.assertEqual(summary["lamb"]["steps"], 80)
        self.assertTrue((self.out / "lamb-seed6.jsonl").exists())
        words = self.what_rank_saw("onebit_lamb-seed6")["words"]
        self.assertEqual(words[words.index("--seed") + 1], "6")
        self.assertEqual(self.left_behind(), [])

    def test_data_paths_are_passed_on(self):
        paths = [self.folder / "a text.txt", self.folder / "b.txt"]
        for path in paths:
            path.write_text("x", encoding="utf-8")
        self.assertEqual(self.run_it("--data", *map(str, paths), "--steps", "40").returncode, 0)
        words = self.what_rank_saw("lamb")["words"]
        self.assertEqual(words[words.index("--data") + 1:][:2], list(map(str, paths)))

    def test_a_failed_run_keeps_the_old_results(self):
        self.assertEqual(self.run_it("--steps", "40").returncode, 0)
        before = (self.out / "summary.json").read_text(encoding="utf-8")
        run = self.run_it("--steps", "40", TEST_FAIL="onebit_lamb")
        self.assertEqual(run.returncode, 1)
        self.assertIn("the disk is full", run.stderr)
        self.assertIn("onebit_lamb run failed", run.stderr)
        self.assertEqual((self.out / "summary.json").read_text(encoding="utf-8"), before)
        self.assertEqual(self.left_behind(), [])

    def test_figures_that_fail_a_check_are_an_exit_code(self):
        run = self.run_it("--steps", "40", TEST_OFF="8")
        self.assertEqual(run.returncode, 3)
        self.assertIn("CHECK FAILED", run.stdout)
        self.assertTrue((self.out / "report.html").exists())

    def test_other_peoples_files_are_not_replaced(self):
        self.out.mkdir()
        (self.out / "thesis.tex").write_text("years of work", encoding="utf-8")
        run = self.run_it("--steps", "40")
        self.assertEqual(run.returncode, 1)
        self.assertIn("thesis.tex", run.stderr)
        self.assertTrue((self.out / "thesis.tex").exists())

    def test_bad_options(self):
        cases = [(["--fast"], "unknown option '--fast'"), (["--steps"], "--steps needs a value"),
                 (["--steps", "0"], "'0'"), (["--steps", "many"], "'many'"), (["--seeds", "1,,2"], "'1,,2'"),
                 (["--seeds", "2,2"], "twice"), (["--links", "-5"], "'-5'"), (["--isolation", "vm"], "'vm'"),
                 (["--data", "/no/such/file"], "/no/such/file")]
        for options, message in cases:
            run = subprocess.run(self.command(*options), env=self.environment(), capture_output=True, text=True,
                                 timeout=DEADLINE_S, check=False)
            self.assertNotEqual(run.returncode, 0, options)
            self.assertIn(message, run.stderr)
            self.assertFalse(self.out.exists())

    def test_help(self):
        run = subprocess.run(self.command("--help"), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        self.assertEqual(run.returncode, 0)
        for option in ("--quick", "--steps", "--seeds", "--data", "--links", "--isolation", "--out"):
            self.assertIn(option, run.stdout)

    def wait_for(self, condition, what):
        end = time.monotonic() + DEADLINE_S
        while not condition():
            self.assertLess(time.monotonic(), end, f"waited in vain: {what}")
            time.sleep(0.05)

    def namespaces_of(self, pid):
        listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
        return [line for line in listing.splitlines() if line.startswith(f"sotto-quickstart-{pid}-")]

    def interrupt(self, isolation, which):
        """Starts a run that would last for minutes, interrupts it, and returns its exit code."""
        process = subprocess.Popen(self.command("--isolation", isolation), env=self.environment(TEST_SLEEP="300"),
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            self.wait_for(lambda: len(list(self.seen.iterdir())) == 4, "four ranks")
            if isolation == "netns":
                self.assertEqual(len(self.namespaces_of(process.pid)), 5)
                self.assertEqual([self.what_rank_saw("lamb", r)["listen"] for r in range(4)],
                                 [f"10.79.0.{r + 1}" for r in range(4)])
            process.send_signal(which)
            code = process.wait(DEADLINE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        ranks = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        self.assertNotIn(str(self.root / "build/quickstart/bin/sotto-c-trainer"), ranks)
        self.assertEqual(self.namespaces_of(process.pid), [])
        self.assertEqual(self.left_behind(), [])
        self.assertFalse(self.out.exists())
        return code

    def test_interrupt_ends_everything(self):
        self.assertEqual(self.interrupt("rate_limiter", signal.SIGTERM), 130)

    def test_interrupt_removes_the_namespaces(self):
        reason = lab_reason()
        if reason:
            self.skipTest(f"no network namespaces: {reason}")
        self.assertEqual(self.interrupt("netns", signal.SIGINT), 130)


if __name__ == "__main__":
    unittest.main()
