#!/usr/bin/python3
"""What is in the Debian packages, and programs that are compiled against them alone.

    debian_packages.py CMAKE BUILD [FOLDER TREE]

FOLDER becomes where cpack puts the packages of the build directory BUILD, TREE what they unpack to, and trainer/cpp-trainer in
it a program that was built with CMake's package of libsotto-dev. Without them nothing is kept.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUST_HAVE = {
    "sotto": ("usr/bin/sotto", "usr/bin/sotto-run", "usr/share/doc/sotto/copyright", "libsotto.so.0"),
    "libsotto-dev": ("usr/include/sotto/sotto.h", "usr/include/sotto/sotto_dlpack.h", "usr/include/sotto/sotto.hpp",
                     "usr/include/sotto/cpp/comm.hpp", "usr/share/doc/libsotto-dev/copyright", "libsotto.so", "sotto.pc",
                     "sottoConfig.cmake"),
}
DEPENDS = {"sotto": (r"libc6 \(>= 2\.\d+\)", r"libhwy1 ", r"libstdc\+\+6 "), "libsotto-dev": (r"^sotto \(= {version}\)$",)}
C_PROGRAM = '#include <sotto/sotto.h>\nint main(void) { return sotto_abi_version() == SOTTO_ABI_VERSION ? 0 : 1; }\n'
CPP_PROGRAM = ('#include <sotto/sotto.hpp>\nint main() {\n  sotto::context context = sotto::context::create();\n'
               '  sotto::comm comm = sotto::comm::create(context, sotto::comm_config().rank(0, 1));\n  return comm.rank();\n}\n')


def run(*command, **kwargs):
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False, **kwargs)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}\nended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def require(condition, text):
    if not condition:
        sys.exit(text)


def one(folder, pattern):
    found = sorted(folder.rglob(pattern))
    require(len(found) == 1, f"{folder}: {pattern} is there {len(found)} times: {found}")
    return found[0]


def check_package(name, package):
    """Fields and files."""
    def field(key):
        return run("dpkg-deb", "--field", package, key).strip()
    files = [line.split()[-1][2:] for line in run("dpkg-deb", "--contents", package).splitlines() if " -> " not in line]
    links = [line.split(" -> ")[0].split()[-1][2:] for line in run("dpkg-deb", "--contents", package).splitlines() if " -> " in line]
    for wanted in MUST_HAVE[name]:
        there = [path for path in files + links if path == wanted or ("/" not in wanted and path.endswith("/" + wanted))]
        require(len(there) == 1, f"{package}: {wanted} is there {len(there)} times")
    require(not [path for path in files if "__pycache__" in path or "/tests/test_" in path], f"{package} has tests or caches")
    require(field("Package") == name and field("Architecture") == "amd64", f"{package}: {field('Package')}")
    for wanted in DEPENDS[name]:
        pattern = wanted.replace("{version}", re.escape(field("Version")))
        require(re.search(pattern, field("Depends")), f"{package} depends on {field('Depends')}, without {pattern}")


def compile_with_pkg_config(tree):
    """In C99 and in C++11."""
    pc = one(tree, "sotto.pc").parent
    flags = run("pkg-config", "--cflags", "--libs", "sotto", env={**os.environ, "PKG_CONFIG_PATH": str(pc)}).split()
    require(Path(flags[0][2:]).resolve() == (tree / "usr/include").resolve(), f"flags are {flags}")
    library = one(tree, "libsotto.so.0").parent
    for compiler, suffix, text, std in (("gcc", "c", C_PROGRAM, "c99"), ("g++", "cc", CPP_PROGRAM, "c++11")):
        source, program = tree / f"use.{suffix}", tree / f"use-{suffix}"
        source.write_text(text, encoding="ascii")
        run(compiler, f"-std={std}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", source, "-o", program, *flags)
        run(program, env={"LD_LIBRARY_PATH": str(library)})


def compile_with_cmake(tree, cmake):
    """integration/cpp_trainer, from nothing."""
    run(cmake, "-S", ROOT / "integration/cpp_trainer", "-B", tree / "trainer", f"-DCMAKE_PREFIX_PATH={tree}/usr",
        "-DCMAKE_BUILD_TYPE=Release")
    run(cmake, "--build", tree / "trainer")
    out = run(tree / "usr/bin/sotto-run", "-n", "2", "--timeout", "100", "--", tree / "trainer/cpp-trainer")
    require("weights are equal on all ranks" in out, out)


def check(cmake, build, folder, tree):
    run(Path(cmake).with_name("cpack"), "-G", "DEB", "-B", folder, cwd=build)
    shutil.rmtree(tree, ignore_errors=True)
    for name in MUST_HAVE:
        package, = folder.glob(f"{name}_*.deb")
        check_package(name, package)
        run("dpkg-deb", "--extract", package, tree)
    compile_with_pkg_config(tree)
    compile_with_cmake(tree, cmake)
    print("the packages have what they should; programs compile against them and run")


def main(cmake, build, *places):
    if not shutil.which("dpkg-shlibdeps"):
        print("SKIPPED: dpkg-shlibdeps is not installed: apt-get install dpkg-dev")
        return 77
    if places:
        folder, tree = (Path(place).resolve() for place in places)
        for old in folder.glob("*.deb"):
            old.unlink()
        check(cmake, build, folder, tree)
    else:
        with tempfile.TemporaryDirectory() as name:
            check(cmake, build, Path(name), Path(name) / "tree")
    return 0


if __name__ == "__main__":
    if len(sys.argv) not in (3, 5):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
