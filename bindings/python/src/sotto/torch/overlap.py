"""Gradients of a module that travel while backward() computes others."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import overlap as plain
from .._view import HOST
from ..comm import Comm
from ..errors import InvalidArgumentError, InvalidStateError, UnsupportedError
from ..group import meet
from ..work import Work
from .averagers import check_whole, ddp_modules, share_ranks
from .base import SottoOptimizer
from .gradients import check_param
from .outer import Outer

MIB = 1 << 20

# One hook before the steps of all optimizers: torch goes through its hooks while other threads may
# make and close overlaps.
_hook: Any = None
_hook_lock = threading.Lock()
_live: weakref.WeakSet[Overlap] = weakref.WeakSet()


def _before_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with _hook_lock:
        overlaps = list(_live)
    for overlap in overlaps:
        overlap._before_step(optimizer)


def _watch_steps(overlap: Overlap) -> None:
    global _hook
    with _hook_lock:
        _live.add(overlap)
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_before_any_step)


# The frame of a torch.autograd.Function that is being differentiated.
_NODE = torch.autograd.function.BackwardCFunction.apply.__code__


def _inside_backward() -> bool:
    """Whether the backward pass that calls is a part of another one.

    As those of activation checkpoints are, with use_reentrant=True and in DeepSpeed.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _NODE:
            return True
    return False


def _bytes(mebibytes: float | None) -> int | None:
    return None if mebibytes is None else max(1, int(mebibytes * MIB))


class _BeforeForward:
    """A module's hook. That of a copy of the module, which no overlap averages, does nothing."""

    def __init__(self, overlap: Overlap | None = None) -> None:
        self._overlap = overlap

    def __call__(self, *_: Any) -> None:
        if self._overlap is not None:
            self._overlap._before_forward()

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()


