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
DEADLINE_S = 120

# Starts the ranks as sotto-run does: environment, wrapper, exit code, everything ends on SIGTERM.
LAUNCHER = """#!/usr/bin/env -S python3 -IS
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
TRAINER = """#!/usr/bin/env -S python3 -IS
import json, os, pathlib, subprocess, sys, time
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
rank = os.environ["SOTTO_RANK"]
traced = "trace-" if os.environ.get("SOTTO_TRACE") else ""
shaping = subprocess.run(["sh", "-c", "PATH=$PATH:/sbin:/usr/sbin tc qdisc show"], capture_output=True, text=True).stdout
pathlib.Path(os.environ["TEST_SEEN"], traced + value("--name") + "-" + rank).write_text(json.dumps(
    {"words": words, "shaping": shaping, "listen": os.environ.get("SOTTO_LISTEN"), "host": os.environ.get("SOTTO_HOST_ID"), "limit": os.environ.get("SOTTO_RATE_LIMIT_MBIT"),
     "config": json.loads(pathlib.Path(value("--config")).read_text())}))
time.sleep(float(os.environ.get("TEST_SLEEP", "0")))
if rank != "0": sys.exit(0)
sys.dont_write_bytecode = True
sys.path.insert(0, os.environ["TEST_SYNTHETIC"])
import synthetic
if os.environ.get("SOTTO_TRACE"): synthetic.write_time_line(os.environ["SOTTO_TRACE"] + ".rank0.json")
if os.environ.get("TEST_FAIL") == value("--name"): sys.exit("the disk is full")
log, steps = pathlib.Path(value("--log")), int(value("--steps"))
onebit = "onebit" in value("--name")
synthetic.write_run(log.parent, log.stem, steps=steps, floor=1.25 if onebit else 1.2,
                    freeze=steps // 5 if onebit else None, sent_off_by=int(os.environ.get("TEST_OFF", "0")),
                    between=0.25 if "sharded" in value("--name") else 0.5)
if os.environ.get("TEST_PERIOD"):
    summary = log.with_name(log.stem + ".summary.json")
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "outer_period": int(os.environ["TEST_PERIOD"])}))
"""

# Says yes to every configuration but one that asks for a refusal; told of each in TEST_SEEN.
TOOL = """#!/usr/bin/env -S python3 -IS
import json, os, pathlib, sys
pathlib.Path(os.environ["TEST_SEEN"], "sotto").write_text(json.dumps(sys.argv[1:]))
print("This configuration ...")
if "refuse me" in pathlib.Path(sys.argv[2]).read_text():
    sys.exit(f"sotto: {sys.argv[2]}: cannot run here: no such optimizer")
