"""integration/setup.sh where nothing can be installed: it says what to install by hand, and fails only if it must."""

import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "integration/setup.sh"
# What the script itself is written with.
NEEDED = ("bash", "basename", "cat", "dirname", "head", "id", "sed", "sort", "tr")


def without_database(*more):
    """A folder that is all of PATH: no apt, no dpkg, and only the programs named."""
    folder = tempfile.TemporaryDirectory()
    for name in NEEDED + more:
        for place in ("/usr/bin", "/bin", "/usr/sbin", "/sbin"):
            if (Path(place) / name).exists():
                os.symlink(Path(place) / name, Path(folder.name) / name)
                break
    return folder


def run(*words, path=None):
    environment = {**os.environ, **({"PATH": path} if path else {})}
    return subprocess.run(["/bin/bash", str(SETUP), *words], env=environment, capture_output=True, text=True, timeout=120,
                          check=False)


class Setup(unittest.TestCase):
    def test_bad_argument(self):
        answer = run("everything")
        self.assertEqual(answer.returncode, 2)
        self.assertIn("'everything'", answer.stderr)

    def test_nothing_to_do_after_setup(self):
        answer = run("test", "--dry-run")  # else it would wait for a package index that is not there
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertIn("are installed", answer.stdout)

    def test_julia_is_installed_where_the_archive_has_one(self):
        for known in (0, 1):
            with tempfile.TemporaryDirectory() as folder:
                program = Path(folder) / "apt-cache"
                program.write_text(f'#!/bin/sh\n[ "$3" = julia ] && exit {known}\nexec /usr/bin/apt-cache "$@"\n', encoding="ascii")
                program.chmod(0o755)
                answer = run("test", "--dry-run", path=f"{folder}:{os.environ['PATH']}")
            self.assertEqual(answer.returncode, 0, answer.stderr)
            self.assertEqual("julia to install" in answer.stdout, known == 0 and shutil.which("julia") is None)

    def test_says_what_to_install_by_hand(self):
        with without_database() as path:
            answer = run("run", path=path)
        self.assertEqual(answer.returncode, 1)
        self.assertIn("there is no apt here", answer.stdout)
        self.assertIn("apt-get install", answer.stdout)
        self.assertIn(" git", answer.stdout)
        self.assertIn(" ccache", answer.stdout)

    def test_what_is_there_without_a_package_database_counts(self):
        with without_database("g++", "as", "gcc", "ccache", "pkg-config", "git", "python3") as path:
            answer = run("run", path=path)
        listed = answer.stdout.split("apt-get install", 1)[-1].split("\n", 1)[0].split()
        for package in ("git", "ccache", "gcc", "libhwy-dev", "python3-matplotlib"):
            self.assertNotIn(package, listed)


if __name__ == "__main__":
    unittest.main()
