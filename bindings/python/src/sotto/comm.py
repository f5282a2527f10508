"""Groups of ranks and their collectives."""

from __future__ import annotations

import contextlib
import ctypes as c
import json
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from . import _abi as abi
from ._buffers import HOST, Buffers
from ._call import INT32, call_on, call_options, whole_number
from ._handle import HandleOwner
from ._json import json_text
from ._lib import Library, interruptible, text_of
from ._text import counted
from .errors import InvalidArgumentError, InvalidStateError, SottoError, error_of
from .exchange import Exchanges
from .work import Work, orphans

if TYPE_CHECKING:
    from .codec import Codec


class Counters(NamedTuple):
    """What this rank has sent and received in one comm, as measured at the transport."""

    payload_bytes_sent: int
    payload_bytes_received: int
    header_bytes_sent: int
    header_bytes_received: int
    service_bytes_sent: int
    service_bytes_received: int
    messages_sent: int
    messages_received: int
    payload_bytes_planned: int
    header_bytes_planned: int
    kernel_ns: int
    ops_completed: int


class Comm(Exchanges, HandleOwner):
    """An ordered set of ranks: what :func:`sotto.init_process_group` makes.

    Collectives take one array or a list of n arrays, which then are one operation: numpy arrays,
    torch tensors, JAX arrays (as inputs: nothing may write them, see ``sotto.jax``), objects with
    the buffer protocol or ``__dlpack__``; in host memory, or tensors of torch and arrays of JAX on
    one CUDA device; contiguous, of dtype int8 to int64, uint8 to uint64, float16, bfloat16, float32
    or float64; any shape, of which the number of elements counts. Nothing is copied. They return a
    :class:`Work` at once. All ranks have to call the same collectives in the same order with the
    same dtypes, counts, ``op``, ``root`` and ``tag``: a difference is a ProtocolError on every
    rank.

    Options that all collectives have: ``tag`` (a number that has to be equal on all ranks),
    ``timeout`` (seconds that the operation may stand still; None: the comm's; math.inf: no limit),
    ``priority`` (larger is more urgent; equal on all ranks; ``PRIORITY_BACKGROUND`` and less:
    streams of its own on CUDA devices, and a small share of the network however busy it is).

    Errors that all of them have: InvalidArgumentError (an array that is not contiguous, counts that
    do not fit, a root or peer out of range), UnsupportedError (dtype, device), InvalidStateError
    (closed, fork), the comm's own if it has failed; from the Work those of the operation.
    Threads: any.
    """

    _noun = "comm"
    _destroy = "sotto_comm_destroy"
    _blocks = True

    def __init__(self, lib: Library, handle: c.c_void_p, context: HandleOwner) -> None:
        """Not for users: init_process_group() and split() make comms."""
        super().__init__(lib, handle)
        self._context: HandleOwner | None = context
        self._lock = threading.RLock()
        self._collected: Work | None = None
        self._told = False  # whether the caller has heard of an error
        self._left: list[HandleOwner] = []  # dropped while averages of theirs were under way
        # In the process group of a framework, if known.
        self._framework_ranks: tuple[int, ...] | None = None
        number = c.c_int32()
        lib.call("sotto_comm_rank", handle, c.byref(number))
        self._rank = number.value
        lib.call("sotto_comm_size", handle, c.byref(number))
        self._size = number.value

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<sotto.Comm rank {self._rank} of {self._size}{state}>"

    def _idle(self) -> bool:
        return not self._left and self.report("waiting")["operations_in_flight"] == 0

    def _live_context(self) -> HandleOwner:
        self._check_process()
        if self._context is None:
            raise InvalidStateError(f"this {self._noun} is closed")
        return self._context

    @property
    def rank(self) -> int:
        """Rank of this process, 0 .. size-1."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    # ---- submission ----------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any) -> None:
        """A call of the library on this comm, whose error the caller hears of."""
        try:
            self._lib.call(name, *arguments)
        except SottoError:
            self._told = True
            raise

    def _submit(self, name: str, *arguments: Any, call: abi.Call | None, keep: Any) -> Work:
        what = name.removeprefix("sotto_")
        things = keep if isinstance(keep, tuple) else (keep,)
        on = (thing.cuda for thing in things if isinstance(thing, Buffers) and thing.cuda != HOST)
        cuda = next(on, HOST)
        with self._lock:
            orphans.reap(self._lib)
            handle = self._handle
            if self._collected is not None:
                self._call(name, handle, *arguments, call_on(HOST, call), None)
                self._collected._keep.append(keep)
                if cuda != HOST:  # the stream is the group's
                    self._collected._cuda = cuda
                return self._collected
            op = c.c_void_p()
            self._call(name, handle, *arguments, call_on(cuda, call), c.byref(op))
            return Work(self, op, [keep], what, cuda)

    def _inputs(self, x: Any, what: str = "x") -> Buffers:
        return Buffers(x, what, writable=False)

    def _outputs(self, out: Any, what: str = "out") -> Buffers:
        return Buffers(out, what, writable=True)

    def _pair(self, x: Any, out: Any) -> tuple[Buffers, Buffers]:
        """Inputs and outputs; no `out` means in place."""
        if out is None:
            both = self._outputs(x, "x")
            return both, both
        ins, outs = self._inputs(x), self._outputs(out)
        if ins.n != outs.n:
            raise InvalidArgumentError(
                f"x has {counted(ins.n, 'array')} and out has {outs.n}; they have to be as many"
            )
        return ins, outs

    # ---- collectives ---------------------------------------------------------------------------

    def barrier(self, *, tag: int = 0, timeout: float | None = None) -> Work:
        """Completes on a rank when every rank has called it."""
        return self._submit("sotto_barrier", call=call_options(tag, timeout), keep=None)

    def all_reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        op: str | None = None,
        codec: Codec | None = None,
        tag: int = 0,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Work:
        """out = reduction of x over ranks, in rank order, with the same bits on all ranks.

        out: same dtypes and counts as x; None: x is replaced. op: "sum" (default), "mean", "min",
        "max", "prod", "bit_or" (integers). codec: sends the data compressed (float32 alone); the
        result is then the error-compensated mean and op has to be None or "mean".
        Errors: also BusyError (codec in use), NonfiniteError from the Work of one with a codec.
        """
        ins, outs = self._pair(x, out)
        handle = None
        if codec is not None:
            if op not in (None, "mean"):
                raise InvalidArgumentError(
                    f"op is {op!r}; with a codec the result is the mean: None or 'mean'"
                )
            handle = codec._handle
        call = call_options(tag, timeout, priority, op, handle)
        return self._submit(
            "sotto_all_reduce", ins.array, outs.array, ins.n, call=call, keep=(ins, outs, codec)
        )

    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        tag: int = 0,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Work:
        """Copies the root's x over x of all other ranks. On the root x is only read."""
        root = self._number(root, "root")
        buffers = self._inputs(x) if self._rank == root else self._outputs(x, "x")
        call = call_options(tag, timeout, priority)
        return self._submit(
            "sotto_broadcast",
            buffers.array,
            buffers.array,
            buffers.n,
            root,
            call=call,
            keep=buffers,
        )

    def all_gather(
        self,
        x: Any,
        out: Any,
        *,
        tag: int = 0,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Work:
        """out = concatenation of x over ranks.

        out: size times as many elements as x. x may be this rank's part of out.
        """
        ins, outs = self._pair(x, out)
        call = call_options(tag, timeout, priority)
        return self._submit(
            "sotto_all_gather", ins.array, outs.array, ins.n, call=call, keep=(ins, outs)
        )

    def reduce_scatter(
        self,
        x: Any,
        out: Any,
        *,
        op: str | None = None,
        tag: int = 0,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Work:
        """out = this rank's part of the reduction of x over ranks.

        x: size times as many elements as out. out may be this rank's part of x. op: as in
        all_reduce.
        """
        ins, outs = self._pair(x, out)
        call = call_options(tag, timeout, priority, op)
        return self._submit(
            "sotto_reduce_scatter", ins.array, outs.array, ins.n, call=call, keep=(ins, outs)
        )

    def reduce(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        *,
        op: str | None = None,
        tag: int = 0,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Work:
        """out on the root = reduction of x over ranks, with the bits that all_reduce has.

        out: same dtypes and counts as x; None on all ranks but the root, and there too if x is to
        be replaced. op: as in all_reduce.
        """
        root = self._number(root, "root")
        ins, outs = self._inputs(x), None
        if self._rank == root:
            ins, outs = self._pair(x, out)
        call = call_options(tag, timeout, priority, op)
        return self._submit(
            "sotto_reduce",
            ins.array,
            None if outs is None else outs.array,
            ins.n,
            root,
            call=call,
            keep=(ins, outs),
        )

    def send(
        self,
        x: Any,
        peer: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Work:
        """Sends x to a rank, which has to call recv() with as many elements of the same dtype.

        Matched in call order per pair of ranks; tags are compared.
        """
        ins = self._inputs(x)
        call = call_options(tag, timeout, priority)
        number = self._number(peer, "peer")
        return self._submit("sotto_send", ins.array, ins.n, number, call=call, keep=ins)

    def recv(
        self,
        out: Any,
        peer: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Work:
        """Receives from a rank what it sends with send()."""
        outs = self._outputs(out)
        call = call_options(tag, timeout, priority)
        number = self._number(peer, "peer")
        return self._submit("sotto_recv", outs.array, outs.n, number, call=call, keep=outs)

    @contextlib.contextmanager
    def group(self, *, timeout: float | None = None, priority: int = 0) -> Iterator[Work]:
        """``with comm.group() as work:`` calls in the block start together as one operation.

        Needed where sends and receives of one rank depend on each other. The calls inside return
        this same Work, which can be waited for after the block. They may set tag and op alone. If
        the block raises, nothing is started. Errors: InvalidStateError (inside a group already).
        """
        with self._lock:
            self._lib.call("sotto_group_begin", self._handle)
            work = Work(self, None, [], "group")
            self._collected = work
            try:
                yield work
            except BaseException:
                self._collected = None
                self._abandon_group()
                raise
            self._collected = None
            op = c.c_void_p()
            call = call_on(work._cuda, call_options(timeout=timeout, priority=priority))
            self._call("sotto_group_end", self._handle, call, c.byref(op))
            work._start(op)

    def _abandon_group(self) -> None:
        # A collected call that is refused makes the library start nothing when the group ends.
        functions, handle = self._lib.functions, self._handle
        functions.sotto_send(handle, None, 0, -1, None, None)
        functions.sotto_group_end(handle, None, None)

    # ---- the group itself ----------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Comm | None:
        """Ranks with the same color form a new comm, ordered by key, then by rank.

        color: 0 to 2**31 - 1; None: this rank gets no comm, and None is returned. Collective.
        Connections are shared: a failure of one comm is a failure of all that were split from the
        same one.
        """
        out = c.c_void_p()
        number = -1 if color is None else whole_number(color, "color", 0, INT32[1])
        key = whole_number(key, "key", *INT32)
        handle, context = self._handle, self._live_context()

        def work() -> None:
            with self._lock:
                self._call("sotto_comm_split", handle, number, key, c.byref(out))

        interruptible(work, lambda: self._lib.functions.sotto_comm_destroy(out))
        return Comm(self._lib, out, context) if out.value else None

    def abort(self, reason: str = "no reason given") -> None:
        """Fails the comm, and all that share its connections, on every rank.

        Operations in flight end with AbortedError and this text. Threads: any.
        """
        self._lib.call("sotto_comm_abort", self._handle, reason.encode())
        self._told = True

    def error(self) -> SottoError | None:
        """The first cause of failure, the same on all ranks; None while the comm is healthy."""
        text = c.c_char_p()
        status = self._lib.functions.sotto_comm_error(self._handle, c.byref(text))
        if status >= 0:
            return None
        self._told = True
        return error_of(status, text_of(text.value))

    def counters(self) -> Counters:
        """Bytes and messages of this comm, without its splits."""
        out = abi.CommCounters()
        self._lib.call("sotto_comm_get_counters", self._handle, c.byref(out))
        return Counters(*(getattr(out, name) for name in Counters._fields))

    def report(self, kind: str = "all") -> dict[str, Any]:
        """kind: "all", "counters" (per peer), "routes", "waiting" (who waits for whom)."""
        text = self._lib.text("sotto_comm_report", self._handle, kind.encode())
        return cast("dict[str, Any]", json.loads(text))

    def plan(self, kind: str, **request: Any) -> dict[str, Any]:
        """What an operation would send, before anything is sent: bytes and messages per peer.

        kind: "all_reduce", ...; the rest as keyword arguments: dtype="fp32", counts=[n, ...],
        op="sum", root, peer, in_place, codec={"type": "onebit"}, in_counts, out_counts.
        """
        if "op" in request:
            request["reduce"] = request.pop("op")
        text = json_text({"kind": kind, **request}).encode()
        return cast(
            "dict[str, Any]", json.loads(self._lib.text("sotto_plan_report", self._handle, text))
        )

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """``with comm.span("forward"):`` puts the block into the time line of SOTTO_TRACE.

        In a row of the trainer's own, beside those of kernels and messages; without SOTTO_TRACE
        nothing happens. name: 200 bytes of its UTF-8 are kept. The block's time on the host:
        what it queues on a GPU ends later. Threads: any. Errors: InvalidStateError (comm closed or
        forked when the block begins, or its UniqueId).
        """
        context = self._live_context()
        begin = time.monotonic_ns()
        try:
            yield
        finally:
            end = time.monotonic_ns()
            self._lib.call("sotto_trace_span", context._handle, name.encode(), begin, end)

    def codec(self, kind: str | Mapping[str, Any], like: Any, **options: Any) -> Codec:
        """A codec for all_reduce of arrays like these: see :class:`sotto.Codec`."""
        from .codec import Codec

        return Codec(self, kind, like, **options)

    def close(self) -> None:
        """Waits for operations in flight, at most the comm's timeout, and leaves the group.

        Not collective. A second call does nothing. Errors: the first met while waiting, unless an
        operation of this comm has raised one before.
        """
        if self._collected is not None:
            raise InvalidStateError("this comm has an open group: leave its `with` block first")
        with self._lock:
            try:
                while self._left:
                    self._left.pop().close()
                super().close()
            except SottoError:
                if not (self.closed and self._told):
                    raise
            finally:
                if self.closed:
                    self._context = None
            orphans.reap(self._lib)
