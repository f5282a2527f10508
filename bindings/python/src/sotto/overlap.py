"""Gradients on plain buffers that are averaged as they become ready, while others are computed."""

from __future__ import annotations

import ctypes as c
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from . import _abi as abi
from ._buffers import (
    DTYPES,
    HOST,
    View,
    buffer_of,
    cuda_of,
    view_of,
)
from ._call import call_on, call_options
from ._frameworks import await_current_stream, current_stream
from ._handle import HandleOwner
from ._json import config_text
from ._lib import interruptible
from .codec import export_state, import_state, state_mode
from .comm import Comm
from .errors import InvalidArgumentError, UnsupportedError
from .group import default_comm
from .optim import Optimizer
from .work import Work, orphans


class Moving(NamedTuple):
    """A gradient that lies elsewhere in every round, so that every ready() says where.

    elements: of the gradient
    dtype:    "float32", "float16" or "bfloat16"
    cuda:     number of its CUDA device; -1: host memory
    """

    elements: int
    dtype: str = "float32"
    cuda: int = HOST


class OverlapInfo(NamedTuple):
    """Hot figures of an overlap. Times are of the last round that ended well; -1: none."""

    buckets: int
    rounds: int  # that ended well
    layout: int  # how often order or buckets have changed
    begin_to_last_ready_ns: int
    network_ns: int  # from the first bucket that was complete to the end
    exposed_ns: int  # from finish() to the end
    payload_bytes_per_round: int
    header_bytes_per_round: int
    state_bytes: int
    missing: int  # gradients of the open round that are not marked
    early_payload_bytes_per_round: int  # sent before the last bucket's gradients are there


