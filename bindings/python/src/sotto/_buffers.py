"""Arrays of other libraries as `sotto_buffer`, without a copy.

Accepted: numpy arrays, torch tensors, anything with the buffer protocol (array.array, memoryview,
bytearray, ctypes arrays), anything with ``__dlpack__``. They have to be contiguous in C order and
of a dtype that the library knows; outputs have to be writable. Torch tensors may be on a CUDA
device, everything else is in host memory. numpy and torch are not imported here: who passes their
arrays has imported them.
"""

from __future__ import annotations

import ctypes as c
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from . import _abi as abi
from .errors import InvalidArgumentError, UnsupportedError

DTYPES = {
    "int8": abi.SOTTO_INT8,
    "int16": abi.SOTTO_INT16,
    "int32": abi.SOTTO_INT32,
    "int64": abi.SOTTO_INT64,
    "uint8": abi.SOTTO_UINT8,
    "uint16": abi.SOTTO_UINT16,
    "uint32": abi.SOTTO_UINT32,
    "uint64": abi.SOTTO_UINT64,
    "float16": abi.SOTTO_FLOAT16,
    "float32": abi.SOTTO_FLOAT32,
    "float64": abi.SOTTO_FLOAT64,
    "bfloat16": abi.SOTTO_BFLOAT16,
}
NAMES = {code: name for name, code in DTYPES.items()}


def item_size(dtype: int) -> int:
    """Bytes of one element of a dtype code."""
    return (dtype >> 8 & 0xFF) // 8


HOST = -1


class View(NamedTuple):
    """Where an array lies. `owner` keeps the memory alive and in place."""

    data: int
    elements: int
    dtype: int
    writable: bool
    owner: Any
    cuda: int = HOST  # number of the CUDA device, whose stream is PyTorch's current one


def cuda_of(views: Iterable[View]) -> int:
    """The CUDA device that arrays are on, or HOST; the library refuses several in one call."""
    return next((view.cuda for view in views if view.cuda != HOST), HOST)


def current_stream(cuda: int) -> int:
    """PyTorch's current stream on a CUDA device, as the library takes it."""
    stream: int = sys.modules["torch"].cuda.current_stream(cuda).cuda_stream
    return stream


def await_current_stream(cuda: int) -> None:
    """The host waits for PyTorch's current stream; for calls that no stream orders.

    Not while the stream is captured into a graph: PyTorch has waited for the device before.
    """
    if cuda != HOST:
        torch_cuda = sys.modules["torch"].cuda
        if not torch_cuda.is_current_stream_capturing():
            torch_cuda.current_stream(cuda).synchronize()


def _dtype(name: str, what: str) -> int:
    code = DTYPES.get(name)
    if code is None:
        raise UnsupportedError(f"{what} is of dtype {name}; allowed: {', '.join(DTYPES)}")
    return code


def _not_contiguous(what: str, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{what} is not contiguous (C order); {remedy}")


def _device(what: str, device: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} is on {device}; allowed: host memory, and for torch tensors CUDA devices"
    )


def _of_numpy(x: Any, what: str) -> View:
    if not x.dtype.isnative:
        raise UnsupportedError(f"{what} has the byte order of another machine; convert it first")
    dtype = _dtype(x.dtype.name, what)
    if not x.flags.c_contiguous:
        raise _not_contiguous(what, "numpy.ascontiguousarray makes a copy that is")
    return View(x.ctypes.data, x.size, dtype, x.flags.writeable, x)


def _of_torch(x: Any, what: str) -> View:
    if x.device.type not in ("cpu", "cuda"):
        raise _device(what, str(x.device))
    if str(x.layout) != "torch.strided":
        raise UnsupportedError(f"{what} has layout {x.layout}; a dense (strided) tensor is needed")
    if x.is_conj() or x.is_neg():
        raise UnsupportedError(
            f"{what} is a lazy conjugate or negative view; call resolve_conj/resolve_neg"
        )
    dtype = _dtype(str(x.dtype).removeprefix("torch."), what)
    if not x.is_contiguous():
        raise _not_contiguous(what, "Tensor.contiguous() makes a copy that is")
    cuda = HOST if x.device.type == "cpu" else x.device.index
    return View(x.data_ptr(), x.numel(), dtype, True, x, cuda)


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
    dtype = _dtype(f"{kind}{8 * view.itemsize}", what)
    if not view.c_contiguous:
        raise _not_contiguous(what, "copy it into one piece first")
    return View(_address(view), view.nbytes // view.itemsize, dtype, not view.readonly, view)


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


_DL_READ_ONLY = 1
_capsule_pointer = c.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = c.c_void_p
_capsule_pointer.argtypes = [c.py_object, c.c_char_p]
_capsule_is = c.pythonapi.PyCapsule_IsValid
_capsule_is.restype = c.c_int
_capsule_is.argtypes = [c.py_object, c.c_char_p]


def _of_dlpack(x: Any, what: str) -> View:
    device = x.__dlpack_device__()
    if int(device[0]) != abi.SOTTO_DEVICE_CPU:
        raise _device(what, f"DLPack device type {int(device[0])}")
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except TypeError:  # a producer from before DLPack 1.0
        capsule = x.__dlpack__()
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
        raise _not_contiguous(what, "make a contiguous copy")
    return View((tensor.data or 0) + tensor.byte_offset, count, dtype, writable, (x, capsule))


def view_of(x: Any, what: str) -> View:
    """Where the array `x` lies; `what` names it in errors.

    Errors: UnsupportedError (dtype, device, layout), InvalidArgumentError (not contiguous, or no
    array).
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _of_torch(x, what)
    if numpy is not None and isinstance(x, numpy.ndarray):
        return _of_numpy(x, what)
    try:
        view = memoryview(x)
    except TypeError:
        pass
    else:
        return _of_buffer(view, what)
    if hasattr(x, "__dlpack__"):
        return _of_dlpack(x, what)
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
