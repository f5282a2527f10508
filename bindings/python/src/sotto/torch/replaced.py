"""Parameters that take the place of others in a module, as load_state_dict(assign=True) makes them.

An optimizer has Parameter objects, and torch's keep those that a module no longer has. Those here
take the new ones: modules tell when a parameter is registered where another one was.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..errors import InvalidStateError
from .averagers import objects_of

# Not a weak reference to the parameter itself: torch.utils.swap_tensors refuses those.
Place = tuple["weakref.ref[torch.nn.Module]", str]

_lock = threading.Lock()
_watching: tuple[weakref.ref[Replaced], ...] | None = None


class Replaced:
    """The places of an optimizer's parameters that modules have given to others since it looked."""

    def __init__(self) -> None:
        global _watching
        self._ids: frozenset[int] = frozenset()
        self._places: dict[int, list[Place]] = {}
        with _lock:
            if _watching is None:
                register_module_parameter_registration_hook(_registered)
            alive = [ref for ref in _watching or () if ref() is not None]
            _watching = (*alive, weakref.ref(self))

    def __bool__(self) -> bool:
        return bool(self._places)

    def watch(self, params: Iterable[torch.Tensor]) -> None:
        """The parameters that the optimizer has, and keeps alive, from now on."""
        self._ids = frozenset(map(id, params))

    def note(self, module: torch.nn.Module, name: str, new: torch.Tensor) -> None:
        """A module is about to have a parameter where it has one already."""
        old = module._parameters[name]
        if old is None or id(old) not in self._ids or old is new:
            return
        self._places.setdefault(id(old), []).append((weakref.ref(module), name))
        if id(new) not in self._ids and new.requires_grad and new.grad is None:
            # As where values are copied: gradients stay. Not the same memory, which both would add
            # to if the old one is still in use.
            grad = old.grad
            if grad is not None and (grad.shape, grad.dtype) == (new.shape, new.dtype):
                new.grad = grad.to(new.device, copy=True)

    def take(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[int, torch.nn.Parameter]:
        """What to train in place of parameters, by their ids. named: those that there are.

        Errors: InvalidStateError (one parameter became several: names it; again at the next call).
        """
        used = _parameters_in_use()
        taken: dict[int, torch.nn.Parameter] = {}
        for name, p in named:
            now = self._now(p)
            if id(p) in used:
                if now:
                    warnings.warn(
                        f'parameter "{name}" is still in use and goes on being trained; what took '
                        f"its place elsewhere ({_listed(now)}) is not: tie them again, or make a "
                        "new optimizer of model.parameters()",
                        stacklevel=5,
                    )
            elif len(now) > 1:
                raise InvalidStateError(
                    f'parameter "{name}" was one at {len(now)} places of the model ({_listed(now)})'
                    ", which have different ones by now, as load_state_dict(assign=True) leaves "
                    "them: tie them again, or make a new optimizer of model.parameters() and load "
                    "this one's state_dict()"
                )
            elif now:
                taken[id(p)] = next(iter(now.values()))[1]
        self._places = {}
        return taken

    def _now(self, p: torch.Tensor) -> dict[int, tuple[str, torch.nn.Parameter]]:
        """By id, what is at the places of a parameter and no parameter of the optimizer."""
        found: dict[int, tuple[str, torch.nn.Parameter]] = {}
        for ref, name in self._places.get(id(p), ()):
            module = ref()
            new = None if module is None else module._parameters.get(name)
            if new is not None and id(new) not in self._ids:
                found[id(new)] = f"{type(module).__name__}.{name}", new
        return found


def _listed(now: dict[int, tuple[str, torch.nn.Parameter]]) -> str:
    return ", ".join(where for where, _ in now.values())


def _parameters_in_use() -> set[int]:
    """The ids of all modules' parameters. Takes some ten milliseconds in a large program."""
    modules = objects_of(torch.nn.Module)
    return {id(p) for module in modules for p in module.__dict__.get("_parameters", {}).values()}


def _registered(module: torch.nn.Module, name: str, new: torch.nn.Parameter) -> None:
    """torch calls it before a module has the parameter."""
    if module._parameters.get(name) is not None:
        for ref in _watching or ():
            replaced = ref()
            if replaced is not None:
                replaced.note(module, name, new)
