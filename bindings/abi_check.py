#!/usr/bin/env python3
"""Holds the declarations of the language bindings against the snapshot of the C ABI.

usage: abi_check.py [--snapshot FILE] [--language NAME [--source PATH]]

Compared are constants by value, structs by field names, types, offsets and sizes, callbacks and functions by result and
arguments, in both directions: what one side lacks is a difference. Where a language names arguments, their order is compared by
name too. LANGUAGES has a row for every binding: what it is called, where its declarations are, and what reads them. Exit code: 0
without a difference, 1 with a list of them. Needs neither the library nor a compiler.
"""

from __future__ import annotations

import argparse
import ctypes as c
import importlib.util
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = ROOT / "capi/abi/sotto.abi.json"
POINTER_BYTES = 8


@dataclass
class Struct:
    """What a language has for a struct of C. fields: {name: (type, offset, size)}, in order."""

    fields: dict[str, tuple[Any, int, int]]
    size: int
    align: int


@dataclass
class Declared:
    """The declarations of one language, with types as that language has them."""

    constants: dict[str, int] = field(default_factory=dict)
    typedefs: dict[str, Any] = field(default_factory=dict)
    handles: list[str] = field(default_factory=list)
    structs: dict[str, Struct] = field(default_factory=dict)
    functions: dict[str, tuple[Any, list[tuple[str | None, Any]]]] = field(default_factory=dict)  # result, (name, type)


class UnknownType(Exception):
    """A C type that this check has no rule for."""


# ---- Python: ctypes -----------------------------------------------------------------------------------------------------------


class CTypes:
    """bindings/python/src/sotto/_abi.py: a module with CONSTANTS, TYPEDEFS, HANDLES, STRUCTS and FUNCTIONS."""

    NUMBERS = {
        "int8_t": c.c_int8, "uint8_t": c.c_uint8, "int32_t": c.c_int32, "uint32_t": c.c_uint32,
        "int64_t": c.c_int64, "uint64_t": c.c_uint64, "double": c.c_double, "float": c.c_float,
    }

    def __init__(self, path, snapshot):
        self.snapshot = snapshot
        spec = importlib.util.spec_from_file_location("sotto_abi_under_check", path)
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)

    def declared(self):
        functions = {name: (result, [(None, kind) for kind in kinds])
                     for name, (result, kinds) in self.module.FUNCTIONS.items()}
        structs = {name: self._struct(kind) for name, kind in self.module.STRUCTS.items()}
        return Declared(self.module.CONSTANTS, self.module.TYPEDEFS, list(self.module.HANDLES), structs, functions)

    @staticmethod
    def _struct(kind):
        places = {name: getattr(kind, name) for name, _ in kind._fields_}
        fields = {name: (member, places[name].offset, places[name].size) for name, member in kind._fields_}
        return Struct(fields, c.sizeof(kind), c.alignment(kind))

    def _of(self, text):
        text = re.sub(r"\bconst\b", "", text)
        text = re.sub(r"\s+", " ", text).replace(" *", "*").replace("* ", "*").strip()
        array = re.fullmatch(r"(\w+)\[(\d+)\]", text)
        if array:
            return self._of(array[1]) * int(array[2])
        if text in ("void*", "char*"):
            # Text that is written to the caller's memory, or read from it, is an address here.
            return c.c_void_p
        if text in self.NUMBERS:
            return self.NUMBERS[text]
        if text in self.snapshot["typedefs"]:
            return self.typedef(text)
        if text in self.snapshot["structs"]:
            if text not in self.module.STRUCTS:
                raise UnknownType(text)
            return self.module.STRUCTS[text]
        if text.endswith("*"):
            return self._pointer(text[:-1])
        raise UnknownType(text)

    def _pointer(self, target):
        if target in self.snapshot["handles"]:
            return c.c_void_p
        if target == "char*":
            return c.POINTER(c.c_char_p)
        return c.POINTER(self._of(target))

    def typedef(self, name):
        """The type that a typedef of C has to be."""
        callback = callback_of(self.snapshot["typedefs"][name])
        if callback is None:
            return self._of(self.snapshot["typedefs"][name])
        result, arguments = callback
        return c.CFUNCTYPE(None if result == "void" else self._of(result), *map(self.argument, arguments))

    def argument(self, text):
        """The type that an argument, a result or a field has to be. Text that is passed in, `const char *`, is c_char_p."""
        return c.c_char_p if text.replace(" ", "") == "constchar*" else self._of(text)

    @staticmethod
    def same(declared, wanted):
        if declared is wanted:
            return True
        callback = getattr(declared, "_argtypes_", None), getattr(declared, "_restype_", None)
        return callback[0] is not None and callback == (
            getattr(wanted, "_argtypes_", None), getattr(wanted, "_restype_", None))

    @staticmethod
    def show(kind):
        return "void" if kind is None else kind.__name__


