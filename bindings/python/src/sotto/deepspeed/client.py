"""Optimizers of the caller: libsotto.so averages, clips and unscales, then their own step runs."""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .. import optim as plain
from ..comm import Comm
from ..errors import InvalidArgumentError, InvalidStateError, UnsupportedError
from ..torch.averagers import check_whole
from ..torch.gradients import adopt
from ..torch.replaced import Replaced
from .config import Settings
from .members import refuse

FORMAT = 1
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class _Trained:
    """A parameter of the model, what the client's optimizer updates for it, and its average."""

    def __init__(self, name: str, p: torch.nn.Parameter) -> None:
        if p.dtype not in DTYPES:
            raise UnsupportedError(
                f'parameter "{name}" is {p.dtype}; allowed: float32, float16, bfloat16'
            )
        self.name = name
        self.model = p
        self.updated = p
        if p.dtype != torch.float32:
            self.updated = torch.nn.Parameter(p.detach().float())
        # A step of SGD with lr 1 on zeros leaves the average with the other sign here.
        self.average = torch.zeros_like(p, dtype=torch.float32)
        self._was = p.dtype, p.device, p.shape
        self.remember()

    def remember(self) -> None:
        """Master and parameter have the same values now."""
        self._seen = self.model.data_ptr(), self.model._version

    def follow(self) -> None:
        """The master takes what others have written into the parameter, or put in its place.

        Errors: InvalidStateError (of another dtype, shape or device).
        """
        p = self.model
        for was, now in zip(self._was, (p.dtype, p.device, p.shape)):
            if was != now:
                raise InvalidStateError(
                    f'parameter "{self.name}" has changed from {was} to {now} since initialize(); '
                    "change it back, or make another engine"
                )
        if self.updated is not p and self._seen != (p.data_ptr(), p._version):
            adopt(self.updated, p)
            self.remember()


