"""DeepSpeed's training loop on sotto's optimizers; DeepSpeed itself is not needed.

    engine, optimizer, _, lr_scheduler = sotto.deepspeed.initialize(model=model, config="ds.json")
    for batch in batches:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

The configuration is read by the C library, which also does what it says: sotto_config_report, or
``sotto config FILE``, explains a file key by key. With DeepSpeed installed,
:func:`optimizer_from_config` makes the optimizer for deepspeed.initialize(optimizer=...).
"""

from __future__ import annotations

from .config import auto_from_training_arguments
from .engine import Engine, initialize
from .optimizer import ConfiguredOptimizer, optimizer_from_config
from .schedule import ConfigSchedule

__all__ = [
    "ConfigSchedule",
    "ConfiguredOptimizer",
    "Engine",
    "auto_from_training_arguments",
    "initialize",
    "optimizer_from_config",
]
