"""Gradients of a module that travel while backward() computes others."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import overlap as plain
from .._text import counted
from .._view import HOST
from ..comm import Comm
from ..errors import InvalidArgumentError, InvalidStateError
from ..group import meet
from ..work import Work
from .averagers import share_ranks
from .base import SottoOptimizer
from .hooked import Hooked, Named, agree, check_model
from .outer import Outer
from .passes import in_backward, inside_backward, is_compiling

MIB = 1 << 20
_FAILED = "backward() has ended with an exception"

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


def _bytes(key: str, mebibytes: float | None) -> int | None:
    if mebibytes is None:
        return None
    if not isinstance(mebibytes, (int, float)) or not 0 <= mebibytes < math.inf:
        raise InvalidArgumentError(f"{key} is {mebibytes!r}; allowed: a number from 0 on, in MiB")
    return max(1, int(mebibytes * MIB))


class _BeforeForward:
    """A module's hook. That of a copy of the module, which no overlap averages, does nothing."""

    def __init__(self, overlap: Overlap | None = None) -> None:
        self._overlap = overlap

    def __call__(self, *_: Any) -> None:
        # torch.compile would break its graph here, or refuse to.
        if self._overlap is not None and not is_compiling():
            self._overlap._before_forward()

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()


class Overlap:
    """Averages the gradients of a module over ranks, while its backward() goes on.

    model:           its parameters that require gradients, dense, all in host memory or all on one
                     CUDA device; equal on all ranks: broadcast_parameters(). Not wrapped. Buffers
                     stay each rank's own; copies of the model (deepcopy, torch.save) are not
                     averaged. What load_state_dict(assign=True) puts in their place is; parameters
                     that are added or require a gradient later are an error
    codec:           "int8", "onebit" or another kind of sotto.Codec, or a dict with its options:
                     compresses every bucket, with error feedback; None: nothing is compressed
    bucket_mb:       MiB of gradients that are sent together; None: 25
    first_bucket_mb: those of the first bucket, so that something is sent early; None:
                     1, or bucket_mb if that is less
    order:           of buckets: "reversed" (also None), "registered", or "observed": that in which
                     gradients became ready on rank 0 in the first backward()
    unused:          "error" (also None), or "zero": parameters that a backward() does not reach
                     have a gradient of zeros on this rank, or what an earlier one has left there,
                     and so get the mean with the others. Frozen ones do not, which is an error if
                     they have a gradient on other ranks, unless a codec hides it
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
    CancelledError on all ranks, at once inside ``with overlap.round()``, where a forward() that
    fails does so too, else with the next forward(), backward(), wait() or close(). wait() is needed
    where a model lies in one checkpoint with use_reentrant=True and a parameter of it has no
    gradient: step() and wait() end the round then.

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
    It averages, and keeps the parameters, until close(): before that of optimizer and comm.
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
        self._named: Named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        check_model(self._named)
        given: dict[str, Any] = {
            "first_bucket_bytes": _bytes("first_bucket_mb", first_bucket_mb),
            "bucket_bytes": _bytes("bucket_mb", bucket_mb),
            "order": order,
            "unused": unused,
            "wire": wire,
            "codec": codec if codec is None or isinstance(codec, str) else dict(codec),
        }
        self._config = {key: value for key, value in given.items() if value is not None}
        self._overlap = self._make(model, comm)
        settings = self._overlap.report()["settings"]
        self._zeros = settings["unused"] == "zero"
        self._observes = settings["order"] == "observed"
        self._work: Work | None = None
        self._open = False  # gradients of a round are being computed
        self._dropped = False  # this rank has given up the round that is not waited for yet
        self._rounds = 0  # that have begun
        self._syncs = True
        self._may_begin: Callable[[], bool] = lambda: True  # asked beside no_sync()
        self._kept: set[int] = set()  # gradients of micro-batches inside no_sync()
        self._missing: set[int] = set()  # of the open round
        self._passes: set[int] = set()  # backward passes that have brought some of it
        self._nested = False  # and one of them is a part of another
        self._inner_ended = False  # which has ended just now
        self._sent: list[tuple[torch.Tensor, int]] = []  # gradients that a step reads, and versions
        self._layout = -1
        self._learn_buckets()
        if optimizer is not None:
            optimizer._overlap = self
        self._params = Hooked(self._named, self._source(model), self._computed)
        self._forward_hook = model.register_forward_pre_hook(_BeforeForward(self))
        _watch_steps(self)

    def _make(self, model: torch.nn.Module, comm: Comm | None) -> plain.Overlap:
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
        self._check_alone()
        comm = meet(comm)
        agree(comm, ((n, p, p.requires_grad) for n, p in model.named_parameters()))
        cuda = self._named[0][1].device
        number = HOST if cuda.type == "cpu" else cuda.index
        like = [
            plain.Moving(p.numel(), str(p.dtype).removeprefix("torch."), number)
            for _, p in self._named
        ]
        return plain.Overlap(like, self._config, comm=comm)

    def _make_steps(self, optimizer: SottoOptimizer) -> plain.Overlap:
        """Gradients are then those of the optimizer's parameters, in its order."""
        if optimizer._overlap is not None and optimizer._overlap is not self:
            raise InvalidStateError("the optimizer has an Overlap already; close() that first")
        self._of = optimizer._build()
        mine = {id(p) for _, p in self._named}
        agree(self._of._comm, ((t.name, t.p, id(t.p) in mine) for t in optimizer._tensors))
        for tensor in optimizer._tensors:
            if id(tensor.p) not in mine:
                raise InvalidArgumentError(
                    f'parameter "{tensor.name}" of the optimizer is none of the model that '
                    "requires a gradient; give the model that has all of them"
                )
        self._named = [(tensor.name, tensor.p) for tensor in optimizer._tensors]
        self._check_alone()
        return self._of_optimizer()

    def _of_optimizer(self) -> plain.Overlap:
        return plain.Overlap.of(self._of, self._config or None)

    def _check_alone(self) -> None:
        """Errors: InvalidStateError (two overlaps would write the same gradient at once)."""
        with _hook_lock:
            taken = {number for other in _live for number in list(other._params.numbers)}
        for name, p in self._named:
            if id(p) in taken:
                raise InvalidStateError(
                    f'parameter "{name}" has an Overlap already; close() that first'
                )

    def _source(self, model: torch.nn.Module) -> Callable[[], Iterable[tuple[str, torch.Tensor]]]:
        """Parameters as they are now, with the names that they have here."""
        optimizer, module = self._optimizer, weakref.ref(model)

        def of_model() -> Iterable[tuple[str, torch.Tensor]]:
            model = module()
            return () if model is None else model.named_parameters()

        def of_optimizer() -> Iterable[tuple[str, torch.Tensor]]:
            assert optimizer is not None
            optimizer._follow_replaced()
            return [(tensor.name, tensor.p) for tensor in optimizer._tensors]

        return of_model if optimizer is None else of_optimizer

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
        optim = optimizer._build()
        if optim is not self._of:
            if [id(tensor.p) for tensor in optimizer._tensors] != [id(p) for _, p in self._named]:
                raise InvalidStateError(
                    "the optimizer has other parameters than when the Overlap was made, as "
                    "add_param_group() gives it: close() the Overlap, and make a new one"
                )
            self._overlap.close()
            self._of = optim
            self._overlap = self._of_optimizer()
            self._layout = -1
        optimizer._begin_step()
        self._steps_before = self._of.info().step

    def _begin(self) -> None:
        self._params.follow()
        self._follow_optimizer()
        self._work = self._overlap.begin()
        self._open = True
        self._dropped = self._nested = False
        self._rounds += 1
        self._sent = []
        self._learn_buckets()
        self._missing = set(range(len(self._named)))
        self._left = list(self._sizes)
        self._waiting: list[dict[int, list[int]]] = [{} for _ in self._sizes]  # by stream
        self._passes.clear()

    def _computed(self, index: int, p: torch.Tensor) -> None:
        with self._lock:
            if not self._is_due():
                self._kept.add(index)
                return
            number = torch._C._current_graph_task_id()
            self._leave_failed(index, number)
            if self._work is not None and not self._open:
                raise InvalidStateError(
                    "a second backward() before the means of the first were waited for; call "
                    "wait() or step() in between, or wrap all micro-batches but the last in "
                    "no_sync()"
                )
            if self._work is None:
                self._begin()
            self._inner_ended = False
            if number not in self._passes:
                self._passes.add(number)
                self._nested = self._nested or inside_backward()
                # It runs when the backward pass has ended well.
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_has_ended)
            try:
                self._hand_over(index, p)
            except BaseException as error:
                self._give_up(f"{type(error).__name__}: {error}")
                raise

    def _is_due(self) -> bool:
        """Whether what backward() computes now is to be averaged."""
        return self._syncs and self._may_begin()

    def _leave_failed(self, index: int, number: int) -> None:
        """Ends what a backward() has left that did not end well, if another one brings gradients.

        Where passes are parts of others it is not known whether this is another one.
        """
        again = index not in self._missing and number not in self._passes and not self._nested
        if self._open and again and not inside_backward():
            self._give_up(_FAILED)
        self._forget_dropped()

    def _forget_dropped(self) -> None:
        """Waits for the round that this rank has given up: the next one is as any."""
        if self._work is not None and self._dropped:
            with contextlib.suppress(Exception):  # an error was raised where it was given up
                self._wait()

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
        if self._optimizer is not None:
            return self._optimizer._gradient(index)
        return self._params.gradient(index)

    def _backward_has_ended(self) -> None:
        """In backward(), behind its last gradient. An error here is one of backward()."""
        with self._lock:
            if not self._open:
                return
            if self._missing and inside_backward():
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
                frozen = self._optimizer is None and not p.requires_grad
                if p.grad is None and (self._optimizer or (frozen and "codec" in self._config)):
                    self._overlap.unused([index])
                    self._count(index, p)
                    continue
                if p.grad is None and not frozen:
                    p.grad = torch.zeros_like(p)
                self._hand_over(index, p)
            if self._missing:
                names = ", ".join(f'"{self._named[i][0]}"' for i in sorted(self._missing)[:8])
                raise InvalidStateError(
                    f"{len(self._missing)} of {counted(len(self._named), 'parameter')} got no "
                    f'gradient in backward(): {names}; with unused="zero" it counts as zeros'
                )
            self._overlap.finish()
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")
            raise
        self._open = False
        self._kept.clear()
        if self._optimizer is None:
            self._wait()
            self._params.check_frozen()
            return
        gradients = [p.grad for _, p in self._named if p.grad is not None]
        self._sent = [(gradient, gradient._version) for gradient in gradients]

    def _give_up(self, reason: str) -> None:
        """The open round ends with CancelledError on all ranks, for whoever waits for it."""
        self._open, self._dropped = False, True
        with contextlib.suppress(InvalidStateError):  # it has ended already
            self._overlap.withdraw(reason)

    def _before_forward(self) -> None:
        if in_backward() or not torch.is_grad_enabled():
            return  # a checkpoint computes it again; an evaluation, perhaps of another thread
        with self._lock:
            if self._syncs:
                if self._open:  # the backward() before has not ended well
                    self._give_up(_FAILED)
                if self._optimizer is None:  # a step() may come for it
                    self._forget_dropped()
            self._params.follow()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        params = (p for group in optimizer.param_groups for p in group["params"])
        if optimizer is self._optimizer or not any(id(p) in self._params.numbers for p in params):
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
            if self._open and in_backward():
                raise InvalidStateError(
                    "step() inside backward(), before the gradients are means: they are when "
                    "backward() returns"
                )
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
        work = self._work
        if work is not None:
            try:
                work.wait()
            finally:
                if work.is_completed():  # Ctrl-C leaves it in flight
                    self._work = None

    def wait(self) -> None:
        """Waits for what the last backward() has left open: a round that failed on this rank.

        With ``optimizer``: until the step that backward() began is done, which step() then finds.
        Errors: see the class; gradients are undefined then, unless they were a step's.
        """
        self._end_backward()
        work = self._work
        self._wait()
        self._check_untouched()
        if self._optimizer is not None:
            self._work, self._dropped = work, True

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
                self._give_up(_FAILED)

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
        """Around forward() and backward(): an exception inside ends the round on all ranks at once.

        Also where this rank has not begun it, since the others have, or will. A step whose
        backward() has ended is made, on all ranks.
        """
        rounds = self._rounds
        try:
            yield
        except BaseException as error:
            with self._lock:
                if self._rounds == rounds and self._is_due() and not self._overlap.closed:
                    self._forget_dropped()
                    with contextlib.suppress(Exception):
                        if self._work is None:
                            self._begin()
                if self._open:
                    self._give_up(f"{type(error).__name__}: {error}")
                self._dropped = True  # a step that has begun is made, on all ranks
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
        """Takes the hooks off; an open round ends on all ranks. A second call does nothing."""
        self._params.release()
        self._forward_hook.remove()
        with _hook_lock:
            _live.discard(self)
        if self._optimizer is not None and self._optimizer._overlap is self:
            self._optimizer._overlap = None
        if not self._overlap.closed:
            with contextlib.suppress(Exception):
                self.wait()
            self._overlap.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an Overlap cannot be pickled or copied: save its state_dict(), load it into a new one"
        )

    def __enter__(self) -> Overlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
