"""The report: figures of the comparison from known runs, clear errors for bad files, a page that needs nothing else."""

import contextlib
import io
import json
import re
import sys
import tempfile
import unittest
from html.parser import HTMLParser
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "integration")]

import synthetic  # noqa: E402
from report import compare, figures, logs, page, quickstart  # noqa: E402

CONFIGS = [str(ROOT / "integration/configs" / name) for name in ("lamb.json", "onebit_lamb.json")]


class InFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def finish(self, *more):
        """(exit code, standard output, standard error) of `finish` on self.folder."""
        words = ["finish", "--dir", str(self.folder), "--root", str(ROOT), "--links", "100", "--isolation",
                 "rate_limiter", "--network", "limiter <tcp>", "--command", "quickstart.sh", "--configs", *CONFIGS]
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = quickstart.main(words + list(more))
        return code, out.getvalue(), err.getvalue()

    def summary(self):
        return json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))


class Comparison(InFolder):
    def test_keys_are_exactly_those_documented(self):
        synthetic.write_pair(self.folder)
        self.assertEqual(self.finish()[0], 0)
        summary = self.summary()
        self.assertEqual(list(summary), ["links_mbit", "isolation", "unigram_entropy", "lamb", "onebit_lamb", "ratios"])
        self.assertEqual(set(summary["lamb"]), {
            "val_loss", "wall_s", "steps", "compute_s", "codec_s", "exposed_comm_s", "payload_bytes_sent",
            "payload_bytes_planned", "header_bytes_sent"})
        self.assertEqual(set(summary["ratios"]), {
            "wall", "time_to_same_loss", "same_loss_reached", "val_loss", "volume_vs_fp32", "volume_vs_16bit"})
        self.assertEqual((summary["links_mbit"], summary["isolation"]), (100, "rate_limiter"))

    def test_ratios_by_hand(self):
        base, comp = synthetic.write_pair(self.folder, steps=4000)
        self.assertEqual(self.finish()[0], 0)
        r = self.summary()["ratios"]
        # 90 ms a step against 90 ms for a fifth of the steps and 18.5 ms for the rest.
        self.assertAlmostEqual(r["wall"], 90 / (0.2 * 90 + 0.8 * 18.5), places=6)
        self.assertAlmostEqual(r["val_loss"], comp["val_loss"] / base["val_loss"], places=12)
        self.assertAlmostEqual(r["volume_vs_fp32"], 1 / (0.2 + 0.8 / 32), places=2)
        self.assertAlmostEqual(r["volume_vs_16bit"], r["volume_vs_fp32"] / 2, places=12)
        # LAMB is at or below 1-bit LAMB's last loss from the first evaluation that the formula says on.
        target = synthetic.loss_at(4000, 1.25)
        step = next(s for s in range(40, 4001, 40) if synthetic.loss_at(s, 1.2) <= target)
        self.assertTrue(r["same_loss_reached"])
        self.assertAlmostEqual(r["time_to_same_loss"], step * 0.09 / comp["wall_s"], places=6)

    def test_loss_never_reached(self):
        synthetic.write_run(self.folder, "lamb", floor=2.0)
        synthetic.write_run(self.folder, "onebit_lamb", freeze=80, floor=1.2)
        code, out, _ = self.finish()
        r = self.summary()["ratios"]
        self.assertEqual(code, 0)
        self.assertFalse(r["same_loss_reached"])
        self.assertEqual(r["time_to_same_loss"], r["wall"])
        self.assertIn("did not reach", out)

    def test_seeds_and_means(self):
        synthetic.write_pair(self.folder, floor=1.2)
        synthetic.write_pair(self.folder, "-seed7", floor=1.1)
        self.assertEqual(self.finish("--seeds", "3,7", "--list-seeds")[0], 0)
        summary = self.summary()
        self.assertEqual([one["seed"] for one in summary["seeds"]], [3, 7])
        losses = [one["lamb"]["val_loss"] for one in summary["seeds"]]
        self.assertNotEqual(*losses)
        self.assertAlmostEqual(summary["lamb"]["val_loss"], sum(losses) / 2, places=12)
        self.assertEqual(summary["lamb"]["steps"], 400)
        self.assertEqual(len(summary["lamb"]["payload_bytes_sent"]), 4)

    def test_bytes_that_were_not_planned_fail(self):
        synthetic.write_pair(self.folder, sent_off_by=1)
        code, out, _ = self.finish()
        self.assertEqual(code, quickstart.EXIT_CHECK_FAILED)
        self.assertIn("CHECK FAILED: LAMB: payload bytes sent", out)
        self.assertIn("Something is wrong", (self.folder / "report.html").read_text(encoding="utf-8"))

    def test_a_clock_that_does_not_add_up_fails(self):
        summary = synthetic.write_pair(self.folder)[0]
        for factor, code in ((1.019, 0), (1.03, quickstart.EXIT_CHECK_FAILED)):
            changed = {**summary, "wall_s": summary["wall_s"] * factor}
            (self.folder / "lamb.summary.json").write_text(json.dumps(changed), encoding="utf-8")
            self.assertEqual(self.finish()[0], code, factor)

    def test_runs_on_different_data_are_not_compared(self):
        synthetic.write_pair(self.folder)
        path = self.folder / "lamb.summary.json"
        path.write_text(path.read_text(encoding="utf-8").replace("3.16", "3.17"), encoding="utf-8")
        code, _, err = self.finish()
        self.assertEqual(code, quickstart.EXIT_BAD_INPUT)
        self.assertIn("different data", err)


