#!/usr/bin/python3
"""abi_snapshot: the header promises exactly what capi/abi/sotto.abi.json records.

    check_snapshot.py HEADER SNAPSHOT            compares
    check_snapshot.py HEADER SNAPSHOT --write    records anew, when the change is meant
"""

import json
import sys

import abi_model

HINT = """The ABI differs from its snapshot. If that is meant: change SOTTO_ABI_MINOR (something was added) or SOTTO_ABI_MAJOR
(anything else) in the header, write an entry in capi/abi/CHANGELOG.md, and record the snapshot anew:
  tests/abi/check_snapshot.py capi/include/sotto/sotto.h capi/abi/sotto.abi.json --write"""


def main(argv):
    header, path = argv[0], argv[1]
    model = abi_model.read_header(header)
    if argv[2:] == ["--write"]:
        with open(path, "w", encoding="utf-8") as f:
            f.write(abi_model.to_text(model))
        return 0
    with open(path, encoding="utf-8") as f:
        recorded = json.load(f)
    lines = abi_model.differences(recorded, model)
    for line in lines:
        print(line)
    if lines:
        print(HINT)
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        sys.exit(main(sys.argv[1:]))
    except abi_model.AbiError as e:
        sys.exit(str(e))
