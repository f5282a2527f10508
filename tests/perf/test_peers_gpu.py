"""Rows 29 and 30 next to other libraries, without a device and without torch: turns, ratios, targets, broken libraries."""

import contextlib
import io
import json
import os
import sys
import tempfile
import types
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import peers_gpu  # noqa: E402

PROGRAM = """#!/bin/sh
[ "$*" = '--n 100 --turns large_step' ] || exit 1
echo ready
for ms in 1 2 3 4; do read -r line || exit 0; echo $ms; done
"""


class Turns(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.program = os.path.join(folder.name, "sotto-perf-gpu")
        Path(self.program).write_text(PROGRAM, encoding="utf-8")
        os.chmod(self.program, 0o755)

    def test_ours_and_theirs_alternate(self):
        ours, seen = peers_gpu.Ours(self.program, "large_step", 100), []

        def mine():
            seen.append("ours")
            return ours()

        def theirs():
            seen.append("theirs")
            return 10.0 * len(seen)

        self.assertEqual(peers_gpu.in_turn(mine, theirs, 2), [[2, 3], [40, 60]])
        self.assertEqual(seen, ["ours", "theirs"] * 3)
        ours.close()

    def test_a_program_that_ends(self):
        with self.assertRaises(peers_gpu.OursFailed):
            peers_gpu.Ours(self.program, "codec", 100)
        ours = peers_gpu.Ours(self.program, "large_step", 100)
        for _ in range(4):
            ours()
        with self.assertRaises(peers_gpu.OursFailed):
            ours()
        ours.close()


class Rows(unittest.TestCase):
    def test_ratios_of_pairs(self):
        row = peers_gpu.rows_of("codec", {"list": ([1, 2, 4], [10, 18, 40])})["list"]
        self.assertEqual((row.row, row.ratio, row.target, row.verdict), (29, 10, 8, "reached"))
        row = peers_gpu.rows_of("codec", {"list": ([1, 1, 1], [9, 30, 90])})["list"]
        self.assertEqual(row.verdict, "not settled: the spread is too large")
        row = peers_gpu.rows_of("codec", {"list": ([1, 1], [7, 7])})["list"]
        self.assertEqual(row.verdict, "not reached")

    def test_the_target_is_for_the_fastest(self):
        figures = {"slow": ([1.0] * 3, [4.0] * 3), "fast": ([1.0] * 3, [0.99] * 3), "middle": ([1.0] * 3, [2.0] * 3)}
        rows = peers_gpu.rows_of("large_step", figures)
        self.assertEqual({name: row.verdict for name, row in rows.items()},
                         {"slow": "no target", "fast": "reached", "middle": "no target"})
        self.assertEqual(peers_gpu.rows_of("small_step", figures)["fast"].verdict, "not reached")
        self.assertEqual(peers_gpu.rows_of("small_step", {}), {})

    def test_lines(self):
        on = types.SimpleNamespace(name="cuda", text="a device")
        with tempfile.NamedTemporaryFile("r", suffix=".json") as file, contextlib.redirect_stdout(io.StringIO()) as out:
            peers_gpu.report({"codec": {"list": ([1.0] * 7, [9.0] * 7)}}, on,
                             types.SimpleNamespace(n=100, pairs=7, json=file.name))
            line = json.loads(file.read())
        self.assertEqual((line["row"], line["clock"], line["ratio"], line["ratio_iqr"], line["target"], line["verdict"]),
                         (29, "device", 9, 0, 8, "reached"))
        self.assertIn("list / ours", out.getvalue())


class BrokenLibraries(unittest.TestCase):
    def test_whatever_an_import_raises_is_a_reason(self):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (("broken_one", "raise RuntimeError('no such symbol')"), ("broken_two", "None.attribute")):
                Path(folder, f"{name}.py").write_text(text, encoding="utf-8")
            sys.path.insert(0, folder)
            self.addCleanup(sys.path.remove, folder)
            self.assertEqual(peers_gpu.imported("broken_one"), (None, "RuntimeError: no such symbol"))
            self.assertIn("AttributeError", peers_gpu.imported("broken_two")[1])
        self.assertIn("ModuleNotFoundError", peers_gpu.imported("no_such_library")[1])

    def test_one_that_fails_when_it_is_used(self):
        calls = []

        class Fake:
            def __init__(self, *_args):
                pass

            def __call__(self):
                return 1.0

            def close(self):
                calls.append("closed")

        def broken():
            raise AttributeError("no kernel")

        on = types.SimpleNamespace(host_ms=lambda work: work(), forget=lambda: None)
        theirs = {"broken": broken, "broken later": lambda: broken, "good": lambda: lambda: 2.0}
        before = peers_gpu.Ours, peers_gpu.peers
        self.addCleanup(lambda: (setattr(peers_gpu, "Ours", before[0]), setattr(peers_gpu, "peers", before[1])))
        peers_gpu.Ours, peers_gpu.peers = Fake, lambda *_: theirs
        args = types.SimpleNamespace(sotto_perf_gpu="", n=100, pairs=7)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            figures = peers_gpu.compare("large_step", on, args)
        self.assertEqual(figures, {"good": [[1.0] * 7, [2.0] * 7]})
        self.assertIn("broken later: skipped, AttributeError: no kernel", out.getvalue())
        self.assertEqual(calls, ["closed"])


if __name__ == "__main__":
    unittest.main()