def callback_of(text):
    """(result, arguments) of a typedef's text, or None if it is no callback."""
    callback = re.fullmatch(r"(\w+) \(\*\)\((.*)\)", text)
    return callback and (callback[1], [argument.strip() for argument in callback[2].split(",")])


# ---- Languages that are read as text ------------------------------------------------------------------------------------------


class OfText:
    """A language whose declarations are read as text: types have the names of C, but for NUMBERS."""

    NUMBERS = {}
    snapshot = None

    def _name(self, name):
        if name in self.NUMBERS:
            return self.NUMBERS[name]
        if any(name in self.snapshot[part] for part in ("typedefs", "structs", "handles")):
            return name
        raise UnknownType(name)

    @staticmethod
    def same(declared, wanted):
        return declared == wanted


# ---- Rust ---------------------------------------------------------------------------------------------------------------------


class Rust(OfText):
    """bindings/rust/sotto-sys/src: constants, type aliases, #[repr(C)] structs, handles! and functions!, as text."""

    NUMBERS = {"int8_t": "i8", "uint8_t": "u8", "int32_t": "i32", "uint32_t": "u32", "int64_t": "i64", "uint64_t": "u64",
               "double": "f64", "float": "f32", "char": "c_char", "void": "c_void"}
    BYTES = {"i8": 1, "u8": 1, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "f64": 8, "f32": 4}

    CONSTANT = re.compile(r"\bpub const (SOTTO_\w+): \w+ = ([\w\s<|()+-]+);")
    ALIAS = re.compile(r"\bpub type (sotto_\w+)\s*=\s*([^;]*);")
    STRUCT = re.compile(r"#\[repr\(C\)\]\s*(?:#\[[^\]]*\]\s*)*pub struct (sotto_\w+) \{([^}]*)\}")
    FIELD = re.compile(r"\bpub (\w+): ([^,;\[]+|\[[^\]]*\]),")
    HANDLES = re.compile(r"^handles! \{([^}]*)\}", re.M)
    FUNCTIONS = re.compile(r"^functions! \{(.*?)^\}", re.M | re.S)
    FUNCTION = re.compile(r"\bfn (\w+)\(([^)]*)\)(?: -> ([^;]+))?;")

    def __init__(self, path, snapshot):
        self.snapshot = snapshot
        files = sorted(path.rglob("*.rs")) if path.is_dir() else [path]
        self.text = re.sub(r"//.*", "", "\n".join(file.read_text(encoding="utf-8") for file in files))

    def declared(self):
        found = Declared()
        for name, value in self.CONSTANT.findall(self.text):
            # Numbers, operators and constants that came before: the pattern lets nothing else through.
            found.constants[name] = eval(value, {"__builtins__": {}}, dict(found.constants))
        self.constants = found.constants
        found.typedefs = {name: self._plain(text) for name, text in self.ALIAS.findall(self.text)}
        self.typedefs = found.typedefs
        found.handles = [name for block in self.HANDLES.findall(self.text) for name in re.findall(r"\w+", block)]
        for name, block in self.STRUCT.findall(self.text):
            fields = [(member, self._plain(kind)) for member, kind in self.FIELD.findall(block)]
            found.structs[name] = lay_out(fields, lambda kind: self._extent(kind, found.structs))
        for block in self.FUNCTIONS.findall(self.text):
            for name, arguments, result in self.FUNCTION.findall(block):
                pairs = [argument.split(":", 1) for argument in arguments.split(",") if argument.strip()]
                found.functions[name] = self._plain(result), [
                    (argument.strip().rstrip("_"), self._plain(kind)) for argument, kind in pairs]
        return found

    def _plain(self, text):
        """A type without names of arguments, in one spelling, with lengths of arrays as numbers."""
        text = re.sub(r"\s+", " ", text).strip()
        text = re.sub(r"\b\w+: ", "", text)
        text = re.sub(r"(?<=[(<]) | (?=[)>])|,(?= ?[)>])", "", text)
        return re.sub(r"; (\w+)\]", lambda length: f"; {self.constants.get(length[1], length[1])}]", text)

    def _extent(self, kind, structs):
        """(size, alignment) of a type."""
        kind = self.typedefs.get(kind, kind)
        array = re.fullmatch(r"\[(.*); (\d+)\]", kind)
        if array:
            size, align = self._extent(array[1], structs)
            return size * int(array[2]), align
        if kind.startswith(("*", "Option<")):
            return POINTER_BYTES, POINTER_BYTES
        if kind in structs:
            return structs[kind].size, structs[kind].align
        size = self.BYTES.get(kind, 0)
        return size, max(1, size)

    def typedef(self, name):
        """The type that a typedef of C has to be."""
        callback = callback_of(self.snapshot["typedefs"][name])
        if callback is None:
            return self.argument(self.snapshot["typedefs"][name])
        result, arguments = callback
        arrow = "" if result == "void" else f" -> {self.argument(result)}"
        return f'Option<unsafe extern "C" fn({", ".join(map(self.argument, arguments))}){arrow}>'

    def argument(self, text):
        """The type that an argument, a result or a field has to be."""
        array = re.fullmatch(r"(\w+)\[(\d+)\]", text.strip())
        if array:
            return f"[{self.argument(array[1])}; {array[2]}]"
        first, *pointers = re.sub(r"\s*\*\s*", "*", text.strip()).split("*")
        words = first.split()
        kind, constant = self._name(words[-1]), "const" in words[:-1]
        for qualifier in pointers:
            kind, constant = f"*{'const' if constant else 'mut'} {kind}", qualifier == "const"
        return kind

    @staticmethod
    def show(kind):
        return kind or "void"


