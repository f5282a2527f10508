"""JSON text of settings, for the library."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from .errors import InvalidArgumentError


def json_text(settings: Any) -> str:
    """Settings as text; scalars of numpy, torch and JAX are numbers.

    Errors: InvalidArgumentError (something that is no JSON: names its key).
    """
    return json.dumps(_plain(settings, ""))


def config_text(
    config: Any = None, kind: str | None = None, hyper: Mapping[str, Any] | None = None
) -> str:
    """Configuration as JSON text.

    config: a dict, JSON text, or a path (os.PathLike) of a file. Or kind with its hyper-parameters.
    """
    if kind is not None:
        if config is not None:
            raise InvalidArgumentError(
                "config and kind are both given; an optimizer is described by one of them"
            )
        return json_text({"optimizer": {"type": kind, "params": dict(hyper or {})}})
    if hyper:
        raise InvalidArgumentError(
            f"hyper-parameters ({', '.join(hyper)}) are given without kind; a "
            "configuration has its own"
        )
    if config is None:
        raise InvalidArgumentError("neither config nor kind is given")
    if isinstance(config, os.PathLike):
        with open(config, encoding="utf-8") as file:
            return file.read()
    return config if isinstance(config, str) else json_text(config)


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {
            key: _plain(one, f"{where}.{key}" if where else str(key)) for key, one in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(one, f"{where}[{i}]") for i, one in enumerate(value)]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    raise InvalidArgumentError(
        f"{where or 'the configuration'} is of type {type(value).__qualname__}; allowed: a number, "
        "a text, true or false, a list, a dict"
    )
