"""What optimizers and outer optimizers have in common: arrays that are registered with a comm."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from typing import Any

from . import _abi as abi
from ._buffers import HOST, View, buffer_of, cuda_of, view_of
from ._call import call_on, call_options
from ._frameworks import await_current_stream
from ._handle import HandleOwner
from ._lib import interruptible
from ._text import counted
from .comm import Comm
from .errors import BusyError, InvalidArgumentError, InvalidStateError
from .group import default_comm
from .work import Work, orphans


def writable_view(array: Any, what: str) -> View:
    """What steps write. Errors: InvalidArgumentError (read-only)."""
    view = view_of(array, what)
    if not view.writable:
        raise InvalidArgumentError(f"{what} is read-only; steps write it")
    return view


def _copy_view(array: Any, what: str) -> View | None:
    return None if array is None else writable_view(array, what)


class Registered(HandleOwner):
    """An object that one collective C function makes of arrays, which it borrows until close()."""

    _blocks = True
    _create = ""  # the C function: of a comm, JSON text and sotto_param
    _places = ""  # the C function that says where params and model copies lie
    _anchored = False  # the anchor of outer steps is in the place of the params

    def __init__(self, params: Sequence[Any], text: str, comm: Comm | None, *others: Comm) -> None:
        """params: with the members param, name and model_copy; _fill() adds others. others: comms
        that the C function takes behind the comm; the object keeps them."""
        comm = default_comm() if comm is None else comm
        lib, handle = comm._lib, comm._handle
        self.cuda = HOST  # number of the CUDA device that the params are on
        self._keep: list[Any] = [
            comm
        ]  # and for each param a tuple of views: param, model_copy, ...
        structs = (abi.Param * len(params))()
        for i, param in enumerate(params):
            struct, what = structs[i], f"params[{i}]"
            live = writable_view(param.param, f"{what}.param")
            copy = _copy_view(param.model_copy, f"{what}.model_copy")
            self.cuda = cuda_of((live,)) if self.cuda == HOST else self.cuda
            struct.struct_size = c.sizeof(abi.Param)
            struct.name = None if param.name is None else param.name.encode()
            struct.param, struct.model_copy = buffer_of(live), buffer_of(copy)
            self._keep.append((live, copy, *self._fill(struct, param, what)))
        out = c.c_void_p()
        await_current_stream(self.cuda)
        handles = [handle, *(other._handle for other in others)]

        def work() -> None:
            with comm._lock:
                comm._call(
                    self._create, *handles, text.encode(), structs, len(params), c.byref(out)
                )

        interruptible(work, lambda: getattr(lib.functions, self._destroy)(out))
        super().__init__(lib, out)
        self._comm, self._others = comm, others

    def _fill(self, struct: abi.Param, param: Any, what: str) -> tuple[View | None, ...]:
        """Fills in the other members of a sotto_param; what to keep for them."""
        return ()

    def __repr__(self) -> str:
        kind = type(self)
        name = f"{kind.__module__}.{kind.__qualname__}"
        return f"<{name} on {self._comm!r}{', closed' if self.closed else ''}>"

    def _kept(self) -> list[Any]:
        """What an operation in flight keeps alive."""
        return [self, self._keep]

    def _averages_under_way(self) -> bool:
        """Of outer steps. Errors: BusyError (step in flight)."""
        raise NotImplementedError

    def _idle(self) -> bool:
        try:
            return self._comm.closed or not self._averages_under_way()
        except BusyError:
            return False

    def _leave(self) -> None:
        self._comm._left.append(self)

    def _check_live(self, what: str) -> None:
        """Errors: InvalidStateError: a state would have, or get, params that are the anchor, which
        nothing puts back where it is imported, or behind the block."""
        if self._anchored:
            raise InvalidStateError(
                f"{what} inside evaluation(): the anchor is in the place of the params"
            )

    def _start(self, name: str, timeout: float | None) -> Work:
        op = c.c_void_p()
        with self._comm._lock:
            orphans.reap(self._lib)
            call = call_on(self.cuda, call_options(timeout=timeout))
            self._comm._call(name, self._handle, call, c.byref(op))
        return Work(self._comm, op, self._kept(), name.removeprefix("sotto_"), self.cuda)

    def set_params(self, params: Sequence[Any], model_copies: Sequence[Any] | None = None) -> None:
        """Says where parameters lie from now on: other arrays than those that were registered.

        params: float32, one for every param, in their order, with the values that steps go on from;
        kept alive until the next call. model_copies: None: they stay where they are; else one or
        None for every param. Masks stay. Errors: InvalidArgumentError (names the parameter),
        BusyError (step in flight). Nothing changes on error.
        """
        live = [writable_view(param, f"params[{i}]") for i, param in enumerate(params)]
        copies = [
            _copy_view(copy, f"model_copies[{i}]")
            for i, copy in enumerate(model_copies or [None] * len(live))
        ]
        if len(copies) != len(live):
            raise InvalidArgumentError(
                f"model_copies has {counted(len(copies), 'value')}, params {len(live)}"
            )
        places = (abi.Buffer * len(live))(*map(buffer_of, live))
        places_of_copies = (abi.Buffer * len(copies))(*map(buffer_of, copies))
        given = None if model_copies is None else places_of_copies
        self._lib.call(self._places, self._handle, places, given, len(live))
        before = self._keep
        self._keep = before[:1] + [
            (param, old[1] if model_copies is None else copy, *old[2:])
            for param, copy, old in zip(live, copies, before[1:])
        ]
