"""The options of a call, as the C interface takes them."""

from __future__ import annotations

import ctypes as c
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
