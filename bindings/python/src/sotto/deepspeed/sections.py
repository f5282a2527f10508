"""Sections of a configuration that the engine reads itself: their keys and types.

The library passes over them. In DeepSpeed too a key that a section does not have is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..errors import InvalidArgumentError

_FILES = {"enabled": bool, "output_path": str, "job_name": str}
# By section: keys, and the type of their values, which may be null.
KEYS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "csv_monitor": _FILES,
        "tensorboard": _FILES,
        "wandb": {"enabled": bool, "group": str, "team": str, "project": str},
        "comet": {
            "enabled": bool,
            "samples_log_interval": int,
            "project": str,
            "workspace": str,
            "api_key": str,
            "experiment_name": str,
            "experiment_key": str,
            "online": bool,
            "mode": str,
        },
        "comms_logger": {
            "enabled": bool,
            "prof_all": bool,
            "prof_ops": list,
            "verbose": bool,
            "debug": bool,
        },
        "torch_autocast": {"enabled": bool, "dtype": str, "lower_precision_safe_modules": list},
    }
)
_NAMES = {bool: "true, false", str: "a string", int: "a whole number", list: "a list"}


def _fits(value: Any, kind: Any) -> bool:
    return value is None or (isinstance(value, kind) and isinstance(value, bool) == (kind is bool))


def check_keys(file: Mapping[str, Any]) -> None:
    """Errors: InvalidArgumentError (names the key, what was found and what is allowed)."""
    for name, keys in KEYS.items():
        section = file.get(name)
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise InvalidArgumentError(
                f"configuration: {name} is {json.dumps(section)}; an object is needed, as "
                '{"enabled": true}'
            )
        for key, value in section.items():
            if key not in keys:
                raise InvalidArgumentError(
                    f"configuration: {name}.{key} is not known; allowed: {', '.join(keys)}"
                )
            if not _fits(value, keys[key]):
                raise InvalidArgumentError(
                    f"configuration: {name}.{key} is {json.dumps(value)}; allowed: "
                    f"{_NAMES[keys[key]]}"
                )