class BadFiles(InFolder):
    def assert_error(self, *words):
        code, _, err = self.finish()
        self.assertEqual(code, quickstart.EXIT_BAD_INPUT)
        for word in words:
            self.assertIn(word, err)
        self.assertFalse((self.folder / "report.html").exists())

    def change(self, name, old, new):
        path = self.folder / name
        text = path.read_text(encoding="utf-8")
        self.assertIn(old, text)
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    def setUp(self):
        super().setUp()
        synthetic.write_pair(self.folder)

    def test_missing_log(self):
        (self.folder / "lamb.jsonl").unlink()
        self.assert_error("lamb.jsonl", "No such file")

    def test_empty_log(self):
        (self.folder / "lamb.jsonl").write_text("", encoding="utf-8")
        self.assert_error("lamb.jsonl", "no step")

    def test_truncated_line(self):
        path = self.folder / "lamb.jsonl"
        path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")
        self.assert_error("lamb.jsonl:410", "not JSON")

    def test_loss_that_is_no_number(self):
        self.change("lamb.jsonl", '"loss": ', '"loss": null, "was": ')
        self.assert_error("lamb.jsonl:1", "'loss' is None")

    def test_steps_that_go_back(self):
        self.change("lamb.jsonl", '"step": 7,', '"step": 5,')
        self.assert_error("ascending")

    def test_log_and_summary_disagree(self):
        self.change("lamb.summary.json", '"steps": 400', '"steps": 401')
        self.assert_error("400 steps", "says 401")

    def test_summary_without_a_figure(self):
        self.change("onebit_lamb.summary.json", '"codec_s"', '"codec"')
        self.assert_error("onebit_lamb.summary.json", "'codec_s' is None")

    def test_summary_with_ranks_missing(self):
        self.change("lamb.summary.json", '"header_bytes_sent": [160000, ', '"header_bytes_sent": [')
        self.assert_error("'header_bytes_sent' has 3 ranks, the others 4")


