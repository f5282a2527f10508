#!/usr/bin/python3
"""The install tree: install, build a program against it with find_package and with pkg-config, run it.

    install_test.py CMAKE BUILD-DIRECTORY TRAINER-SOURCE [CMAKE-ARGUMENT...]
"""

import os
import subprocess
import sys
import tempfile

C_PROGRAM = """#include <sotto/sotto.h>
#include <sotto/sotto_dlpack.h>
int main(void) { return sotto_abi_version() == SOTTO_ABI_VERSION ? 0 : 1; }
"""
CPP_PROGRAM = """#include <sotto/sotto.hpp>
int main() { return sotto::abi_version() == SOTTO_ABI_VERSION ? 0 : 1; }
"""


def run(*command, **kwargs):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500, check=False, **kwargs)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def find(folder, name):
    found = [os.path.join(path, name) for path, _, files in os.walk(folder) if name in files]
    if len(found) != 1:
        sys.exit(f"{name} is {len(found)} times in the install tree")
    return found[0]


# Versions that find_package is asked for, and whether this one is found: those whose programs the library takes.
ASKED = (("", True), ("0.1", True), ("0.2", True), ("0.1...0.2", True), ("0.1...<1", True), ("0.0", False), ("0.3", False),
         ("0.2.9", False), ("0.1...<0.2", False), ("0.3...<1", False), ("1", False))


def find_by_version(cmake, prefix, folder):
    """One configuration without a compiler asks for all."""
    lines = [f'find_package(sotto {asked} QUIET CONFIG)\nmessage("asked {asked}: ${{sotto_FOUND}}")\nunset(sotto_DIR CACHE)'
             for asked, _ in ASKED]
    os.mkdir(folder)
    with open(os.path.join(folder, "CMakeLists.txt"), "w", encoding="ascii") as f:
        f.write("cmake_minimum_required(VERSION 3.25)\nproject(asks LANGUAGES NONE)\n" + "\n".join(lines) + "\n")
    said = run(cmake, "-S", folder, "-B", os.path.join(folder, "build"), f"-DCMAKE_PREFIX_PATH={prefix}")
    for asked, found in ASKED:
        if f"asked {asked}: {int(found)}\n" not in said:
            sys.exit(f"find_package(sotto {asked}) has to {'find it' if found else 'refuse'}:\n{said}")


def main(cmake, build, source, *arguments):
    with tempfile.TemporaryDirectory() as folder:
        prefix, trainer = os.path.join(folder, "prefix"), os.path.join(folder, "trainer")
        for component in ("runtime", "development"):
            run(cmake, "--install", build, "--prefix", prefix, "--component", component)
        for name in ("sotto.h", "sotto_dlpack.h", "sotto.hpp", "comm.hpp", "libsotto.so.0", "sottoConfig.cmake", "sotto", "sotto-run"):
            find(prefix, name)

        find_by_version(cmake, prefix, os.path.join(folder, "asks"))
        run(cmake, "-S", source, "-B", trainer, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Release", *arguments)
        run(cmake, "--build", trainer)
        program = os.path.join(trainer, "cpp-trainer")
        linked = run("readelf", "-d", program)
        if "libsotto.so.0" not in linked:
            sys.exit(f"cpp-trainer does not need libsotto.so.0:\n{linked}")
        # The build environment must not help: only what is installed is used.
        for ranks in ("2", "4"):
            output = run(find(prefix, "sotto-run"), "-n", ranks, "--timeout", "200", "--", program, env={"PATH": "/usr/bin:/bin"})
            print(output)
            if "weights are equal on all ranks" not in output:
                sys.exit("the trainer did not say that the weights are equal")

        pkg_path = os.path.dirname(find(prefix, "sotto.pc"))
        flags = run("pkg-config", "--cflags", "--libs", "sotto", env={**os.environ, "PKG_CONFIG_PATH": pkg_path}).split()
        version = run("pkg-config", "--modversion", "sotto", env={**os.environ, "PKG_CONFIG_PATH": pkg_path}).strip()
        use = os.path.join(folder, "use.c")
        with open(use, "w", encoding="ascii") as f:
            f.write(C_PROGRAM)
        sanitizers = [word for a in arguments for word in a.split("=", 1)[1].split() if "fsanitize" in word]
        run("gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", *sanitizers, use, "-o", use + ".out", *flags,
            f"-Wl,-rpath,{os.path.dirname(find(prefix, 'libsotto.so.0'))}")
        run(use + ".out")
        use_cpp = use + "c"
        with open(use_cpp, "w", encoding="ascii") as f:
            f.write(CPP_PROGRAM)
        run("g++", "-std=c++11", "-Wall", "-Wextra", "-Werror", *sanitizers, use_cpp, "-o", use_cpp + ".out", *flags,
            f"-Wl,-rpath,{os.path.dirname(find(prefix, 'libsotto.so.0'))}")
        run(use_cpp + ".out")
        bench = run(find(prefix, "sotto"), "bench", "net", "--loopback", "--gap", "1ms", "--n", "1000", "--ranks", "2",
                    env={"PATH": "/usr/bin:/bin"})
        print(bench)
        if "6 figures and rows, 0 wrong" not in bench:
            sys.exit("sotto bench net of the installation has not measured")
        if run("find", prefix, "-name", "__pycache__"):
            sys.exit("running a benchmark has written into the installation")
        info = run(find(prefix, "sotto"), "info", env={"PATH": "/usr/bin:/bin"})
        if version not in info:
            sys.exit(f"sotto info does not show version {version} of sotto.pc:\n{info}")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
