"""Holds the direction of includes between the folders of the tree.

Inside core: base <- kernels <- iface <- wire, cpu <- plan <- engine <- group <- codec <- optim <- overlap <- outer <- state, predict; config sees base alone,
and codec and what is above it see config.
transports and cuda see core/base, core/kernels, core/iface, core/wire; transports that are made of frame carriers (shm, tcp, ucx) also
transports/framed; cuda and transports/nccl also cuda/calls, which sees core/base alone. capi sees core. capi/src/backends.cc alone also sees transports.
integration and bindings see the public headers alone. The public headers see the C library alone.
"""

import argparse
import re
import sys
from pathlib import Path

from sources import C_SUFFIXES, project_files, report

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
TOP_FOLDERS = ("core", "capi", "transports", "cuda", "bindings", "integration", "tests")

_TIERS = [("base",), ("kernels",), ("iface",), ("wire", "cpu"), ("plan",), ("engine",), ("group",), ("codec",), ("optim",), ("overlap",), ("outer",), ("state", "predict")]


def _core_rules():
    """For each folder of core the folders that it may include, itself among them."""
    rules = {"config": {"config", "base"}}
    below = set()
    for tier in _TIERS:
        for folder in tier:
            rules[folder] = below | {folder}
        below |= set(tier)
    for folder in ("codec", "optim", "overlap", "outer", "state", "predict"):
        rules[folder] |= {"config"}
    return {f"core/{folder}": {f"core/{name}" for name in names} for folder, names in rules.items()}


CORE_RULES = _core_rules()
FOR_TRANSPORTS = {"core/base", "core/kernels", "core/iface", "core/wire"}
FRAMED = "transports/framed"
ON_FRAMES = {"transports/shm", "transports/tcp", "transports/ucx"}
CUDA_CALLS = "cuda/calls"
PUBLIC_HEADERS = "capi/include"
MAIN_HEADER = "capi/include/sotto/sotto.h"
MAIN_MAY_INCLUDE = {"stddef.h", "stdint.h"}
# Headers with inline functions beside it may use more of C99.
OTHERS_MAY_INCLUDE = MAIN_MAY_INCLUDE | {"limits.h", "stdbool.h", "string.h"}


def folder_of(path):
    """core/plan for core/plan/x.h; capi, integration and the like for everything below them."""
    parts = Path(path).parts
    if len(parts) > 2 and parts[0] in ("core", "transports") or parts[:2] == ("cuda", "calls"):
        return "/".join(parts[:2])
    if parts[:2] == ("capi", "include") or parts[0] == "sotto":
        return PUBLIC_HEADERS
    return parts[0]


def allowed_folders(path):
    """Rooms that the file at `path` may include; None means all."""
    folder = folder_of(path)
    if folder in CORE_RULES:
        return CORE_RULES[folder]
    if folder.startswith("core/"):
        return set()
    if folder == CUDA_CALLS:
        return {"core/base", folder}
    if folder in ("cuda", "transports/nccl"):
        return FOR_TRANSPORTS | {folder, CUDA_CALLS}
    if folder.startswith("transports/"):
        return FOR_TRANSPORTS | {folder} | ({FRAMED} if folder in ON_FRAMES else set())
    if folder == "capi":
        allowed = set(CORE_RULES) | {"capi", PUBLIC_HEADERS}
        return None if path.as_posix() == "capi/src/backends.cc" else allowed
    if folder in ("integration", "bindings"):
        return {folder, PUBLIC_HEADERS}
    return None


def includes_of(text):
    """(line number, quote, included path) of every include."""
    return [(text.count("\n", 0, m.start(2)) + 1, m.group(1), m.group(2)) for m in INCLUDE.finditer(text)]


def resolve(root, path, quote, name):
    """The included file's path below root, or None for a file that is not the project's."""
    if name.split("/")[0] in TOP_FOLDERS or name.startswith("sotto/"):
        return Path(name)
    beside = path.parent / name
    if quote == '"' and (root / beside).is_file():
        return Path(*_normal(beside.parts))
    return None


def _normal(parts):
    out = []
    for part in parts:
        if part == ".." and out:
            out.pop()
        else:
            out.append(part)
    return out


def _check_public_header(path, number, name, target):
    may = MAIN_MAY_INCLUDE if path.as_posix() == MAIN_HEADER else OTHERS_MAY_INCLUDE
    if name in may or (target is not None and folder_of(target) == PUBLIC_HEADERS):
        return []
    return [f"{path}:{number}: public header includes '{name}'; allowed: {', '.join(sorted(may))} and sotto/*.h"]


def check_file(root, path, text):
    problems = []
    allowed = allowed_folders(path)
    folder = folder_of(path)
    if folder.startswith("core/") and folder not in CORE_RULES:
        return [f"{path}:1: folder {folder} has no rule in tests/lint/check_includes.py: give it its place in the order"]
    for number, quote, name in includes_of(text):
        target = resolve(root, path, quote, name)
        if folder == PUBLIC_HEADERS:
            problems += _check_public_header(path, number, name, target)
            continue
        if target is None:
            if quote == '"':
                problems.append(f"{path}:{number}: \"{name}\" is not a file of the project: write <{name}>, or the "
                                "path from the repository root")
            continue
        if allowed is not None and folder_of(target) not in allowed:
            problems.append(f"{path}:{number}: {folder} must not include {folder_of(target)} ({name}); allowed: "
                            f"{', '.join(sorted(allowed))}")
    return problems


def check_asio_wrapper(texts):
    """Asio needs a definition before its first include: one wrapper header has it, everybody includes that."""
    users = sorted(path.as_posix() for path, text in texts.items()
                   if any(name.startswith("boost/asio") for _, _, name in includes_of(text)))
    if len(users) <= 1:
        return []
    return [f"{user}:1: includes Boost.Asio directly; one wrapper header alone may (now: {', '.join(users)})"
            for user in users]


def check(root):
    root = Path(root)
    texts = {path: (root / path).read_text(encoding="utf-8", errors="replace")
             for path in project_files(root, C_SUFFIXES)}
    problems = []
    for path, text in texts.items():
        problems += check_file(root, path, text)
    return problems + check_asio_wrapper(texts), len(texts)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default=Path(__file__).resolve().parents[2])
    return report(*check(parser.parse_args().root))


if __name__ == "__main__":
    sys.exit(main())
