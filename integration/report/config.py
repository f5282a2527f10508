"""Configuration files: read as the library reads them, and scaled to another number of steps."""

import json
import math
import re
from pathlib import Path

from .logs import ReportError

# What is counted in optimizer steps, so that a shorter run keeps its shape: where the schedule turns, where a stage
# begins, and after how many steps 0/1 Adam doubles the distance of its synchronisations. What stays is that distance's limit
# (local_step_clipper) and what is counted in updates of the variance (var_update_scaler): it needs as many of them whatever
# the length of a run.
SCHEDULER_STEPS = ("warmup_num_steps",)
OPTIMIZER_STEPS = ("freeze_step", "var_freeze_step", "local_step_scaler")
# Of outer steps; period and delay stay, since what they hide does not depend on the length of a run.
OUTER_STEPS = ("switch_step", "warmup_steps")

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])', re.DOTALL)


def plain_json(text):
    """The text without comments (//, #, /* */) and trailing commas, line by line as before."""
    def keep_strings(match):
        token = match.group()
        return token if token.startswith('"') else re.sub(r"[^\n]", " ", token)

    return _TRAILING_COMMA.sub(lambda match: match.group(1) or " ", _TOKEN.sub(keep_strings, text))


def read_config(path):
    try:
        config = json.loads(plain_json(Path(path).read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ReportError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ReportError(f"{path}: expected an object")
    return config


def _object(owner, key):
    """An object inside another; empty where it is absent or null, which is the same."""
    value = owner.get(key)
    return value if isinstance(value, dict) else {}


def _params(config, section):
    return _object(_object(config, section), "params")


def settle_period(config, period):
    """With outer steps whose period is measured ("auto"), in any case: the one that a run has chosen. None: it has chosen none."""
    outer = _object(_object(config, "sotto"), "outer")
    if period and str(outer.get("period")).lower() == "auto":
        outer["period"] = period
    return config


def has_length(config):
    """Whether the schedule says how many steps it is made for."""
    return "total_num_steps" in _params(config, "scheduler")


def _steps(key, value):
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ReportError(f"'{key}' is {value!r}, expected a number of steps: it is scaled with the schedule")
    return value


def scale_config(config, steps):
    """The same schedule on another number of steps: everything that is counted in steps keeps its share. What has none stays
    without any: 0 switches a warm-up off."""
    scheduler, params = _params(config, "scheduler"), _params(config, "optimizer")
    try:
        share = steps / scheduler["total_num_steps"]
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ReportError("a configuration whose schedule is to be scaled needs scheduler.params.total_num_steps, a "
                          "number above 0") from error
    scheduler["total_num_steps"] = steps
    outer = _object(_object(config, "sotto"), "outer")
    for place, keys in ((scheduler, SCHEDULER_STEPS), (params, OPTIMIZER_STEPS), (outer, OUTER_STEPS)):
        for key in keys:
            if place.get(key):
                place[key] = max(1, round(_steps(key, place[key]) * share))
    return config
