"""C and C++ sources are formatted as .clang-format says, by clang-format 14 (others format differently)."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from sources import C_SUFFIXES, project_files, report

PROGRAM = "clang-format-14"


def misformatted(root, path):
    """The first complaint about a file, or None."""
    run = subprocess.run([PROGRAM, "--dry-run", "-Werror", "--style=file", str(path)], cwd=root, capture_output=True,
                         text=True, check=False)
    if run.returncode == 0:
        return None
    first = run.stderr.strip().splitlines()[0] if run.stderr.strip() else f"{path}: {PROGRAM} failed"
    return f"{first}  (mend: {PROGRAM} -i {path})"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default=Path(__file__).resolve().parents[2])
    root = parser.parse_args().root
    if not shutil.which(PROGRAM):
        print(f"{PROGRAM} is not installed: run integration/setup.sh")
        return 1
    files = project_files(root, C_SUFFIXES)
    return report([text for text in (misformatted(root, path) for path in files) if text], len(files))


if __name__ == "__main__":
    sys.exit(main())
