#!/usr/bin/python3
"""abi_symbols: what the library exports is what the map lists, the header declares and the snapshot records; and what
it needs at run time is what it may need.

    check_symbols.py LIBRARY MAP HEADER SNAPSHOT [--also-allowed PATTERN]
"""

import argparse
import json
import re
import subprocess
import sys

import abi_model

SONAME = "libsotto.so.0"
# The C and C++ run time, and Highway for SIMD dispatch.
NEEDED = r"libc\.so\.6|libm\.so\.6|libstdc\+\+\.so\.6|libgcc_s\.so\.1|libhwy\.so\.1|ld-linux-x86-64\.so\.2|ld-linux-aarch64\.so\.1"


def tool(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout


def read_map(path):
    """{node: set of names} of a version script that lists every symbol and hides the rest."""
    with open(path, encoding="ascii") as f:
        text = re.sub(r"/\*.*?\*/", " ", f.read(), flags=re.DOTALL)
    nodes = {}
    for node, body in re.findall(r"(SOTTO_[0-9.]+)\s*\{(.*?)\}", text, re.DOTALL):
        visible = body.split("local:")[0].replace("global:", " ")
        nodes[node] = set(visible.replace(";", " ").split())
        wild = [name for name in nodes[node] if not re.fullmatch(r"\w+", name)]
        if wild:
            raise abi_model.AbiError(f"{path}: {node} exports by pattern: {' '.join(wild)}; list every symbol")
    if not re.search(r"local:\s*\*\s*;", text):
        raise abi_model.AbiError(f"{path}: 'local: *;' is missing")
    return nodes


def exports(library):
    """{(name, version node)} of the dynamic symbol table, without the nodes themselves."""
    found = set()
    for line in tool("nm", "-D", "--defined-only", library).splitlines():
        name = line.split()[-1]
        name, _, node = name.replace("@@", "@").partition("@")
        if line.split()[-2] != "A" or not name.startswith("SOTTO_"):
            found.add((name, node))
    return found


def problems_of_symbols(library, nodes, header, snapshot):
    problems = []
    mapped = {(name, node) for node, names in nodes.items() for name in names}
    found = exports(library)
    for name, node in sorted(found - mapped):
        problems.append(f"exported but not in the map: {name} ({node or 'no version'})")
    for name, node in sorted(mapped - found):
        problems.append(f"in the map but not exported: {name} ({node})")
    names = {name for name, _ in mapped}
    for where, others in (("header", set(abi_model.exported(header))), ("snapshot", set(abi_model.exported(snapshot)))):
        problems += [f"in the {where}, but not in the map: {name}" for name in sorted(others - names)]
        problems += [f"in the map, but not in the {where}: {name}" for name in sorted(names - others)]
    return problems


def problems_of_dependencies(library, allowed):
    problems = []
    dynamic = tool("readelf", "-d", "-W", library)
    soname = re.findall(r"\(SONAME\).*\[(.*)\]", dynamic)
    if soname != [SONAME]:
        problems.append(f"soname is {soname}, expected {SONAME}")
    for name in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic):
        if not re.fullmatch(allowed, name):
            problems.append(f"needs {name} at run time; only libc, libm, libstdc++, libgcc and libhwy are allowed")
    for bad in ("TEXTREL", "RPATH", "RUNPATH"):
        if f"({bad})" in dynamic:
            problems.append(f"has {bad}")
    return problems


def main():
    parser = argparse.ArgumentParser()
    for name in ("library", "map", "header", "snapshot"):
        parser.add_argument(name)
    parser.add_argument("--also-allowed", default="", help="regular expression of further libraries (sanitizers)")
    parser.add_argument("--allow-runpath", action="store_true", help="in the build tree the linker may have set one")
    args = parser.parse_args()
    with open(args.snapshot, encoding="utf-8") as f:
        snapshot = json.load(f)
    allowed = NEEDED + (f"|{args.also_allowed}" if args.also_allowed else "")
    problems = problems_of_symbols(args.library, read_map(args.map), abi_model.read_header(args.header), snapshot)
    problems += [p for p in problems_of_dependencies(args.library, allowed)
                 if not (args.allow_runpath and p.endswith("RUNPATH"))]
    for problem in problems:
        print(f"{args.library}: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except abi_model.AbiError as e:
        sys.exit(str(e))
