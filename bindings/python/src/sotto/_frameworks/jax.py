"""JAX's arrays: inputs alone, since nobody may write them."""

from __future__ import annotations

import functools
from typing import Any

import jax

from .._dlpack import view_of_dlpack
from .._view import View, device_error, dtype_code
from ..errors import InvalidArgumentError, UnsupportedError
from . import current_stream
from .base import Framework

PLATFORMS = ("cpu", "gpu")  # as arrays name them; "gpu" is CUDA or ROCm, which DLPack tells apart


@functools.cache
def name_of(dtype: Any) -> str:
    """The name of a dtype, which JAX makes anew at every call."""
    return str(dtype)


class Fresh:
    """Memory on a device for a result: an array that the program gets when it has been written."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: Any) -> None:
        self.array = jax.numpy.zeros(shape, dtype, device=sharding)


def check_values(x: Any, what: str) -> None:
    """Errors: InvalidArgumentError (an array of JAX that has no values: traced, deleted)."""
    if isinstance(x, jax.core.Tracer):
        raise InvalidArgumentError(
            f"{what} is traced by a transformation of JAX (jit, grad, vmap, ...), where it has "
            "no values; call sotto between jitted functions, not inside one"
        )
    if x.is_deleted():
        raise InvalidArgumentError(
            f"{what} is deleted: it was donated to a jitted function, or delete() was called"
        )


def device_of(x: Any, what: str) -> Any:
    """The one device of an array. Errors: UnsupportedError (sharded, or a device not taken)."""
    devices = x.devices()
    if len(devices) != 1:
        raise UnsupportedError(
            f"{what} is sharded over {len(devices)} devices; allowed: arrays on one device"
        )
    (device,) = devices
    if device.platform not in PLATFORMS:
        raise device_error(what, str(device))
    return device


class Jax(Framework):
    """Arrays of one device each; JAX shows neither its streams nor its ranks."""

    def view(self, x: Any, what: str) -> View | None:
        """As the base class says. The array counts as read-only.

        Host memory: returns when JAX has computed the array. CUDA: JAX makes the current stream
        wait for that, as DLPack asks of it.
        """
        if isinstance(x, Fresh):
            return view_of_dlpack(x.array, what, stream_on=current_stream)._replace(writable=True)
        if not isinstance(x, jax.Array):
            return None
        check_values(x, what)
        dtype_code(name_of(x.dtype), what)
        if device_of(x, what).platform == "cpu":
            x.block_until_ready()
        return view_of_dlpack(x, what, stream_on=current_stream)._replace(writable=False)


FRAMEWORK = Jax()
