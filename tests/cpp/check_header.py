#!/usr/bin/python3
"""Every function that the library exports, and every struct of sotto.h, is used in the C++ headers, and every header is
included by sotto.hpp.

    check_header.py [--snapshot FILE] [--headers FOLDER]

Exit code: 0 if all are, 1 with a list of those that are not. --self-test plants one of each kind that is missing.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = ROOT / "capi/abi/sotto.abi.json"
HEADERS = ROOT / "bindings/cpp"
COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"', re.DOTALL)


def code_of(path):
    """Without comments, texts and includes."""
    text = path.read_text(encoding="utf-8")
    return COMMENT_OR_TEXT.sub(" ", re.sub(r"^\s*#\s*include.*$", "", text, flags=re.M))


def problems_of(snapshot, headers):
    files = sorted(headers.glob("cpp/*.hpp"))
    used = set(re.findall(r"\bsotto_\w+", "\n".join(code_of(path) for path in files)))
    exported = [name for name, entry in snapshot["functions"].items() if not entry.get("inline")]
    problems = [f"function {name} is used in no C++ header" for name in exported if name not in used]
    problems += [f"struct {name} is used in no C++ header" for name in snapshot["structs"] if name not in used]
    entry = (headers / "sotto.hpp").read_text(encoding="utf-8")
    problems += [f"sotto.hpp does not include cpp/{path.name}" for path in files if f'#include "cpp/{path.name}"' not in entry]
    return problems, len(exported)


def planted(snapshot):
    """Problems that should be found and are not."""
    missed = []
    for old, new, expected in (("sotto_overlap_unused(", "unused_(", "function sotto_overlap_unused"),
                               ("sotto_outer_info", "outer_info_", "struct sotto_outer_info"),
                               ("sotto_scatter,", '/* sotto_scatter */ "sotto_scatter",', "function sotto_scatter")):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "headers"
            shutil.copytree(HEADERS, copy)
            changed = 0
            for path in copy.glob("cpp/*.hpp"):
                text = path.read_text(encoding="utf-8")
                changed += old in text
                path.write_text(text.replace(old, new), encoding="utf-8")
            found, _ = problems_of(snapshot, copy)
            if not changed or not any(problem.startswith(expected + " ") for problem in found):
                missed.append(f"planted, and not found: {expected}")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "headers"
        shutil.copytree(HEADERS, copy)
        (copy / "cpp/more.hpp").touch()
        if problems_of(snapshot, copy)[0] != ["sotto.hpp does not include cpp/more.hpp"]:
            missed.append("planted, and not found: a header that is not included")
    more = json.loads(json.dumps(snapshot))
    more["functions"]["sotto_new_one"] = {}
    if problems_of(more, HEADERS)[0] != ["function sotto_new_one is used in no C++ header"]:
        missed.append("planted, and not found: a new function")
    return missed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--snapshot", default=SNAPSHOT, type=Path)
    parser.add_argument("--headers", default=HEADERS, type=Path)
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()
    snapshot = json.loads(options.snapshot.read_text(encoding="utf-8"))
    problems, count = problems_of(snapshot, options.headers)
    if options.self_test:
        problems += planted(snapshot)
    print("\n".join([*problems, f"{count} functions, {len(snapshot['structs'])} structs, {len(problems)} problems"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
