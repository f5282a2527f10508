"""C and C++ sources are formatted as .clang-format says, by clang-format 14 (others format differently).

A comment that the formatter can keep on a line only by breaking the declaration in front of it stands above it instead.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from sources import C_SUFFIXES, project_files, report

PROGRAM = "clang-format-14"
OPEN = re.compile(r"(=|[(])$")  # the end of a line that goes on because of a comment
VALUE_AND_COMMENT = re.compile(r"\s+[^\s/][^;,]*[;,]\s+// ")


def misformatted(root, path):
    """The first complaint about a file, or None."""
    run = subprocess.run([PROGRAM, "--dry-run", "-Werror", "--style=file", str(path)], cwd=root, capture_output=True,
                         text=True, check=False)
    if run.returncode == 0:
        return None
    first = run.stderr.strip().splitlines()[0] if run.stderr.strip() else f"{path}: {PROGRAM} failed"
    return f"{first}  (mend: {PROGRAM} -i {path})"


def torn_by_comments(root, path):
    """Complaints about declarations that are broken in favour of a comment behind them."""
    lines = (root / path).read_text(encoding="utf-8", errors="replace").splitlines()
    return [f"{path}:{number}: the comment breaks its declaration; put it above"
            for number, (line, following) in enumerate(zip(lines, lines[1:]), 1)
            if OPEN.search(line) and VALUE_AND_COMMENT.match(following)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default=Path(__file__).resolve().parents[2])
    root = parser.parse_args().root
    if not shutil.which(PROGRAM):
        print(f"{PROGRAM} is not installed: run integration/setup.sh")
        return 1
    files = project_files(root, C_SUFFIXES)
    problems = [text for text in (misformatted(root, path) for path in files) if text]
    problems += [text for path in files for text in torn_by_comments(root, path)]
    return report(problems, len(files))


if __name__ == "__main__":
    sys.exit(main())
