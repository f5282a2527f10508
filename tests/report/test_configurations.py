"""Configurations and summaries that cannot be scaled or settled are errors with the file's name."""

import contextlib
import io
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "integration"))

from report import config, logs, quickstart  # noqa: E402


class BadConfigurations(unittest.TestCase):
    def test_steps_that_are_no_number(self):
        for bad in ("auto", True, [300], float("inf")):
            source = {"scheduler": {"params": {"total_num_steps": 3600}}, "optimizer": {"params": {"freeze_step": bad}}}
            with self.assertRaisesRegex(logs.ReportError, "freeze_step"):
                config.scale_config(source, 360)

    def test_files_that_cannot_be_scaled_or_settled(self):
        with tempfile.TemporaryDirectory() as folder:
            source, target, summary = Path(folder, "source.json"), Path(folder, "target.json"), Path(folder, "summary.json")
            scale = ["scale", str(source), str(target), "--steps", "10"]
            for text, words, expected in (
                    ('{"scheduler": {"params": {"total_num_steps": 100}}, "sotto": [1]}', [*scale, "--hierarchy", "sharded"], "sotto"),
                    ('{"optimizer": {"params": {"freeze_step": "auto"}}, "scheduler": {"params": {"total_num_steps": 9}}}', scale, "freeze_step")):
                source.write_text(text, encoding="utf-8")
                self.assert_refused(words, "source.json", expected)
            source.write_text("{}", encoding="utf-8")
            for text in ("", "[1]", "{"):
                summary.write_text(text, encoding="utf-8")
                self.assert_refused(["settle", str(source), str(summary), str(target)], "summary.json")
            self.assertFalse(target.exists())

    def assert_refused(self, words, *expected):
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            self.assertEqual(quickstart.main(words), quickstart.EXIT_BAD_INPUT)
        for word in expected:
            self.assertIn(word, told.getvalue())


if __name__ == "__main__":
    unittest.main()