class Overlap(HandleOwner):
    """Averages gradients over ranks, each as soon as it is ready. Collective: all make the same.

    gradients: arrays, which are the same in every round and borrowed until close(), or Moving
    config:    {"bucket_bytes": 26214400, "unused": "zero", ...} (sotto_overlap_create): dict, JSON
               text or path
    comm:      None: the default comm

    A round is begin(), ready() for every gradient, finish(), and the wait for begin()'s Work. If
    one rank refuses to make the overlap, all of them raise its error. Errors: InvalidArgumentError
    (names the key or the gradient), UnsupportedError, ProtocolError (ranks differ), the comm's own.
    Threads: ready() and unused() any, at the same time; the rest one at a time.
    """

    _noun = "overlap"
    _destroy = "sotto_overlap_destroy"
    _blocks = True
    _steps = False  # rounds are steps of an optimizer

    def __init__(
        self,
        gradients: Sequence[Moving | Any],
        config: Any = None,
        *,
        comm: Comm | None = None,
    ) -> None:
        comm = default_comm() if comm is None else comm
        text = config_text({} if config is None else config).encode()
        lib, handle = comm._lib, comm._handle
        self.cuda = HOST  # number of the CUDA device that the gradients are on
        self._keep: list[Any] = [comm]
        self._round: list[Any] = []  # memory of the open round
        like = (abi.Buffer * len(gradients))()
        for i, gradient in enumerate(gradients):
            if isinstance(gradient, Moving):
                like[i] = self._like(gradient, f"gradients[{i}]")
            else:
                view = self._writable(gradient, f"gradients[{i}]")
                self._keep.append(view)
                self.cuda = cuda_of((view,)) if self.cuda == HOST else self.cuda
                like[i] = buffer_of(view)
        out = c.c_void_p()
        await_current_stream(self.cuda)

        def work() -> None:
            with comm._lock:
                comm._call("sotto_overlap_create", handle, text, like, len(like), c.byref(out))

        interruptible(work, lambda: lib.functions.sotto_overlap_destroy(out))
        super().__init__(lib, out)
        self._comm = comm

    @classmethod
    def of(cls, optimizer: Optimizer, config: Any = None) -> Overlap:
        """Rounds that are steps of an optimizer, which begin before its gradients are there.

        config: {"bucket_bytes": 26214400, ...} (sotto_overlap_create_step): dict, JSON text or
        path; None: "sotto": {"overlap"} of the optimizer's configuration, or the defaults

        Gradient i is that of the optimizer's param i: where its `grad` is, unless ready() says
        otherwise. A Work of begin() completes when the step is done; while a round is open the
        optimizer is busy. Collective. Errors: InvalidArgumentError (names the key),
        UnsupportedError ("sotto": {"outer"}, mode compat), BusyError (step in flight), the comm's
        own.
        """
        comm, out = optimizer._comm, c.c_void_p()
        text = None if config is None else config_text(config).encode()
        await_current_stream(optimizer.cuda)

        def work() -> None:
            with comm._lock:
                comm._call("sotto_overlap_create_step", optimizer._handle, text, c.byref(out))

        interruptible(work, lambda: comm._lib.functions.sotto_overlap_destroy(out))
        overlap = cls.__new__(cls)
        HandleOwner.__init__(overlap, comm._lib, out)
        overlap.cuda, overlap._comm = optimizer.cuda, comm
        overlap._keep, overlap._round = [optimizer], []
        overlap._steps = True
        return overlap

    def _like(self, gradient: Moving, what: str) -> abi.Buffer:
        dtype = DTYPES.get(gradient.dtype)
        if dtype is None:
            raise UnsupportedError(
                f"{what} is of dtype {gradient.dtype}; allowed: {', '.join(DTYPES)}"
            )
        if gradient.elements < 0:
            raise InvalidArgumentError(f"{what} has {gradient.elements} elements; allowed: >= 0")
        self.cuda = gradient.cuda if self.cuda == HOST else self.cuda
        view = View(0, gradient.elements, dtype, True, None, gradient.cuda)
        return buffer_of(view)

    @staticmethod
    def _writable(array: Any, what: str) -> View:
        view = view_of(array, what)
        if not view.writable:
            raise InvalidArgumentError(f"{what} is read-only; rounds write it")
        return view

    def __repr__(self) -> str:
        return f"<sotto.overlap.Overlap on {self._comm!r}{', closed' if self.closed else ''}>"

    def begin(self, *, op: str = "mean", timeout: float | None = None, priority: int = 0) -> Work:
        """Opens a round. Its Work completes when all gradients have become their mean or sum.

        Collective. Errors: BusyError (a round is open or in flight), the comm's own; from the Work
        also CancelledError (a rank has withdrawn; the group is healthy).
        """
        handle = c.c_void_p()
        memory: list[Any] = []
        with self._comm._lock:
            orphans.reap(self._lib)
            reduce = None if self._steps and op == "mean" else op
            call = call_on(self.cuda, call_options(timeout=timeout, op=reduce, priority=priority))
            self._comm._call("sotto_overlap_begin", self._handle, call, c.byref(handle))
        self._round = memory
        return Work(self._comm, handle, [self, self._keep, memory], "overlap_begin", self.cuda)

    def ready(self, indices: Sequence[int], gradients: Sequence[Any] | None = None) -> None:
        """Gradients are final behind what is queued on PyTorch's current stream.

        indices:   their numbers, from 0 in the order of the constructor
        gradients: where they are in this round; None: where they are in every round

        Errors: InvalidArgumentError (names the index or the gradient), InvalidStateError (marked
        before; no open round), or what the round has ended with. Nothing changes on error.
        """
        places = None
        if gradients is not None:
            if len(gradients) != len(indices):
                raise InvalidArgumentError(
                    f"{len(gradients)} gradients for {len(indices)} indices; give one for each"
                )
            view = view_of if self._steps else self._writable  # a step reads them
            views = [view(g, f"gradients[{i}]") for i, g in enumerate(gradients)]
            places = (abi.Buffer * len(views))(*(buffer_of(view) for view in views))
            self._round.append(views)
        stream = None if self.cuda == HOST else current_stream(self.cuda)
        numbers = (c.c_uint64 * len(indices))(*indices)
        self._lib.call("sotto_overlap_ready", self._handle, numbers, places, len(indices), stream)

    def unused(self, indices: Sequence[int]) -> None:
        """Gradients that this rank does not have in this round: they count as zero.

        Those with memory of every round get the average as all others. Errors: as ready().
        """
        numbers = (c.c_uint64 * len(indices))(*indices)
        self._lib.call("sotto_overlap_unused", self._handle, numbers, len(indices))

    def finish(self) -> None:
        """Nothing more comes in this round.

        Errors: InvalidStateError (names what is missing, unless "unused" is "zero"; the round stays
        open), or what the round has ended with.
        """
        self._lib.call("sotto_overlap_finish", self._handle)

    def withdraw(self, reason: str = "") -> None:
        """This rank gives the open round up: it ends with CancelledError on every rank.

        Errors: InvalidStateError (no open round), or what the round has ended with.
        """
        self._lib.call("sotto_overlap_withdraw", self._handle, reason.encode() or None)

    def export_state(self, mode: str = "exact") -> bytearray:
        """The error feedback of a codec, between rounds. Mode mean is collective.

        mode: "exact" (same ranks and buckets), "reset" (without it), "mean" (any ranks and buckets)

        Errors: InvalidStateError (no codec), BusyError (a round is open or in flight).
        """
        number = state_mode(mode, ("exact", "reset", "mean"))
        return export_state(self._comm, "sotto_overlap_state_export", self._handle, number)

    def import_state(self, state: Any, mode: str = "exact") -> None:
        """What export_state gave in the same mode; "reset" takes any.

        Errors: InvalidArgumentError (damaged; of other gradients, settings, buckets or ranks),
        InvalidStateError (no codec), BusyError. Nothing changes on error.
        """
        number = state_mode(mode, ("exact", "reset", "mean"))
        import_state(self._lib, "sotto_overlap_state_import", self._handle, number, state)

    def info(self) -> OverlapInfo:
        """Hot figures."""
        info = abi.OverlapInfo()
        self._lib.call("sotto_overlap_get_info", self._handle, c.byref(info))
        names = (field[0] for field in info._fields_)
        skipped = ("struct_size", "reserved")
        return OverlapInfo(*(getattr(info, name) for name in names if name not in skipped))

    def report(self, kind: str = "all") -> Any:
        """Settings, buckets and order ("all", "buckets", "order")."""
        text = self._lib.text("sotto_overlap_report", self._handle, kind.encode())
        return cast("Any", json.loads(text))