class Page(InFolder):
    class Links(HTMLParser):
        """Collects what a browser would fetch, and checks that tags are closed in order."""

        VOID = {"meta", "br", "img", "link", "hr", "path", "use", "rect"}

        def __init__(self):
            super().__init__()
            self.outside, self.open = [], []

        def handle_starttag(self, tag, attrs):
            if tag not in self.VOID:
                self.open.append(tag)
            for name, value in attrs:
                if name in ("src", "href", "xlink:href") and not value.startswith("#"):
                    self.outside.append(value)

        def handle_startendtag(self, tag, attrs):
            self.handle_starttag(tag, attrs)
            if tag not in self.VOID:
                self.open.pop()

        def handle_endtag(self, tag):
            if tag not in self.VOID:
                assert self.open.pop() == tag, tag

    def test_is_self_contained_and_complete(self):
        synthetic.write_pair(self.folder)
        self.assertEqual(self.finish()[0], 0)
        text = (self.folder / "report.html").read_text(encoding="utf-8")
        parser = self.Links()
        parser.feed(text)
        self.assertEqual(parser.open, [])
        self.assertEqual(parser.outside, [])
        self.assertNotIn("<script", text)
        self.assertEqual(len(re.findall("<svg", text)), 4)
        for title in ("Loss against samples", "Loss against time", "Bytes per step", "Where a step's time goes"):
            self.assertIn(title.replace("'", "&#x27;"), text)
        self.assertIn("rate limiter", text)
        self.assertIn("limiter &lt;tcp&gt;", text)
        self.assertLess(len(text), 1_000_000)

    def test_quick_runs_say_so(self):
        synthetic.write_pair(self.folder)
        self.finish()
        self.assertNotIn("Quick run", (self.folder / "report.html").read_text(encoding="utf-8"))
        self.finish("--quick")
        self.assertIn("Quick run", (self.folder / "report.html").read_text(encoding="utf-8"))

    def test_text_is_escaped(self):
        self.assertEqual(page.paragraph("a < b & c"), "<p>a &lt; b &amp; c</p>")


class Pieces(unittest.TestCase):
    def test_bytes(self):
        self.assertEqual([figures.bytes_text(v) for v in (0, 999, 1500, 930_000, 2.25e9)],
                         ["0 B", "999 B", "1.5 kB", "930 kB", "2.2 GB"])

    def test_smooth_keeps_length_and_mean_of_constants(self):
        for window in (1, 2, 5, 100):
            self.assertEqual(list(figures.smooth([2.0] * 7, window)), [2.0] * 7)
        self.assertAlmostEqual(figures.smooth([0.0, 3.0, 6.0], 3)[1], 3.0)

    def test_stage_means(self):
        with tempfile.TemporaryDirectory() as folder:
            synthetic.write_pair(folder)
            run = logs.read_run("1-bit LAMB", Path(folder, "onebit_lamb.jsonl"), Path(folder, "onebit_lamb.summary.json"))
        stages = figures.stage_means(run)
        self.assertEqual([(label, steps) for label, _, steps in stages],
                         [("1-bit LAMB\nfull precision", 80), ("1-bit LAMB\ncompressed", 320)])
        self.assertAlmostEqual(stages[1][1]["comm_ms"], 2.5)

    def test_mean(self):
        self.assertEqual(compare.mean([{"a": 1, "b": [1, 2], "c": True}, {"a": 2, "b": [3, 4], "c": False}]),
                         {"a": 1.5, "b": [2, 3], "c": False})

    def test_scaled_configuration(self):
        config = quickstart.scale_config(json.loads(Path(CONFIGS[1]).read_text(encoding="utf-8")), 360)
        self.assertEqual(config["scheduler"]["params"]["total_num_steps"], 360)
        self.assertEqual(config["scheduler"]["params"]["warmup_num_steps"], 8)
        self.assertEqual(config["optimizer"]["params"]["freeze_step"], 72)
        self.assertEqual(config["optimizer"]["params"]["lr"], 0.02)
        with self.assertRaises(logs.ReportError):
            quickstart.scale_config({"optimizer": {"params": {}}}, 360)


if __name__ == "__main__":
    unittest.main()
