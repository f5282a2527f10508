"""Files of at most 600 lines; functions of at most 100 lines, kernels (core/cpu, cuda) of at most 150.

The public header is one file by rule, comments included, and so are its frozen copies.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from sources import C_SUFFIXES, project_files, report

FILE_LIMIT = 600
FUNCTION_LIMIT = 100
KERNEL_LIMIT = 150
KERNEL_ROOMS = ("core/cpu/", "cuda/")
PUBLIC_HEADER = "sotto.h"
TEXT_SUFFIXES = C_SUFFIXES | {".py", ".sh", ".rs", ".jl"}


def long_files(root, files):
    problems = []
    for path in files:
        lines = len((root / path).read_text(encoding="utf-8", errors="replace").splitlines())
        if lines > FILE_LIMIT and path.name != PUBLIC_HEADER:
            problems.append(f"{path}: {lines} lines; at most {FILE_LIMIT}: split it by concept")
    return problems


def functions(root, files):
    """(path, first line, last line, name) of every C and C++ function."""
    command = ["ctags", "-L", "-", "--languages=C,C++", "--langmap=C++:+.cu.cuh", "--kinds-C=f", "--kinds-C++=f",
               "--fields=+ne", "-f", "-"]
    listing = subprocess.run(command, input="\n".join(map(str, files)) + "\n", cwd=root, capture_output=True, text=True,
                             check=True)
    for line in listing.stdout.splitlines():
        name, path, *rest = line.split("\t")
        fields = dict(part.split(":", 1) for part in rest if part.startswith(("line:", "end:")))
        if "end" in fields:
            yield path, int(fields["line"]), int(fields["end"]), name


def long_functions(root, files):
    problems = []
    for path, first, last, name in functions(root, files):
        limit = KERNEL_LIMIT if path.startswith(KERNEL_ROOMS) else FUNCTION_LIMIT
        if last - first + 1 > limit:
            problems.append(f"{path}:{first}: function {name} has {last - first + 1} lines; at most {limit}")
    return problems


def check(root):
    root = Path(root)
    sources = project_files(root, C_SUFFIXES)
    texts = project_files(root, TEXT_SUFFIXES)
    return long_files(root, texts) + long_functions(root, sources), len(texts)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default=Path(__file__).resolve().parents[2])
    root = parser.parse_args().root
    if not shutil.which("ctags"):
        print("ctags is not installed: run integration/setup.sh")
        return 1
    return report(*check(root))


if __name__ == "__main__":
    sys.exit(main())
