"""sotto bench overlap without ranks: the formula, figures of a turn, verdicts, what counts as wrong, options."""

import contextlib
import io
import json
import sys
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import overlap  # noqa: E402

PREDICTED = {"average_ms": 100.0, "exposed_ms_per_period": 0.0, "period_ms": 112.0, "period": 8,
             "payload_bytes_per_launch": 6000, "memory_bytes": 777}


def reply(ns, exposed=0, network=100e6, averages=1, compute=80e6, **more):
    return {"ns": ns, "exposed_ns": exposed, "network_ns": network, "averages": averages, "compute_ns": compute,
            "contention": None, "payload": 6000, "state_bytes": 777, **more}


def setting(name, delay, steps):
    return overlap.Setting(name, delay, dict(PREDICTED), steps)


def quiet(function, *args):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        result = function(*args)
    return result, out.getvalue()


class Figures(unittest.TestCase):
    def test_formula(self):
        self.assertEqual(overlap.formula_ms(100, 4, 10, 0), 60)
        self.assertEqual(overlap.formula_ms(100, 4, 10, 0.5), 40)
        self.assertEqual(overlap.formula_ms(100, 20, 10, 0), 0)

    def test_turn_of_the_slowest_rank(self):
        s = setting("full", 8, 16)
        overlap.take(s, [reply(160e6, averages=2), reply(176e6, exposed=8.8e6, network=240e6, averages=2, contention=0.25,
                                                         compute=168e6)], 10e6)
        self.assertEqual(s.ms, [11])
        self.assertAlmostEqual(s.ratios[0], 1.1)
        self.assertAlmostEqual(s.kappas[0], (80 + 168) / 2 / 16 / 10 - 1)
        self.assertAlmostEqual(s.exposed[0], 4.4)
        self.assertAlmostEqual(s.average[0], 120)
        self.assertAlmostEqual(s.shares[0], 0.05)
        self.assertEqual(s.contention, [0.25])

    def test_rates_are_means_over_ranks(self):
        ranks = [{"rates": {"onebit": {"ns_per_element": a}, "outer configuration": {"ns_per_element": b},
                            "outer co2": {"ns_per_element": 9}, "topk co2": {"ns_per_element": 9}}} for a, b in ((1, 2), (3, 6))]
        self.assertEqual(overlap.rates_of(ranks), {"onebit": 2, "outer": 4})

    def test_bounds_of_predictions(self):
        self.assertEqual([overlap.bound_of(mbit * 1e6) for mbit in (10, 100, 500, 1000, 2500)], [0.15, 0.15, 0.20, 0.20, None])


class Verdicts(unittest.TestCase):
    def verdicts(self, full_ns, half_exposed, exposed=0, average=100e6, bits=100e6):
        full, half = setting("full", 8, 8), setting("half", 4, 4)
        for _ in range(3):
            overlap.take(full, [reply(full_ns, exposed=exposed, network=average)], 14e6)
            overlap.take(half, [reply(100e6, exposed=half_exposed, compute=56e6)], 14e6)
        lines, text = quiet(overlap.verdicts, full, half, [14.0] * 3, bits)
        self.assertIn("steps alone 14.00 ms", text)
        return {what.split(":")[0].split(" (")[0] if row != 21 else (row, what.split(" ")[0]): verdict
                for row, what, _, _, verdict in lines}

    def test_all_reached(self):
        found = self.verdicts(112.5e6, 44e6)
        self.assertEqual(set(found.values()), {"reached"}, found)

    def test_each_one_missed(self):
        self.assertEqual(self.verdicts(117e6, 44e6)[21, "overlapped"], "not reached")
        self.assertEqual(self.verdicts(112e6, 30e6)[21, "exposed"], "not reached")
        late = self.verdicts(112e6, 44e6, exposed=20e6)
        self.assertEqual(late["exposed share of averages"], "not reached")
        self.assertEqual(self.verdicts(112e6, 44e6, average=130e6)["average"], "not reached")
        self.assertEqual(self.verdicts(112e6, 44e6, average=130e6, bits=2.5e9)["average"], "no target")

    def test_a_spread_settles_nothing(self):
        full, half = setting("full", 8, 8), setting("half", 4, 4)
        for ns in (104e6, 112e6, 120e6):
            overlap.take(full, [reply(ns)], 14e6)
            overlap.take(half, [reply(100e6, exposed=44e6)], 14e6)
        lines, _ = quiet(overlap.verdicts, full, half, [14.0] * 3, 1e8)
        self.assertEqual(lines[0][4], "not settled: the spread is too large")


class Wrong(unittest.TestCase):
    def test_bytes_and_memory(self):
        s = setting("full", 8, 8)
        self.assertEqual(overlap.check_bytes(s, [reply(1), reply(1, payload=5000)]), [])
        self.assertEqual(overlap.check_bytes(s, [reply(1, payload=5000)]), ["delay 8: an average sends 5000 bytes, predicted 6000"])
        self.assertEqual(overlap.check_bytes(s, [reply(1), reply(1, state_bytes=1)]), ["delay 8: rank 1 holds 1 bytes, predicted 777"])

    def test_parameters_that_differ(self):
        class Side:
            def tell(self, command, _limit_s):
                return [reply(1), reply(1)] if command.startswith("run") else [{"digest": "a"}, {"digest": "b"}]
        self.assertEqual(overlap.finish(Side(), [setting("full", 8, 8)]), ["delay 8: parameters differ between ranks"])


class Options(unittest.TestCase):
    def parse(self, *words):
        return overlap.parse([*words, "--sotto-perf", "x"])

    def test_requests(self):
        options = self.parse("--rate", "1gbit", "--codec", "int8", "--n", "1000")
        found = json.loads(overlap.request(options, 6, 2.5, None))
        self.assertEqual(found, {"config": {"preset": "co2", "period": 6, "dense_rounds": 0, "codec": "int8"}, "params": 1000,
                                 "ranks": 4, "bandwidth_mbit": 1000, "step_ms": 2.5, "threads": 1})
        options.codec, options.loopback = "none", True
        found = json.loads(overlap.request(options, 6, 2.5, {"fp32": 1}))
        self.assertEqual(found["config"], {"preset": "co2", "period": 6})
        self.assertEqual((found["rates"], found["efficiency"]), ({"fp32": 1}, 1))

    def test_every_codec_of_the_library(self):
        for codec in ("onebit", "int4", "int8", "bf16", "fp16", "topk"):
            self.assertEqual(overlap.configuration(self.parse("--codec", codec), 3)["codec"], codec)

    def test_refused(self):
        for words, text in ((("--rate", "none"), "there is nothing to hide"), (("--rate", "fast"), "'fast' is no rate"),
                            (("--delay", "1"), "'1' is not a whole number from 2"), (("--ranks", "1"), "'1' is not a whole number from 2"),
                            (("--codec", "zip"), "invalid choice: 'zip'"), (("--compute", "nap"), "invalid choice: 'nap'")):
            with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as err:
                self.parse(*words)
            self.assertIn(text, err.getvalue())


if __name__ == "__main__":
    unittest.main()
