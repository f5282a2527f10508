"""Arrays that other libraries export by DLPack."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from typing import Any

from . import _abi as abi
from ._view import DTYPES, HOST, NAMES, View, device_error, not_contiguous
from .errors import UnsupportedError


class _DLTensor(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("device_type", c.c_int32),
        ("device_id", c.c_int32),
        ("ndim", c.c_int32),
        ("code", c.c_uint8),
        ("bits", c.c_uint8),
        ("lanes", c.c_uint16),
        ("shape", c.POINTER(c.c_int64)),
        ("strides", c.POINTER(c.c_int64)),
        ("byte_offset", c.c_uint64),
    ]


class _DLManagedVersioned(c.Structure):
    _fields_ = [
        ("major", c.c_uint32),
        ("minor", c.c_uint32),
        ("manager", c.c_void_p),
        ("deleter", c.c_void_p),
        ("flags", c.c_uint64),
        ("tensor", _DLTensor),
    ]


LEGACY_DEFAULT_STREAM = 1
_DL_READ_ONLY = 1
_capsule_pointer = c.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = c.c_void_p
_capsule_pointer.argtypes = [c.py_object, c.c_char_p]
_capsule_is = c.pythonapi.PyCapsule_IsValid
_capsule_is.restype = c.c_int
_capsule_is.argtypes = [c.py_object, c.c_char_p]


def _export(x: Any, stream: int | None) -> Any:
    """A capsule. stream: None in host memory, where producers take none."""
    options = {} if stream is None else {"stream": stream}
    try:
        return x.__dlpack__(max_version=(1, 0), **options)
    except TypeError:  # a producer from before DLPack 1.0
        return x.__dlpack__(**options)


def view_of_dlpack(x: Any, what: str, *, stream_on: Callable[[int], int] | None = None) -> View:
    """Where an array with ``__dlpack__`` lies.

    stream_on: the stream (cudaStream_t) on a CUDA device on which the library will use the array;
    the producer puts that behind what it has queued itself. None: host memory alone is allowed.
    Errors: UnsupportedError (device, dtype), InvalidArgumentError (not contiguous).
    """
    kind, number = map(int, x.__dlpack_device__())
    cuda, stream = HOST, None
    if kind == abi.SOTTO_DEVICE_CUDA and stream_on is not None:
        # In DLPack 0 is no stream, and 1 the legacy default stream, which CUDA itself calls 0.
        cuda, stream = number, stream_on(number) or LEGACY_DEFAULT_STREAM
    elif kind != abi.SOTTO_DEVICE_CPU:
        raise device_error(what, f"DLPack device type {kind}")
    capsule = _export(x, stream)
    # A capsule that is not consumed frees its tensor when it goes: holding it holds the memory.
    writable = True
    if _capsule_is(capsule, b"dltensor_versioned"):
        managed = _DLManagedVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        tensor, writable = managed.tensor, not managed.flags & _DL_READ_ONLY
    else:
        tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    dtype = tensor.code | tensor.bits << 8 | tensor.lanes << 16
    if dtype not in NAMES:
        raise UnsupportedError(
            f"{what} has DLPack dtype code {tensor.code}, {tensor.bits} bits, {tensor.lanes} "
            f"lanes; allowed: {', '.join(DTYPES)}"
        )
    count, packed = 1, True
    for i in reversed(range(tensor.ndim)):
        size = tensor.shape[i]
        packed = packed and (not tensor.strides or size == 1 or tensor.strides[i] == count)
        count *= size
    if not packed and count != 0:
        raise not_contiguous(what, "make a contiguous copy")
    return View((tensor.data or 0) + tensor.byte_offset, count, dtype, writable, (x, capsule), cuda)
