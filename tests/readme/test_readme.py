"""What the README names exists."""

import os
import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


class Readme(unittest.TestCase):
    def test_commands_can_be_started(self):
        commands = re.findall(r"(?:^|[\s`])(?:\./)?((?:integration|tests)/[\w/]+\.sh)\b", TEXT)
        self.assertIn("integration/quickstart.sh", commands)
        self.assertIn("tests/run.sh", commands)
        for command in commands:
            self.assertTrue(os.access(ROOT / command, os.X_OK), command)

    def test_folders_and_files_exist(self):
        names = re.findall(r"`((?:bindings|capi|core|docs|transports|integration|tests)(?:/[\w./]+)?|LICENSE|CONTRIBUTING\.md)`", TEXT)
        self.assertGreater(len(names), 5)
        for name in names:
            self.assertTrue((ROOT / name).exists(), name)

    def test_presets_exist(self):
        presets = (ROOT / "CMakePresets.json").read_text(encoding="utf-8")
        for preset in re.findall(r"--preset (\w+)", TEXT):
            self.assertIn(f'"name": "{preset}"', presets)

    def test_variables_are_parameters_of_the_library_or_options_of_cmake(self):
        lists = [path for room in ("core", "transports") for path in sorted((ROOT / room).glob("*/params.def"))]
        self.assertIn(ROOT / "core/base/params.def", lists)
        parameters = "".join(path.read_text(encoding="utf-8") for path in lists)
        options = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
        known = set(re.findall(r'"(SOTTO_[A-Z_]+)"', parameters))
        known |= set(re.findall(r"^(?:option|set)\((SOTTO_[A-Z_]+) ", options, re.MULTILINE))
        for name in set(re.findall(r"\bSOTTO_[A-Z_]+\b", TEXT)):
            self.assertIn(name, known)

    def test_what_it_is_stands_in_the_first_45_lines(self):
        start = "\n".join(TEXT.splitlines()[:45])
        for word in ("Use it", "Do not use it", "```c", "```python", "```diff", "quickstart.sh", "tests/run.sh", "Install", "Status", "Limits"):
            self.assertIn(word, start)


if __name__ == "__main__":
    unittest.main()
