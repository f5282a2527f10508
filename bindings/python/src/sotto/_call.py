"""The options of a call, as the C interface takes them."""

from __future__ import annotations

import ctypes as c
import operator
from typing import Any

from . import _abi as abi
from ._frameworks import current_stream
from ._lib import microseconds
from ._view import HOST
from .errors import InvalidArgumentError

REDUCTIONS = {
    "sum": abi.SOTTO_REDUCE_SUM,
    "mean": abi.SOTTO_REDUCE_MEAN,
    "min": abi.SOTTO_REDUCE_MIN,
    "max": abi.SOTTO_REDUCE_MAX,
    "prod": abi.SOTTO_REDUCE_PROD,
    "bit_or": abi.SOTTO_REDUCE_BIT_OR,
}


INT32 = (-(2**31), 2**31 - 1)
UINT32 = (0, 2**32 - 1)
UINT64 = (0, 2**64 - 1)


def whole_number(value: Any, what: str, low: int, high: int) -> int:
    """An argument that C would cut to its width. Errors: InvalidArgumentError (names it)."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise InvalidArgumentError(
            f"{what} is {value!r}; allowed: a whole number from {low} to {high}"
        )
    return number


def real_number(value: Any, what: str) -> float:
    """A setting, of any type that is a number. Errors: InvalidArgumentError (names it)."""
    try:
        return c.c_double(value).value
    except TypeError:
        raise InvalidArgumentError(f"{what} is {value!r}; allowed: a number") from None


def call_options(
    tag: int = 0,
    timeout: float | None = None,
    priority: int = 0,
    op: str | None = None,
    codec: c.c_void_p | None = None,
) -> abi.Call | None:
    """The `sotto_call` of these options, or None where all are defaults."""
    reduce = abi.SOTTO_REDUCE_DEFAULT
    if op is not None:
        if op not in REDUCTIONS:
            raise InvalidArgumentError(f"op is {op!r}; allowed: {', '.join(REDUCTIONS)}")
        reduce = REDUCTIONS[op]
    tag = tag and whole_number(tag, "tag", *UINT64)
    priority = priority and whole_number(priority, "priority", *INT32)
    if not (tag or timeout is not None or priority or reduce or codec):
        return None
    call = abi.Call(tag=tag, timeout_us=microseconds(timeout), priority=priority, reduce=reduce)
    if codec is not None:
        call.codec = codec.value
    return call


def call_on(cuda: int, call: abi.Call | None) -> Any:
    """The argument for these options; on a CUDA device with the current stream."""
    if cuda != HOST:
        call = call or abi.Call()
        call.stream = current_stream(cuda)
    return None if call is None else c.byref(call)