# ---- Julia --------------------------------------------------------------------------------------------------------------------


class Julia(OfText):
    """bindings/julia/src/abi.jl: constants, type aliases, handles, structs and @c_function, as text. Callbacks are Ptr{Cvoid}."""

    NUMBERS = {"int8_t": "Int8", "uint8_t": "UInt8", "int32_t": "Int32", "uint32_t": "UInt32", "int64_t": "Int64",
               "uint64_t": "UInt64", "double": "Float64", "float": "Float32", "char": "UInt8", "void": "Cvoid"}
    BYTES = {"Int8": 1, "UInt8": 1, "Int32": 4, "UInt32": 4, "Int64": 8, "UInt64": 8, "Float64": 8, "Float32": 4,
             "Cstring": POINTER_BYTES}

    CONSTANT = re.compile(r"^const (SOTTO_\w+) = (-?\w+)$", re.M)
    ALIAS = re.compile(r"^const (sotto_\w+) = (\S+)$", re.M)
    HANDLE = re.compile(r"^mutable struct (sotto_\w+) end$", re.M)
    STRUCT = re.compile(r"^struct (sotto_\w+)\n(.*?)^end$", re.M | re.S)
    FIELD = re.compile(r"^    (\w+)::(.+)$", re.M)
    FUNCTION = re.compile(r"^@c_function (\w+)\(([^)]*)\)::(\S+)$", re.M)

    def __init__(self, path, snapshot):
        self.snapshot = snapshot
        self.text = re.sub(r"^#.*", "", path.read_text(encoding="utf-8"), flags=re.M)

    def declared(self):
        found = Declared({name: int(value, 0) for name, value in self.CONSTANT.findall(self.text)})
        found.typedefs = dict(self.ALIAS.findall(self.text))
        found.handles = self.HANDLE.findall(self.text)
        for name, block in self.STRUCT.findall(self.text):
            found.structs[name] = lay_out(self.FIELD.findall(block), lambda kind: self._extent(kind, found))
        for name, block, result in self.FUNCTION.findall(self.text):
            pairs = [argument.split("::", 1) for argument in re.split(r",\s*", block.strip()) if argument]
            found.functions[name] = result, [(argument.rstrip("_"), kind) for argument, kind in pairs]
        return found

    def _extent(self, kind, found):
        """(size, alignment) of a type."""
        kind = found.typedefs.get(kind, kind)
        array = re.fullmatch(r"NTuple\{(\d+), (\w+)\}", kind)
        if array:
            size, align = self._extent(array[2], found)
            return size * int(array[1]), align
        if kind.startswith("Ptr{"):
            return POINTER_BYTES, POINTER_BYTES
        if kind in found.structs:
            return found.structs[kind].size, found.structs[kind].align
        size = self.BYTES.get(kind, 0)
        return size, max(1, size)

    def typedef(self, name):
        """The type that a typedef of C has to be."""
        text = self.snapshot["typedefs"][name]
        return self.argument(text) if callback_of(text) is None else "Ptr{Cvoid}"

    def argument(self, text):
        """The type that an argument, a result or a field has to be. Text that is passed in, `const char *`, is Cstring."""
        array = re.fullmatch(r"(\w+)\[(\d+)\]", text.strip())
        if array:
            return f"NTuple{{{array[2]}, {self.argument(array[1])}}}"
        plain = text.replace(" ", "")
        text_pointer = re.fullmatch(r"constchar\*(\**)", plain)
        kind, pointers = re.fullmatch(r"(\w+)(\**)", re.sub(r"\bconst\b|\s", "", text)).groups()
        kind, pointers = ("Cstring", text_pointer[1]) if text_pointer else (self._name(kind), pointers)
        for _ in pointers:
            kind = f"Ptr{{{kind}}}"
        return kind

    @staticmethod
    def show(kind):
        return kind


