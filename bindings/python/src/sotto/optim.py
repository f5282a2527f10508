"""Optimizers on plain buffers: what DeepSpeed's configuration describes, without a framework."""

from __future__ import annotations

import contextlib
import ctypes as c
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from . import _abi as abi
from ._buffers import Buffers, View, buffer_of, view_of
from ._call import INT32, real_number, whole_number
from ._frameworks import await_current_stream, bytes_of_bools
from ._json import config_text, json_text
from ._lib import interruptible, library
from ._registered import Registered
from ._text import counted
from .codec import export_state, import_state, state_mode
from .comm import Comm
from .errors import InvalidArgumentError, InvalidStateError, SottoError
from .outer import Outer
from .work import Work

STATE_MODES = ("configured", "exact", "mean", "reset", "common")


class Param(NamedTuple):
    """One tensor of an optimizer. The arrays have as many elements each.

    param:      float32, updated in place by every step
    grad:       float32, float16 or bfloat16 (all params alike); read by step() and accumulate():
                mean over this rank's samples, times the loss scale if there is one
    name:       unique; None: "param<index>"
    group:      index into the parameter groups
    model_copy: float16 or bfloat16 (all alike), or None: written at the end of every step
    mask:       uint8 or bool, 0 or 1, or None: elements with 0 take no part
    """

    param: Any
    grad: Any
    name: str | None = None
    group: int = 0
    model_copy: Any = None
    mask: Any = None


class Info(NamedTuple):
    """Hot figures of an optimizer."""

    stage: int  # 0: full precision (warm-up), 1: compressed
    step: int  # updates done
    state_step: int  # step number of checkpoints and schedules
    lr: float  # of group 0 in the next step
    grad_norm: float  # last step, before clipping; NaN: not computed
    payload_bytes_next_step: int
    header_bytes_next_step: int
    state_bytes: int
    skipped_steps: int
    loss_scale: float  # gradients of the next step have to be multiplied with it; 1: none
    micro_batches: int  # accumulated for the next step


def config_report(config: Any, *, world_size: int = 0, n_params: int = 0) -> dict[str, Any]:
    """What a DeepSpeed configuration will do here, key by key.

    config: a dict, JSON text or a path. world_size: data-parallel ranks, 0: unknown. n_params:
    parameters, 0: unknown. Errors: InvalidArgumentError (names the key and a remedy).
    """
    text = config_text(config).encode()
    return cast(
        "dict[str, Any]",
        json.loads(library().text("sotto_config_report", text, world_size, n_params)),
    )


