"""Wrong arguments of sotto-perf, and output that cannot be written: test_arguments.py PATH-OF-SOTTO-PERF"""

import os
import subprocess
import sys
import unittest

PERF = ""


def perf(*args, **kwargs):
    kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs}
    return subprocess.run([PERF, *args], text=True, timeout=60, check=False, **kwargs)


class Arguments(unittest.TestCase):
    def test_wrong_ones(self):
        counted = "has no effect on {}, which has sizes of its own"
        for words, text in (
            (("nosuch",), "benchmark: nosuch not in {codec_blocks,"),
            (("codec_encode", "--n", "5"), "--n: found 5, allowed is a whole number from 65536 to 8589934592"),
            (("codec_encode", "--n", "-18446744073709486080"), "--n: found -18446744073709486080, allowed is"),
            (("codec_encode", "--fail-above", "nan"), "--fail-above: found nan, allowed is a number from 1 to 1000"),
            (("codec_encode", "--nosuch"), "--nosuch"),
            (("wire_bytes", "--n", "65536"), "--n " + counted.format("wire_bytes")),
            (("--n", "65536", "codec_encode", "zeroone_bits"), "--n " + counted.format("zeroone_bits")),
            (("scale", "--pairs", "7"), "--pairs " + counted.format("scale")),
            (("wire_bytes", "--cpu-clock"), "--cpu-clock " + counted.format("wire_bytes")),
        ):
            done = perf(*words)
            self.assertEqual((done.returncode, done.stdout), (2, ""), words)
            self.assertRegex(done.stderr, r"^sotto-perf: .*\nTry sotto-perf --help\.\n$")
            self.assertIn(text, done.stderr)

    def test_lines_that_cannot_be_written(self):
        for name in ("codec_encode", "net", "overlap", "overlap_bucket", "step_ddp", "python_step"):
            done = perf(name, "--json", "/nonexistent/lines")
            self.assertEqual((done.returncode, done.stdout), (2, ""), name)
            self.assertIn("/nonexistent/lines", done.stderr)
            self.assertNotIn("Traceback", done.stderr)

    def test_numbers_of_python_step(self):
        for words in (("--steps", "-3"), ("--pairs", "0"), ("--tensors", "x"), ("--before", "/nonexistent")):
            done = perf("python_step", *words)
            self.assertEqual((done.returncode, done.stdout), (2, ""), words)
            self.assertRegex(done.stderr, rf"error: .*{words[0]}.*{words[1]}")

    def test_cores_of_net(self):
        done = perf("net", "--cores", "4096")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertRegex(done.stderr, "error: --cores: found 4096, allowed is 1 to [0-9]+, the cores that")

    def test_help(self):
        done = perf("--help")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("--cpu-clock", done.stdout)
        self.assertIn("Usage: sotto-perf [OPTIONS]", done.stdout)

    def test_the_name_that_was_typed(self):
        def typed(*words):
            return subprocess.run(["sotto bench", *words], executable=PERF, capture_output=True, text=True, timeout=60, check=False)

        self.assertIn("Usage: sotto bench [OPTIONS]", typed("--help").stdout)
        self.assertRegex(typed("--nosuch").stderr, r"^sotto bench: .*\nTry sotto bench --help\.\n$")
        if os.path.exists(PERF + "-gpu"):
            self.assertIn("Usage: sotto bench gpu [OPTIONS]", typed("gpu", "--help").stdout)

    def test_what_cannot_be_written(self):
        with open("/dev/full", "w", encoding="ascii") as full:
            for words in (("--help",), ("codec_encode", "--n", "65536", "--pairs", "7")):
                done = perf(*words, stdout=full)
                self.assertEqual((done.returncode, done.stderr),
                                 (2, "sotto-perf: cannot write standard output: No space left on device\n"))


if __name__ == "__main__":
    PERF = os.path.abspath(sys.argv.pop(1))
    unittest.main()