class ClientOptimizer(torch.optim.Optimizer):
    """What initialize() returns for an optimizer that averages nothing itself.

    step() averages the gradients over the ranks inside the library, with the configuration's
    clipping, loss scale, communication type and accumulation, then calls the client's own step().
    param_groups and state are the client's; with 16-bit parameters its groups hold float32 masters,
    as under DeepSpeed's wrappers, which follow what others write into the model. A gradient that is
    None counts as zero. Parameters of its groups that require a gradient later, or are added later,
    are averaged from the next update on: on all ranks alike. `optimizer` is the client's. Threads:
    one.
    """

    def __init__(
        self,
        client: torch.optim.Optimizer,
        names: Mapping[int, str],
        settings: Settings,
        comm: Comm,
    ) -> None:
        closure = inspect.signature(client.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise UnsupportedError(
                f"{type(client).__name__} needs a closure: gradients that it makes would not be "
                "averaged; use an optimizer whose step() takes those of backward()"
            )
        # Not Optimizer.__init__: groups and state are those of the client.
        self.optimizer = client
        self.comm = comm
        self._config = _averager_of(settings)
        self._report = plain.config_report(self._config, world_size=comm.size)
        if not self._report["can_run"]:
            raise UnsupportedError("; ".join(self._report["reasons"]))
        self._averager: plain.Optimizer | None = None
        self._open = 0  # micro-batches of the next update that the averager has
        self._frozen: list[bool] = []
        self._own: dict[int, torch.Tensor] = {}  # by position: gradients that had to be copied
        self._trained: list[_Trained] = []
        self._names = names
        self._replaced = Replaced()
        self._dtype = torch.float32
        self._take_all()

    def _take_all(self) -> None:
        """What requires a gradient in the client's groups, in their order."""
        before = {id(t.updated): t for t in self._trained}
        trained = []
        for group in self.optimizer.param_groups:
            for i, p in enumerate(group["params"]):
                if id(p) in before:
                    trained.append(before.pop(id(p)))
                elif p.requires_grad:
                    trained.append(self._take(group["params"], i, len(trained)))
        self._trained = [*trained, *before.values()]
        check_whole((t.name, t.model) for t in self._trained)
        dtypes = {t.model.dtype for t in self._trained}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        self._own.clear()
        self._replaced.watch(t.model for t in self._trained)

    def _take(self, params: list[Any], i: int, number: int) -> _Trained:
        p, state = params[i], self.optimizer.state
        taken = _Trained(self._names.get(id(p), f"param{number}"), p)
        if taken.updated is not p:
            params[i] = taken.updated
            if p in state:
                state[taken.updated] = _widened(state.pop(p), p.dtype)
        return taken

    def take_new(self) -> None:
        """Averages what requires a gradient by now and did not, or was added. Collective then.

        Error feedback of a gradient_codec begins anew, and so does the window of a dynamic scale.
        Errors: InvalidStateError (between micro-batches of one update).
        """
        averaged = {id(taken.updated) for taken in self._trained}
        new = [
            p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and id(p) not in averaged
        ]
        if not new:
            return
        if self._open:
            name = self._names.get(id(new[0]), "added since")
            raise InvalidStateError(
                f'parameter "{name}" requires a gradient now, and did not when the first '
                f"{self._open} of this update's micro-batches were taken: change that, or add it, "
                "behind the step() that updates"
            )
        self._take_all()
        if self._averager is None:
            return
        scale = self._averager.info().loss_scale
        self.close()
        self._set_scale(scale)

    def _set_scale(self, scale: float) -> None:
        settings = self._report["loss_scale"]
        if settings is not None and settings["kind"] == "dynamic":
            self._build().set("loss_scale", scale)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The client's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The client's."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The client's."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"<{type(self.optimizer).__name__} behind the average over {self.comm!r}>"

    # ---- what others do with the parameters ------------------------------------------------------

    @torch.no_grad()
    def _follow(self) -> None:
        """Takes what others have written into parameters, or put in their place.

        Errors: InvalidStateError (of another dtype, shape or device; one became several).
        """
        self._follow_replaced()
        for taken in self._trained:
            taken.follow()

    def _follow_replaced(self) -> None:
        if not self._replaced:
            return
        new = self._replaced.take((t.name, t.model) for t in self._trained)
        for taken in self._trained:
            p = new.get(id(taken.model))
            if p is not None and taken.updated is taken.model:
                taken.updated = p
                if taken.model in self.optimizer.state:
                    self.optimizer.state[p] = self.optimizer.state.pop(taken.model)
        for group in self.optimizer.param_groups:
            group["params"][:] = [new.get(id(p), p) for p in group["params"]]
        for taken in self._trained:
            taken.model = new.get(id(taken.model), taken.model)
        self._replaced.watch(t.model for t in self._trained)

    # ---- the average -----------------------------------------------------------------------------

    def _build(self) -> plain.Optimizer:
        if self._averager is None:
            zeros = [torch.zeros_like(t.model, dtype=self._dtype) for t in self._trained]
            params = [plain.Param(t.average, zero, t.name) for t, zero in zip(self._trained, zeros)]
            self._averager = plain.Optimizer(params, json.dumps(self._config), comm=self.comm)
            self._frozen = [False] * len(params)  # as it has been told
        return self._averager

    def _gradient(self, i: int, taken: _Trained) -> torch.Tensor:
        grad = taken.model.grad if taken.model.requires_grad else None
        if grad is not None and grad.is_sparse:
            raise UnsupportedError(
                f'parameter "{taken.name}" has a sparse gradient; gradients have to be dense'
            )
        if grad is not None and grad.dtype == self._dtype and grad.is_contiguous():
            return grad
        if i not in self._own:
            shape = taken.model.shape
            self._own[i] = torch.empty(shape, dtype=self._dtype, device=taken.model.device)
        return self._own[i].zero_() if grad is None else self._own[i].copy_(grad)

    def _check_untrained(self) -> None:
        """Errors: InvalidStateError (the client would update by a gradient of this rank alone)."""
        averaged = {id(taken.updated) for taken in self._trained}
        for index, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                if p.grad is not None and id(p) not in averaged:
                    name = self._names.get(id(p), "added since")
                    raise InvalidStateError(
                        f'parameter "{name}" of group {index} has a gradient, which would not be '
                        "averaged, since it requires none: set its grad to None, or let it require "
                        "one, on all ranks"
                    )

    def _located(self) -> plain.Optimizer:
        self.take_new()
        averager = self._build()
        self._follow()
        self._check_untrained()
        averager.set_grads([self._gradient(i, t) for i, t in enumerate(self._trained)])
        return averager

    @torch.no_grad()
    def accumulate(self) -> None:
        """Takes the gradients of one micro-batch; the next step() averages them with its own."""
        self._located().accumulate().wait()
        self._open += 1

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Averages, and unless the step is skipped for an overflow, lets the client update.

        Collective; waits. closure: refused, since it would make gradients that are not averaged.
        Errors: those of the library's step, of which ProtocolError if ranks have frozen other
        parameters; what the client raises.
        """
        if closure is not None:
            raise UnsupportedError(
                "step() with a closure: gradients that it makes would not be averaged; call "
                "backward() and then step()"
            )
        averager = self._located()
        frozen = [not taken.model.requires_grad for taken in self._trained]
        if frozen != self._frozen:
            averager.set_frozen(frozen)
            self._frozen = frozen
        before = averager.info().step
        self._open = 0
        averager.step().wait()
        if averager.info().step == before:
            return None
        for taken in self._trained:
            if taken.model.requires_grad:  # else it was frozen meanwhile, and stands still
                taken.updated.grad = taken.average.neg_()
        try:
            self.optimizer.step()
        finally:
            for taken in self._trained:
                taken.updated.grad = None
                taken.average.zero_()
        self._write_model()
        return None

    def _write_model(self) -> None:
        for taken in self._trained:
            if taken.updated is not taken.model:
                taken.model.copy_(taken.updated)
                taken.remember()

    @torch.no_grad()
    def refresh_fp32_params(self) -> None:
        """The masters become what the model's 16-bit parameters are now."""
        self._follow_replaced()
        for taken in self._trained:
            if taken.updated is not taken.model:
                taken.updated.copy_(taken.model)
                taken.remember()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the model's parameters."""
        self._follow_replaced()
        for taken in self._trained:
            if set_to_none:
                taken.model.grad = None
            elif taken.model.grad is not None:
                taken.model.grad.zero_()

    def masters(self) -> dict[int, torch.Tensor]:
        """By id of the model's parameter: the float32 values that are updated."""
        self._follow()
        return {id(t.model): t.updated.detach() for t in self._trained}

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step has to be multiplied with; 1 without loss scaling."""
        if self._averager is not None:
            return self._averager.info().loss_scale
        scale = self._report["loss_scale"]
        if scale is None:
            return 1.0
        return float(scale["first_scale"] if scale["kind"] == "dynamic" else scale["scale"])

    def info(self) -> plain.Info:
        """Figures of the average. Collective if no step was made yet."""
        return self._build().info()

    def report(self, kind: str = "all") -> dict[str, Any]:
        """As sotto.optim.Optimizer.report(), of the average."""
        return self._build().report(kind)

    def close(self) -> None:
        """Gives the library's part back; call it before the comm's close()."""
        if self._averager is not None:
            self._averager.close()
        self._averager, self._open = None, 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The client's; averaged from the next update on. On all ranks alike."""
        self.optimizer.add_param_group(param_group)

    # ---- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The client's, and under "sotto" masters and loss scale. Local."""
        self._follow()
        blob = None
        if self._averager is not None:
            # Nearly all of it is zeros.
            packed = zlib.compress(bytes(self._averager.export_state("mean")), 1)
            blob = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        held = [t for t in self._trained if t.updated is not t.model]
        mine = {
            "format": FORMAT,
            "kind": type(self.optimizer).__name__,
            "masters": [t.updated.detach() for t in held],
            "names": [t.name for t in self._trained],
            "held": [t.name for t in held],
            "loss_scale": self.loss_scale,
            "average": blob,
        }
        return {**self.optimizer.state_dict(), "sotto": mine}

    def gather_state(self) -> dict[str, Any]:
        """As state_dict(): it is the same on all ranks."""
        return self.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state_dict(), or one of the client's alone. Collective.

        Where other parameters of the groups were frozen, those that train on both sides keep their
        masters and the loss scale goes on. Errors: InvalidArgumentError (another optimizer or
        model).
        """
        self._follow_replaced()
        self.take_new()
        mine = state_dict.get("sotto") or {}
        kind = type(self.optimizer).__name__
        if mine.get("kind", kind) != kind:
            raise InvalidArgumentError(f"the state is of {mine['kind']}, this optimizer is {kind}")
        self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != "sotto"})
        names = [t.name for t in self._trained]
        if mine.get("names", names) != names:
            self._load_some(dict(zip(mine["held"], mine["masters"])))
            self._set_scale(mine["loss_scale"])
            return
        self._load_masters(mine.get("masters"))
        if mine.get("average") is not None:
            state = zlib.decompress(mine["average"].numpy().tobytes())
            self._build().import_state(state, "mean")

    @torch.no_grad()
    def _load_some(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Masters by name; the others are what the model's 16-bit parameters are."""
        self.refresh_fp32_params()
        for taken in self._trained:
            if taken.updated is not taken.model and taken.name in saved:
                taken.updated.copy_(saved[taken.name].view(taken.updated.shape))
        self._write_model()

    @torch.no_grad()
    def _load_masters(self, saved: Iterable[torch.Tensor] | None) -> None:
        """saved: None: those of the model."""
        held = [t for t in self._trained if t.updated is not t.model]
        if not saved:
            self.refresh_fp32_params()
            return
        given = [tensor.reshape(-1) for tensor in saved]
        if [x.numel() for x in given] != [t.updated.numel() for t in held]:
            raise InvalidArgumentError(
                f"the state has {len(given)} float32 masters of other sizes than this optimizer's "
                f"{len(held)}: it is of another model"
            )
        for taken, values in zip(held, given):
            taken.updated.copy_(values.view(taken.updated.shape))
        self._write_model()

    def import_deepspeed(self, saved: Mapping[str, Any]) -> None:
        """Takes "optimizer" of a checkpoint that DeepSpeed wrote without ZeRO. Collective.

        That is the client's state_dict, or that of a 16-bit wrapper around it.
        Errors: InvalidArgumentError (another model).
        """
        self._follow_replaced()
        self.optimizer.load_state_dict(dict(saved.get("optimizer_state_dict", saved)))
        tensors = [t for group in saved.get("fp32_groups", []) for t in group]
        if "fp32_groups_flat" in saved:
            sizes = [t.updated.numel() for t in self._trained]
            flat = torch.cat(list(saved["fp32_groups_flat"]))
            tensors = list(torch.split(flat, sizes))
        self._load_masters(tensors)
        if self._report["loss_scale"] is not None and saved.get("dynamic_loss_scale"):
            self._build().set("loss_scale", float(saved["cur_scale"]))


def _widened(state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The state of a 16-bit parameter as that of its master: float32 where it has its dtype."""
    return {
        key: value.float() if isinstance(value, torch.Tensor) and value.dtype == dtype else value
        for key, value in state.items()
    }


def _averager_of(settings: Settings) -> dict[str, Any]:
    """The configuration of the library's part: an SGD that leaves the average behind."""
    config = settings.sections()
    config.pop("scheduler", None)
    section = settings.section("sotto")
    if section.get("outer") is not None:
        refuse(
            'the key "sotto": {"outer"} with an optimizer of the program\'s own',
            "describe the optimizer in the configuration, or put sotto.torch.Outer around it in a "
            "loop of the program's own",
        )
    if section:
        config["sotto"] = section
    return {**config, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
