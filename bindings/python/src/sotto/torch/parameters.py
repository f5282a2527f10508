"""The parameters of an optimizer here: their names, which are trained, and what replaces them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import itemgetter

import torch

from ..errors import InvalidStateError, UnsupportedError
from .averagers import check_whole
from .dtensors import local
from .gradients import Tensor, check_param
from .replaced import Replaced

_params = itemgetter("params")


class Parameters(torch.optim.Optimizer):
    """What optimizers and outer optimizers here do with the parameters of their groups."""

    _tensors: list[Tensor]  # as the library has them; empty: it has none yet
    _loaded: frozenset[str]  # parameters of a state: frozen ones are kept too
    _untrained: list[tuple[str, torch.Tensor]]  # those that the library does not have
    _known: frozenset[int]  # the ids of both
    _replaced: Replaced
    _closed = False  # close() was called, and nothing made anew since

    def _forget(self) -> None:
        """Nothing is registered with the library."""
        self._tensors, self._untrained = [], []
        self._loaded, self._known = frozenset(), frozenset()

    def synchronize(self) -> None:
        """Waits until the last step has ended on its CUDA device. Errors: those of the step."""
        raise NotImplementedError

    def _drop(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Gives the library's part back; call it before the comm's close()."""
        try:
            self.synchronize()
        finally:
            self._closed = True
            self._drop()

    def _warn_if_closed(self) -> None:
        if self._closed:
            warnings.warn(
                "the optimizer is closed: the state has its parameter groups alone, without "
                "parameters, moments and step number; make states before close()",
                stacklevel=4,
            )

    def _names(self) -> list[list[str]]:
        """A name for every parameter of every group."""
        names, n = [], 0
        for group in self.param_groups:
            given = group.get("param_names")
            names.append(
                list(given) if given else [f"param{n + i}" for i in range(len(group["params"]))]
            )
            n += len(group["params"])
        return names

    def _named(self) -> list[tuple[str, int, torch.Tensor]]:
        """Name, group and tensor of all parameters."""
        return [
            (name, index, p)
            for index, (group, names) in enumerate(zip(self.param_groups, self._names()))
            for name, p in zip(names, group["params"])
        ]

    def _registered(self) -> list[tuple[str, int, torch.Tensor]]:
        """The same of those that the library has, or will have."""
        if self._tensors:
            return [(t.name, t.group, t.p) for t in self._tensors]
        return [
            (name, index, p)
            for name, index, p in self._named()
            if p.requires_grad or name in self._loaded
        ]

    def _fill_gradients(self) -> None:
        """Parameters that this backward() has not reached get zeros, as in DeepSpeed's average.

        They move then as those of other ranks do, and with weight decay also if no rank has reached
        them. Without any gradient there was no backward().
        """
        params = [p for _, _, p in self._registered() if p.requires_grad]
        absent = [p for p in params if p.grad is None]
        if len(absent) < len(params):
            for p in absent:
                p.grad = torch.zeros_like(p)

    def _trained(self) -> list[tuple[str, int, torch.Tensor]]:
        """The same for the library, checked.

        Errors: InvalidStateError (none requires a gradient), UnsupportedError (names a parameter).
        """
        trained = self._registered()
        if not trained:
            raise InvalidStateError(
                "no parameter of the optimizer requires a gradient: there is nothing to train"
            )
        self._check_parts((name, p) for name, _, p in trained)
        check_params(trained)
        return trained

    def _check_parts(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Errors: UnsupportedError (names a parameter of which this rank has not what it needs)."""
        check_whole(named)

    def _note_untrained(self) -> None:
        known = {id(t.p) for t in self._tensors}
        self._untrained = [(name, p) for name, _, p in self._named() if id(p) not in known]
        self._known = frozenset(id(p) for _, _, p in self._named())

    def _check_known(self) -> None:
        """Errors: InvalidStateError (a group has a parameter that it had not at the first step)."""
        groups = map(_params, self.param_groups)
        if not self._tensors or self._known.issuperset(map(id, chain.from_iterable(groups))):
            return
        name, index = next((name, i) for name, i, p in self._named() if id(p) not in self._known)
        raise InvalidStateError(
            f'parameter "{name}" of group {index} was added after the first step, and would not be '
            "averaged; take it out of the group, or make a new optimizer"
        )

    def _check_untrained(self) -> None:
        for name, p in self._untrained:
            if p.grad is not None:
                raise InvalidStateError(
                    f'parameter "{name}" has a gradient, but did not require one at the first '
                    "step: let it require one then, and freeze it behind that step, or make a new "
                    "optimizer"
                )

    # ---- parameters that others take the place of ------------------------------------------------

    def _follow_replaced(self) -> None:
        """Takes what modules have been given in place of parameters: load_state_dict(assign=True).

        Errors: InvalidStateError (one parameter became several).
        """
        if self._replaced:
            named = [(name, p) for name, _, p in self._named()]
            new = self._replaced.take(named)
            if new:
                self._replace(new)
                self._replaced.watch(new.get(id(p), p) for _, p in named)

    def _follow_groups(self) -> None:
        """Errors: InvalidStateError (those of _follow_replaced() and of _check_known())."""
        self._follow_replaced()
        self._check_known()

    def _replace(self, new: Mapping[int, torch.Tensor]) -> None:
        """new: Parameters that take the place of others, by the ids of those."""
        for group in self.param_groups:
            group["params"][:] = [new.get(id(p), p) for p in group["params"]]
        self._untrained = [(name, new.get(id(p), p)) for name, p in self._untrained]
        self._known = frozenset(id(new[n]) if n in new else n for n in self._known)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        self._follow_replaced()
        super().zero_grad(set_to_none)


def check_params(trained: list[tuple[str, int, torch.Tensor]]) -> None:
    """Errors: UnsupportedError (a parameter that the library cannot work on: names it)."""
    for name, _, p in trained:
        check_param(name, local(p))
        if p.device != trained[0][2].device:
            raise UnsupportedError(
                f'parameter "{name}" is on {p.device}, "{trained[0][0]}" on '
                f"{trained[0][2].device}; all have to be on one device"
            )
