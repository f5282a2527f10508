"""DeepSpeed's training loop on sotto's optimizers; DeepSpeed itself is not needed.

    import sotto.deepspeed as deepspeed

    engine, optimizer, _, lr_scheduler = deepspeed.initialize(model=model, config="ds.json")
    for batch in batches:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

Programs of DeepSpeed's at ZeRO stage 0 run with that import in the place of theirs. Its module
paths are here too: ``from sotto.deepspeed.ops.adam import FusedAdam``; after
:func:`install_as_deepspeed` also under DeepSpeed's own name. What is not here raises
UnsupportedError, which says what to do in its place.

The configuration is read by the C library, which also does what it says: sotto_config_report, or
``sotto config FILE``, explains a file key by key. With DeepSpeed installed,
:func:`optimizer_from_config` makes the optimizer for deepspeed.initialize(optimizer=...).
"""

from __future__ import annotations

import importlib
from typing import Any

from . import modules, zero
from ._names import (
    ADAM_OPTIMIZER,
    LAMB_OPTIMIZER,
    DeepSpeedEngine,
    DeepSpeedOptimizerCallable,
    DeepSpeedSchedulerCallable,
)
from .accelerator import get_accelerator
from .arguments import add_config_arguments
from .client import ClientOptimizer
from .comm import TORCH_DISTRIBUTED_DEFAULT_PORT, init_distributed
from .config import auto_from_training_arguments
from .engine import Engine
from .logs import log_dist, logger
from .lr_schedules import add_tuning_arguments
from .modules import install_as_deepspeed
from .optimizer import ConfiguredOptimizer, optimizer_from_config
from .schedule import ConfigSchedule
from .start import initialize
from .weights import OnDevice

modules.register()
# The release of DeepSpeed whose interface this is; its release checks read it.
__version__ = "0.18.9"
__version_major__, __version_minor__, __version_patch__ = 0, 18, 9
version = __version__

__all__ = [
    "ADAM_OPTIMIZER",
    "LAMB_OPTIMIZER",
    "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "ClientOptimizer",
    "ConfigSchedule",
    "ConfiguredOptimizer",
    "DeepSpeedEngine",
    "DeepSpeedOptimizerCallable",
    "DeepSpeedSchedulerCallable",
    "Engine",
    "OnDevice",
    "add_config_arguments",
    "add_tuning_arguments",
    "auto_from_training_arguments",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "install_as_deepspeed",
    "log_dist",
    "logger",
    "optimizer_from_config",
    "zero",
]
# What the package of DeepSpeed has beside its modules, and why it is not here.
REFUSED = {
    "DeepSpeedConfig": "use sotto.config_report(), which reads a whole configuration",
    "DeepSpeedConfigError": "use sotto.InvalidArgumentError",
    "DeepSpeedHybridEngine": modules.INFERENCE,
    "DeepSpeedInferenceConfig": modules.INFERENCE,
    "DeepSpeedTransformerConfig": modules.KERNELS,
    "DeepSpeedTransformerLayer": modules.KERNELS,
    "InferenceEngine": modules.INFERENCE,
    "PipelineEngine": modules.PIPE,
    "PipelineModule": modules.PIPE,
    "datastates": modules.OTHER,
    "default_inference_config": modules.INFERENCE,
    "domino": modules.TENSOR,
    "init_inference": modules.INFERENCE,
    "load_ds_config": "use sotto.config_resolve()",
    "merge_tp_model_init_into_config": modules.TENSOR,
    "record_tp_model_init_args": modules.TENSOR,
    "replace_transformer_layer": modules.KERNELS,
    "revert_transformer_layer": modules.KERNELS,
    "set_autotp_mode": modules.TENSOR,
    "set_optimizer_flags": modules.OTHER,
    "tp_model_init": modules.TENSOR,
    "MUON_OPTIMIZER": modules.OTHER,
}


def is_compile_supported() -> bool:
    """Whether engine.compile() works: wherever torch.compile does."""
    return True


def __getattr__(name: str) -> Any:
    if name in modules.PATHS:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "dist":
        return importlib.import_module(f"{__name__}.comm")
    if name in ("git_hash", "git_branch", "__git_hash__", "__git_branch__"):
        return "sotto"
    if name in REFUSED:
        return modules.refused(f"deepspeed.{name}", REFUSED[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
