"""deepspeed.utils.zero_to_fp32 at stage 0, and other helpers around a model's weights."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import InvalidArgumentError, UnsupportedError
from . import files


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint without ZeRO, as float32.

    16-bit weights have the values that the model computes with, not those of the float32 masters.
    tag: None: what "latest" names. lazy_mode: has no meaning here, since one file has all.
    exclude_frozen_parameters: refused: save them so. Errors: OSError, InvalidArgumentError (no
    "latest"), UnsupportedError (a checkpoint of ZeRO or of shards, exclude_frozen_parameters).
    """
    if exclude_frozen_parameters:
        raise UnsupportedError(
            "exclude_frozen_parameters: pass it to save_checkpoint(); a checkpoint does not say "
            "which parameters were frozen"
        )
    if tag is None:
        latest = Path(checkpoint_dir) / "latest"
        if not latest.is_file():
            raise InvalidArgumentError(f"{latest} does not exist: pass tag=")
        tag = latest.read_text(encoding="utf-8").strip()
    folder = Path(checkpoint_dir) / tag
    if list(folder.glob("*zero_pp_rank_*")):
        raise UnsupportedError(
            f"{folder} was written with ZeRO: the script zero_to_fp32.py in its folder makes one "
            "file of it"
        )
    shards = len(list(folder.glob("mp_rank_*_model_states.pt")))
    if shards > 1:
        raise UnsupportedError(
            f"{folder} has {shards} model-parallel shards: merge them with the tools of the "
            "program that made them"
        )
    module = files.read(folder / files.MODEL_FILE)["module"]
    return {
        name: value.float() if value.is_floating_point() else value
        for name, value in module.items()
    }


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: Any = None,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes get_fp32_state_dict_from_zero_checkpoint() to output_dir/pytorch_model.bin.

    max_shard_size: one file is written whatever it is. Errors: also UnsupportedError
    (safe_serialization).
    """
    if safe_serialization:
        raise UnsupportedError("safe_serialization: write the state_dict with safetensors yourself")
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    files.write(Path(output_dir) / "pytorch_model.bin", state)


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> torch.nn.Module:
    """Loads get_fp32_state_dict_from_zero_checkpoint() into a model on the host; returns it."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.cpu().load_state_dict(state, strict=False)
    return model


@contextlib.contextmanager
def OnDevice(dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> Iterator[None]:
    """``with OnDevice(dtype=..., device=...):`` models made in the block have both."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor:
    """A copy of a float32 parameter. Errors: UnsupportedError (a 16-bit one)."""
    if param.dtype != torch.float32:
        raise UnsupportedError(
            f"safe_get_full_fp32_param of a parameter that is {param.dtype}: its float32 master is "
            "the optimizer's; with one of PyTorch's it is engine.optimizer.masters()[id(param)]"
        )
    return param.detach().clone()


@torch.no_grad()
def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Writes a parameter; the float32 master of a 16-bit one follows, in its precision."""
    param.copy_(value.reshape(param.shape))


def _state_of(name: str) -> Callable[..., NoReturn]:
    def refused(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            f"{name}: moments are the library's, and engine.optimizer.state_dict() has them as "
            "bytes; an optimizer object of PyTorch's has them in engine.optimizer.state"
        )

    return refused


safe_get_full_optimizer_state = _state_of("safe_get_full_optimizer_state")
safe_set_full_optimizer_state = _state_of("safe_set_full_optimizer_state")


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """The gradient of this rank."""
    return param.grad


def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Changes it in place. Errors: InvalidArgumentError (there is none)."""
    if param.grad is None:
        raise InvalidArgumentError("the parameter has no gradient")
    with torch.no_grad():
        param.grad.copy_(value)


def set_random_seed(seed: int) -> None:
    """Seeds Python, numpy if it is there, and PyTorch."""
    import random
    import sys

    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str) -> None:
    """Makes the folder of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def noop_context() -> Iterator[None]:
    """A context that does nothing."""
    yield


def is_model_parallel_parameter(p: Any) -> bool:
    """Whether a model-parallel layer has marked a parameter as a shard."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """As torch.nn.utils.clip_grad_norm_. Errors: UnsupportedError (mpu)."""
    if mpu is not None:
        raise UnsupportedError("clip_grad_norm_ with mpu: use Megatron's own")
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def to_device(item: Any, device: Any) -> Any:
    """Tensors in nested lists, tuples and dicts on a device."""
    if isinstance(item, dict):
        return {key: to_device(value, device) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)(to_device(value, device) for value in item)
    return item.to(device) if hasattr(item, "to") else item


copy_to_device = move_to_device = to_device


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in nested lists and dicts as `dtype`."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(cast(item, dtype) for item in value)
    return value


def clone_tensors_for_torch_save(item: Any, device: Any = torch.device("cpu")) -> Any:  # noqa: B008
    """Copies of all tensors in lists, tuples and dicts, which share no memory with others."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, (list, tuple)):
        return type(item)([clone_tensors_for_torch_save(value, device) for value in item])
    if isinstance(item, dict):
        copies = {k: clone_tensors_for_torch_save(value, device) for k, value in item.items()}
        return type(item)(copies)
    return item
