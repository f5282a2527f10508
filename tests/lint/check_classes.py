"""Classes and structs of at most 40 methods and 16 fields.

Methods are member functions that are neither deleted nor defaulted; fields are members that every object has. CEILINGS may
have classes that are larger: they may not grow, and where one has become smaller its row follows.
"""

import argparse
import sys
from pathlib import Path

from class_parser import classes
from sources import C_SUFFIXES, project_files, report

LIMITS = {"methods": 40, "fields": 16}
FOLDERS = ("capi", "core", "cuda", "transports")
# A struct of the C ABI is flat: callers read its members by name, and it grows at its end.
CEILINGS = {"sotto_outer_info": {"fields": 26}}  # by name without the namespace sotto: {kind: count}


def _check_class(place, name, found, row):
    problems = []
    for kind, limit in LIMITS.items():
        count, ceiling = getattr(found, kind), row.get(kind)
        if count > (ceiling or limit):
            problems.append(f"{place}: {name} has {count} {kind}; at most {ceiling or limit}: split it by concept")
        elif ceiling and count < ceiling:
            mend = f"lower it to {count}" if count > limit else "take it out"
            problems.append(f"{place}: {name} has {count} {kind}, its ceiling in check_classes.py is {ceiling}: {mend}")
    return problems


def check(root, ceilings=None):
    root = Path(root)
    ceilings = CEILINGS if ceilings is None else ceilings
    files = [path for path in project_files(root, C_SUFFIXES) if path.parts[0] in FOLDERS]
    problems, names = [], set()
    for path in files:
        for found in classes((root / path).read_text(encoding="utf-8", errors="replace")):
            name = found.name.removeprefix("sotto::")
            names.add(name)
            problems += _check_class(f"{path}:{found.line}", name, found, ceilings.get(name, {}))
    gone = [name for name in ceilings if name not in names]
    return problems + [f"check_classes.py: there is no class {name}: take its ceiling out" for name in gone], len(files)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default=Path(__file__).resolve().parents[2])
    return report(*check(parser.parse_args().root))


if __name__ == "__main__":
    sys.exit(main())
