#!/usr/bin/python3
"""abi_diff: abidiff finds nothing between two libraries but what capi/abi/suppress.ini allows.

    check_diff.py SUPPRESSIONS INCLUDE-DIRECTORY OLD-LIBRARY NEW-LIBRARY

Until there is a release, the library is compared with itself, which shows that it can be read; what the header promises
is compared with the record by check_snapshot.py. SOTTO_ABI_PREVIOUS names the library of a release to compare with too
(its debug information is needed). Exit code 77: abidiff is not installed.
"""

import os
import shutil
import subprocess
import sys

SKIPPED = 77


def differences(suppressions, include, old, new):
    """abidiff's report, empty if there is nothing to report. Types outside of the public headers are left out."""
    command = ["abidiff", "--exported-interfaces-only", "--drop-private-types", "--suppressions", suppressions, "--headers-dir1", include, "--headers-dir2", include, old, new]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False)
    if done.returncode == 0:
        return ""
    return done.stdout or f"abidiff ended with code {done.returncode}"


def main(argv):
    suppressions, include, old, new = argv
    if shutil.which("abidiff") is None:
        print("skipped: abidiff is not installed (Debian package abigail-tools)")
        return SKIPPED
    previous = os.environ.get("SOTTO_ABI_PREVIOUS")
    failed = False
    for library in [old] + ([previous] if previous else []):
        report = differences(suppressions, include, library, new)
        if report:
            print(f"{library} -> {new}:\n{report}")
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
