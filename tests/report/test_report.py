"""The report: figures of the comparison from known runs, clear errors for bad files, a page that needs nothing else."""

import argparse
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
from report import compare, config, figures, lanes, logs, machine, page, quickstart, several  # noqa: E402

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


class OneMore(InFolder):
    """An additional run next to the two."""

    def finish(self, *more):
        path = self.folder / "mine.json"
        path.write_text('{"mine": "configuration of its own"}', encoding="utf-8")
        return super().finish(str(path), "--extra", "mine", *more)

    def setUp(self):
        super().setUp()
        synthetic.write_pair(self.folder)

    def page(self):
        return (self.folder / "report.html").read_text(encoding="utf-8")

    def test_figures_stand_next_to_the_two(self):
        self.assertEqual(super().finish()[0], 0)
        alone = self.summary()
        one = synthetic.write_run(self.folder, "mine", freeze=40, floor=1.22)
        code, out, err = self.finish()
        self.assertEqual(code, 0, err)
        summary = self.summary()
        self.assertEqual(list(summary), ["links_mbit", "isolation", "unigram_entropy", "lamb", "onebit_lamb", "mine",
                                         "ratios", "ratios_mine"])
        self.assertEqual({key: summary[key] for key in alone}, alone)
        r = summary["ratios_mine"]
        self.assertAlmostEqual(r["wall"], 90 / (0.1 * 90 + 0.9 * 18.5), places=6)
        self.assertAlmostEqual(r["val_loss"], one["val_loss"] / summary["lamb"]["val_loss"], places=12)
        self.assertIn(f"mine: {one['wall_s']:.0f} s (LAMB / mine {r['wall']:.2f})", out)
        text = self.page()
        for part in ("LAMB, 1-bit LAMB and mine on a slow network", "<th>LAMB / mine</th>", "Configuration of mine",
                     "configuration of its own", "Three runs", f"<td>{one['val_loss']:.4f}</td>"):
            self.assertIn(part, text)
        self.assertEqual(len(re.findall("<svg", text)), 4)
        self.assertNotIn("left out by loss scaling", text)

    def test_equal_time_and_nearly_the_same_loss(self):
        # 90 ms a step against 18.5 ms behind 40 steps of 90: evaluations every 40 steps.
        base = synthetic.write_run(self.folder, "lamb", steps=4000, floor=1.2)
        synthetic.write_run(self.folder, "onebit_lamb", steps=4000, floor=1.2)
        for floor, is_near in ((1.22, True), (2.0, False)):
            synthetic.write_run(self.folder, "mine", steps=4000, freeze=40, floor=floor)
            code, out, err = self.finish()
            self.assertEqual(code, 0, err)
            r = self.summary()["ratios_mine"]
            end = 40 * 0.09 + 3960 * 0.0185
            then = synthetic.loss_at(max(s for s in range(40, 4001, 40) if s * 0.09 <= end), 1.2)
            self.assertAlmostEqual(r["baseline_loss_at_equal_time"], then, places=6)
            self.assertAlmostEqual(r["loss_at_equal_time"], synthetic.loss_at(4000, floor) / then, places=6)
            self.assertEqual(r["near_loss_reached"], is_near)
            self.assertIn(f"LAMB's {then:.3f} nats", out)
            near = 1.03 * synthetic.loss_at(4000, 1.2)
            theirs = next(s for s in range(40, 4001, 40) if synthetic.loss_at(s, 1.2) <= near) * 0.09
            if is_near:
                own = next(s for s in range(40, 4001, 40) if synthetic.loss_at(s, floor) <= near)
                clock = 40 * 0.09 + (own - 40) * 0.0185
                self.assertAlmostEqual(r["time_to_near_loss"], theirs / clock, places=6)
                self.assertIn(f"It came within 3 % of LAMB's last evaluation loss after {clock:.0f} s", out)
            else:
                self.assertLess(r["time_to_near_loss"], base["wall_s"] / end)
                self.assertIn("It did not come within 3 % of LAMB's last evaluation loss.", out)

    def test_two_levels(self):
        flat = synthetic.write_run(self.folder, "onebit_lamb", freeze=80, between=0.5)
        one = synthetic.write_run(self.folder, "mine", freeze=40, between=0.125)
        code, out, err = self.finish("--hosts", "2", "2")
        self.assertEqual(code, 0, err)
        summary, key = self.summary(), compare.BETWEEN_HOSTS
        self.assertEqual(list(summary)[2], "hosts")
        self.assertEqual((summary["hosts"], summary["mine"][key]), ([2, 2], one[key]))
        levels = summary["hierarchy"]
        self.assertAlmostEqual(levels["between_hosts"], sum(flat[key]) / sum(one[key]), places=9)
        self.assertAlmostEqual(levels["wall_saved_s"], flat["wall_s"] - one["wall_s"], places=9)
        self.assertIn(f"hierarchy saves {levels['wall_saved_s']:.0f} s", out)
        for part in ("to ranks of other hosts", "inside hosts", "2 in each of 2 network namespaces", "hierarchy saves"):
            self.assertIn(part, self.page())
        slow = synthetic.write_run(self.folder, "mine", freeze=90, between=0.125)
        self.assertIn(f"hierarchy costs {slow['wall_s'] - flat['wall_s']:.0f} s (ratio 0.", self.finish("--hosts", "2", "2")[1])
        synthetic.write_run(self.folder, "mine", freeze=40, between=0)
        code, _, err = self.finish("--hosts", "2", "2")
        self.assertEqual(code, quickstart.EXIT_BAD_INPUT)
        self.assertIn("mine: the summary has no payload_bytes_between_hosts", err)

    def test_every_figure_draws_it(self):
        synthetic.write_run(self.folder, "mine")
        self.assertEqual(self.finish()[0], 0)
        self.assertEqual([svg.count(figures.COLOURS[2]) > 0 for svg in re.findall("<svg.*?</svg>", self.page(), re.DOTALL)[:3]],
                         [True] * 3)

    def test_skipped_steps_are_told_and_checked(self):
        synthetic.write_run(self.folder, "mine", skipped=7)
        code, _, err = self.finish()
        self.assertEqual(code, 0, err)
        self.assertEqual(self.summary()["mine"]["skipped_steps"], 7)
        self.assertEqual(self.summary()["mine"]["steps"], 400)
        self.assertIn("left out by loss scaling</td><td></td><td></td><td></td><td>7</td>", self.page())
        path = self.folder / "mine.jsonl"
        path.write_text("".join(path.read_text(encoding="utf-8").splitlines(True)[1:]), encoding="utf-8")
        code, _, err = self.finish()
        self.assertEqual(code, quickstart.EXIT_BAD_INPUT)
        self.assertIn("6 skipped steps", err)

    def test_seeds_and_means(self):
        synthetic.write_pair(self.folder, "-seed7", floor=1.1)
        synthetic.write_run(self.folder, "mine", floor=1.3)
        synthetic.write_run(self.folder, "mine-seed7", floor=1.4)
        code, _, err = self.finish("--seeds", "3,7", "--list-seeds")
        self.assertEqual(code, 0, err)
        summary = self.summary()
        losses = [one["mine"]["val_loss"] for one in summary["seeds"]]
        self.assertNotEqual(*losses)
        self.assertAlmostEqual(summary["mine"]["val_loss"], sum(losses) / 2, places=12)
        self.assertEqual(self.page().count("<th>difference</th>"), 2)

    def test_its_broken_checks_fail_too(self):
        synthetic.write_run(self.folder, "mine", sent_off_by=1)
        code, out, _ = self.finish()
        self.assertEqual(code, quickstart.EXIT_CHECK_FAILED)
        self.assertIn("CHECK FAILED: mine: payload bytes sent", out)

    def test_a_run_on_other_data_is_not_compared(self):
        synthetic.write_run(self.folder, "mine")
        path = self.folder / "mine.summary.json"
        path.write_text(path.read_text(encoding="utf-8").replace("3.16", "3.17"), encoding="utf-8")
        code, _, err = self.finish()
        self.assertEqual(code, quickstart.EXIT_BAD_INPUT)
        self.assertIn("LAMB and mine saw different data", err)


    def test_what_the_network_costs(self):
        # Waiting: 74.5 ms a step with the limit; 2.5 ms without it, behind 40 such steps.
        here = synthetic.write_run(self.folder, "mine")
        away = synthetic.write_run(self.folder, "mine-unlimited", freeze=40)
        code, out, err = self.finish("--unlimited")
        self.assertEqual(code, 0, err)
        summary = self.summary()
        self.assertEqual(list(summary)[5:], ["mine", "ratios", "ratios_mine", "mine-unlimited", "network_costs"])
        self.assertEqual(set(summary["mine-unlimited"]), set(summary["mine"]))
        costs = summary["network_costs"]
        self.assertAlmostEqual(costs["wall"], 90 / (0.1 * 90 + 0.9 * 18.5), places=6)
        self.assertAlmostEqual(costs["exposed_share"], 74.5 / 90, places=6)
        self.assertAlmostEqual(costs["exposed_share_unlimited"], away["exposed_comm_s"] / away["wall_s"], places=9)
        self.assertAlmostEqual(costs["exposed_share_added"], 0.9 * 72 / 90, places=6)
        sentence = f"mine with no limit on the links: {away['wall_s']:.1f} s, with it {here['wall_s']:.1f} s (ratio {costs['wall']:.3f})"
        for text in (out, self.page()):
            self.assertIn(sentence, text)
            self.assertIn("what the network adds is 72.0 % of its time.", text)
        for part in ("Four runs", "with no limit on the links", "<th>mine, no limit</th>"):
            self.assertIn(part, self.page())
        self.assertNotIn("something else used the processor", out)
        away["compute_s"] *= 1.2
        (self.folder / "mine-unlimited.summary.json").write_text(json.dumps(away), encoding="utf-8")
        self.assertIn("But compute took 7.2 s without the limit and 6.0 s with it: something else used", self.finish("--unlimited")[1])

    def test_what_the_network_costs_over_seeds(self):
        synthetic.write_pair(self.folder, "-seed7")
        for seed, freeze in (("", 40), ("-seed7", 200)):
            synthetic.write_run(self.folder, f"mine{seed}")
            synthetic.write_run(self.folder, f"mine-unlimited{seed}", freeze=freeze)
        code, _, err = self.finish("--unlimited", "--seeds", "3,7", "--list-seeds")
        self.assertEqual(code, 0, err)
        summary = self.summary()
        walls = [one["network_costs"]["wall"] for one in summary["seeds"]]
        self.assertGreater(walls[0], walls[1])
        self.assertAlmostEqual(summary["network_costs"]["wall"], sum(walls) / 2, places=12)
        for wall in (*walls, sum(walls) / 2):
            self.assertIn(f"<td>{wall:.3f}</td>", self.page())

    def test_without_a_limit_needs_one_more(self):
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as err:
            quickstart.parse(["finish", "--dir", ".", "--root", ".", "--links", "100", "--isolation", "netns", "--network", "n",
                              "--command", "c", "--configs", "a", "b", "--unlimited"])
        self.assertIn("--unlimited: needs --extra", err.getvalue())
        self.assertEqual(self.finish("--unlimited")[0], quickstart.EXIT_BAD_INPUT)


