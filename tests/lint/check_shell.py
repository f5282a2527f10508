"""Shell scripts pass shellcheck's errors and warnings."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from sources import project_files, report

PROGRAM = "shellcheck"
WITHOUT_SUFFIX = [Path(".ci/run")]


def complaints(root, path):
    run = subprocess.run([PROGRAM, "-x", "-S", "warning", "-f", "gcc", str(path)], cwd=root, capture_output=True,
                         text=True, check=False)
    return run.stdout.splitlines() or ([f"{path}: {run.stderr.strip()}"] if run.returncode else [])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default=Path(__file__).resolve().parents[2], type=Path)
    root = parser.parse_args().root
    if not shutil.which(PROGRAM):
        print(f"{PROGRAM} is not installed: run integration/setup.sh")
        return 1
    files = project_files(root, {".sh"}) + [path for path in WITHOUT_SUFFIX if (root / path).is_file()]
    return report([line for path in files for line in complaints(root, path)], len(files))


if __name__ == "__main__":
    sys.exit(main())
