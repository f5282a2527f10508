#!/usr/bin/python3
"""A manylinux wheel has the library, what it needs beside the C library, and sotto-run, and asks for no newer C++ library.

    wheel_contents.py WHEEL PLATFORM
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

OF_THE_SYSTEM = re.compile(r"^(libc|libm|libpthread|libdl|librt|ld-linux-x86-64|libstdc\+\+|libgcc_s)\.so")
MUST_HAVE = ("sotto/lib/libsotto.so.0", "sotto/lib/libhwy.so.1", "sotto/LICENSE", "sotto/py.typed")
NOT_LINKED = re.compile(r"^libstdc\+\+\.so")  # by ours: it is linked in


def needed(path):
    out = subprocess.run(["readelf", "-d", str(path)], stdout=subprocess.PIPE, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", out), re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", out)


def problems_of(wheel, platform):
    problems = []
    if not re.fullmatch(rf"sotto-[\d.]+-py3-none-(\w+\.)*{platform}(\.\w+)*\.whl", wheel.name):
        problems.append(f"{wheel.name} is not one for {platform}")
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(wheel) as archive:
        folder = Path(name)
        archive.extractall(folder)
        problems += [f"{path} is not there" for path in MUST_HAVE if not (folder / path).is_file()]
        programs = list(folder.glob("sotto-*.data/scripts/sotto-run"))
        if len(programs) != 1:
            problems.append(f"sotto-run is there {len(programs)} times")
        libraries = {path.name for path in folder.rglob("*.so*")}
        for path in [*folder.rglob("*.so*"), *programs]:
            names, search = needed(path)
            problems += [f"{path.name} needs {n}, which is not in the wheel" for n in names
                         if n not in libraries and not OF_THE_SYSTEM.match(n)]
            ours = path.name.startswith(("libsotto", "sotto-run"))
            problems += [f"{path.name} needs {n}" for n in names if ours and NOT_LINKED.match(n)]
            if any(n in libraries for n in names) and search != ["$ORIGIN"]:
                problems.append(f"{path.name} is to search {search}, not beside itself")
    return problems


def main(wheel, platform):
    problems = problems_of(Path(wheel), platform)
    print("\n".join(problems) or f"{Path(wheel).name}: complete")
    return 1 if problems else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
