"""Command-line arguments of DeepSpeed's programs."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import InvalidArgumentError
from .logs import logger


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --deepspeed, --deepspeed_config FILE and their old names. Returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    for name in ("deepspeed", "deepscale"):
        old = "Deprecated: --deepspeed. " if name == "deepscale" else ""
        group.add_argument(
            f"--{name}",
            default=False,
            action="store_true",
            help=f"{old}Enable DeepSpeed (helper flag for user code, no impact on the engine)",
        )
        group.add_argument(
            f"--{name}_config",
            default=None,
            type=str,
            help=f"{old}DeepSpeed json configuration file.",
        )
    return parser


def pick(args: Any, config: Any, config_params: Any) -> Any:
    """The one configuration of initialize(), where DeepSpeed's callers may put it."""
    given = [x for x in (config, config_params) if x is not None]
    if getattr(args, "deepscale_config", None) is not None:
        logger.warning("--deepscale_config is deprecated: use --deepspeed_config")
        given.append(args.deepscale_config)
    named = getattr(args, "deepspeed_config", None)
    if named is not None:
        given.append(named)
    if len(given) != 1:
        raise InvalidArgumentError(
            f"{len(given)} configurations are given; one is needed: config=, a dict or the path "
            "of a file, or args.deepspeed_config"
        )
    return given[0]
