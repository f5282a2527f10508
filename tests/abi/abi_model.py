"""What a C header promises to those compiled against it, as data: functions, callbacks, constants, struct layouts.

The declarations come from clang-14's syntax tree, sizes and values from a probe program compiled with the C compiler.
"""

import json
import os
import re
import subprocess
import tempfile

CLANG = "clang-14"
PREFIX = "sotto_"
CONSTANT_PREFIX = "SOTTO_"
# Macros of the header that are no constants.
NOT_CONSTANTS = re.compile(r"^SOTTO_(API|SOTTO_H|.*_INIT)$")


class AbiError(Exception):
    """The header cannot be read as an ABI; the text says why."""


def run(command, **kwargs):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
                          **kwargs)
    if done.returncode != 0:
        raise AbiError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def syntax_tree(header):
    text = run([CLANG, "-x", "c", "-std=c99", "-fsyntax-only", "-Xclang", "-ast-dump=json", header])
    return json.loads(text)["inner"]


def from_header(node):
    """Declarations of the header itself and not of what it includes."""
    return node.get("name", "").startswith(PREFIX)


def qual_type(node):
    return node["type"]["qualType"]


def function_entry(node):
    params = [p for p in node.get("inner", []) if p["kind"] == "ParmVarDecl"]
    entry = {"returns": qual_type(node).split("(", 1)[0].strip(),
             "params": [{"name": p.get("name", ""), "type": qual_type(p)} for p in params]}
    if node.get("variadic"):
        raise AbiError(f"{node['name']} is variadic")
    if node.get("inline") or node.get("storageClass") == "static":
        entry["inline"] = True
    elif "()" in qual_type(node):
        raise AbiError(f"{node['name']} has no prototype: write (void)")
    return entry


def record_fields(node):
    fields = []
    for field in node.get("inner", []):
        if field["kind"] != "FieldDecl":
            continue
        if field.get("isBitfield"):
            raise AbiError(f"{node['name']}.{field['name']} is a bit-field")
        fields.append({"name": field["name"], "type": qual_type(field)})
    return fields


def constants(header):
    text = run([CLANG, "-x", "c", "-std=c99", "-E", "-dM", header])
    names = re.findall(rf"^#define ({CONSTANT_PREFIX}[A-Z0-9_]+) .+$", text, re.MULTILINE)
    return sorted(n for n in names if not NOT_CONSTANTS.match(n))


def probe(header, structs, names):
    """Sizes, offsets and values as the C compiler sees them."""
    lines = ["#include <stdio.h>", f'#include "{header}"', "int main(void) {"]
    for name, entry in structs.items():
        lines.append(f'printf("%s %zu %zu\\n", "{name}", sizeof({name}), sizeof(struct {{ char c; {name} s; }}) - sizeof({name}));')
        for field in entry["fields"]:
            member = f"(({name} *)0)->{field['name']}"
            lines.append(f'printf("%s.%s %zu %zu\\n", "{name}", "{field["name"]}", offsetof({name}, {field["name"]}), sizeof({member}));')
    for name in names:
        lines.append(f'printf("%s %lld\\n", "{name}", (long long)({name}));')
    lines += ["return 0;", "}"]
    with tempfile.TemporaryDirectory() as folder:
        source, program = os.path.join(folder, "probe.c"), os.path.join(folder, "probe")
        with open(source, "w", encoding="ascii") as f:
            f.write("\n".join(lines))
        run([CLANG, "-std=c99", "-w", "-O0", source, "-o", program])
        output = run([program])
    return {words[0]: [int(w) for w in words[1:]] for words in (line.split() for line in output.splitlines())}


def read_header(header):
    """The ABI of a header as a dictionary with stable order."""
    header = os.path.abspath(header)
    functions, structs, typedefs, handles = {}, {}, {}, []
    for node in syntax_tree(header):
        if not from_header(node):
            continue
        name, kind = node["name"], node["kind"]
        if kind == "FunctionDecl":
            functions[name] = function_entry(node)
        elif kind == "RecordDecl" and node.get("completeDefinition"):
            structs[name] = {"fields": record_fields(node)}
        elif kind == "RecordDecl":
            handles.append(name)
        elif kind == "TypedefDecl" and not qual_type(node).startswith("struct "):
            typedefs[name] = qual_type(node)
    names = constants(header)
    values = probe(header, structs, names)
    for name, entry in structs.items():
        entry["size"], entry["align"] = values[name]
        for field in entry["fields"]:
            field["offset"], field["size"] = values[f"{name}.{field['name']}"]
    return {
        "abi_version": f"{values['SOTTO_ABI_MAJOR'][0]}.{values['SOTTO_ABI_MINOR'][0]}",
        "constants": {name: values[name][0] for name in names},
        "functions": dict(sorted(functions.items())),
        "handles": sorted(set(handles) - set(structs)),
        "structs": dict(sorted(structs.items())),
        "typedefs": dict(sorted(typedefs.items())),
    }


def exported(model):
    """Names of the functions that the library has to export."""
    return sorted(name for name, entry in model["functions"].items() if not entry.get("inline"))


def to_text(model):
    return json.dumps(model, indent=1) + "\n"


def differences(old, new, path=""):
    """Readable lines, one for each place where two models differ."""
    if type(old) is not type(new):
        return [f"{path}: was {json.dumps(old)}, is {json.dumps(new)}"]
    if isinstance(old, dict):
        lines = []
        for key in sorted(set(old) | set(new)):
            where = f"{path}.{key}" if path else key
            if key not in new:
                lines.append(f"{where}: gone")
            elif key not in old:
                lines.append(f"{where}: new")
            else:
                lines += differences(old[key], new[key], where)
        return lines
    if isinstance(old, list) and len(old) == len(new):
        return [line for i, (a, b) in enumerate(zip(old, new)) for line in differences(a, b, f"{path}[{i}]")]
    return [] if old == new else [f"{path}: was {json.dumps(old)}, is {json.dumps(new)}"]


def incompatibilities(old, new):
    """What of `new` would break a program compiled against `old`: an older version of the same ABI major."""
    lines = []
    for kind in ("constants", "typedefs"):
        for name, value in old[kind].items():
            # Versions move on by themselves.
            if name not in ("SOTTO_ABI_MINOR", "SOTTO_ABI_VERSION") and new[kind].get(name) != value:
                lines.append(f"{kind}.{name}: was {value}, is {new[kind].get(name)}")
    for name, entry in old["functions"].items():
        current = new["functions"].get(name)
        if current is None:
            lines.append(f"functions.{name}: gone")
        elif [p["type"] for p in current["params"]] != [p["type"] for p in entry["params"]] or current["returns"] != entry["returns"]:
            lines.append(f"functions.{name}: signature changed")
    for name, entry in old["structs"].items():
        current = new["structs"].get(name)
        if current is None:
            lines.append(f"structs.{name}: gone")
            continue
        grows = bool(entry["fields"]) and entry["fields"][0]["name"] == "struct_size"
        if current["fields"][: len(entry["fields"])] != entry["fields"]:
            lines.append(f"structs.{name}: a field was changed, moved or put in between")
        elif current["size"] != entry["size"] and not grows:
            lines.append(f"structs.{name}: frozen at {entry['size']} bytes, is {current['size']}")
    return lines
