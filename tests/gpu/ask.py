#!/usr/bin/env python3
"""What a Python can run, for tests/gpu.sh. Exit code 0: it can; 77: the line says why it cannot."""
import argparse
import ctypes
import importlib
import importlib.util
import sys
from pathlib import Path

SKIPPED = 77


class Missing(Exception):
    """The text is the reason."""


def modules(names):
    """Nothing, if all of them can be imported and torch sees a CUDA device."""
    for name in names:
        try:
            found = importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  # a broken installation fails in many ways
            raise Missing(f"{name} cannot be imported: {error}") from None
        if name == "torch" and not found.cuda.is_available():
            raise Missing(f"torch {found.__version__} sees no CUDA device")
    return ""


def nccl_of_this_python():
    """The library of the package nvidia.nccl, which torch uses; None without the package."""
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    places = [] if package is None else package.submodule_search_locations or []
    found = (Path(place) / "lib/libnccl.so.2" for place in places)
    return next((str(path) for path in found if path.is_file()), None)


def nccl(library):
    """Its version, as NCCL counts, and its path. None: this Python's, or else the system's."""
    library = library or nccl_of_this_python() or "libnccl.so.2"
    version = ctypes.c_int()
    try:
        ctypes.CDLL(library).ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError) as error:
        raise Missing(f"NCCL cannot be opened (SOTTO_NCCL_LIBRARY): {error}") from None
    return f"{version.value} {library}"


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__)
    questions = parser.add_subparsers(required=True)
    question = questions.add_parser("modules", help="whether these can be imported")
    question.add_argument("names", nargs="+")
    question.set_defaults(answer=lambda args: modules(args.names))
    question = questions.add_parser("nccl", help="version and path")
    question.add_argument("library", nargs="?")
    question.set_defaults(answer=lambda args: nccl(args.library))
    args = parser.parse_args(words)
    try:
        print(args.answer(args))
    except Missing as reason:
        print(" ".join(str(reason).split()))
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