class TimeLine(InFolder):
    def write(self, name, **more):
        (self.folder / "trace").mkdir(exist_ok=True)
        path = self.folder / "trace" / f"{name}.rank0.json"
        synthetic.write_time_line(path, **more)
        return path

    def test_rows_by_hand(self):
        steps, rows = lanes.read_lanes(self.write("lamb", steps=3))
        self.assertEqual(steps, [5000, 5086, 5172])
        self.assertEqual({key: row[1] for key, row in rows.items()}, {
            "compute_ms": (5086, 5101), "codec_ms": (5171, 5172), "comm_ms": (5101, 5171), "network": (5101, 5171)})
        steps, rows = lanes.read_lanes(self.write("mine", steps=12, period=6))
        self.assertEqual((rows["comm_ms"], rows["network"][0]), ([], (steps[6], steps[6] + 60)))  # while four steps compute

    def test_holes_and_joins(self):
        self.assertEqual(lanes.joined([(3, 4), (0, 2), (1, 2.5)], 0.4), [(0, 2.5), (3, 4)])
        self.assertEqual(lanes.joined([(3, 4), (0, 2), (1, 2.5)], 0.5), [(0, 4)])
        self.assertEqual(lanes.without([(0, 4), (6, 9)], [(1, 2), (3, 7)]), [(0, 1), (2, 3), (7, 9)])

    def test_is_a_figure_of_the_report(self):
        synthetic.write_pair(self.folder)
        for name in ("lamb", "onebit_lamb"):
            path = self.write(name)
        self.assertEqual(self.finish()[0], 0)
        text = (self.folder / "report.html").read_text(encoding="utf-8")
        self.assertEqual(len(re.findall("<svg", text)), 5)
        self.assertIn("What rank 0 does, and what is on its way", text)
        for content, message in (("[", "not a time line of SOTTO_TRACE"), ('[{"ph": "M"}]', "the time line has no step")):
            path.write_text(content, encoding="utf-8")
            code, _, err = self.finish()
            self.assertEqual(code, quickstart.EXIT_BAD_INPUT)
            self.assertIn(f"{path}: {message}", err)


