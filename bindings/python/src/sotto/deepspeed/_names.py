"""Names of deepspeed.runtime.engine and of the package itself that mean something here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .engine import Engine

DeepSpeedEngine = Engine
DeepSpeedOptimizerCallable = Callable[[Any], Any]
DeepSpeedSchedulerCallable = Callable[[Any], Any]
ADAM_OPTIMIZER, LAMB_OPTIMIZER = "adam", "lamb"
