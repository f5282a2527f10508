"""sotto bench overlap_bucket without ranks: figures of a turn, the verdict, what counts as wrong, options."""

import contextlib
import io
import json
import sys
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import overlap_bucket  # noqa: E402


class Lab:
    description = "a lab"

    def __init__(self, sent):
        self.sent = sent

    def sent_bytes(self, pid):
        return self.sent[pid]


class Side:
    pids = (7, 8)

    def __init__(self, digests):
        self.digests = digests

    def tell(self, command, _limit_s):
        assert command == "digest"
        return [{"digest": digest} for digest in self.digests]


def of_turns(*turns):
    """Of (pass, averages, both, exposed per round) in ms, two rounds each."""
    figures = overlap_bucket.Figures()
    for alone, averages, both, exposed in turns:
        overlap_bucket.take(figures, 2, [{"ns": 2e6 * alone}, {"ns": 1e6 * alone}], [{"ns": 2e6 * averages}] * 2,
                            [{"ns": 2e6 * both, "exposed_ns": [1e6 * e for e in exposed]},
                             {"ns": 2e6 * both, "exposed_ns": [99e6, 1e6 * exposed[1]]}])
    return figures


class Figures(unittest.TestCase):
    def test_turn(self):
        figures = of_turns((60, 40, 63, (3, 5)))
        self.assertEqual((figures.alone, figures.averages, figures.both, figures.exposed), ([60], [40], [63], [4]))
        self.assertAlmostEqual(figures.shares()[0], 0.1)
        self.assertAlmostEqual(figures.ratios()[0], 1.05)
        self.assertAlmostEqual(figures.saved()[0], 37 / 40)

    def test_waiting_for_the_pass_of_another_rank_is_not_exposed(self):
        self.assertEqual(of_turns((60, 40, 63, (2, 0))).exposed, [1])

    def test_verdicts(self):
        def of(exposed, *both):
            return overlap_bucket.verdict(of_turns(*((60, 40, ms, (exposed, exposed)) for ms in both)))
        self.assertEqual(of(4, 63, 64, 63), (0.1, "reached"))
        self.assertEqual(of(5, 63, 64, 63)[1], "not reached")
        self.assertEqual(of(4, 50, 64, 90)[1], "not settled: the spread is too large")

    def test_line(self):
        options = overlap_bucket.parse(["--sotto-perf", "x", "--ranks", "3"])
        line = overlap_bucket.json_line(options, of_turns((60, 40, 63, (4, 4))), 25, [(500, 480), (490, 470)], Lab({}))
        self.assertEqual((line["row"], line["exposed_share"], line["verdict"], line["payload_bytes"], line["early_payload_bytes"]),
                         (22, 0.1, "reached", 500, 480))
        self.assertEqual((line["codec"], line["rate"], line["ranks"], line["buckets"]), ("onebit", "1gbit", 3, 25))
        json.dumps(line)


class Wrong(unittest.TestCase):
    def wrong(self, digests, sent, before=(100, 100)):
        return overlap_bucket.finish(Side(digests), Lab({7: sent, 8: 5100}), 10, [(500, 480), (500, 480)], before)

    def test_results_and_bytes(self):
        self.assertEqual(self.wrong("aa", 5100), [])
        self.assertEqual(self.wrong("ab", 5100), ["averages differ between ranks"])
        self.assertEqual(self.wrong("aa", 5000), ["the interface of rank 0 carried 4900 bytes in 10 rounds of 500 bytes"])

    def test_loopback_has_no_bytes(self):
        self.assertEqual(self.wrong("aa", None, (None, None)), [])


class Options(unittest.TestCase):
    def test_refused(self):
        for words, text in ((("--rate", "fast"), "'fast' is no rate"), (("--ranks", "1"), "'1' is not a whole number from 2"),
                            (("--n", "10", "--buckets", "11"), "--buckets 11: at most one for each of 10 elements"),
                            (("--backward", "0"), "--backward 0: allowed is 0.01 to 1000"), (("--backward", "nan"), "--backward nan: allowed"),
                            (("--codec", "zip"), "invalid choice: 'zip'"), (("--json", "/nonexistent/x"), "/nonexistent/x")):
            with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as err:
                overlap_bucket.parse([*words, "--sotto-perf", "x"])
            self.assertIn(text, err.getvalue())


if __name__ == "__main__":
    unittest.main()
