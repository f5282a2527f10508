"""Comments that were broken when the formatter shortened a line of them, which it does without seeing lists or paragraphs.

A line that goes on with an item of a list stands under the item's text. A line of a paragraph that ends early, in the middle of
a sentence, takes up what follows.
"""

import argparse
import re
import sys
from pathlib import Path

from sources import C_SUFFIXES, project_files, report

WIDTH = 100
SPARE = 16  # columns that may stay empty beyond the next word: paragraphs are not broken anew for each word that changes
COMMENT = re.compile(r"^(\s*)//(\s+)(\S.*)$")
ITEM = re.compile(r"([-*]|\d+[.)]) ")
COLUMNS = re.compile(r"\S {2,}\S")  # a table, or code
END = tuple(".:;?!{})")


def broken_items(lines):
    """Numbers of lines that stand under the sign of an item instead of its text."""
    at = None
    for number, line in enumerate(lines, 1):
        match = COMMENT.match(line)
        indent = len(match.group(2)) if match else 0
        if match and ITEM.match(match.group(3)):
            at = indent
        elif at is not None and indent == at > 1:
            yield number
        elif indent <= 1:
            at = None


def broken_paragraphs(lines):
    """Numbers of lines that end early in the middle of a sentence."""
    for number, pair in enumerate(zip(lines, lines[1:]), 1):
        line, following = (COMMENT.match(text) for text in pair)
        if not line or not following or line.groups()[:2] != following.groups()[:2]:
            continue
        text, more = line.group(3), following.group(3)
        if text.endswith(END) or ITEM.match(more) or COLUMNS.search(text) or COLUMNS.search(more):
            continue
        if "clang-format" not in text and len(pair[0]) + 1 + len(more.split()[0]) + SPARE <= WIDTH:
            yield number


def check(root):
    root = Path(root)
    files, problems = project_files(root, C_SUFFIXES), []
    for path in files:
        lines = (root / path).read_text(encoding="utf-8", errors="replace").splitlines()
        problems += [f"{path}:{number}: goes on with an item of a list: put it under the item's text"
                     for number in broken_items(lines)]
        problems += [f"{path}:{number}: the comment's line ends early: what follows fits on it"
                     for number in broken_paragraphs(lines)]
    return problems, len(files)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default=Path(__file__).resolve().parents[2])
    return report(*check(parser.parse_args().root))


if __name__ == "__main__":
    sys.exit(main())
