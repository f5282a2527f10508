"""deepspeed.zero at stage 0: nothing is partitioned, so its contexts leave parameters whole."""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..errors import InvalidArgumentError, UnsupportedError
from ..torch.values import broadcast_parameters
from .ranks import has_comm, meet

DEVICES = (None, "none", "cpu", "cuda")


class ZeroParamType(enum.Enum):
    """How a parameter of ZeRO is held."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Whether a parameter of ZeRO is here; without ZeRO parameters have no ds_status."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def _stage_of(config: Any) -> int:
    if config is None:
        return 0
    if not isinstance(config, dict):
        config = json.loads(Path(config).read_text(encoding="utf-8"))
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    return stage if isinstance(stage, int) else 0


class Init(contextlib.AbstractContextManager["Init"]):
    """``with deepspeed.zero.Init():`` models made in the block are whole, as at stage 0.

    dtype: of the parameters that are made in the block, as in DeepSpeed. remote_device: "cpu" and
    "none" change nothing. Accepted and without meaning where nothing is partitioned: module,
    data_parallel_group, mem_efficient_linear, pin_memory, mpu and the other arguments of
    DeepSpeed's. Errors: UnsupportedError (a configuration of stage 3; remote_device "nvme",
    zero_quantized_weights), InvalidArgumentError (remote_device).
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        self.enabled = enabled
        self._dtype = dtype if enabled else None
        self._before: torch.dtype | None = None
        if not enabled:
            return
        stage = _stage_of(config_dict_or_path if config_dict_or_path is not None else config)
        refused = {
            "remote_device": remote_device == "nvme",
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
            "param_swapper": param_swapper is not None,
        }
        names = [name for name, is_set in refused.items() if is_set]
        if stage > 0 or names:
            what = f"zero_optimization.stage {stage}" if stage > 0 else ", ".join(names)
            raise UnsupportedError(
                f"zero.Init: {what}: parameters are whole on every rank here; set stage 0 and "
                "leave these arguments out, or keep DeepSpeed for this model"
            )
        if remote_device not in DEVICES:
            raise InvalidArgumentError(
                f"zero.Init: remote_device is {remote_device!r}; allowed: None, 'none', 'cpu'"
            )
        if module is not None and dtype is not None:
            module.to(dtype)

    def __enter__(self) -> Init:
        if self._dtype is not None:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            torch.set_default_dtype(self._before)
            self._before = None


class GatheredParameters(contextlib.AbstractContextManager["GatheredParameters"]):
    """Parameters are whole already; with modifier_rank that rank's become everybody's at the end.

    In DeepSpeed a parameter that is not partitioned is left alone, and ranks that changed it
    differently go on so; here they are made equal, since training needs that. Collective then, if
    there are other ranks. fwd_module has no meaning where nothing is partitioned.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        self.params = [p for p in given if isinstance(p, torch.Tensor)]
        self._modifier = modifier_rank if enabled else None

    def __enter__(self) -> GatheredParameters:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None or self._modifier is None or not self.params or not has_comm():
            return
        comm = meet(None, None)
        if comm.size > 1:
            broadcast_parameters(self.params, self._modifier, comm=comm)


def register_external_parameter(module: torch.nn.Module, parameter: torch.Tensor) -> None:
    """Nothing to register: parameters are whole. Errors: InvalidArgumentError (no parameter)."""
    if not isinstance(parameter, torch.nn.Parameter):
        raise InvalidArgumentError(
            f"parameter is of type {type(parameter).__qualname__}; a torch.nn.Parameter is needed"
        )


unregister_external_parameter = register_external_parameter


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[torch.nn.Module]:
    """The module of an engine."""
    yield getattr(model, "module", model)


def shutdown_init_context() -> None:
    """Nothing to shut down."""


restore_init_context = shutdown_init_context
