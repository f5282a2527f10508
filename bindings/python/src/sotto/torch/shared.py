"""The keywords that the constructors of all optimizers for PyTorch share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar

from ..comm import Comm
from .base import SottoOptimizer

_Init = TypeVar("_Init", bound=Callable[..., None])


class Shared(TypedDict, total=False):
    """Keywords of all optimizers here: see :class:`SottoOptimizer`."""

    comm: Comm | None
    mode: str
    gradient_clipping: float
    loss_scale: float | str | None
    checkpoint: str
    sotto: Mapping[str, Any] | None


def shows_shared(init: _Init) -> _Init:
    """Lets the signature of a constructor show what ``**shared`` may be, with the defaults."""
    base = inspect.signature(SottoOptimizer.__init__).parameters
    shown = inspect.signature(init)
    own = [p for p in shown.parameters.values() if p.kind is not p.VAR_KEYWORD]
    both = [*own, *(base[name] for name in Shared.__annotations__)]
    init.__signature__ = shown.replace(parameters=both)  # type: ignore[attr-defined]
    return init
