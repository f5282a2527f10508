"""extract.py README TEMPLATE OUT: puts the README's C example into the template, in place of @EXAMPLE@."""

import re
import sys
from pathlib import Path


def main(readme, template, out):
    blocks = re.findall(r"^```c\n(.*?)^```", Path(readme).read_text(encoding="utf-8"), re.M | re.S)
    if len(blocks) != 1:
        sys.exit(f"{readme}: expected one C example, found {len(blocks)}")
    Path(out).write_text(Path(template).read_text(encoding="utf-8").replace("@EXAMPLE@", blocks[0]), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
