"""The frameworks whose arrays are taken, one file each.

A framework is asked only where the program has imported it: its module here is imported then. What
concerns one framework alone stands in that module, so a new one is a file and a row of NAMES.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

from .._view import HOST, View
from .base import Framework, MakeComm

NAMES = ("torch", "jax", "numpy")  # modules of the programs; they are asked in this order
LEGACY_DEFAULT_STREAM = 0  # as CUDA numbers it

_found: dict[str, Framework] = {}


def _in_use() -> Iterator[Framework]:
    for name in NAMES:
        if name in _found:
            yield _found[name]
        elif _is_imported(name):
            module = importlib.import_module(f".{name}", __name__)
            _found[name] = cast("Framework", module.FRAMEWORK)
            yield _found[name]


def _is_imported(name: str) -> bool:
    """Also False while the module's own import is still under way."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def view_in_framework(x: Any, what: str) -> View | None:
    """Where an array of a framework lies; None: it belongs to none of them.

    Errors: those of Framework.view().
    """
    for framework in _in_use():
        view = framework.view(x, what)
        if view is not None:
            return view
    return None


def bytes_of_bools(x: Any) -> Any:
    """An array of booleans as one of uint8, not copied; other arrays as they are."""
    for framework in _in_use():
        found = framework.bytes_of_bools(x)
        if found is not None:
            return found
    return x.view("uint8") if str(getattr(x, "dtype", "")) == "bool" else x


def current_stream(cuda: int) -> int:
    """The stream (cudaStream_t) that calls get: the framework's current one, else the default."""
    for framework in _in_use():
        if framework.has_streams:
            return framework.current_stream(cuda)
    return LEGACY_DEFAULT_STREAM


def await_current_stream(cuda: int) -> None:
    """The host waits for the current stream; for calls that no stream orders."""
    if cuda != HOST:
        for framework in _in_use():
            if framework.has_streams:
                framework.await_current_stream(cuda)
                return


def has_process_group() -> bool:
    """Whether a framework has joined ranks in this process; nothing is imported for that."""
    return any(framework.has_process_group() for framework in _in_use())


def meeting(environ: Mapping[str, str]) -> MakeComm | None:
    """How ranks of a framework meet: see Framework.meeting()."""
    for framework in _in_use():
        make = framework.meeting(environ)
        if make is not None:
            return make
    return None
