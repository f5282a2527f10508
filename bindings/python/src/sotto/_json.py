"""JSON text of settings, for the library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .errors import InvalidArgumentError


def json_text(settings: Any) -> str:
    """Settings as text; scalars of numpy, torch and JAX are numbers.

    Errors: InvalidArgumentError (something that is no JSON: names its key).
    """
    return json.dumps(_plain(settings, ""))


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
