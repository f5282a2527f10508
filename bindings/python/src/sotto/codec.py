"""Codecs: how all_reduce encodes data on the wire, and what encoding has left over."""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import _abi as abi
from ._buffers import Buffers
from ._handle import HandleOwner
from ._json import json_text
from ._lib import Library, interruptible
from ._text import counted
from .errors import InternalError, InvalidArgumentError

if TYPE_CHECKING:
    from .comm import Comm

STATE_MODES = {
    "configured": abi.SOTTO_STATE_CONFIGURED,
    "exact": abi.SOTTO_STATE_EXACT,
    "reset": abi.SOTTO_STATE_RESET,
    "mean": abi.SOTTO_STATE_MEAN,
    "common": abi.SOTTO_STATE_COMMON,
}


def state_mode(mode: str, allowed: tuple[str, ...]) -> int:
    """The number of a state mode. Errors: InvalidArgumentError."""
    if mode not in allowed:
        raise InvalidArgumentError(f"mode is {mode!r}; allowed: {', '.join(allowed)}")
    return STATE_MODES[mode]


def export_state(comm: Comm, name: str, handle: c.c_void_p, mode: int) -> bytearray:
    """Calls an export function: asks for the size, then for the bytes. Collective in some modes."""
    lib, need = comm._lib, c.c_uint64()
    lib.call(name, handle, mode, None, 0, c.byref(need))
    blob = bytearray(need.value)
    place = (c.c_char * len(blob)).from_buffer(blob)

    def work() -> None:
        with comm._lock:
            comm._call(name, handle, mode, place, len(place), c.byref(need))

    interruptible(work)
    if need.value > len(blob):
        raise InternalError(f"{name} said {counted(len(blob), 'byte')} and then {need.value}")
    return blob if need.value == len(blob) else blob[: need.value]


def import_state(lib: Library, name: str, handle: c.c_void_p, mode: int, state: Any) -> None:
    """Calls an import function with anything that has bytes."""
    view = Buffers(memoryview(state).cast("B"), "state", writable=False)
    lib.call(name, handle, mode, view.views[0].data or None, view.views[0].elements)


def _settings(kind: str | Mapping[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(kind, Mapping):
        return {"type": kind, **options}
    if options:
        raise InvalidArgumentError(
            f"options ({', '.join(options)}) are given beside a dict, which has its own"
        )
    return dict(kind)


class Codec(HandleOwner):
    """How :meth:`Comm.all_reduce` sends data, with the residual of every array.

    The result of an all_reduce with a codec is the error-compensated mean: what one call loses in
    encoding is added to the next. Make the same codec for the same counts on all ranks.

    comm:    the comm that it is used with
    kind:    "onebit", "int8" or another type of sotto_codec_create, or a dict of type and options
    like:    an array, or a list: float32, as many elements each as will be reduced; not read
    options: the codec's own keys: chunk_align, scale, granularity, bucket_elements, mode, block,
             residual; the C header describes them
    Errors: InvalidArgumentError (names the key or the array), UnsupportedError (kind, dtype).
    Threads: one at a time.
    """

    _noun = "codec"
    _destroy = "sotto_codec_destroy"

    def __init__(
        self, comm: Comm, kind: str | Mapping[str, Any], like: Any, **options: Any
    ) -> None:
        arrays = Buffers(like, "like", writable=False)
        self.settings = _settings(kind, options)
        handle = c.c_void_p()
        text = json_text(self.settings).encode()
        comm._lib.call(
            "sotto_codec_create", comm._handle, text, arrays.array, arrays.n, c.byref(handle)
        )
        super().__init__(comm._lib, handle)
        self._comm = comm  # a codec must not outlive what its calls go through

    def __repr__(self) -> str:
        return f"<sotto.Codec {self.settings}{', closed' if self.closed else ''}>"

    def export_state(self, mode: str = "exact") -> bytearray:
        """The residuals.

        mode: "exact" (this rank's; continues bit for bit), "mean" (averaged over ranks; collective;
        for any number of ranks), "reset" (none).
        Errors: BusyError (in use), the comm's own.
        """
        number = state_mode(mode, ("exact", "mean", "reset"))
        return export_state(self._comm, "sotto_codec_state_export", self._handle, number)

    def import_state(self, state: Any, mode: str = "exact") -> None:
        """Replaces the residuals by those of an export in the same mode. Nothing changes on error.

        Errors: InvalidArgumentError (damaged, other arrays, other codec, mode, rank or size).
        """
        number = state_mode(mode, ("exact", "mean", "reset"))
        import_state(self._lib, "sotto_codec_state_import", self._handle, number, state)
