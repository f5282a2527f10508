#!/usr/bin/python3
"""abi_header: the public headers are plain C, compile in every dialect, keep to the rules for types, and document every
function.

    check_header.py INCLUDE-DIRECTORY
"""

import os
import re
import subprocess
import sys
import tempfile

import abi_model

HEADERS = ("sotto/sotto.h", "sotto/sotto_dlpack.h")
COMMON = ["-Wall", "-Wextra", "-Wpedantic", "-pedantic-errors", "-Wconversion", "-Wshadow", "-Wundef", "-Werror", "-fsyntax-only"]
C_FLAGS = ["-Wstrict-prototypes", "-Wmissing-prototypes", "-Wc++-compat"]
DIALECTS = [
    ("gcc", "c", "c99", C_FLAGS), ("gcc", "c", "c11", C_FLAGS), ("gcc", "c", "c17", C_FLAGS),
    ("g++", "c++", "c++11", []), ("g++", "c++", "c++20", []),
    ("clang-14", "c", "c99", C_FLAGS), ("clang++-14", "c++", "c++11", []), ("clang++-14", "c++", "c++20", []),
]
ALLOWED_INCLUDES = {"stddef.h", "stdint.h", "string.h", "sotto.h"}
FORBIDDEN_TYPES = re.compile(r"\b(_?[Bb]ool|long|short|size_t|ssize_t|int|unsigned|float|enum|union)\b")
TAGS = ("Threads:", "Blocks:", "Errors:", "Since:")


def compile_problems(include, header):
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        for compiler, language, standard, extra in DIALECTS:
            source = os.path.join(folder, "use.c" if language == "c" else "use.cc")
            with open(source, "w", encoding="ascii") as f:
                f.write(f"#include <{header}>\n#include <{header}>\nint main(void);\nint main(void) {{ return 0; }}\n")
            done = subprocess.run([compiler, "-x", language, f"-std={standard}", *COMMON, *extra, "-I", include, source],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False)
            if done.returncode != 0:
                problems.append(f"{header} as {standard} with {compiler}:\n{done.stdout}")
    return problems


def include_problems(text, header):
    found = re.findall(r'^\s*#\s*include\s*[<"]([^>"]*)[>"]', text, re.MULTILINE)
    allowed = ALLOWED_INCLUDES if header != HEADERS[0] else {"stddef.h", "stdint.h"}
    return [f"{header} includes {name}; only {', '.join(sorted(allowed))} are allowed" for name in found if name not in allowed]


def type_problems(model):
    problems = []
    structs = set(model["structs"])

    def look(where, text, by_value_ok=False):
        if FORBIDDEN_TYPES.search(text):
            problems.append(f"{where} has type {text}: use fixed-width integers")
        if not by_value_ok and "*" not in text and text.replace("const ", "").strip() in structs:
            problems.append(f"{where} passes {text} by value")

    for name, entry in model["functions"].items():
        look(f"{name}()", entry["returns"])
        for param in entry["params"]:
            look(f"{name}({param['name']})", param["type"])
    for name, text in model["typedefs"].items():
        look(name, text)
    for name, entry in model["structs"].items():
        end = 0
        for field in entry["fields"]:
            look(f"{name}.{field['name']}", field["type"], by_value_ok=True)
            if field["offset"] != end:
                problems.append(f"{name} has {field['offset'] - end} bytes of padding before {field['name']}: add a reserved field")
            end = field["offset"] + field["size"]
        if end != entry["size"]:
            problems.append(f"{name} has {entry['size'] - end} bytes of padding at its end: add a reserved field")
    return problems


def documented_functions(text):
    """(name, parameter names, comment in front, whole declaration) of every function in the text of a header."""
    pattern = re.compile(r"(/\*(?:(?!\*/).)*\*/)\s*((?:SOTTO_API|static inline)\s[^;{]*?\b(sotto_\w+)\(([^;{]*?)\))\s*[;{]", re.DOTALL)
    for comment, declaration, name, params in pattern.findall(text):
        names = [re.search(r"(\w+)\s*$", p).group(1) for p in params.split(",") if p.strip() != "void"]
        yield name, names, comment, declaration


def init_problems(include, text, model):
    """Every struct has a SOTTO_<NAME>_INIT that sets struct_size, if there is one, and nothing else."""
    problems, sized = [], []
    for name, entry in model["structs"].items():
        macro = name.upper() + "_INIT"
        if not re.search(rf"^#define {macro}\b", text, re.MULTILINE):
            problems.append(f"{name} has no {macro}")
        else:
            sized.append((name, macro, entry["fields"][0]["name"] == "struct_size"))
    lines = ["#include <sotto/sotto.h>", "#include <string.h>", "int main(void) {"]
    for name, macro, grows in sized:
        size = "zero.struct_size = sizeof zero;" if grows else ""
        lines.append(f'{{ {name} made = {macro}; {name} zero; memset(&zero, 0, sizeof zero); {size}'
                     f' if (memcmp(&made, &zero, sizeof zero) != 0) return 1; }}')
    lines += ["return 0;", "}"]
    with tempfile.TemporaryDirectory() as folder:
        for compiler, language, standard, extra in DIALECTS[::3]:
            source, program = os.path.join(folder, f"init.{'c' if language == 'c' else 'cc'}"), os.path.join(folder, "init")
            with open(source, "w", encoding="ascii") as f:
                f.write("\n".join(lines))
            command = [compiler, f"-std={standard}", *[f for f in COMMON if f != "-fsyntax-only"], *extra, "-I", include, source,
                       "-o", program]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False)
            if done.returncode != 0:
                problems.append(f"initializers as {standard} with {compiler}:\n{done.stdout}")
            elif subprocess.run([program], timeout=60, check=False).returncode != 0:
                problems.append(f"an initializer of {standard} sets more than struct_size")
    return problems


def comment_problems(text, model, internal=()):
    problems, seen = [], set()
    for name, params, comment, declaration in documented_functions(text):
        seen.add(name)
        if name in internal:
            continue
        flat = re.sub(r"\s*\n \*\s*", " ", comment)
        tags = TAGS + (("Stream:",) if "sotto_call" in declaration or "stream" in params else ())
        problems += [f"{name}: the comment has no {tag}" for tag in tags if tag not in flat]
        problems += [f"{name}: the comment does not describe {param} with [in] or [out]" for param in params
                     if not re.search(rf"^ \*\s+{param}\s+\[(in|out|in,out)\]", comment, re.MULTILINE)]
    for name in sorted(set(model["functions"]) - seen):
        problems.append(f"{name}: no comment in front")
    return problems


def main(argv):
    include = os.path.abspath(argv[0])
    problems = []
    for header in HEADERS:
        path = os.path.join(include, header)
        with open(path, encoding="ascii") as f:
            text = f.read()
        problems += include_problems(text, header)
        problems += compile_problems(include, header)
        if header == HEADERS[0]:
            model = abi_model.read_header(path)
            problems += type_problems(model)
            problems += init_problems(include, text, model)
            problems += comment_problems(text, model)
        else:
            problems += comment_problems(text, {"functions": {}}, internal=("sotto_dlpack_count",))
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except abi_model.AbiError as e:
        sys.exit(str(e))