def config_resolve(config: Any, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A DeepSpeed configuration as a dict: comments left out, values "auto" replaced.

    config: a dict, JSON text (also base64url) or a path. values: from the path of a key,
    "optimizer.params.lr", to what takes the place of an "auto" there. Paths where the configuration
    has something else, or nothing, are not used; an "auto" without a value stays, and is refused
    where it matters. Errors: InvalidArgumentError (no JSON: line and column).
    """
    given = json_text(dict(values or {})).encode()
    text = library().text("sotto_config_resolve", config_text(config).encode(), given)
    return cast("dict[str, Any]", json.loads(text))


def _mask_view(mask: Any, what: str) -> View:
    return view_of(bytes_of_bools(mask), what)


def _param_of(param: Any, what: str) -> Param:
    """Errors: InvalidArgumentError (an array, whose rows are no param and grad)."""
    if not isinstance(param, (tuple, list)):
        raise InvalidArgumentError(
            f"{what} is of type {type(param).__qualname__}; allowed: Param, or a tuple of the "
            "parameter, its gradient and what else Param has"
        )
    return Param(*param)


class Optimizer(Registered):
    """An optimizer over registered buffers. Collective: all ranks make the same.

    comm:   None: the default comm
    params: Param, or tuples of the same order; the arrays are borrowed and kept alive until close()
    config: a DeepSpeed configuration, whole or just {"optimizer": {...}}: dict, JSON text or path
    kind:   in place of config: "SGD", "Adam", "AdamW", "Lamb", "Lion", "OneBitAdam", "ZeroOneAdam",
            "OneBitLamb", with hyper-parameters as keyword arguments: lr, betas, freeze_step, ...

    Parameter values have to be equal on all ranks, which is checked by a hash; "sotto":
    {"initial_parameters": "broadcast"} gives all ranks those of rank 0, "trust" does not look. If
    one rank refuses, all of them raise its error. Errors: InvalidArgumentError (names the key or
    the parameter), UnsupportedError, ProtocolError (ranks differ), the comm's own. Threads: one at
    a time.
    """

    _noun = "optimizer"
    _create = "sotto_optim_create"
    _destroy = "sotto_optim_destroy"
    _places = "sotto_optim_set_params"

    def __init__(
        self,
        params: Sequence[Param | tuple[Any, ...]],
        config: Any = None,
        *,
        comm: Comm | None = None,
        kind: str | None = None,
        **hyper: Any,
    ) -> None:
        self._grads: list[View] = []  # kept alive until others take their place
        registered = [_param_of(param, f"params[{i}]") for i, param in enumerate(params)]
        super().__init__(registered, config_text(config, kind, hyper), comm)

    def _fill(self, struct: abi.Param, param: Any, what: str) -> tuple[View | None, ...]:
        if param.group < 0:
            raise InvalidArgumentError(f"{what}.group is {param.group}; allowed: from 0")
        grad = view_of(param.grad, f"{what}.grad")
        mask = None if param.mask is None else _mask_view(param.mask, f"{what}.mask")
        self._grads.append(grad)
        struct.group = param.group
        struct.grad, struct.mask = buffer_of(grad), buffer_of(mask)
        return (mask,)

    def _kept(self) -> list[Any]:
        return [*super()._kept(), self._grads]

    def _averages_under_way(self) -> bool:
        with contextlib.suppress(InvalidStateError), Outer.of(self) as outer:
            return outer.info().in_flight > 0
        return False  # it has no outer steps

    def step(self, *, timeout: float | None = None) -> Work:
        """One step with what is in the grad arrays now: averages, clips, updates the parameters.

        Collective. If the Work ends with an error nothing was updated; NonfiniteError leaves the
        group healthy. On a stream that is being captured into a CUDA graph the step is recorded and
        does not happen: see replay(). Errors: BusyError (previous step in flight), the comm's own.
        """
        return self._start("sotto_optim_step", timeout)

    def replay(self, recorded: Work) -> None:
        """A step that is part of a CUDA graph happens with the next launch of that.

        recorded: what step() has returned while a stream was being captured, and in flight again
        when this returns. Launch the graph once then, and wait for it. The arrays must not move,
        and the graph must not be launched any more when the Work is dropped. Errors:
        InvalidStateError (the next step is not like the recorded one: the C header says when; call
        step(), or record another graph), BusyError (a step in flight), the comm's own.
        """
        with self._comm._lock:
            self._comm._call("sotto_optim_replay", self._handle, recorded._started())
        recorded._again([self, self._keep, self._grads])

    def accumulate(self, *, timeout: float | None = None) -> Work:
        """Adds the gradients of one micro-batch to those that the next step takes the mean of.

        Local, but all ranks have to make as many calls. The grad arrays are free again when the
        Work has completed. Errors: BusyError, InvalidStateError (more than
        gradient_accumulation_steps).
        """
        return self._start("sotto_optim_accumulate", timeout)

    def synchronize(self, *, timeout: float | None = None) -> Work:
        """0/1 Adam between synchronisations: brings the parameters of all ranks together.

        Collective. Where there is nothing to do, and for other optimizers, the Work does nothing.
        Errors: BusyError (step in flight), InvalidStateError (micro-batches accumulated), the
        comm's own.
        """
        return self._start("sotto_optim_synchronize", timeout)

    def set_grads(self, grads: Sequence[Any]) -> None:
        """Says where gradients lie from now on: other arrays than those of Param.grad.

        grads: one for every param, in their order, of the registered dtype and element count; kept
        alive until the next call. Errors: InvalidArgumentError (names the parameter), BusyError
        (step in flight). Nothing changes on error.
        """
        views = [view_of(grad, f"grads[{i}]") for i, grad in enumerate(grads)]
        self._set_grad_buffers((abi.Buffer * len(views))(*(buffer_of(view) for view in views)))
        self._grads = views

    def _set_grad_buffers(self, buffers: c.Array[abi.Buffer]) -> None:
        """As set_grads; the caller keeps the memory alive while a step may read it."""
        self._lib.call("sotto_optim_set_grads", self._handle, buffers, len(buffers))
        self._grads = []

    def set_frozen(self, frozen: Sequence[bool]) -> None:
        """Says which params the next steps leave as they are, with their momentum and variance.

        frozen: one for every param, in their order, the same on all ranks; their gradients should
        be zero. 0/1 Adam: collective if it is another choice than before. Errors:
        InvalidArgumentError, BusyError (step in flight), 0/1 Adam: the comm's own; of the next
        step: ProtocolError (ranks have frozen other params).
        """
        flags = (c.c_uint8 * len(frozen))(*frozen)
        handle = self._handle
        await_current_stream(self.cuda)

        def work() -> None:
            with self._comm._lock:
                self._comm._call("sotto_optim_set_frozen", handle, flags, len(flags))

        interruptible(work)

    def set(self, name: str, value: float, group: int = -1) -> None:
        """Sets "lr" (NaN: the schedule again), "weight_decay", "scheduler_iteration" and the like.

        The C header lists the names and their ranges. group: index, -1: all.
        Errors: InvalidArgumentError, BusyError (step in flight), InvalidStateError (eps of a frozen
        variance).
        """
        number, index = real_number(value, name), whole_number(group, "group", -1, INT32[1])
        self._lib.call("sotto_optim_set", self._handle, name.encode(), index, number)

    def info(self) -> Info:
        """Hot figures. Errors: BusyError (step in flight)."""
        out = abi.OptimInfo()
        self._lib.call("sotto_optim_get_info", self._handle, c.byref(out))
        return Info(*(getattr(out, name) for name in Info._fields))

    def report(self, kind: str = "all") -> dict[str, Any]:
        """kind: "all", "config", "groups", "tensors". Errors: BusyError (step in flight)."""
        text = self._lib.text("sotto_optim_report", self._handle, kind.encode())
        return cast("dict[str, Any]", json.loads(text))

    def export_state(self, mode: str = "configured") -> bytearray:
        """This rank's state, parameters included. Nothing of the optimizer changes.

        mode: "exact" (continues bit for bit on the same ranks; not collective), "mean" (error
        feedback averaged over ranks: restores on any number of them; collective for the 1-bit
        types), "reset" (without error feedback; collective for 0/1 Adam), "common" (as "exact"),
        "configured": what "sotto": {"checkpoint"} says, "mean" unless set.
        Accumulated micro-batches are no part of it, nor is what set() has set, but for loss_scale
        and scheduler_iteration. Errors: BusyError (step in flight), InvalidStateError (inside
        evaluation() of its outer steps), the comm's own.
        """
        self._check_live("export_state()")
        number = state_mode(mode, STATE_MODES)
        await_current_stream(self.cuda)
        return export_state(self._comm, "sotto_optim_state_export", self._handle, number)

    def write_state(self, file: Any, mode: str = "configured") -> None:
        """Writes what export_state() gives to a binary file, without having it in memory.

        On the main thread file.write() is called from another one, while this one sees Ctrl-C.
        Errors: those of export_state() and of file.write().
        """
        self._check_live("write_state()")
        number = state_mode(mode, STATE_MODES)
        await_current_stream(self.cuda)
        failed: list[BaseException] = []

        def write(_: Any, data: int, n: int) -> int:
            try:
                if not failed:
                    file.write((c.c_char * n).from_address(data))
            except BaseException as error:  # raised below, outside of C
                failed.append(error)
            return len(failed)

        function, handle = abi.WriteFn(write), self._handle

        def work() -> None:
            self._comm._call("sotto_optim_state_write", handle, number, function, None)

        try:
            interruptible(work)
        except SottoError:
            if not failed:
                raise
        except BaseException as error:  # an interrupt: what goes on writes nothing more
            failed.append(error)
        if failed:
            raise failed[0]

    def read_state(self, file: Any, mode: str = "configured") -> None:
        """Imports a state from a seekable binary file, without having it in memory.

        Errors: those of import_state() and of the file's methods. Nothing changes on error, unless
        the file can be read once and not again: then steps are refused until another import.
        """
        self._check_live("read_state()")
        number = state_mode(mode, STATE_MODES)
        await_current_stream(self.cuda)
        begin = file.tell()
        length = file.seek(0, os.SEEK_END) - begin
        failed: list[BaseException] = []

        def read(_: Any, offset: int, data: int, n: int) -> int:
            try:
                file.seek(begin + offset)
                part = file.read(n)
                if len(part) != n:
                    raise EOFError(
                        f"the file has {counted(len(part), 'byte')} at {offset}, {n} are needed"
                    )
                c.memmove(data, part, n)
            except BaseException as error:  # raised below, outside of C
                failed.append(error)
            return len(failed)

        function = abi.ReadFn(read)
        try:
            self._lib.call("sotto_optim_state_read", self._handle, number, function, None, length)
        except SottoError:
            if not failed:
                raise
        if failed:
            raise failed[0]
        file.seek(begin + length)

    @property
    def user_state(self) -> bytes:
        """Bytes of the trainer's own that are saved and restored with the state.

        Set from anything that has bytes, at most 64 MiB. Errors of that: InvalidArgumentError,
        BusyError (step in flight), TypeError (a text: encode() it).
        """
        n = c.c_uint64()
        self._lib.call("sotto_optim_get_user_state", self._handle, None, 0, c.byref(n))
        out = c.create_string_buffer(n.value)
        self._lib.call("sotto_optim_get_user_state", self._handle, out, n, c.byref(n))
        return out.raw

    @user_state.setter
    def user_state(self, data: bytes) -> None:
        copy = memoryview(data).tobytes()
        self._lib.call("sotto_optim_set_user_state", self._handle, copy, len(copy))

    def import_state(self, state: Any, mode: str = "configured") -> None:
        """Replaces this rank's state by an export of the same mode. Nothing changes on error.

        "common": all ranks, of any number, take one rank's export, "exact" or "common", without its
        error feedback. Errors: InvalidArgumentError (damaged, other parameters or algorithm; exact:
        other world size or rank), BusyError (step in flight), InvalidStateError (inside
        evaluation() of its outer steps).
        """
        self._check_live("import_state()")
        number = state_mode(mode, STATE_MODES)
        await_current_stream(self.cuda)
        import_state(self._lib, "sotto_optim_state_import", self._handle, number, state)

    def import_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Replaces the state by what a DeepSpeed checkpoint holds, array by array. Collective.

        arrays: by name, "<parameter>/<key>" or "group:<i>/<key>"; the C header lists the keys. A
        single number is an array of one element. Nothing changes on error, on any rank.
        Errors: InvalidArgumentError (names the array), ProtocolError (ranks differ).
        """
        self._check_live("import_arrays()")
        structs = (abi.NamedArray * len(arrays))()
        keep = []
        for struct, (name, values) in zip(structs, arrays.items()):
            buffers = Buffers(values, f"arrays[{name!r}]", writable=False)
            if buffers.n != 1:
                raise InvalidArgumentError(
                    f"arrays[{name!r}] is a list of {counted(buffers.n, 'array')}; one is needed"
                )
            keep.append(buffers)
            struct.struct_size = c.sizeof(abi.NamedArray)
            struct.name = name.encode()
            struct.values = buffers.array[0]
        handle = self._handle
        await_current_stream(self.cuda)

        def work() -> None:
            with self._comm._lock:
                self._comm._call("sotto_optim_state_import_arrays", handle, structs, len(arrays))

        interruptible(work)