"""

MINE = """{ // a configuration of one's own
  "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100, "total_num_steps": 1000,}}
}
"""


def lab_reason():
    """None where network namespaces can be made, else why not."""
    check = subprocess.run([str(ROOT / "integration/netns/lab.sh"), "check"], capture_output=True, text=True, check=False)
    if check.returncode != 0:
        return check.stdout.strip()
    return None if check.stdout.strip() == "root" else "only inside a user namespace"


class Quickstart(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="sotto test fonts ")
        cls.addClassCleanup(folder.cleanup)
        cls.fonts = Path(folder.name)  # which matplotlib lists once for all tests

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="sotto test ")  # a blank in every path
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.root = self.folder / "checkout"
        shutil.copytree(ROOT / "integration", self.root / "integration", ignore=shutil.ignore_patterns("__pycache__"))
        programs = self.root / "build/quickstart/bin"
        programs.mkdir(parents=True)
        (programs.parent / "matplotlib").symlink_to(self.fonts)
        for name, text in (("sotto-run", LAUNCHER), ("sotto-c-trainer", TRAINER), ("sotto", TOOL)):
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
        # Short runs come first, for the time line.
        traced = self.what_rank_saw("trace-onebit_lamb")
        self.assertEqual(traced["config"]["optimizer"]["params"]["freeze_step"], 12)
        self.assertEqual([one["words"][one["words"].index("--steps") + 1] for one in (traced, seen)], ["60", "360"])
        self.assertIn("What rank 0 does, and what is on its way", (self.out / "report.html").read_text(encoding="utf-8"))
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

    def write_config(self, name, text=MINE):
        path = self.folder / "checkout" / name
        path.write_text(text, encoding="utf-8")
        return path

    def out_files(self):
        return sorted(p.name for p in self.out.iterdir())

    def test_one_more_configuration(self):
        config = self.write_config("mine.json")
        run = self.run_it("--steps", "40", "--config", str(config))
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertEqual(self.out_files(), ["lamb.jsonl", "mine.jsonl", "onebit_lamb.jsonl", "report.html", "summary.json"])
        summary = json.loads((self.out / "summary.json").read_text(encoding="utf-8"))
        self.assertEqual(summary["mine"]["steps"], 40)
        at_equal_time = {"baseline_loss_at_equal_time", "loss_at_equal_time", "near_loss_s", "near_loss_reached", "time_to_near_loss"}
        self.assertEqual(set(summary["ratios_mine"]), set(summary["ratios"]) | at_equal_time)
        self.assertEqual(json.loads((self.seen / "sotto").read_text(encoding="utf-8")),
                         ["config", str(config), "--world-size", "4"])
        seen, lamb = self.what_rank_saw("mine", 3), self.what_rank_saw("lamb", 3)
        self.assertEqual(seen["config"]["scheduler"]["params"], {"warmup_num_steps": 4, "total_num_steps": 40})
        for option in ("--seed", "--steps"):
            self.assertEqual(*(words[words.index(option) + 1] for words in (seen["words"], lamb["words"])))
        self.assertIn("run 3 of 3: mine, seed 1", run.stdout)
        self.assertIn("mine: ", run.stdout)
        self.assertEqual(self.left_behind(), [])

    def test_one_more_configuration_without_a_limit_too(self):
        config = str(self.write_config("mine.json"))
        run = self.run_it("--steps", "40", "--seeds", "1,2", "--config", config, "--unlimited-too")
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertEqual([name for name in self.out_files() if name.startswith("mine")],
                         ["mine-seed2.jsonl", "mine-unlimited-seed2.jsonl", "mine-unlimited.jsonl", "mine.jsonl"])
        for seed in ("", "-seed2"):
            limited, unlimited = self.what_rank_saw(f"mine{seed}", 3), self.what_rank_saw(f"mine-unlimited{seed}", 3)
            self.assertEqual((limited["limit"], unlimited["limit"]), ("100", None))
            self.assertEqual(limited["config"], unlimited["config"])
        self.assertEqual(self.what_rank_saw("lamb-seed2")["limit"], "100")
        self.assertIn("run 4 of 8: mine, seed 1, no limit on the links", run.stdout)
        self.assertIn("mine with no limit on the links: ", run.stdout)
        summary = json.loads((self.out / "summary.json").read_text(encoding="utf-8"))
        self.assertEqual(summary["network_costs"]["wall"], 1)
        self.assertEqual([one["mine-unlimited"]["steps"] for one in summary["seeds"]], [40, 40])
        self.assertEqual(self.run_it("--steps", "40").returncode, 0)
        self.assertEqual(self.out_files(), ["lamb.jsonl", "onebit_lamb.jsonl", "report.html", "summary.json"])

    def test_a_measured_period_is_that_of_the_run_without_a_limit(self):
        for period, chosen in (("Auto", 7), (12, 12)):
            text = json.dumps({"optimizer": {"type": "Lamb"}, "sotto": {"outer": {"period": period}}})
            run = self.run_it("--steps", "40", "--seeds", "1,2", "--config", str(self.write_config("mine.json", text)),
                              "--unlimited-too", TEST_PERIOD="7")
            self.assertEqual(run.returncode, 0, run.stderr)
            for name, want in (("mine", period), ("mine-seed2", period), ("mine-unlimited", chosen), ("mine-unlimited-seed2", chosen)):
                self.assertEqual(self.what_rank_saw(name)["config"]["sotto"]["outer"]["period"], want, name)

    def test_the_limit_of_a_lab_is_taken_away(self):
        reason = lab_reason()
        if reason:
            self.skipTest(f"no network namespaces: {reason}")
        config = str(self.write_config("mine.json"))
        run = self.run_it("--steps", "40", "--config", config, "--unlimited-too", isolation="netns")
        self.assertEqual(run.returncode, 0, run.stderr)
        limited, unlimited = self.what_rank_saw("mine")["shaping"], self.what_rank_saw("mine-unlimited")["shaping"]
        self.assertIn("rate 100Mbit", limited)
        self.assertNotIn("rate 100Mbit", unlimited)

    def test_results_with_one_more_are_replaced(self):
        config = str(self.write_config("mine.json"))
        self.assertEqual(self.run_it("--steps", "40", "--seeds", "1,2", "--config", config).returncode, 0)
        self.assertIn("mine-seed2.jsonl", self.out_files())
        other = str(self.write_config("other.json"))
        run = self.run_it("--steps", "40", "--config", other)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertEqual(self.out_files(), ["lamb.jsonl", "onebit_lamb.jsonl", "other.jsonl", "report.html", "summary.json"])
        (self.out / "mine.jsonl").write_text("not the quickstart's any more", encoding="utf-8")
        run = self.run_it("--steps", "40")
        self.assertEqual(run.returncode, 1)
        self.assertIn("mine.jsonl", run.stderr)
        self.assertIn("other.jsonl", self.out_files())

    def test_a_configuration_without_length_is_used_as_it_is(self):
        config = self.write_config("plain.json", '{"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 30}}}')
        run = self.run_it("--steps", "40", "--config", str(config))
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertEqual(self.what_rank_saw("plain")["config"]["optimizer"]["params"]["freeze_step"], 30)
        self.assertIn("plain.json has no scheduler.params.total_num_steps", run.stdout)

    def test_an_unsupported_configuration_fails_before_training(self):
        config = self.write_config("mine.json", "refuse me")
        run = self.run_it("--steps", "40", "--config", str(config))
        self.assertEqual(run.returncode, 1)
        self.assertIn(f"--config: sotto: {config}: cannot run here: no such optimizer", run.stderr)
        self.assertEqual([p.name for p in self.seen.iterdir()], ["sotto"])
        self.assertFalse(self.out.exists())
        self.assertEqual(self.left_behind(), [])

    def test_names_that_are_taken_or_no_words(self):
        for name in ("lamb.json", "onebit_lamb.json", "ratios.json", "ratios_x.json", "seeds.json", "a-seed2.json", "a b.json",
                     "1x.json", "mine.hjson", "x" * 41 + ".json"):
            config = self.write_config(name)
            run = self.run_it("--config", str(config))
            self.assertEqual(run.returncode, 2, name)
            self.assertIn(f"'{name.removesuffix('.json')}'", run.stderr)

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

    def test_a_place_that_cannot_be_written_is_told_before_the_build(self):
        for out in ("/dev/null/out", "/proc/sys/out"):
            run = self.run_it("--out", out, QUICKSTART_INSIDE="no")
            self.assertEqual((run.returncode, run.stdout), (1, ""))
            self.assertIn(f"--out: cannot write to '{Path(out).parent}'", run.stderr)

    def test_bad_options(self):
        cases = [(["--fast"], "unknown option '--fast'"), (["--steps"], "--steps needs a value"),
                 (["--steps", "0"], "'0'"), (["--steps", "many"], "'many'"), (["--seeds", "1,,2"], "'1,,2'"),
                 (["--seeds", "2,2"], "twice"), (["--seeds", "1,02"], "'1,02'"), (["--links", "-5"], "'-5'"), (["--isolation", "vm"], "'vm'"),
                 (["--data", "/no/such/file"], "/no/such/file"), (["--config"], "--config needs a value"),
                 (["--unlimited-too"], "--unlimited-too repeats the run of --config FILE: give one"),
                 (["--unlimited-too", "--hosts", "2x2"], "--config FILE: give one"),
                 (["--hosts", "4"], "'4' is not like 2x2"), (["--hosts", "1x4"], "'1x4'"), (["--hosts", "5x4"], "20 ranks"),
                 (["--hosts", "2x2", "--config", "a.json"], "leave out --config"),
                 (["--hosts", "2x2", "--isolation", "rate_limiter"], "--hosts needs --isolation netns"),
                 (["--config", "/no/such/file.json"], "/no/such/file.json"), (["--config", "/usr"], "'/usr' does not")]
        for options, message in cases:
            run = subprocess.run(self.command(*options), env=self.environment(), capture_output=True, text=True,
                                 timeout=DEADLINE_S, check=False)
            self.assertNotEqual(run.returncode, 0, options)
            self.assertIn(message, run.stderr)
            self.assertFalse(self.out.exists())

    def test_help(self):
        run = subprocess.run(self.command("--help"), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        self.assertEqual(run.returncode, 0)
        for option in ("--quick", "--steps", "--seeds", "--config", "--unlimited-too", "--data", "--links", "--hosts", "--isolation", "--out"):
            self.assertIn(option, run.stdout)

    def test_hosts_of_several_ranks(self):
        reason = lab_reason()
        if reason:
            self.skipTest(f"no network namespaces: {reason}")
        run = self.run_it("--hosts", "2x3", "--steps", "40", isolation="netns")
        self.assertEqual(run.returncode, 0, run.stderr)
        sharded = "onebit_lamb_sharded"
        self.assertEqual(self.out_files(), ["lamb.jsonl", "onebit_lamb.jsonl", f"{sharded}.jsonl", "report.html", "summary.json"])
        for name in ("lamb", sharded):
            seen = [self.what_rank_saw(name, rank) for rank in range(6)]
            self.assertEqual([one["listen"] for one in seen], ["10.79.0.1"] * 3 + ["10.79.0.2"] * 3)
            self.assertEqual(len({one["host"] for one in seen[:3]}), 1)
            self.assertEqual(len({one["host"] for one in seen}), 2)
        flat, levels = (self.what_rank_saw(name)["config"] for name in ("onebit_lamb", sharded))
        self.assertEqual(levels.pop("sotto"), {**flat.pop("sotto"), "hierarchy": "sharded"})
        self.assertEqual(levels, flat)
        summary = json.loads((self.out / "summary.json").read_text(encoding="utf-8"))
        self.assertEqual((summary["hosts"], summary["hierarchy"]["between_hosts"]), ([2, 3], 2))
        self.assertIn("2 network namespaces of 3 ranks each", run.stdout)
        self.assertIn("hierarchy saves", run.stdout)
        self.assertEqual(self.left_behind(), [])

    def wait_for(self, condition, what):
        end = time.monotonic() + DEADLINE_S
        while not condition():
            self.assertLess(time.monotonic(), end, f"waited in vain: {what}")
            time.sleep(0.05)

    def namespaces_of(self, pid):
        listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
        return [line for line in listing.splitlines() if line.startswith(f"sotto-quickstart-{pid}-")]

    def ranks(self):
        listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        return str(self.root / "build/quickstart/bin/sotto-c-trainer") in listing

    def interrupt(self, isolation, which):
        """Starts a run that would last for minutes, interrupts it, and returns its exit code."""
        process = subprocess.Popen(self.command("--isolation", isolation), env=self.environment(TEST_SLEEP="300"),
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            self.wait_for(lambda: len(list(self.seen.iterdir())) == 4, "four ranks")
            if isolation == "netns":
                self.assertEqual(len(self.namespaces_of(process.pid)), 5)
                self.assertEqual([self.what_rank_saw("trace-lamb", r)["listen"] for r in range(4)],
                                 [f"10.79.0.{r + 1}" for r in range(4)])
            process.send_signal(which)
            code = process.wait(DEADLINE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.wait_for(lambda: not self.ranks(), "the end of all ranks")
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