class Several(InFolder):
    """Any number of runs."""

    def runs(self, **more):
        """Three runs, the first at full precision."""
        options = {"first": {}, "second": {"freeze": 40, "floor": 1.25}, "<third>": {"freeze": 0, "floor": 1.3}}
        for name, given in options.items():
            synthetic.write_run(self.folder, name, **given, **more.get(name, {}))
        return [self.read(name) for name in options]

    def read(self, name):
        return logs.read_run(name, self.folder / f"{name}.jsonl", self.folder / f"{name}.summary.json")

    def write(self, runs):
        problems = several.write(self.folder / "report.html", runs, title="R & D", about=["so <it> was"], network="a lab",
                                 command="compare.py", configs=[("first", CONFIGS[0])], root=ROOT)
        return problems, (self.folder / "report.html").read_text(encoding="utf-8")

    def test_table_by_hand(self):
        lines = several.markdown(self.runs()).splitlines()
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        self.assertEqual(lines[1], "| --- |" + " ---: |" * 7)
        self.assertEqual(cells[0][2], "against first")
        self.assertEqual(cells[2][2:5:2], ["+0.0 %", "1.00"])
        self.assertEqual(cells[2][6:], ["-", "1.00"])
        # 90 ms a step against 90 ms for a tenth of the steps and 18.5 ms for the rest; 32 times fewer bytes in these.
        self.assertEqual(cells[3][4], f"{90 / (0.1 * 90 + 0.9 * 18.5):.2f}")
        self.assertEqual(float(cells[3][7]), round(1 / (0.1 + 0.9 / 32), 2))
        self.assertEqual(cells[4][4], f"{90 / 18.5:.2f}")

    def test_bytes_of_interfaces_count_where_they_are_known(self):
        runs = self.runs()
        for run, each in zip(runs, (4_000_000, 1_000_000, 500_000)):
            run.summary["interface_bytes_sent"] = [each] * 4
        cells = [line.split("|")[7:9] for line in several.markdown(runs).splitlines()[2:]]
        self.assertEqual([[cell.strip() for cell in pair] for pair in cells],
                         [["4.0 MB", "1.00"], ["1.0 MB", "4.00"], ["500 kB", "8.00"]])
        self.assertIn("Sent by the interface, per rank", self.write(runs)[1])

    def test_page(self):
        problems, text = self.write(self.runs())
        self.assertEqual(problems, [])
        for part in ("<h1>R &amp; D</h1>", "so &lt;it&gt; was", "<th>first / &lt;third&gt;</th>", "Configuration of first"):
            self.assertIn(part, text)
        self.assertEqual(len(re.findall("<svg", text)), 4)
        for colour in figures.COLOURS[:3]:
            self.assertIn(colour, text)
        self.assertNotIn("Sent by the interface", text)

    def test_broken_checks_are_told(self):
        problems, text = self.write(self.runs(second={"sent_off_by": 1}))
        self.assertEqual(len(problems), 1)
        self.assertIn("second: payload bytes sent", problems[0])
        self.assertIn("Something is wrong", text)

    def test_other_data_and_too_many_runs_are_refused(self):
        runs = self.runs()
        with self.assertRaisesRegex(logs.ReportError, "colours"):
            self.write(runs[:1] * (len(figures.COLOURS) + 1))
        runs[2].summary["unigram_entropy"] += 0.01
        with self.assertRaisesRegex(logs.ReportError, "different data"):
            self.write(runs)


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

    def test_bytes_that_are_no_text(self):
        for name, what in (("lamb.summary.json", "not JSON"), ("lamb.jsonl", "not UTF-8")):
            path = self.folder / name
            path.write_bytes(b"\xff\xfe" + path.read_bytes())
            self.assert_error(name, what)

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

    def test_processor_kernels_and_share_of_the_network(self):
        synthetic.write_pair(self.folder)
        code, out, _ = self.finish()
        self.assertEqual(code, 0)
        text = (self.folder / "report.html").read_text(encoding="utf-8")
        # LAMB: 74.5 of 90 ms. 1-bit LAMB sends 1 / (0.2 + 0.8 / 32) times fewer bytes.
        expected = 1 / (1 - 74.5 / 90 * (1 - (0.2 + 0.8 / 32)))
        for part in ("in 83 % of its time (30 of 36 s)", "compute took 6 s", f"it would be {expected:.2f}",
                     f"Processor: {machine.processor()}", "BLAS kernels: Haswell"):
            self.assertIn(part, text)
            self.assertIn(part, out)
        self.assertIn("<dt>BLAS kernels</dt><dd>Haswell</dd>", text)
        self.assertRegex(machine.processor(), r"^.+, [0-9]+ cores usable$")

    def test_kernels_that_differ_or_are_not_told(self):
        synthetic.write_pair(self.folder)
        path = self.folder / "lamb.summary.json"
        path.write_text(path.read_text(encoding="utf-8").replace("Haswell", "Zen"), encoding="utf-8")
        self.assertIn("BLAS kernels: Haswell, Zen", self.finish()[1])
        path.write_text(path.read_text(encoding="utf-8").replace('"blas_kernels"', '"other"'), encoding="utf-8")
        self.assertIn("BLAS kernels: Haswell, unknown", self.finish()[1])

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

    def test_bytes_that_alternate_are_drawn_as_a_mean(self):
        with tempfile.TemporaryDirectory() as folder:
            synthetic.write_pair(folder)
            run = logs.read_run("run", Path(folder, "onebit_lamb.jsonl"), Path(folder, "onebit_lamb.summary.json"))
        self.assertFalse(figures.sent_per_step(run)[1])
        sent = run.columns["payload_bytes"]
        sent[:] = 0
        sent[::4] = 4000
        drawn, is_mean = figures.sent_per_step(run)
        self.assertTrue(is_mean)
        self.assertEqual((len(drawn), float(drawn[200])), (len(sent), 1200.0))  # 3 of the 10 steps around it send

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
        scaled = config.scale_config(config.read_config(CONFIGS[1]), 360)
        self.assertEqual(scaled["scheduler"]["params"]["total_num_steps"], 360)
        self.assertEqual(scaled["scheduler"]["params"]["warmup_num_steps"], 8)
        self.assertEqual(scaled["optimizer"]["params"]["freeze_step"], 72)
        self.assertEqual(scaled["optimizer"]["params"]["lr"], 0.02)
        for bad in ({"optimizer": {"params": {}}}, {"scheduler": {"params": {"total_num_steps": "3600"}}},
                    {"scheduler": {"params": {"total_num_steps": 0}}}):
            with self.assertRaises(logs.ReportError):
                config.scale_config(bad, 360)

    def test_scaled_zero_one_adam(self):
        source = {"scheduler": {"params": {"total_num_steps": 3.6e3}},
                  "optimizer": {"params": {"var_freeze_step": 700, "var_update_scaler": 16, "local_step_scaler": 300,
                                           "local_step_clipper": 16}}}
        self.assertEqual(config.scale_config(source, 360)["optimizer"]["params"], {
            "var_freeze_step": 70, "var_update_scaler": 16, "local_step_scaler": 30, "local_step_clipper": 16})

    def test_scaled_steps_that_are_none(self):
        for outer in (None, {"warmup_steps": 0}, {"switch_step": 0}):
            source = {"scheduler": {"params": {"total_num_steps": 3600, "warmup_num_steps": 0}}, "sotto": {"outer": outer}}
            want = {"scheduler": {"params": {"total_num_steps": 360, "warmup_num_steps": 0}}, "sotto": {"outer": outer}}
            self.assertEqual(config.scale_config(json.loads(json.dumps(source)), 360), want)

    def test_comments_and_trailing_commas(self):
        text = '{ // a\n "a": "// no comment, ]", # b\n /* c\n, } */ "b": [1, 2, ], "c": "\\"#", }'
        self.assertEqual(json.loads(config.plain_json(text)), {"a": "// no comment, ]", "b": [1, 2], "c": '"#'})
        self.assertEqual(config.plain_json(text).count("\n"), text.count("\n"))

    def test_configurations_of_the_folder_are_read_and_scaled(self):
        for path in sorted((ROOT / "integration/configs").glob("*.json")):
            scaled = config.scale_config(config.read_config(path), 360)
            self.assertEqual(scaled["scheduler"]["params"]["total_num_steps"], 360, path)
            self.assertEqual(quickstart.run_name("x" + path.stem), "x" + path.stem)

    def test_names_of_additional_runs(self):
        for name in ("lamb", "onebit_lamb", "seeds", "ratios", "ratios_x", "a-b", "a b", "1x", "", "a.b", "x" * 41):
            with self.assertRaises(argparse.ArgumentTypeError, msg=name):
                quickstart.run_name(name)


if __name__ == "__main__":
    unittest.main()
