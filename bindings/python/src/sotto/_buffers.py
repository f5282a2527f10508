"""Arrays of other libraries as `sotto_buffer`, without a copy.

Accepted: arrays of the frameworks in ``_frameworks`` (numpy, PyTorch, JAX), anything
with the buffer protocol (array.array, memoryview, bytearray, ctypes arrays), anything with
``__dlpack__``. They have to be contiguous in C order and of a dtype that the library knows; outputs
have to be writable. Arrays of frameworks may be on a CUDA device, everything else is in host
memory.
"""

from __future__ import annotations

import ctypes as c
import sys
from collections.abc import Sequence
from typing import Any

from . import _abi as abi
from ._dlpack import view_of_dlpack
from ._frameworks import view_in_framework
from ._view import DTYPES, HOST, View, cuda_of, dtype_code, not_contiguous
from .errors import InvalidArgumentError

__all__ = ["DTYPES", "HOST", "Buffers", "View", "buffer_of", "cuda_of", "view_of"]


class _PyBuffer(c.Structure):
    """CPython's Py_buffer."""

    _fields_ = [
        ("buf", c.c_void_p),
        ("obj", c.py_object),
        ("len", c.c_ssize_t),
        ("itemsize", c.c_ssize_t),
        ("readonly", c.c_int),
        ("ndim", c.c_int),
        ("format", c.c_char_p),
        ("shape", c.c_void_p),
        ("strides", c.c_void_p),
        ("suboffsets", c.c_void_p),
        ("internal", c.c_void_p),
    ]


def _address(view: memoryview) -> int:
    # The view itself holds the export; this only reads where it lies.
    raw = _PyBuffer()
    c.pythonapi.PyObject_GetBuffer(c.py_object(view), c.byref(raw), c.c_int(0x18 | 0x4))
    try:
        return raw.buf or 0
    finally:
        c.pythonapi.PyBuffer_Release(c.byref(raw))


_KINDS = {"b": "int", "h": "int", "i": "int", "l": "int", "q": "int", "n": "int"}
_KINDS |= {
    "B": "uint",
    "c": "uint",
    "H": "uint",
    "I": "uint",
    "L": "uint",
    "Q": "uint",
    "N": "uint",
}
_KINDS |= {"e": "float", "f": "float", "d": "float"}


def _of_buffer(view: memoryview, what: str) -> View:
    form = view.format.lstrip("@=<" if sys.byteorder == "little" else "@=>!")
    kind = _KINDS.get(form, f"buffer format '{view.format}' with ")
    dtype = dtype_code(f"{kind}{8 * view.itemsize}", what)
    if not view.c_contiguous:
        raise not_contiguous(what, "copy it into one piece first")
    return View(_address(view), view.nbytes // view.itemsize, dtype, not view.readonly, view)


def view_of(x: Any, what: str) -> View:
    """Where the array `x` lies; `what` names it in errors.

    Errors: UnsupportedError (dtype, device, layout), InvalidArgumentError (not contiguous, or no
    array).
    """
    found = view_in_framework(x, what)
    if found is not None:
        return found
    try:
        view = memoryview(x)
    except TypeError:
        pass
    else:
        return _of_buffer(view, what)
    if hasattr(x, "__dlpack__"):
        return view_of_dlpack(x, what)
    raise InvalidArgumentError(
        f"{what} is of type {type(x).__qualname__}; allowed: numpy arrays, torch tensors, objects "
        "with the buffer protocol or __dlpack__, and lists or tuples of these"
    )


class Buffers:
    """n arrays as an array of `sotto_buffer`, and references that keep their memory alive."""

    def __init__(self, arrays: Any, what: str, *, writable: bool) -> None:
        several = isinstance(arrays, (list, tuple))
        items: Sequence[Any] = arrays if several else (arrays,)
        self.views: list[View] = []
        for i, x in enumerate(items):
            view = view_of(x, f"{what}[{i}]" if several else what)
            if writable and not view.writable:
                raise InvalidArgumentError(
                    f"{what}{f'[{i}]' if several else ''} is read-only and would be written"
                )
            self.views.append(view)
        self.n = len(self.views)
        self.cuda = cuda_of(self.views)
        self.array = (abi.Buffer * self.n)(*(buffer_of(view) for view in self.views))


def buffer_of(view: View | None) -> abi.Buffer:
    """The C struct; None gives an absent buffer."""
    if view is None:
        return abi.Buffer()
    data = view.data if view.elements else None
    kind, number = abi.SOTTO_DEVICE_CPU, 0
    if view.cuda != HOST:
        kind, number = abi.SOTTO_DEVICE_CUDA, view.cuda
    return abi.Buffer(data, view.elements, view.dtype, kind, number, 0)
