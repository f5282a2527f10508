"""sotto bench step_ddp without ranks: what counts as wrong, peers that are not there, ratios, bounds and verdicts."""

import argparse
import contextlib
import io
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import sides  # noqa: E402
import step_ddp  # noqa: E402


class TrainingSide:
    """Two ranks of step_ddp, whose losses are given by method."""

    def __init__(self, **losses):
        self.losses = {"ddp": [3.0, 2.0], "deepspeed": [3.0, 1.999], "alone": [3.0, 2.0], "fp32": [3.0, 2.001], "1bit": [3.0, 2.5], **losses}
        for name in ("fp32", "1bit"):
            self.losses.setdefault(f"{name}_overlap", self.losses[name])

    def tell(self, command, _limit_s=0):
        word, what = command.split()[:2]
        if word == "model":
            return [{"parameters": 10}] * 2
        if word == "digest":
            differs = what.startswith("1bit") or what == "alone"
            return [{"digest": self.losses[what][0]}, {"digest": self.losses[what][1 if differs else 0]}]
        first, last = self.losses[what]
        return [{"losses": [first, first, first, first, first, last + offset]} for offset in (-0.5, 0.5)]


class TrainingSteps(unittest.TestCase):
    def wrong(self, **losses):
        return step_ddp.warm_up(TrainingSide(**losses), "tiny", 25, [step_ddp.Figure(m) for m in step_ddp.METHODS])[1]

    def test_losses_are_compared(self):
        self.assertEqual(self.wrong(), [])
        self.assertIn("the losses of AdamW differ", self.wrong(fp32=[3.0, 2.1])[0])
        self.assertRegex(self.wrong(deepspeed=[3.0, 1.9])[0], "^the losses of AdamW differ: .* in torch, .* in DeepSpeed$")
        self.assertIn("1bit: the loss went from 3.0000 to 3.1000", self.wrong(**{"1bit": [3.0, 3.1]})[0])
        self.assertIn("the losses of fp32 differ with overlap", self.wrong(fp32_overlap=[3.0, 2.0])[0])

    def test_a_peer_that_is_not_there_is_left_out(self):
        with tempfile.TemporaryDirectory() as folder:
            python = Path(folder, "python")

            def answers(script):
                python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
                python.chmod(0o755)

            def present(*names):
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    return step_ddp.present(names, str(python)), out.getvalue()

            answers("echo 'Traceback:' >&2; echo \"ModuleNotFoundError: No module named 'deepspeed'\" >&2; exit 1")
            left, text = present("ddp", "deepspeed", "fp32")
            self.assertEqual(left, ["ddp", "fp32"])
            self.assertEqual(text, f"deepspeed is left out, since {python} cannot import it: ModuleNotFoundError: No module named 'deepspeed'\n")
            with self.assertRaisesRegex(sides.Missing, "^deepspeed cannot be imported by .*: ModuleNotFoundError"):
                present("deepspeed")
            self.assertEqual(present("ddp"), (["ddp"], ""))
            answers("exit 3")
            self.assertIn("cannot import it: exit code 3", present("ddp", "deepspeed")[1])
            answers("exit 0")
            self.assertEqual(present("ddp", "deepspeed"), (["ddp", "deepspeed"], ""))

    def test_parameters_are_compared(self):
        wrong = step_ddp.compare(TrainingSide(), [step_ddp.Figure(m) for m in step_ddp.METHODS])
        self.assertEqual(wrong, [f"{name}: parameters differ between ranks" for name in ("1bit", "1bit_overlap")])

    def test_methods_are_a_list(self):
        self.assertEqual(step_ddp.methods("1bit,ddp"), ["1bit", "ddp"])
        for text in ("1bit,1bit", "", "ddp,2bit"):
            with self.assertRaisesRegex(argparse.ArgumentTypeError, "list of different ones"):
                step_ddp.methods(text)

    def test_verdicts(self):
        for target, ratio, iqr, verdict in ((None, 1, 0, "no target"), (20, 19, 0, "not reached"), (20, 21, 0.05, "reached")):
            self.assertEqual(step_ddp.verdict(target, ratio, iqr), verdict)
        self.assertIn("not settled", step_ddp.verdict(20, 30, 0.5))
        for ratio, verdict in ((1.11, "not reached"), (1.1, "reached"), (1.0, "reached")):
            self.assertEqual(step_ddp.verdict(1.1, ratio, 0.05, at_most=True), verdict)

    def test_a_step_cannot_be_shorter_than_the_model_or_its_bytes(self):
        alone = step_ddp.Figure("alone", ms=[100, 200], interface=0)
        small = step_ddp.Figure("1bit", ms=[110, 300], interface=1e6)
        large = step_ddp.Figure("fp32", ms=[800, 1600], interface=1e8)
        figures = [alone, small, large]
        for figure, rate, ratios in ((small, 1e9, [1.1, 1.5]), (large, 1e9, [1.0, 2.0]), (alone, 1e9, []), (small, None, [])):
            self.assertEqual(step_ddp.against_bound(figure, figures, rate), ratios)
        self.assertEqual(step_ddp.against_bound(small, [small], 1e9), [])

    def test_the_report(self):
        figures = [step_ddp.Figure(name, ms=ms, losses=[3.0, 2.0], interface=sent)
                   for name, ms, sent in (("ddp", [400.0, 420.0], 1e8), ("alone", [100.0, 105.0], 0), ("1bit", [20.0, 21.0], 1e6))]
        options = argparse.Namespace(model="25m", bucket_mb=25, rate="1gbit", ranks=2, pairs=2)
        line = step_ddp.line_of(figures[2], figures, 10, options, 1e9)
        self.assertEqual((line["method"], line["parameters"], line["steps"], line["ms_p50"]), ("1bit", 10, 1, 20.5))
        self.assertEqual((line["ratio"], line["target"], line["verdict"]), (20, 10, "reached"))
        self.assertEqual((line["bound_ratio"], line["bound_target"], line["bound_verdict"]), (0.2, 1.1, "reached"))
        self.assertRegex(step_ddp.row_of(line), r"^1bit +20\.5 +2\.4 +1000000 +3\.0+ +2\.0+ +20\.00 +0\.0 +>= 10: reached +0\.20 +0\.0 +<= 1\.1: reached$")
        line = step_ddp.line_of(figures[0], figures[:1], 10, argparse.Namespace(**{**vars(options), "model": "tiny"}), 1e9)
        self.assertEqual((line["ratio"], line["target"], line["bound_ratio"], line["bound_verdict"]), (1, None, None, "no target"))
        self.assertRegex(step_ddp.row_of(line), r"^ddp .* 1\.00 +0\.0 +- +- +- +-$")


if __name__ == "__main__":
    unittest.main()
