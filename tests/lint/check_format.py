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
COMPLAINT = re.compile(r"(?P<path>[^:]+):\d+:\d+: (?:error|warning): ")
OPEN = re.compile(r"(=|[(])$")  # the end of a line that goes on because of a comment
VALUE_AND_COMMENT = re.compile(r"\s+[^\s/][^;,]*[;,]\s+// ")


def misformatted(root, paths):
    """The first complaint about each file, in the order of the files. One process takes all of them: most of its time is its
    start."""
    if not paths:
        return []
    run = subprocess.run([PROGRAM, "--dry-run", "-Werror", "--style=file", *map(str, paths)], cwd=root, capture_output=True,
                         text=True, check=False)
    if run.returncode == 0:
        return []
    first = {}
    for line in run.stderr.splitlines():
        found = COMPLAINT.match(line)
        if found:
            first.setdefault(found["path"], line.strip())
    if not first:
        return [f"{PROGRAM} failed: {run.stderr.strip()[:1000]}"]
    return [f"{first[path]}  (mend: {PROGRAM} -i {path})" for path in map(str, paths) if path in first]


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
    problems = misformatted(root, files)
    problems += [text for path in files for text in torn_by_comments(root, path)]
    return report(problems, len(files))


if __name__ == "__main__":
    sys.exit(main())
