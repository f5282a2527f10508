"""Adds up the JUnit files of several ctest runs.

Prints skipped cases with their reasons, failed ones with the end of their output, then one plain line "N passed, N failed, N skipped".
Exit code: 0 if something ran and nothing failed, else 1.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


SHOWN_LINES = 40  # of a failed case; all of them stand where the case ran, far above


class Totals:
    def __init__(self):
        self.passed = 0
        self.failed = []  # (run, case, output)
        self.skipped = []  # (run, case, reason)
        self.inside = []  # the same for parts of cases that passed; not counted


def skip_reason(case):
    """The text that the test gave (gtest's, pytest's or unittest's), else what ctest says."""
    output = case.findtext("system-out") or ""
    gtest = re.search(r": Skipped\n(.*?)\n\s*(?:\n|\[  SKIPPED)", output, re.S)
    if gtest and gtest.group(1).strip():
        return " ".join(gtest.group(1).split())
    pytest = re.search(r"^SKIPPED \[\d+\] \S+: (.+)$", output, re.M)
    if pytest:
        return pytest.group(1).strip()
    plain = re.search(r"^(?:SKIP|SKIPPED|skipped)[:\s]+(.+)$", output, re.M)
    if plain:
        return plain.group(1).strip()
    element = case.find("skipped")
    message = element.get("message", "") if element is not None else ""
    return message or case.get("status", "no reason given")


def was_skipped(case):
    """Skipped on purpose. ctest also writes "notrun" for a program that is missing: that is a failure."""
    element = case.find("skipped")
    asked = element is not None and element.get("message", "").startswith("SKIP_")
    return asked or case.get("status") == "disabled"


def skipped_inside(case):
    """(test, reason) of tests that were skipped inside a case that passed: a whole unittest or pytest file is one case."""
    output = case.findtext("system-out") or ""
    unittest = re.findall(r"^(\w+) \(.*\.\.\. skipped ['\"](.*)['\"]$", output, re.M)
    return unittest + re.findall(r"^SKIPPED \[\d+\] (\S+): (.+)$", output, re.M)


def add_file(totals, path):
    run = path.stem
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = case.get("name", "?")
        if was_skipped(case):
            totals.skipped.append((run, name, skip_reason(case)))
        elif case.get("status") == "run" and case.find("failure") is None and case.find("error") is None:
            totals.passed += 1
            totals.inside += [(run, f"{name}: {test}", reason) for test, reason in skipped_inside(case)]
        else:
            totals.failed.append((run, name, case.findtext("system-out") or ""))


def print_totals(totals):
    for title, entries in (("Skipped:", totals.skipped), ("Skipped inside cases that passed:", totals.inside)):
        if entries:
            print(title)
        for run, name, reason in entries:
            print(f"  {run}: {name}: {reason}")
    if totals.failed:
        print("Failed:")
        for run, name, output in totals.failed:
            print(f"  {run}: {name}")
            for line in output.splitlines()[-SHOWN_LINES:]:
                print(f"    | {line}")
    print(f"{totals.passed} passed, {len(totals.failed)} failed, {len(totals.skipped)} skipped")


def main(arguments):
    totals = Totals()
    for argument in arguments:
        try:
            add_file(totals, Path(argument))
        except (OSError, ElementTree.ParseError) as error:
            print(f"{argument}: not a readable JUnit file: {error}")
            totals.failed.append((Path(argument).stem, "(no result file)", ""))
    print_totals(totals)
    if not totals.passed and not totals.failed:
        print("No test ran.", file=sys.stderr)
    return 0 if totals.passed and not totals.failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
