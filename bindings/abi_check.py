#!/usr/bin/env python3
"""Holds the ctypes declarations of the Python package against the snapshot of the C ABI.

usage: abi_check.py [--snapshot FILE] [--module FILE]

Compared are constants by value, structs by field names, types, offsets and sizes, callbacks and
functions by result and arguments, in both directions: what one side lacks is a difference. Exit
code: 0 without a difference, 1 with a list of them. Needs neither the library nor a compiler.
"""

import argparse
import ctypes as c
import importlib.util
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = ROOT / "capi/abi/sotto.abi.json"
MODULE = ROOT / "bindings/python/src/sotto/_abi.py"

NUMBERS = {
    "int8_t": c.c_int8, "uint8_t": c.c_uint8, "int32_t": c.c_int32, "uint32_t": c.c_uint32,
    "int64_t": c.c_int64, "uint64_t": c.c_uint64, "double": c.c_double, "float": c.c_float,
}


def load(path):
    spec = importlib.util.spec_from_file_location("sotto_abi_under_check", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class UnknownType(Exception):
    """A C type that this check has no rule for."""


class Types:
    """From the spelling of a C type to the ctypes that may stand for it."""

    def __init__(self, snapshot, module):
        self.snapshot = snapshot
        self.module = module

    def of(self, text):
        """The ctypes type of a C type, as the package has to write it."""
        text = re.sub(r"\bconst\b", "", text)
        text = re.sub(r"\s+", " ", text).replace(" *", "*").replace("* ", "*").strip()
        array = re.fullmatch(r"(\w+)\[(\d+)\]", text)
        if array:
            return self.of(array[1]) * int(array[2])
        if text in ("void*", "char*"):
            # Text that is written to the caller's memory, or read from it, is an address here.
            return c.c_void_p
        if text in NUMBERS:
            return NUMBERS[text]
        if text in self.snapshot["typedefs"]:
            return self.typedef(text)
        if text in self.snapshot["structs"]:
            return self.module.STRUCTS[text]
        if text.endswith("*"):
            return self.pointer(text[:-1])
        raise UnknownType(text)

    def typedef(self, name):
        spelled = self.snapshot["typedefs"][name]
        callback = re.fullmatch(r"(\w+) \(\*\)\((.*)\)", spelled)
        if not callback:
            return self.of(spelled)
        result = None if callback[1] == "void" else self.of(callback[1])
        arguments = [self.argument(a.strip()) for a in callback[2].split(",")]
        return c.CFUNCTYPE(result, *arguments)

    def pointer(self, target):
        if target in self.snapshot["handles"]:
            return c.c_void_p
        if target == "char*":
            return c.POINTER(c.c_char_p)
        return c.POINTER(self.of(target))

    def argument(self, text):
        """As of(); a text that is passed in, `const char *`, is c_char_p."""
        return c.c_char_p if text.replace(" ", "") == "constchar*" else self.of(text)


def same(declared, wanted):
    if declared is wanted:
        return True
    callback = getattr(declared, "_argtypes_", None), getattr(declared, "_restype_", None)
    return callback[0] is not None and callback == (
        getattr(wanted, "_argtypes_", None), getattr(wanted, "_restype_", None))


def show(kind):
    return "void" if kind is None else kind.__name__


def names_that_differ(what, declared, wanted):
    return [f"{what} {name} is missing in the package" for name in wanted if name not in declared] + [
        f"{what} {name} of the package is not in the snapshot" for name in declared if name not in wanted]


def check_constants(snapshot, module):
    wanted, declared = snapshot["constants"], module.CONSTANTS
    problems = names_that_differ("constant", declared, wanted)
    for name in sorted(set(wanted) & set(declared)):
        if wanted[name] != declared[name]:
            problems.append(f"constant {name} is {declared[name]}, in the snapshot {wanted[name]}")
    return problems


def check_typedefs(snapshot, module, types):
    problems = names_that_differ("type", module.TYPEDEFS, snapshot["typedefs"])
    for name in sorted(set(snapshot["typedefs"]) & set(module.TYPEDEFS)):
        wanted = types.typedef(name)
        if not same(module.TYPEDEFS[name], wanted):
            problems.append(f"type {name} is not {snapshot['typedefs'][name]}")
    if sorted(module.HANDLES) != sorted(snapshot["handles"]):
        problems.append(f"handles are {sorted(module.HANDLES)}, in the snapshot {sorted(snapshot['handles'])}")
    return problems


def check_struct(name, entry, struct, types):
    problems = []
    declared = dict(struct._fields_)
    fields = {field["name"]: field for field in entry["fields"]}
    problems += names_that_differ(f"struct {name}: field", declared, fields)
    for field in (f for f in fields.values() if f["name"] in declared):
        where = f"struct {name}: field {field['name']}"
        wanted, found = types.argument(field["type"]), declared[field["name"]]
        if not same(found, wanted):
            problems.append(f"{where} is {show(found)}, {field['type']} needs {show(wanted)}")
        offset, size = getattr(struct, field["name"]).offset, getattr(struct, field["name"]).size
        if (offset, size) != (field["offset"], field["size"]):
            problems.append(f"{where} is at {offset} with {size} bytes, in the snapshot at {field['offset']} with "
                            f"{field['size']}")
    if (c.sizeof(struct), c.alignment(struct)) != (entry["size"], entry["align"]):
        problems.append(f"struct {name} has {c.sizeof(struct)} bytes aligned to {c.alignment(struct)}, in the snapshot "
                        f"{entry['size']} aligned to {entry['align']}")
    return problems


def check_structs(snapshot, module, types):
    problems = names_that_differ("struct", module.STRUCTS, snapshot["structs"])
    for name in sorted(set(snapshot["structs"]) & set(module.STRUCTS)):
        problems += check_struct(name, snapshot["structs"][name], module.STRUCTS[name], types)
    return problems


def check_functions(snapshot, module, types):
    exported = {name: f for name, f in snapshot["functions"].items() if not f.get("inline")}
    problems = names_that_differ("function", module.FUNCTIONS, exported)
    for name in sorted(set(exported) & set(module.FUNCTIONS)):
        result, arguments = module.FUNCTIONS[name]
        wanted = types.argument(exported[name]["returns"])
        if not same(result, wanted):
            problems.append(f"function {name} returns {show(result)}, {exported[name]['returns']} needs {show(wanted)}")
        params = exported[name]["params"]
        if len(arguments) != len(params):
            problems.append(f"function {name} has {len(arguments)} arguments, in the snapshot {len(params)}")
            continue
        for index, (found, param) in enumerate(zip(arguments, params)):
            wanted = types.argument(param["type"])
            if not same(found, wanted):
                problems.append(f"function {name}: argument {index} ({param['name']}) is {show(found)}, {param['type']} "
                                f"needs {show(wanted)}")
    return problems


def differences(snapshot, module):
    types = Types(snapshot, module)
    problems = check_constants(snapshot, module) + names_that_differ("struct", module.STRUCTS, snapshot["structs"])
    if problems:  # the rest refers to structs by name
        return problems
    return check_typedefs(snapshot, module, types) + check_structs(snapshot, module, types) + check_functions(
        snapshot, module, types)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--snapshot", default=SNAPSHOT, type=Path)
    parser.add_argument("--module", default=MODULE, type=Path)
    options = parser.parse_args(arguments)
    snapshot = json.loads(options.snapshot.read_text(encoding="utf-8"))
    module = load(options.module)
    problems = differences(snapshot, module)
    for problem in problems:
        print(problem)
    print(f"{len(module.FUNCTIONS)} functions, {len(module.STRUCTS)} structs, {len(module.CONSTANTS)} constants checked, "
          f"{len(problems)} differences")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
