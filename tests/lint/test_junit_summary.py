"""The closing line of tests/run.sh counts what ctest wrote."""

import contextlib
import io
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import junit_summary  # noqa: E402

PASSED = '<testcase name="good" status="run"><system-out/></testcase>'
FAILED = '<testcase name="bad" status="fail"><failure message=""/></testcase>'
MISSING = '<testcase name="gone" status="notrun"><skipped message="Unable to find executable"/></testcase>'
DISABLED = '<testcase name="off" status="disabled"><system-out>Disabled</system-out></testcase>'
GTEST_SKIP = """<testcase name="gpu" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/><system-out>
[ RUN      ] A.b
a.cc:2: Skipped
no GPU here
[  SKIPPED ] A.b (0 ms)
</system-out></testcase>"""


def summarise(*files):
    """(exit code, printed text) for JUnit files with the given test cases."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, cases in enumerate(files):
            path = Path(folder) / f"run{number}.xml"
            path.write_text(f"<testsuite>{cases}</testsuite>", encoding="utf-8")
            paths.append(str(path))
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            code = junit_summary.main(paths)
        return code, out.getvalue()


class Summary(unittest.TestCase):
    def last_line(self, text):
        return text.strip().splitlines()[-1]

    def test_adds_up_several_files(self):
        code, text = summarise(PASSED, PASSED + GTEST_SKIP)
        self.assertEqual((code, self.last_line(text)), (0, "2 passed, 0 failed, 1 skipped"))

    def test_skips_are_listed_with_their_reason(self):
        self.assertIn("run0: gpu: no GPU here", summarise(PASSED + GTEST_SKIP)[1])
        self.assertIn("run0: off: disabled", summarise(PASSED + DISABLED)[1])

    def test_skips_inside_a_case_are_listed_but_not_counted(self):
        inside = ("<testcase name='file' status='run'><system-out>test_a (x.Y.test_a) ... ok\n"
                  "test_b (x.Y.test_b) ... skipped 'no namespaces: denied'\nOK (skipped=1)</system-out></testcase>")
        code, text = summarise(inside)
        self.assertEqual((code, self.last_line(text)), (0, "1 passed, 0 failed, 0 skipped"))
        self.assertIn("run0: file: test_b: no namespaces: denied", text)

    def test_reasons_of_pytest(self):
        line = "SKIPPED [1] python/tests/test_torch.py:9: torch is not installed"
        skipped = f'<testcase name="t" status="notrun"><skipped message="SKIP_RETURN_CODE=5"/><system-out>{line}\n</system-out></testcase>'
        inside = f'<testcase name="t" status="run"><system-out>{line}\n1 passed, 1 skipped</system-out></testcase>'
        self.assertIn("run0: t: torch is not installed", summarise(PASSED + skipped)[1])
        self.assertEqual(self.last_line(summarise(PASSED + skipped)[1]), "1 passed, 0 failed, 1 skipped")
        self.assertIn("run0: t: python/tests/test_torch.py:9: torch is not installed", summarise(inside)[1])

    def test_a_failure_is_an_exit_code(self):
        code, text = summarise(PASSED + FAILED)
        self.assertEqual((code, self.last_line(text)), (1, "1 passed, 1 failed, 0 skipped"))
        self.assertIn("run0: bad", text)

    def test_the_end_of_what_a_failure_printed_is_shown(self):
        output = "\n".join(f"line {i}" for i in range(100))
        failed = f'<testcase name="bad" status="fail"><failure message=""/><system-out>{output}</system-out></testcase>'
        shown = [line for line in summarise(failed)[1].splitlines() if "| line" in line]
        self.assertEqual(shown, [f"    | line {i}" for i in range(60, 100)])

    def test_a_program_that_is_missing_is_a_failure(self):
        code, text = summarise(PASSED + MISSING)
        self.assertEqual((code, self.last_line(text)), (1, "1 passed, 1 failed, 0 skipped"))

    def test_no_test_is_a_failure(self):
        self.assertEqual(summarise("")[0], 1)
        self.assertEqual(summarise(GTEST_SKIP)[0], 1)

    def test_a_file_that_was_never_written_is_a_failure(self):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = junit_summary.main(["nowhere.xml"])
        self.assertEqual(code, 1)
        self.assertIn("nowhere.xml", out.getvalue())


if __name__ == "__main__":
    unittest.main()
