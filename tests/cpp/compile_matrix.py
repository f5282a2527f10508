#!/usr/bin/python3
"""sotto.hpp compiles in every dialect, with both compilers, with and without exceptions, and refuses what it has to.

    compile_matrix.py INCLUDE-DIRECTORY...
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMPILERS = {"g++": ("11", "14", "17", "20", "23"), "clang++-14": ("11", "14", "17", "20", "2b")}
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Wnon-virtual-dtor", "-Werror")
MODES = ((), ("-fno-exceptions",), ("-fno-exceptions", "-fno-rtti"), ("-DSOTTO_CPP_NO_EXCEPTIONS",))
RESULTS = "/* results */"  # begins what is compiled without exceptions
# What must not compile: a statement, and words of the compiler's complaint.
REFUSED = (
    ("sotto::comm a; sotto::comm b(a);", "deleted"),
    ("sotto::comm a, b; a = b;", "deleted"),
    ("sotto::op a; a.close();", "deleted"),
    ("sotto::overlap_round a; sotto::overlap_round b(a);", "deleted"),
    ("sotto::group a; sotto::group b(a);", "deleted"),
    ("sotto::comm c; const std::vector<float> x(4); sotto::wait(c.all_reduce(x));", "memory that is written cannot be const"),
    ("sotto::comm c; std::vector<char> x(4); sotto::wait(c.all_reduce(x));", "dtype_of<char"),
    ("const std::vector<float> x(4); sotto::param(\"x\", x);", "memory that is written cannot be const"),
    ("sotto::comm c; c.barrier();", "unused-result"),
    ("sotto::comm c; c.barrier();", "unused-result"),
    ("std::vector<float> x(4); sotto::param(std::string(\"x\"), x);", "deleted"),
    ("std::vector<float> x(4); sotto::named_array(std::string(\"x\"), x);", "deleted"),
    ("sotto::comm_config c; c.transport(std::string(\"tcp\"));", "deleted"),
    (f"{RESULTS} sotto::op a; if (a.test()) return;", "result<bool>"),
    (f"{RESULTS} sotto::op a; if (a.test()) return;", "result<bool>"),
)


def compile_text(compiler, options, path, includes):
    command = [compiler, *options, *WARNINGS, "-fsyntax-only", *(f"-I{folder}" for folder in includes), str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, " ".join(command)


def accepted(includes):
    jobs = [(compiler, (f"-std=c++{std}", *mode)) for compiler, stds in COMPILERS.items() for std in stds
            for mode in (MODES if std == "17" else MODES[:2])]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda job: compile_text(*job, HERE / "every_call.cc", includes), jobs)
        return [f"{command}\n{out}" for code, out, command in results if code != 0], len(jobs)


def refused(includes, folder):
    def problem(numbered):
        number, (statement, words) = numbered
        path = Path(folder) / f"refused{number}.cc"
        path.write_text(f"#include <sotto/sotto.hpp>\nvoid f();\nvoid f() {{ {statement} }}\n", encoding="ascii")
        compiler, std = (("g++", "17"), ("clang++-14", "11"))[number % 2]
        form = ("-DSOTTO_CPP_NO_EXCEPTIONS",) if statement.startswith(RESULTS) else ()
        code, out, _ = compile_text(compiler, (f"-std=c++{std}", *form), path, includes)
        if code == 0:
            return f"{compiler} compiles: {statement}"
        return None if words in out else f"{compiler} refuses {statement} without \"{words}\":\n{out}"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [found for found in pool.map(problem, enumerate(REFUSED)) if found]


def main(*includes):
    missing = [compiler for compiler in COMPILERS if not shutil.which(compiler)]
    if missing:
        print(f"SKIPPED: {' and '.join(missing)} are not installed: run integration/setup.sh")
        return 77
    problems, count = accepted(includes)
    with tempfile.TemporaryDirectory() as folder:
        problems += refused(includes, folder)
    print("\n".join([*problems, f"{count} ways of compiling, {len(REFUSED)} refusals, {len(problems)} problems"]))
    return 1 if problems else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