def lay_out(fields, extent):
    """A struct as C lays it out. fields: (name, type); extent(type): (size, alignment)."""
    places, end, widest = {}, 0, 1
    for name, kind in fields:
        size, align = extent(kind)
        end = (end + align - 1) // align * align
        places[name] = kind, end, size
        end, widest = end + size, max(widest, align)
    return Struct(places, (end + widest - 1) // widest * widest, widest)


# ---- the comparison -----------------------------------------------------------------------------------------------------------


@dataclass
class Language:
    """A row of the table. reader(path, snapshot) has declared(), typedef(name) and argument(text), which say what C's types have
    to be in the language, same(declared, wanted) and show(type)."""

    title: str
    source: Path
    reader: Callable[[Path, dict], Any]


LANGUAGES = {
    "python": Language("Python", ROOT / "bindings/python/src/sotto/_abi.py", CTypes),
    "rust": Language("Rust", ROOT / "bindings/rust/sotto-sys/src", Rust),
    "julia": Language("Julia", ROOT / "bindings/julia/src/abi.jl", Julia),
}


class Comparison:
    """One language against the snapshot; problems has the differences."""

    def __init__(self, language, source, snapshot):
        self.title, self.snapshot = language.title, snapshot
        self.types = language.reader(source, snapshot)
        self.declared = self.types.declared()
        self.problems = []

    def run(self):
        self.names("constant", self.declared.constants, self.snapshot["constants"])
        self.names("struct", self.declared.structs, self.snapshot["structs"])
        if self.problems:  # the rest refers to structs by name
            return
        self.constants()
        self.typedefs()
        for name, entry in sorted(self.snapshot["structs"].items()):
            self.struct(name, entry, self.declared.structs[name])
        self.functions()

    def say(self, text):
        self.problems.append(f"{self.title}: {text}")

    def names(self, what, declared, wanted):
        for name in wanted:
            if name not in declared:
                self.say(f"{what} {name} is missing")
        for name in declared:
            if name not in wanted:
                self.say(f"{what} {name} is not in the snapshot")

    def check_type(self, where, found, text):
        wanted = self.types.argument(text)
        if not self.types.same(found, wanted):
            self.say(f"{where} {self.types.show(found)}, {text} needs {self.types.show(wanted)}")

    def constants(self):
        for name, value in sorted(self.snapshot["constants"].items()):
            if self.declared.constants[name] != value:
                self.say(f"constant {name} is {self.declared.constants[name]}, in the snapshot {value}")

    def typedefs(self):
        wanted = self.snapshot["typedefs"]
        self.names("type", self.declared.typedefs, wanted)
        for name in sorted(set(wanted) & set(self.declared.typedefs)):
            if not self.types.same(self.declared.typedefs[name], self.types.typedef(name)):
                self.say(f"type {name} is not {wanted[name]}")
        handles = sorted(self.snapshot["handles"])
        if sorted(self.declared.handles) != handles:
            self.say(f"handles are {sorted(self.declared.handles)}, in the snapshot {handles}")

    def struct(self, name, entry, struct):
        fields = {member["name"]: member for member in entry["fields"]}
        self.names(f"struct {name}: field", struct.fields, fields)
        for member in (member for member in fields.values() if member["name"] in struct.fields):
            where = f"struct {name}: field {member['name']}"
            found, *place = struct.fields[member["name"]]
            self.check_type(f"{where} is", found, member["type"])
            if place != [member["offset"], member["size"]]:
                self.say(f"{where} is at {place[0]} with {place[1]} bytes, in the snapshot at {member['offset']} with "
                         f"{member['size']}")
        if (struct.size, struct.align) != (entry["size"], entry["align"]):
            self.say(f"struct {name} has {struct.size} bytes aligned to {struct.align}, in the snapshot {entry['size']} aligned "
                     f"to {entry['align']}")

    def functions(self):
        exported = {name: f for name, f in self.snapshot["functions"].items() if not f.get("inline")}
        self.names("function", self.declared.functions, exported)
        for name in sorted(set(exported) & set(self.declared.functions)):
            result, arguments = self.declared.functions[name]
            self.check_type(f"function {name} returns", result, exported[name]["returns"])
            params = exported[name]["params"]
            if len(arguments) != len(params):
                self.say(f"function {name} has {len(arguments)} arguments, in the snapshot {len(params)}")
                continue
            for index, ((called, found), param) in enumerate(zip(arguments, params)):
                self.check_type(f"function {name}: argument {index} ({param['name']}) is", found, param["type"])
                if called not in (None, param["name"]):
                    self.say(f"function {name}: argument {index} is called {called}, in the snapshot {param['name']}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--snapshot", default=SNAPSHOT, type=Path)
    parser.add_argument("--language", choices=LANGUAGES, help="this one alone")
    parser.add_argument("--source", type=Path, help="its declarations, in place of those of this tree")
    options = parser.parse_args(arguments)
    if options.source and not options.language:
        parser.error("--source needs --language")
    snapshot = json.loads(options.snapshot.read_text(encoding="utf-8"))
    different = 0
    for name in [options.language] if options.language else LANGUAGES:
        language = LANGUAGES[name]
        comparison = Comparison(language, options.source or language.source, snapshot)
        comparison.run()
        print(*comparison.problems, sep="\n", end="\n" if comparison.problems else "")
        declared = comparison.declared
        print(f"{language.title}: {len(declared.functions)} functions, {len(declared.structs)} structs, "
              f"{len(declared.constants)} constants checked, {len(comparison.problems)} differences")
        different += len(comparison.problems)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