class Overlap:
    """Averages the gradients of a module over ranks, while its backward() goes on.

    model:           its parameters that require gradients, dense, all in host memory or all on one
                     CUDA device; equal on all ranks: broadcast_parameters(). Not wrapped. Buffers
                     stay each rank's own; copies of the model (deepcopy, torch.save) are not
                     averaged
    codec:           "int8", "onebit" or another kind of sotto.Codec, or a dict with its options:
                     compresses every bucket, with error feedback; None: nothing is compressed
    bucket_mb:       MiB of gradients that are sent together; None: 25
    first_bucket_mb: those of the first bucket, so that something is sent early; None: 1
    order:           of buckets: "reversed" (also None), "registered", or "observed": that in which
                     gradients became ready on rank 0 in the first backward()
    unused:          "error" (also None), or "zero": parameters that a backward() does not reach
                     have a gradient of zeros on this rank, and so get the mean of the others
    wire:            "fp32", "fp16" or "bf16": type that is sent; None: each gradient's own
    comm:            None: as for the optimizers
    optimizer:       one of this package, of parameters of the model: backward() begins its step,
                     and step() waits for it (below). Without codec, wire and comm, which are the
                     optimizer's; None: gradients become means

        overlap = sotto.torch.Overlap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    Collective: the constructor, and every backward() outside of no_sync(). When that returns,
    gradients are means, as those of DistributedDataParallel are: they may be clipped, unscaled by
    GradScaler and looked at. A backward() that ends with an exception makes the round end with
    CancelledError on all ranks, at once inside ``with overlap.round()``, else with the next
    forward(), wait() or close(). wait() is needed where a model lies in one checkpoint with
    use_reentrant=True and a parameter of it has no gradient: step() and wait() end the round then.

    With ``optimizer`` a round is a step of it: averages, or what its 1-bit stage sends, travel
    during backward(), and the update is behind them, to the bit that of a step() that begins when
    all gradients are there. Learning rates and the like are those of the beginning of backward().
    Gradients stay as they are, and must not be changed before step(), of which that is an error;
    every parameter has to have one ("zero" counts those without as zeros).
    `sotto={"granularity": "bucket"}` lets 1-bit stages send bucket by bucket; bucket_mb and
    first_bucket_mb then follow from it. report() says what is hidden.

        optimizer = sotto.torch.OnebitAdam(model.parameters(), sotto={"granularity": "bucket"})
        overlap = sotto.torch.Overlap(model, optimizer=optimizer)

    Errors of backward(), and of the optimizer's step(): CancelledError (the backward() of a rank
    has failed; the next one is as any), NonfiniteError (with a codec), InvalidStateError
    (parameters without a gradient; a gradient that was changed before step()), the comm's own.
    close() it before the comm.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        codec: str | Mapping[str, Any] | None = None,
        bucket_mb: float | None = None,
        first_bucket_mb: float | None = None,
        order: str | None = None,
        unused: str | None = None,
        wire: str | None = None,
        comm: Comm | None = None,
        optimizer: SottoOptimizer | None = None,
    ) -> None:
        self._lock = threading.Lock()  # hooks run on the threads of autograd
        self._optimizer = optimizer
        self._named: list[tuple[str, torch.Tensor]] = [
            (n, p) for n, p in model.named_parameters() if p.requires_grad
        ]
        self._check(model)
        given: dict[str, Any] = {
            "first_bucket_bytes": _bytes(first_bucket_mb),
            "bucket_bytes": _bytes(bucket_mb),
            "order": order,
            "unused": unused,
            "wire": wire,
            "codec": codec if codec is None or isinstance(codec, str) else dict(codec),
        }
        self._config = {key: value for key, value in given.items() if value is not None}
        self._overlap = self._make(comm)
        settings = self._overlap.report()["settings"]
        self._zeros = settings["unused"] == "zero"
        self._observes = settings["order"] == "observed"
        self._work: Work | None = None
        self._open = False  # gradients of a round are being computed
        self._syncs = True
        self._may_begin: Callable[[], bool] = lambda: True  # asked beside no_sync()
        self._kept: set[int] = set()  # gradients of micro-batches inside no_sync()
        self._missing: set[int] = set()  # of the open round
        self._passes: set[int] = set()  # backward passes that have brought some of it
        self._inner_ended = False  # and of these one has ended inside of another, just now
        self._sent: list[tuple[torch.Tensor, int]] = []  # gradients that a step reads, and versions
        self._layout = -1
        self._learn_buckets()
        numbers = {id(p): i for i, (_, p) in enumerate(self._named)}
        if optimizer is not None:
            optimizer._overlap = self
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda q: self._computed(numbers[id(q)], q)
            )
            for _, p in self._named
        ]
        self._handles.append(model.register_forward_pre_hook(_BeforeForward(self)))
        self._numbers = numbers
        _watch_steps(self)

    def _make(self, comm: Comm | None) -> plain.Overlap:
        if self._optimizer is not None:
            if not isinstance(self._optimizer, SottoOptimizer):
                raise InvalidArgumentError(
                    f"optimizer is of type {type(self._optimizer).__qualname__}; allowed is one of "
                    "sotto.torch that averages gradients: Adam, AdamW, Lamb, Lion, OnebitAdam, "
                    "OnebitLamb. Before others Overlap(model) averages them"
                )
            if comm is not None:
                raise InvalidArgumentError("comm and optimizer are both given; it has its own")
            return self._make_steps(self._optimizer)
        cuda = self._named[0][1].device
        number = HOST if cuda.type == "cpu" else cuda.index
        like = [
            plain.Moving(p.numel(), str(p.dtype).removeprefix("torch."), number)
            for _, p in self._named
        ]
        return plain.Overlap(like, self._config, comm=meet(comm))

    def _make_steps(self, optimizer: SottoOptimizer) -> plain.Overlap:
        """Gradients are then those of the optimizer's parameters, in its order."""
        if optimizer._overlap is not None and optimizer._overlap is not self:
            raise InvalidStateError("the optimizer has an Overlap already; close() that first")
        self._of = optimizer._build()
        mine = {id(p) for _, p in self._named}
        for tensor in optimizer._tensors:
            if id(tensor.p) not in mine:
                raise InvalidArgumentError(
                    f'parameter "{tensor.name}" of the optimizer is none of the model that '
                    "requires a gradient; give the model that has all of them"
                )
        self._named = [(tensor.name, tensor.p) for tensor in optimizer._tensors]
        return plain.Overlap.of(self._of, self._config or None)

    def _check(self, model: torch.nn.Module) -> None:
        if not self._named:
            raise UnsupportedError("the model has no parameter that requires a gradient")
        if ddp_modules(p for _, p in self._named):
            raise UnsupportedError(
                "the model is wrapped in DistributedDataParallel, which averages gradients itself: "
                "give the module inside, or take sotto.torch.ddp_hook"
            )
        check_whole(self._named)
        for name, p in self._named:
            check_param(name, p)
            if p.device != self._named[0][1].device:
                raise UnsupportedError(
                    f'parameter "{name}" is on {p.device}, "{self._named[0][0]}" on '
                    f"{self._named[0][1].device}; a model is on one device"
                )
        if not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
            raise UnsupportedError(f"torch {torch.__version__} is too old; 2.1 or later is needed")

    # ---- rounds --------------------------------------------------------------------------------

    def _learn_buckets(self) -> None:
        """Which gradients are handed over together: those of a bucket that have one stream."""
        layout = self._overlap.info().layout
        if layout == self._layout:
            return
        self._layout = layout
        buckets = [bucket["gradients"] for bucket in self._overlap.report("buckets")]
        if self._observes and layout == 0:  # the order is that of these calls
            buckets = [[i] for bucket in buckets for i in bucket]
        self._sizes = [len(bucket) for bucket in buckets]
        self._bucket_of = {i: b for b, bucket in enumerate(buckets) for i in bucket}

    def _follow_optimizer(self) -> None:
        """The step that begins is one of the optimizer as it is now. Collective if that is new."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        if optimizer._build() is not self._of:
            self._overlap.close()
            self._overlap = self._make_steps(optimizer)
            self._layout = -1
        optimizer._begin_step()
        self._steps_before = self._of.info().step

    def _begin(self) -> None:
        self._follow_optimizer()
        self._work = self._overlap.begin()
        self._open = True
        self._sent = []
        self._learn_buckets()
        self._missing = set(range(len(self._named)))
        self._left = list(self._sizes)
        self._waiting: list[dict[int, list[int]]] = [{} for _ in self._sizes]  # by stream
        self._passes.clear()

    def _computed(self, index: int, p: torch.Tensor) -> None:
        with self._lock:
            if not self._syncs or not self._may_begin():
                self._kept.add(index)
                return
            if self._work is not None and not self._open:
                raise InvalidStateError(
                    "a second backward() before the means of the first were waited for; call "
                    "wait() or step() in between, or wrap all micro-batches but the last in "
                    "no_sync()"
                )
            if self._work is None:
                self._begin()
            self._inner_ended = False
            number = torch._C._current_graph_task_id()
            if number not in self._passes:
                self._passes.add(number)
                # It runs when the backward pass has ended well.
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_has_ended)
            try:
                self._hand_over(index, p)
            except BaseException as error:
                self._give_up(f"{type(error).__name__}: {error}")
                raise

    def _hand_over(self, index: int, p: torch.Tensor) -> None:
        if index not in self._missing:
            raise InvalidStateError(
                f'parameter "{self._named[index][0]}" got a gradient in a second backward() before '
                "the first has ended well; wrap micro-batches but the last in no_sync()"
            )
        stream = 0 if not p.is_cuda else torch.cuda.current_stream(p.device).cuda_stream
        self._waiting[self._bucket_of[index]].setdefault(stream, []).append(index)
        self._count(index, p)

    def _count(self, index: int, p: torch.Tensor) -> None:
        """One gradient less is missing."""
        bucket = self._bucket_of[index]
        self._missing.discard(index)
        self._left[bucket] -= 1
        if self._left[bucket] == 0:
            self._flush(bucket, p)

    def _flush(self, bucket: int, p: torch.Tensor) -> None:
        for stream, indices in self._waiting[bucket].items():
            where: Any = contextlib.nullcontext()
            if p.is_cuda:
                where = torch.cuda.stream(torch.cuda.ExternalStream(stream, p.device))  # type: ignore[no-untyped-call]
            with where:
                self._overlap.ready(indices, [self._gradient(i) for i in indices])
        self._waiting[bucket] = {}

    def _gradient(self, index: int) -> Any:
        if self._optimizer is None:
            return self._named[index][1].grad
        return self._optimizer._gradient(index)

    def _backward_has_ended(self) -> None:
        """In backward(), behind its last gradient. An error here is one of backward()."""
        with self._lock:
            if not self._open:
                return
            if self._missing and _inside_backward():
                self._inner_ended = True  # the outer one brings others
                return
            self._end_round()

    def _end_round(self) -> None:
        """Nothing more comes."""
        try:
            for index in sorted(self._missing):
                p = self._named[index][1]
                if index not in self._kept and not self._zeros:
                    continue
                if p.grad is None and self._optimizer is not None:
                    self._overlap.unused([index])
                    self._count(index, p)
                    continue
                if index not in self._kept or p.grad is None:
                    p.grad = torch.zeros_like(p)
                self._hand_over(index, p)
            if self._missing:
                names = ", ".join(f'"{self._named[i][0]}"' for i in sorted(self._missing)[:8])
                raise InvalidStateError(
                    f"{len(self._missing)} of {len(self._named)} parameters got no gradient in "
                    f'backward(): {names}; with unused="zero" it counts as zeros'
                )
            self._overlap.finish()
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")
            raise
        self._open = False
        self._kept.clear()
        if self._optimizer is None:
            self._wait()
            return
        gradients = [p.grad for _, p in self._named if p.grad is not None]
        self._sent = [(gradient, gradient._version) for gradient in gradients]

    def _give_up(self, reason: str) -> None:
        """The open round ends with CancelledError on all ranks, for whoever waits for it."""
        self._open = False
        with contextlib.suppress(InvalidStateError):  # it has ended already
            self._overlap.withdraw(reason)

    def _before_forward(self) -> None:
        with self._lock:
            if self._open and self._syncs:  # the backward() before has not ended well
                self._give_up("backward() has ended with an exception")
        if self._optimizer is not None:
            return  # its step() is what waits
        if self._work is not None and not self._open and self._syncs and torch.is_grad_enabled():
            with contextlib.suppress(Exception):  # the next wait() is for another round
                self._wait()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        params = (p for group in optimizer.param_groups for p in group["params"])
        if optimizer is self._optimizer or not any(id(p) in self._numbers for p in params):
            return
        if isinstance(optimizer, Outer):
            self._check_local(optimizer)
        if isinstance(optimizer, SottoOptimizer):
            raise InvalidStateError(
                "the gradients would be averaged twice: by sotto.torch.Overlap, and in step(); "
                "give the Overlap this optimizer (optimizer=), close it, or take an optimizer of "
                "torch.optim"
            )
        if self._optimizer is None:
            self.wait()

    def _check_local(self, optimizer: Outer) -> None:
        """Errors: InvalidStateError (inner steps are to be each rank's own)."""
        if optimizer._allow_ddp or not share_ranks(self._overlap._comm, optimizer._comm):
            return
        raise InvalidStateError(
            "sotto.torch.Overlap averages the gradients in backward(): inner steps are the same on "
            "all ranks then, and outer steps have nothing to average. Close it; where it is meant "
            "to average too, over other ranks, give the outer optimizer ddp=True"
        )

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def wait(self) -> None:
        """Waits for what the last backward() has left open: a round that failed on this rank.

        With ``optimizer``: until the step that backward() began is done, as its step() does.
        Errors: see the class; gradients are undefined then, unless they were a step's.
        """
        self._end_backward()
        self._wait()
        self._check_untouched()

    def _check_untouched(self) -> None:
        """A step has read gradients where they are since backward() ended."""
        sent, self._sent = self._sent, []
        versions = {id(gradient): version for gradient, version in sent}
        for name, p in self._named:
            if p.grad is not None and sent and p.grad._version != versions.get(id(p.grad)):
                raise InvalidStateError(
                    f'the gradient of "{name}" was changed between backward() and step(), while '
                    "that was being made, as clipping and zero_grad(set_to_none=False) do: take "
                    '"gradient_clipping"'
                )

    def _end_backward(self) -> None:
        with self._lock:
            if self._open and self._inner_ended:
                self._end_round()
            elif self._open:
                self._give_up("backward() has ended with an exception")

    def _begun(self) -> bool:
        """Whether backward() has begun a step that the optimizer's step() has not waited for."""
        return self._work is not None

    def _take(self) -> Work:
        """That step, when backward() has ended."""
        self._end_backward()
        work, self._work = self._work, None
        assert work is not None
        return work

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """Around backward(): an exception inside ends the round on all ranks at once."""
        try:
            yield
        except BaseException as error:
            with self._lock:
                if self._open:
                    self._give_up(f"{type(error).__name__}: {error}")
            raise

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around all micro-batches but the last: gradients are added up, and nothing is sent."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    # ---- state ---------------------------------------------------------------------------------

    def info(self) -> plain.OverlapInfo:
        """Hot figures: see sotto.overlap.OverlapInfo."""
        return self._overlap.info()

    def report(self, kind: str = "all") -> Any:
        """Settings, buckets, what is hidden and why not: sotto.overlap.Overlap.report()."""
        return self._overlap.report(kind)

    def state_dict(self, mode: str = "exact") -> dict[str, Any]:
        """The error feedback of a codec, between rounds; without a codec nothing.

        mode: "exact": this rank's, to be saved by every rank and loaded by the same; "mean":
        averaged over ranks, the same on all of them: collective, for any number of ranks.
        """
        if self._overlap.report()["settings"]["codec"] is None:
            return {"mode": mode, "state": None}
        blob = self._overlap.export_state(mode)
        return {"mode": mode, "state": torch.frombuffer(blob, dtype=torch.uint8)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what state_dict() gave. Errors: InvalidArgumentError (other model or settings)."""
        if state["state"] is not None:
            self._overlap.import_state(state["state"].numpy(), state["mode"])
            self._learn_buckets()

    def close(self) -> None:
        """Takes the hooks off; an open round ends on all ranks. A second call does nothing.

        Before the optimizer's close(), if it has one.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        with _hook_lock:
            _live.discard(self)
        if self._optimizer is not None and self._optimizer._overlap is self:
            self._optimizer._overlap = None
        if not self._overlap.closed:
            with contextlib.suppress(Exception):
                self.wait()
            self._overlap.close()

    def __enter__(self) -> Overlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
