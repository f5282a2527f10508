"""The base of the optimizers for PyTorch: what they share, which is nearly everything."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, Union, overload

import torch

from .. import optim as plain
from .._text import counted
from ..comm import Comm
from ..errors import InvalidArgumentError, InvalidStateError, ProtocolError
from ..group import meet
from ..outer import Outer
from ..work import Work
from . import state as states
from .amp import Scaled
from .averagers import (
    adopt_engine,
    check_ddp,
    check_whole,
    ddp_averages,
    ddp_modules,
    deepspeed_engine,
)
from .callers import check_keeps_states, is_dcp_rehearsal, is_rehearsal
from .gradients import Gradients, Tensor
from .hyper import CONSTANTS, Groups
from .moments import converted
from .parameters import check_params
from .replaced import Replaced

NAMED_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MASK = "exp_avg_mask"  # DeepSpeed's key of a parameter group
ParamsT = Union[
    Iterable[torch.Tensor], Iterable[dict[str, Any]], Iterable[tuple[str, torch.Tensor]]
]


class SottoOptimizer(Groups):
    """Base of the optimizers here: a torch.optim.Optimizer over :class:`sotto.optim.Optimizer`.

    Arguments that all of them have, as keywords, beside DeepSpeed's own:

    comm:              None: the default comm; if there is none, collectively,
                       sotto.init_process_group(): of torch's process group or the launcher's ranks
    mode:              "strict", or "compat": the published arithmetic, for comparison (1-bit types)
    gradient_clipping: limit of the gradients' global norm; 0: off. Clipping by other means before
                       step() sees the gradient of one rank alone
    loss_scale:        None: none; a number: static; "dynamic": steps whose gradients overflow on
                       any rank are skipped on all. Multiply the loss with ``optimizer.loss_scale``.
                       None beside torch's GradScaler, which works for float32 gradients: a step
                       that overflows on any rank is left out on all (collective, host waits)
    checkpoint:        what load_state_dict() does with the error feedback of a state_dict() (1-bit
                       types, gradient_codec, outer). "mean": the rank that made it uses it, where
                       there are as many ranks again; on others it starts at zero, with a warning;
                       "exact": every rank has to save and load its own, else an error; "reset": it
                       starts at zero
    sotto:             more keys of the section "sotto" of the configuration, as a dict

    Parameters: float32 (updated in place), float16 or bfloat16 (with float32 masters), dense, all
    in host memory or all on one CUDA device, equal on all ranks at the first step: see
    broadcast_parameters(). Groups may have their own lr, betas, eps, weight_decay, and where the
    algorithm has them max_coeff, min_coeff, non_freeze. A group of one parameter may have
    "exp_avg_mask", as in DeepSpeed: a tensor of 0 and 1 with as many elements; those with 0 take no
    part. It is not a part of state_dict(). Between steps all of these but non_freeze and the mask
    may change, on all ranks alike: torch's schedulers work.

    The library's optimizer is made, collectively, at the first step or load_state_dict(), of the
    parameters that require gradients then. A parameter without a gradient (None, or
    requires_grad_(False)) stands still in a step, and all ranks have to agree on which do: a rank
    that does not use a parameter which others use gives it a gradient of zeros. The step number,
    for bias corrections, is that of all.

    Parameters may move to other memory of the same dtype, device and shape, and modules may be
    given other Parameters in their place, as load_state_dict(assign=True) does: those are trained
    from then on. What others write into 16-bit parameters (load_state_dict() of the model, in-place
    operations) becomes the master's value, but for writes past autograd, through p.data, which
    torch does not count.

    On a CUDA device step() and accumulate() start behind what is queued on PyTorch's current
    stream, and what is queued on it later comes after them. They return when all of the step is
    queued on the device: over NCCL soon, over TCP when its messages have come. So a step's error is
    raised by the next call that needs the optimizer (step, accumulate, loss_scale, info,
    state_dict, close), or by synchronize(). With a "scheduler" of the configuration the host waits
    for the end.
    """

    # Keys that DeepSpeed's constructors have and that change nothing here: passed on only if they
    # are not the default, so that the configuration's report and warnings name them.
    _quiet: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        params: ParamsT,
        group_defaults: dict[str, Any],
        fixed: dict[str, Any],
        *,
        comm: Comm | None = None,
        mode: str = "strict",
        gradient_clipping: float = 0.0,
        loss_scale: float | str | None = None,
        checkpoint: str = "mean",
        sotto: Mapping[str, Any] | None = None,
        max_grad_norm: float = 0.0,
    ) -> None:
        self._optim: plain.Optimizer | None = None
        self._forget()
        self._gradients: Gradients | None = None
        self._flying: Work | None = None  # a step or micro-batch on a device whose end is not seen
        self.recorded: Work | None = None  # the step of the graph that was captured last
        self._ddp: list[Any] = []  # DistributedDataParallel modules of these parameters
        self._averaged: list[bool] | None = None  # whether they did in the last backward()
        self._overlap: Any = None  # a torch.Overlap whose backward() begins the steps
        self._adopted = False  # whether DeepSpeed's engine, if there is one, leaves averaging to us
        self._sent: list[dict[str, Any]] = []
        self._replaced = Replaced()
        self._held = None
        self._group_keys = tuple(group_defaults)
        self._step_supports_amp_scaling = True  # GradScaler then leaves its verdict to step()
        if max_grad_norm:
            raise InvalidArgumentError(
                f"max_grad_norm is {max_grad_norm}; it has to be 0: use gradient_clipping"
            )
        if (
            loss_scale is not None
            and loss_scale != "dynamic"
            and not isinstance(loss_scale, (int, float))
        ):
            raise InvalidArgumentError(
                f"loss_scale is {loss_scale!r}; allowed: None, a number above 0, 'dynamic'"
            )
        self._comm = meet(comm)
        self._fixed = {
            k: v for k, v in fixed.items() if k not in self._quiet or v != self._quiet[k]
        }
        self._common: dict[str, Any] = {"gradient_clipping": gradient_clipping}
        if loss_scale is not None:
            scale = 0 if loss_scale == "dynamic" else loss_scale
            self._common["fp16"] = {"enabled": True, "loss_scale": scale}
        self._section = self._section_of(mode, checkpoint, sotto or {})
        # Of the constructor alone: a group that has another value would not get it.
        self._constants = {**CONSTANTS, **fixed}
        for key in group_defaults:
            self._constants.pop(key, None)
        super().__init__(params, group_defaults)
        check_whole((name, p) for name, _, p in self._registered())
        self._check_config()
        self._watch_gradients()

    # ---- the library's optimizer ---------------------------------------------------------------

    def _mask_of(self, name: str, index: int, p: torch.Tensor) -> torch.Tensor | None:
        """The group's "exp_avg_mask" for its parameter, as 0 and 1."""
        mask: torch.Tensor | None = self.param_groups[index].get(MASK)
        if mask is None:
            return None
        if mask.numel() != p.numel() or len(self.param_groups[index]["params"]) != 1:
            raise InvalidArgumentError(
                f"{MASK} of group {index} has {counted(mask.numel(), 'element')}, parameter "
                f'"{name}" '
                f"{p.numel()}; a mask needs a group of one parameter with as many elements"
            )
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise InvalidArgumentError(f"{MASK} of group {index} has other values than 0 and 1")
        ones: torch.Tensor = mask.detach().to(p.device, torch.uint8).contiguous()
        return ones

    def _gradient_dtype(self, trained: list[tuple[str, int, torch.Tensor]]) -> torch.dtype:
        named = (self._common.get("data_types") or {}).get("grad_accum_dtype")
        if named is not None:
            return NAMED_DTYPES[named.lower()]
        dtypes = {p.dtype for _, _, p in trained}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def _build(self) -> plain.Optimizer:
        self.synchronize()
        self._follow_groups()
        if self._optim is not None:
            return self._optim
        trained = self._trained()
        self._meet_averagers()
        self._tensors = [
            Tensor(name, group, p, self._mask_of(name, group, p)) for name, group, p in trained
        ]
        self._gradients = Gradients(
            self._tensors, self._gradient_dtype(trained), local=self._kind == "ZeroOneAdam"
        )
        params = self._gradients.registered()
        self._optim = plain.Optimizer(params, self._config(), comm=self._comm)
        self._sent = [self._hyper(group) for group in self.param_groups]
        self._note_untrained()
        self._closed = False
        return self._optim

    def outer(self) -> Outer:
        """The outer steps that a `sotto={"outer": {...}}` adds: flush(), evaluation(), info().

        step() makes them; close() what this gives, which is of the parameters that are there now.
        Collective at the first call before any step. Errors: InvalidStateError (there are none).
        """
        return Outer.of(self._build())

    def _drop(self) -> None:
        if self._optim is not None:
            self._optim.close()
        self._optim, self._gradients, self._tensors = None, None, []
        self.recorded = None

    def _replace(self, new: Mapping[int, torch.Tensor]) -> None:
        super()._replace(new)
        if self._gradients is not None:
            self._gradients.replace(new)
            self._meet_averagers()
        self._watch_gradients()

    # ---- who else averages -----------------------------------------------------------------------

    def _watch_gradients(self) -> None:
        """Looks at who else averages while backward() is under way.

        DeepSpeed's engine averages right behind the first one, so it is told before. What
        DistributedDataParallel did can be told from the outside during backward() alone.
        """
        first = next((p for _, _, p in self._registered()), None)
        if first is None or not first.is_leaf:
            return

        optimizer, seen = weakref.ref(self), False

        def look(_: torch.Tensor) -> None:
            nonlocal seen
            me = optimizer()
            if me is not None and not seen:
                seen = True
                me._meet_averagers()
            if me is None or not me._ddp:
                handle.remove()
            else:
                me._averaged = [ddp_averages(module) for module in me._ddp]

        register: Any = first.register_post_accumulate_grad_hook
        handle = register(look)

    def _meet_engine(self) -> None:
        engine = None if self._adopted else deepspeed_engine(self)
        if engine is None:
            return
        limit = adopt_engine(engine, self, ranks=self._comm.size)
        self._adopted = True
        if not self._common.get("gradient_clipping"):
            self._common["gradient_clipping"] = limit

    def _meet_averagers(self) -> None:
        self._meet_engine()
        self._ddp = ddp_modules(p for _, _, p in self._registered())

    def _ready(self, *, micro_batch: bool = False) -> plain.Optimizer:
        """The library's optimizer, which knows where the gradients are."""
        optim = self._build()
        if self._adopted:  # DeepSpeed's engine does it while it averages, which it does not here
            self._fill_gradients()
        check_ddp(self._ddp, self._averaged, self._comm)
        self._averaged = None
        self._check_untrained()
        if self._gradients is not None:
            self._gradients.locate(optim, micro_batch=micro_batch)
        return optim

    # ---- torch.optim.Optimizer -----------------------------------------------------------------

    @overload
    def step(self, closure: None = ...) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Averages the gradients over the ranks, clips, updates the parameters. Collective; waits.

        closure: evaluates the model again and returns the loss.
        Errors: NonfiniteError (NaN or Inf; nothing was updated on any rank, and in 0/1 Adam between
        synchronisations on this one; the group is healthy), ProtocolError (ranks differ), the
        comm's own.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if (self._optim is None and is_rehearsal()) or is_dcp_rehearsal():
            return loss
        scaled = Scaled.of(self)
        if scaled is None or scaled.agree():
            self._make_step()
        if scaled is not None:
            scaled.give_back()
        return loss

    def _make_step(self) -> None:
        if self._overlap is not None and self._overlap._begun():
            self._end_step()
            return
        optim = self._ready()
        self._send_hyper(optim)
        work = optim.step()
        if work.on_cuda and torch.cuda.is_current_stream_capturing():
            self.recorded = work
            return
        self._await(work)
        self._show_schedule(optim)
        if self._gradients is not None:
            self._gradients.written()
            self._gradients.check_moving()

    @torch.no_grad()
    def _begin_step(self) -> None:
        """Before a step whose gradients backward() is going to bring."""
        optim = self._build()
        self._check_untrained()
        assert self._gradients is not None
        self._gradients.follow(optim)
        still = {t.name for t in self._tensors if not t.p.requires_grad}
        self._gradients.freeze(optim, still)
        self._send_hyper(optim)

    def _gradient(self, index: int) -> Any:
        """The gradient of the library's parameter, as that reads it, for this step."""
        assert self._gradients is not None
        return self._gradients.of(index)

    def _end_step(self) -> None:
        """Of the step that backward() has begun."""
        self._await(self._overlap._take())
        assert self._optim is not None
        assert self._gradients is not None
        self._gradients.written()
        self._overlap._check_untouched()
        for group, sent in zip(self.param_groups, self._sent):
            changed = [key for key, value in self._hyper(group).items() if value != sent[key]]
            if changed and not self._schedule:
                raise InvalidStateError(
                    f"{changed[0]} was changed from {sent[changed[0]]} to {group[changed[0]]} "
                    "between backward() and step(): the step began in backward() and was made "
                    "with the old value; change it behind step()"
                )
        self._show_schedule(self._optim)

    @torch.no_grad()
    def replay(self, graph: Any, recorded: Work | None = None) -> None:
        """Launches a graph in whose capture step() was called: graph.replay(), with this step.

        Learning rates, bias corrections and loss scale are those of this step. Gradients have to be
        where they were in the capture. graph: a torch.cuda.CUDAGraph. recorded: what `recorded` was
        behind its capture; None: the graph is the one that was captured last.
        Errors: those of step(); InvalidStateError (this step is not like the recorded one: another
        stage of a 1-bit optimizer, the other one of the two places of error feedback, gradients
        that have moved): the graph is not launched; call step(), or capture one for such steps.
        """
        recorded = self.recorded if recorded is None else recorded
        if recorded is None:
            raise InvalidStateError("no step was recorded: call step() while a graph is captured")
        optim = self._ready()
        self._send_hyper(optim)
        optim.replay(recorded)
        graph.replay()  # the caller's work behind it comes after the step
        self._flying = recorded
        if self._gradients is not None:
            self._gradients.written()
        if self._schedule:
            self.synchronize()
            self._show_schedule(optim)

    def _await(self, work: Work) -> None:
        """Work of the caller from now on comes after the operation: the host's, or a stream's."""
        if not work.on_cuda or self._schedule:
            self._wait(work)
            return
        self._flying = work
        work.wait_stream()

    def synchronize_parameters(self) -> None:
        """0/1 Adam between synchronisations: gives all ranks the same parameters and momentum, for
        an evaluation for example. Collective; nothing for other types, and before the first step.

        Errors: InvalidStateError (micro-batches accumulated), the comm's own.
        """
        self.synchronize()
        if self._optim is not None and self._gradients is not None:
            self._optim.synchronize().wait()
            self._gradients.written()

    def synchronize(self) -> None:
        """Waits until the last step has ended on its CUDA device. Errors: those of the step."""
        work, self._flying = self._flying, None
        if work is not None:
            self._wait(work)

    def _wait(self, work: Work) -> None:
        try:
            work.wait()
        except ProtocolError as error:
            if "optimizer step(" not in str(error):
                raise
            still = self.standing_still()
            names = ", ".join(f'"{name}"' for name in still[:3]) or "no parameter"
            more = f" and {len(still) - 3} more" if len(still) > 3 else ""
            raise ProtocolError(
                f"{error}; on this rank {names}{more} had no gradient, and ranks have to agree on "
                "which stand still for want of one: where a rank does not use a parameter that "
                "others use, set p.grad = torch.zeros_like(p)"
            ) from None

    @torch.no_grad()
    def accumulate(self) -> None:
        """Takes the gradients of one micro-batch; the next step() averages them with its own.

        Sums are kept in float32, and the gradients can be cleared. Local, but all ranks have to
        make as many calls. Errors: InvalidStateError (more than gradient_accumulation_steps).
        """
        self._await(self._ready(micro_batch=True).accumulate())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Before the first step alone. Errors: InvalidStateError (after it)."""
        self._follow_replaced()
        if self._optim is not None:
            if self._build().info().step:
                raise InvalidStateError(
                    "parameters cannot be added after the first step; make a new optimizer"
                )
            self._drop()
        super().add_param_group(param_group)
        try:
            self._check_constants(self.param_groups)
            check_params(self._registered())
        except BaseException:
            self.param_groups.pop()
            raise
        self._replaced.watch(p for group in self.param_groups for p in group["params"])

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step has to be multiplied with; 1 without loss scaling."""
        if self._optim is not None:
            return self._build().info().loss_scale
        scale: dict[str, Any] | None = self._check_config()["loss_scale"]
        if scale is None:
            return 1.0
        return float(scale["first_scale"] if scale["kind"] == "dynamic" else scale["scale"])

    def standing_still(self) -> list[str]:
        """Names of the parameters that the last step left as they are: they had no gradient."""
        return [] if self._gradients is None else self._gradients.standing_still()

    def info(self) -> plain.Info:
        """Stage, step, bytes of the next step and the like. Collective if no step was made yet."""
        return self._build().info()

    def report(self, kind: str = "all") -> dict[str, Any]:
        """As sotto.optim.Optimizer.report(). Collective if no step was made yet."""
        return self._build().report(kind)

    def close(self) -> None:
        """Gives the library's optimizer back; call it before the comm's close().

        A step afterwards begins anew, without moments and step number.
        """
        super().close()

    def state_dict(self) -> dict[str, Any]:
        """Parameter groups as in torch, and under "sotto" everything that the library keeps.

        That is parameters (float32 masters), moments, error feedback, step, stage and schedules, as
        one tensor of bytes. Any rank can make it alone, and all ranks can load it: see "checkpoint"
        above for the error feedback. Accumulated micro-batches are no part of it. Errors:
        InvalidStateError (another dtype, device or shape of a parameter, or one that was added),
        those of the last step on a CUDA device.
        """
        check_keeps_states()
        self.synchronize()
        self._follow_groups()
        state = self._groups_state()
        if self._optim is not None:
            if self._gradients is not None:
                self._gradients.follow(self._optim)
            state["sotto"].update(states.own_state(self, self._optim, self._policy))
        return state

    def gather_state(self, mode: str = "mean") -> dict[str, Any]:
        """A state_dict() with the error feedback of all ranks, the same on all. Collective.

        mode: "mean": averaged, for any number of ranks; loses nothing of the sum of all steps. With
        checkpoint="reset" there is no error feedback in it.
        "whole": that of every rank: as many ranks continue bit for bit; as large as the
        state_dict() of all ranks together. Of 0/1 Adam between synchronisations "mean" has what
        one in full precision would give; parameters stay as they are (synchronize_parameters()).
        Errors: InvalidArgumentError (mode), those of state_dict(), the comm's own.
        """
        if mode not in ("mean", "whole"):
            raise InvalidArgumentError(f"mode is {mode!r}; allowed: mean, whole")
        self.synchronize()
        self._follow_groups()
        state = self._groups_state()
        if self._optim is not None:
            if self._gradients is not None:
                self._gradients.follow(self._optim)
            if mode == "mean":
                made = states.mean_state(self, self._optim, self._policy)
            else:
                made = states.whole_state(self, self._optim)
            state["sotto"].update(made)
        return state

    def _groups_state(self) -> dict[str, Any]:
        state = super().state_dict()
        for group in state["param_groups"]:
            group.pop(MASK, None)
        state["sotto"] = states.description(self)
        self._warn_if_closed()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state_dict() or gather_state(). Collective: every rank loads one, the same or its
        own. Parameters become those of the state.

        Or takes that of another optimizer, as torch.optim.AdamW, the same on all ranks: moments and
        step number; parameters stay as they are, and have to be those of the state.

        Hyper-parameters of the groups are the state's; freeze_step and other arguments of the
        constructor stay this optimizer's, as in DeepSpeed. Nothing changes on error. A warning says
        where error feedback is not used.
        Errors: InvalidArgumentError (another optimizer or model: names what differs; "exact":
        another rank or number of ranks; of another optimizer what this one has not, as amsgrad).
        """
        check_keeps_states()
        self._follow_groups()
        own = "sotto" in state_dict
        if not own:
            state_dict = converted(self, state_dict)
        saved = state_dict["sotto"]
        self._loaded = frozenset(saved["names"])
        if own:
            states.check_saved(self, saved)
        groups = [
            {k: v if k == MASK else copy.deepcopy(v) for k, v in g.items() if k != "params"}
            for g in self.param_groups
        ]
        before = self._optim, self._tensors, self._gradients, self._sent
        # A schedule of the configuration starts from the rates there.
        kept = (MASK, "initial_lr") if self._schedule else (MASK,)
        try:
            super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
            for group, mine in zip(self.param_groups, groups):
                group.pop(MASK, None)
                group.update({key: mine[key] for key in kept if key in mine})
            if saved["blob"] is None:
                self._drop()
                return
            if self._needs_another():
                self._optim = (
                    None  # made anew with the state's; the old one goes when that has worked
                )
            optim = self._build()
            if self._gradients is not None:
                (self._gradients.follow_for_load if own else self._gradients.follow)(optim)
                self._gradients.freeze(optim, frozenset(saved.get("frozen", ())))
            states.load(self, optim, saved)
            if self._gradients is not None:
                self._gradients.written()
        except BaseException:
            if self._optim not in (None, before[0]):
                self._drop()
            self._optim, self._tensors, self._gradients, self._sent = before
            for group, values in zip(self.param_groups, groups):
                group.update(values)
            raise
        if before[0] not in (None, optim):
            before[0].close()
        if self._schedule:  # its position is a part of the state
            self._give_to_schedule(optim)
            self._show_schedule(optim)
        self._send_hyper(optim)
        for index, sent in enumerate(self._sent):  # also where a scheduler had another value
            optim.set("weight_decay", sent["weight_decay"], index)
            if not self._schedule:
                optim.set("lr", sent["lr"], index)

    def import_arrays(self, arrays: Mapping[str, Any]) -> None:
        """As sotto.optim.Optimizer.import_arrays: what a DeepSpeed checkpoint holds. Collective."""
        optim = self._build()
        optim.import_arrays(arrays)
        self._show_schedule(optim)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an optimizer of sotto.torch cannot be pickled or copied: save its state_dict()"
        )
