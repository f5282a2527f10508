"""Outer steps around the inner steps of any optimizer of torch: CO2, DiLoCo and their family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NoReturn, overload

import torch

from .. import outer as plain
from .._view import HOST
from ..comm import Comm
from ..errors import InvalidArgumentError, InvalidStateError, ProtocolError, UnsupportedError
from ..group import meet
from ..optim import config_report
from ..work import Work
from . import outer_state as states
from .averagers import check_local, ddp_over_ranks_of, deepspeed_engine
from .base import SottoOptimizer
from .callers import check_keeps_states, is_dcp_rehearsal
from .dtensors import Gathered, least, local, meshes_of
from .gradients import Tensor
from .parameters import Parameters
from .replaced import Replaced
from .shards import agree as agree_on_parts
from .shards import check_parts, check_unaveraged, needs_whole, takes_norms

# Inner optimizers that cannot be: the name of a class, and what it does.
REFUSED = MappingProxyType(
    {
        "ZeroOneAdam": "0/1 Adam has local steps and synchronisations of its own",
        "OnebitAdam": "it averages over the ranks in every step",
        "OnebitLamb": "it averages over the ranks in every step",
        "ZeroRedundancyOptimizer": "every rank updates a shard and sends it to the others",
        "PostLocalSGDOptimizer": "it averages parameters; preset post_local_sgd does that here",
    }
)


def _check_inner(inner: Any) -> None:
    kind = type(inner)
    name = kind.__qualname__
    if not isinstance(inner, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"inner_optimizer is of type {name}; it has to be a torch.optim.Optimizer"
        )
    if isinstance(inner, Outer):
        raise InvalidArgumentError(
            "inner_optimizer is an Outer; give this one the optimizer that it is around"
        )
    names = {base.__name__ for base in kind.__mro__}
    if isinstance(inner, SottoOptimizer):
        names &= {"ZeroOneAdam"}  # the others may have a comm of one rank
    for refused in names & set(REFUSED):
        raise UnsupportedError(
            f"inner_optimizer is a {name}, which is not supported: {REFUSED[refused]}"
        )
    if isinstance(inner, SottoOptimizer) and inner._comm.size > 1:
        raise UnsupportedError(
            f"inner_optimizer is a {name} that averages over {inner._comm.size} ranks in every "
            "step; allowed is one on a comm of one rank. The configuration file composes the two: "
            '"sotto": {"outer": {...}} of the optimizer'
        )


def _restore(tensor: Tensor) -> None:
    """A parameter that lies elsewhere than the library knows takes the values that are there, if
    its shape is the same."""
    here = tensor.here
    if here.data_ptr() != tensor.registered.data_ptr() and here.shape == tensor.master.shape:
        here.copy_(tensor.master)


class Outer(Parameters):
    """Inner steps that send nothing, and outer ones that average what they have changed.

    A torch optimizer around another one, which makes the inner steps: this rank's alone, with the
    gradients of this rank's samples. Every ``period`` of them what they have changed is averaged
    over the ranks, in the background of the next ones, and moves an anchor from which all go on:

        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = sotto.torch.Outer(inner, preset="co2", period=12, codec="onebit")

    Parameter groups and their state are those of the inner optimizer: torch's schedulers work on
    either.

    inner_optimizer: any of torch's, or one of sotto.torch on a comm of one rank, not 0/1 Adam
    preset: "co2", "diloco", "streaming_diloco", "slowmo", "local_sgd" and the others of
            docs/outer-configuration.md
    period: inner steps from one launch of an average to the next; "auto": ranks measure how many
            hide it; None: the preset's
    codec:  of what is averaged: a type, "onebit" for one, or a dict; None: the preset's
    comm:   as for the other optimizers here; None: the default comm, or of torch's process group
    ddp:    True: DistributedDataParallel around the model, an Overlap, or a mesh over which
            parameters are replicated, averages gradients too, over the ranks of a host for one.
            Without it that is an error where it averages over ranks of the comm
    shards: where parameters are cut, a comm of the ranks that hold the shards of this replica
    hierarchy: of averages: "sharded", "leader" or "auto" have two levels (docs/hierarchy.md)
    keys:   delay, alpha, beta, merge and all other keys of the section "sotto": {"outer": {...}}

    Parameters are those that require gradients at the first step: float32, or float16 and bfloat16,
    which have float32 masters; dense, all in host memory or all on one CUDA device, equal on all
    ranks then: see broadcast_parameters(). Buffers of modules stay each rank's own. The library's
    outer optimizer is made at the first step or load_state_dict(), collectively. Later every rank
    has to make as many steps as the others; collective is a step in which something is launched or
    consumed. The inner learning rate that outer steps may need is that of group 0.

    Parameters of fully_shard and other DTensors are averaged by the shard that a rank holds: comm
    is of the ranks that hold the same, one of every replica, which is compared at the first step.
    With a mesh of ("replica", "shard"):

        fully_shard(model, mesh=mesh["shard"])
        comm = sotto.torch.comm_of_process_group(mesh["replica"].get_group())

    Norms over whole parameters (penalties gap_* but by element, clip "norm" and "rms") take
    shards=, a comm of the ranks that hold the shards of this replica. Both comms are parts of one:

        world = sotto.torch.comm_of_process_group()
        replica, shard = mesh.get_coordinate()
        comm, shards = world.split(shard), world.split(replica)

    What every shard would decide for itself is refused: granularity "tensor" of a gap_*, freshness
    with norms, period "auto", a number of fragments, nonfinite "error". Codecs have scales of the
    shard, info() its figures but for norms, and a state goes on on that shard alone. A replica of
    which one shard is not finite is left out by all its shards.

    Parameters may move to other memory of the same dtype, device and shape, and modules may be
    given others in their place. One that is frozen later gets no more inner steps; outer steps go
    on until what it has changed before is averaged and their momentum has faded.

    GradScaler works: an inner step whose gradients overflow is left out on this rank, and counted.
    An exception of an inner step is not counted: other ranks would wait for this one.

    On a CUDA device outer steps start behind what is queued on PyTorch's current stream, and what
    is queued there later comes after them. A step's error is raised by the next call, or by
    synchronize().

    Errors: InvalidArgumentError (inner_optimizer; a key: names it and what is allowed),
    UnsupportedError (an inner optimizer that averages; a parameter of FullyShardedDataParallel, one
    that is cut beside a setting that needs the whole, or one that is not as above: names it; what
    is not built). In the first step also ProtocolError (ranks differ; hold other shards) and
    InvalidStateError (DTensors are replicated over ranks of the comm, and so averaged already).
    """

    _kind = "Outer"

    def __init__(
        self,
        inner_optimizer: torch.optim.Optimizer,
        *,
        preset: str = "co2",
        period: int | str | None = None,
        codec: str | Mapping[str, Any] | None = None,
        comm: Comm | None = None,
        shards: Comm | None = None,
        ddp: bool = False,
        hierarchy: str = "flat",
        **keys: Any,
    ) -> None:
        _check_inner(inner_optimizer)
        self.inner = inner_optimizer
        self._forget()
        self._outer: plain.Outer | None = None
        self._flying: Work | None = None  # a step on a device whose end is not seen
        self._at: list[int] = []  # where the library knows the parameters to lie
        self._ddp: list[Any] = []  # DistributedDataParallel modules that must not average
        self._allow_ddp = ddp
        self._evaluating = False
        self._lr: float | None = None  # of the last inner step
        self._weight = 1.0  # of this rank's inner steps
        self._meshes: list[Any] = []  # over which the library's parameters are cut
        self._gathered = Gathered(())
        self._step_supports_amp_scaling = True  # GradScaler leaves its verdict to step()
        self.__setstate__({})  # torch's hooks
        self._comm = meet(comm)
        self._file = plain.file_of(hierarchy, preset=preset, period=period, codec=codec, **keys)
        # Wrong values are told now, not at the first step.
        report = config_report(self._file, world_size=self._comm.size)
        if not report["can_run"]:
            raise UnsupportedError("; ".join(report["reasons"]))
        self._shards = shards
        self._refused = needs_whole(report["outer"], shards)
        self._takes_norms = takes_norms(report["outer"])
        self._skips = report["outer"]["nonfinite"] == "skip_rank"
        self._compares_lr = report["outer"]["lr_normalised"]
        self._check_parts(self._parts())
        self._replaced = Replaced()
        self._replaced.watch(p for _, _, p in self._named())

    # ---- the inner optimizer's ------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the inner optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the inner optimizer."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the inner optimizer."""
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's."""
        self._follow_replaced()
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Before the first step alone. Errors: InvalidStateError (after it)."""
        self._check_open()
        if self._outer is not None:
            raise InvalidStateError(
                "parameters cannot be added after the first step; make a new optimizer"
            )
        self._follow_replaced()
        self.inner.add_param_group(param_group)
        try:
            self._check_parts(self._parts())
        except BaseException:
            self.param_groups.pop()
            raise
        self._replaced.watch(p for _, _, p in self._named())

    def _inner_step(self, closure: Callable[[], float] | None) -> float | None:
        """Of this rank. Where GradScaler has found an overflow there is none, or the inner one
        leaves it out."""
        step: Callable[..., float | None] = self.inner.step
        arguments = () if closure is None else (closure,)
        found_inf, scale = (getattr(self, name, None) for name in ("found_inf", "grad_scale"))
        if found_inf is None:
            return step(*arguments)
        if getattr(self.inner, "_step_supports_amp_scaling", False):
            inner: Any = self.inner
            inner.found_inf, inner.grad_scale = found_inf, scale
            try:
                return step(*arguments)
            finally:
                for name in ("found_inf", "grad_scale"):
                    inner.__dict__.pop(name, None)
        if bool(found_inf.item()):
            return None
        if scale is not None:
            inverse = scale.double().reciprocal().float()  # as GradScaler.unscale_() has it
            for _, _, p in self._named():
                if p.grad is not None:
                    local(p.grad).mul_(inverse.to(p.grad.device))
        return step(*arguments)

    # ---- the library's outer optimizer ----------------------------------------------------------

    def _parts(self) -> list[tuple[str, torch.Tensor]]:
        """Names and tensors of those that the library has, or will have."""
        return [(name, p) for name, _, p in self._registered()]

    def _check_parts(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        over = self._shards.size if self._shards is not None and self._takes_norms else 0
        check_parts(named, self._refused, over)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidStateError("this outer optimizer is closed")

    def _build(self) -> plain.Outer:
        self._check_open()
        self.synchronize()
        self._follow()
        if self._outer is not None:
            return self._outer
        if deepspeed_engine(self) is not None:
            raise UnsupportedError(
                "DeepSpeed's engine averages the gradients in every step; its configuration has "
                'outer steps as "sotto": {"outer": {...}}'
            )
        trained = self._trained()
        for name, _, p in trained:
            if isinstance(self.inner, SottoOptimizer) and p.dtype != torch.float32:
                raise UnsupportedError(
                    f'parameter "{name}" is {p.dtype}, of which {type(self.inner).__name__} keeps '
                    "a float32 master of its own; allowed is float32, or an optimizer of torch"
                )
        self._ddp = (
            [] if self._allow_ddp else ddp_over_ranks_of(self._comm, (p for *_, p in trained))
        )
        agree_on_parts(self._comm, self._parts())
        if not self._allow_ddp:
            check_unaveraged(self._comm, self._parts())
        tensors = [Tensor(name, group, p) for name, group, p in trained]
        params = [plain.OuterParam(t.master, t.name, t.copy) for t in tensors]
        self._outer = plain.Outer(params, self._file, comm=self._comm, shards=self._shards)
        self._tensors = tensors
        self._at = [local(t.p).data_ptr() for t in tensors]
        self._meshes = meshes_of(t.p for t in tensors)
        self._gathered = Gathered(t.p for t in tensors)
        self._note_untrained()
        return self._outer

    def _drop(self) -> None:
        outer, self._outer, self._tensors = self._outer, None, []
        self._weight = 1.0
        if outer is not None:
            outer.close()

    def _replace(self, new: Mapping[int, torch.Tensor]) -> None:
        for tensor in self._tensors:
            tensor.p = new.get(id(tensor.p), tensor.p)
        super()._replace(new)
        state = self.inner.state
        for p in [p for p in state if isinstance(p, torch.Tensor) and id(p) in new]:
            state[new[id(p)]] = state.pop(p)

    def _follow_replaced(self) -> None:
        if not isinstance(self.inner, SottoOptimizer):
            super()._follow_replaced()
            return
        before = [id(p) for _, _, p in self._named()]
        self.inner._follow_replaced()  # which has the same groups
        new = {old: p for old, (_, _, p) in zip(before, self._named()) if old != id(p)}
        if new:
            self._replace(new)

    @torch.no_grad()
    def _follow(self) -> None:
        """Tells the library where the parameters lie.

        Errors: InvalidStateError (dtype, device or shape has changed, one became several, or was
        added).
        """
        self._follow_groups()
        at = [local(t.p).data_ptr() for t in self._tensors]
        if self._outer is None or at == self._at:
            return
        for tensor in self._tensors:
            tensor.check_still()
        for tensor, now, before in zip(self._tensors, at, self._at):
            if now != before:
                tensor.move()
        copies = [t.copy for t in self._tensors]
        self._outer.set_params(
            [t.master for t in self._tensors],
            None if all(copy is None for copy in copies) else copies,
        )
        self._at = at

    @torch.no_grad()
    def _adopt(self) -> None:
        """Masters take what inner steps, or others, have written into 16-bit parameters."""
        for tensor in self._tensors:
            if tensor.copy is not None:
                tensor.adopt()

    def _check_at_work(self, what: str) -> None:
        self._check_open()
        if self._evaluating:
            raise InvalidStateError(
                f"{what} inside evaluation(): the anchor is in the place of the parameters"
            )
        on_cuda = self._outer is not None and self._outer.cuda != HOST
        if on_cuda and torch.cuda.is_current_stream_capturing():
            raise InvalidStateError(
                f"{what} cannot be recorded into a CUDA graph; capture what comes before it"
            )

    # ---- torch.optim.Optimizer ------------------------------------------------------------------

    @overload
    def step(self, closure: None = ...) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """The inner optimizer's step, then the outer one: in most calls that only counts.

        closure: as the inner optimizer takes it; its loss is returned.
        Errors: those of the inner step; InvalidStateError (inside evaluation(); DDP has averaged:
        neither step was made); the comm's own: the inner step was made and is not counted, anchor
        and momentum are those of before; NonfiniteError ("nonfinite": "error"): the same, but it is
        counted.
        """
        self._check_at_work("step()")
        if is_dcp_rehearsal():
            return None
        outer = self._build()
        check_local(self._ddp)
        self._check_untrained()
        lr = self.param_groups[0].get("lr")
        self._lr = None if lr is None else float(lr)
        at_boundary = outer.info().next_boundary == 1
        if at_boundary:
            outer.set(lr=self._lr)
        loss = self._inner_step(closure)
        self._adopt()
        if at_boundary:
            self._weigh(outer)
        with self._naming_lr():
            self._await(outer.step())
        if at_boundary:
            self._written()
        return loss

    @torch.no_grad()
    def _weigh(self, outer: plain.Outer) -> None:
        """A replica of which one shard is not finite is left out of the averages of all shards."""
        if not (self._meshes and self._skips):
            return
        finite = torch.stack([t.master.isfinite().all() for t in self._tensors]).all()
        outer.set(weight=least(self._weight if bool(finite) else 0.0, self._meshes))

    def _await(self, work: Work) -> None:
        """Work of the caller from now on comes after the operation: the host's, or a stream's."""
        if work.on_cuda:
            self._flying = work
            work.wait_stream()
        else:
            work.wait()
        self._gathered.drop()

    def synchronize(self) -> None:
        """Waits until the last step has ended on its CUDA device. Errors: those of the step."""
        work, self._flying = self._flying, None
        if work is not None:
            with self._naming_lr():
                work.wait()

    @contextmanager
    def _naming_lr(self) -> Iterator[None]:
        """A learning rate that momentum is in units of is a part of what ranks compare."""
        try:
            yield
        except ProtocolError as error:
            if not self._compares_lr or "outer step(" not in str(error):
                raise
            raise ProtocolError(
                f"{error}; on this rank the learning rate of group 0 is {self._lr}, and ranks have "
                "to have the same where momentum is in its units (lr_normalised)"
            ) from None

    def flush(self) -> None:
        """Averages and consumes everything: the parameters become the anchor, equal on all ranks.

        For the end of a training. Collective; nothing before the first step.
        Errors: those of step().
        """
        self._check_at_work("flush()")
        if self._outer is None:
            return
        outer = self._build()
        outer.set(lr=self._lr)
        self._adopt()
        self._weigh(outer)
        with self._naming_lr():
            self._await(outer.flush())
        self._written()

    def _written(self) -> None:
        """Parameters were written past autograd, which is told: as Gradients.written()."""
        torch.autograd.graph.increment_version([local(t.p) for t in self._tensors])

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """The anchor is in the place of the parameters inside; then they are back, bit for bit.

        Local. Averages under way go on. close() inside ends it. Errors: InvalidStateError (inside
        another; at its end those of a parameter that is not as before, which has the live values
        where its shape is that of before), the comm's own.
        """
        self._check_at_work("evaluation()")
        if self._outer is None:  # the parameters are what the first anchor will be
            yield
            return
        outer = self._build()
        self._adopt()
        with outer.evaluation():
            self._evaluating = True
            self._gathered.drop()
            try:
                yield
            finally:
                self._end_evaluation(outer)

    @torch.no_grad()
    def _end_evaluation(self, outer: plain.Outer) -> None:
        if not self._evaluating:
            return
        self._evaluating = False
        try:
            self._follow()
        finally:
            outer._swap_back()
            for tensor in self._tensors:
                _restore(tensor)
            self._gathered.drop()

    def set(
        self, *, loss: float | None = None, weight: float | None = None, retune: bool = False
    ) -> None:
        """What belongs to the next averages; see sotto.outer.Outer.set().

        loss: told to the others (info().loss). weight: 1, or 0: this rank's inner steps do not
        count, as on a rank that has run out of samples; where parameters are cut, those of its
        replica.
        retune: all ranks measure a period "auto" anew.
        Collective if no step was made yet. Errors: InvalidStateError (retune of another period).
        """
        self._build().set(loss=loss, weight=weight, retune=retune)
        if weight is not None:
            self._weight = weight

    def vote(self, bits: int) -> None:
        """Bits that travel with the next average; info().votes has those of all ranks, or-ed, when
        it was consumed, at the same step on all. Collective if no step was made yet."""
        self._build().vote(bits)

    def info(self) -> plain.OuterInfo:
        """Steps, rounds, averages under way and the like. Collective if no step was made yet."""
        return self._build().info()

    def close(self) -> None:
        """Gives the library's outer optimizer back; call it before the comm's close().

        Afterwards steps, states and figures are InvalidStateError; a second call does nothing.
        """
        try:
            if self._outer is not None:
                self._end_evaluation(self._outer)
        finally:
            super().close()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and under "sotto" what the library keeps, as a tensor of bytes.

        That is parameters, anchor, momentum, error feedback, counters and the average under way,
        which it waits for. Any rank can make it alone, after any step, also when the comm has
        failed. If every rank saves and loads its own, all go on bit for bit. If all load the state
        of one rank, its parameters and its inner optimizer's state are everybody's; on another
        number of ranks parameters become the anchor.
        Errors: InvalidStateError (inside evaluation()), those of the last step on a CUDA device.
        """
        self._check_at_work("state_dict()")
        check_keeps_states()
        self.synchronize()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._follow()
        self._adopt()
        state = states.own_state(self)
        for behind in self._optimizer_state_dict_post_hooks.values():
            state = behind(self, state) or state
        return state

    def gather_state(self) -> dict[str, Any]:
        """The states of all ranks in one, the same on all: each goes on bit for bit from it. As
        large as all of them together. Collective. Errors: those of state_dict(), the comm's own."""
        return states.gathered(self, self.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state_dict() or gather_state(). Collective: every rank loads one, the same or its
        own. Parameters become those of the state, whatever they were. Nothing changes on error.

        A warning says where a rank goes on from another one's state. Keys alpha, beta, penalty and
        clip may be others than those of the state.
        Errors: InvalidArgumentError (another optimizer, model, preset, period, delay, codec or
        fragments; another number of ranks with freshness: names what differs), InvalidStateError
        (inside evaluation()), OperationTimeoutError (not every rank loads one).
        """
        self._check_at_work("load_state_dict()")
        check_keeps_states()
        self.synchronize()
        plain.meet_for_load(self._comm)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, dict(state_dict)) or state_dict
        self._follow()
        states.load(self, state_dict)
        self._written()
        self._gathered.drop()
        for behind in self._optimizer_load_state_dict_post_hooks.values():
            behind(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an optimizer of sotto.torch cannot be pickled or copied: save its state_dict()"
        )
