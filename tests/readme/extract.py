"""extract.py PAGE LANGUAGE OUT [TEMPLATE]: writes a page's one example in a language to a file, in place of the template's @EXAMPLE@.

Without a template the example is the file. It has at most 30 lines. A template with @EXAMPLE 2@ takes the second of several, of any
length.
"""

import re
import sys
from pathlib import Path

LINES = 30


def the_only(blocks, page, language):
    """Of a page for newcomers."""
    if len(blocks) != 1:
        sys.exit(f"{page}: expected one example in {language}, found {len(blocks)}")
    lines = blocks[0].count("\n")
    if lines > LINES:
        sys.exit(f"{page}: the example in {language} has {lines} lines, at most {LINES} are allowed")
    return blocks[0]


def main(page, language, out, template=None):
    blocks = re.findall(rf"^```{language}\n(.*?)^```", Path(page).read_text(encoding="utf-8"), re.M | re.S)
    around = "@EXAMPLE@" if template is None else Path(template).read_text(encoding="utf-8")
    if "@EXAMPLE@" in around:
        around = around.replace("@EXAMPLE@", the_only(blocks, page, language))
    text = re.sub(r"@EXAMPLE (\d+)@", lambda number: blocks[int(number[1]) - 1], around)
    Path(out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
