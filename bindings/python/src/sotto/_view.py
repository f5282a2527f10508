"""Where arrays lie, and what is said of those that cannot be taken."""

from __future__ import annotations

from collections.abc import Iterable
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
    cuda: int = HOST  # number of the CUDA device, or HOST


def cuda_of(views: Iterable[View]) -> int:
    """The CUDA device that arrays are on, or HOST; the library refuses several in one call."""
    return next((view.cuda for view in views if view.cuda != HOST), HOST)


def dtype_code(name: str, what: str) -> int:
    """The library's code of a dtype. Errors: UnsupportedError (it has none; `what` is named)."""
    code = DTYPES.get(name)
    if code is None:
        raise UnsupportedError(f"{what} is of dtype {name}; allowed: {', '.join(DTYPES)}")
    return code


def not_contiguous(what: str, remedy: str) -> InvalidArgumentError:
    """What is raised for an array with gaps or in another order."""
    return InvalidArgumentError(f"{what} is not contiguous (C order); {remedy}")


def device_error(what: str, device: str) -> UnsupportedError:
    """What is raised for an array on a device that is not taken."""
    return UnsupportedError(
        f"{what} is on {device}; allowed: host memory, and CUDA devices for torch tensors and "
        "JAX arrays"
    )
