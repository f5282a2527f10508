"""deepspeed.utils.groups where all ranks are data-parallel, or an mpu says which are."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..errors import UnsupportedError
from .comm import get_rank, get_world_group, get_world_size

mpu: Any = None
_HINT = "experts are averaged over other ranks than the rest; keep DeepSpeed for them"


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Takes the mpu. Errors: UnsupportedError (ep_size above 1)."""
    if ep_size != 1:
        raise UnsupportedError(f"groups.initialize: ep_size is {ep_size}; allowed: 1: {_HINT}")
    globals()["mpu"] = mpu


def _of_mpu(name: str, default: Any) -> Any:
    return default if mpu is None else getattr(mpu, name)()


def get_data_parallel_group() -> Any:
    """The mpu's, or all ranks."""
    return _of_mpu("get_data_parallel_group", None) or get_world_group()


def get_data_parallel_world_size() -> int:
    """Ranks that average."""
    return get_world_size(get_data_parallel_group())


def get_data_parallel_rank() -> int:
    """This rank among them."""
    return get_rank(get_data_parallel_group())


def get_model_parallel_world_size() -> int:
    """The mpu's, or 1."""
    return int(_of_mpu("get_model_parallel_world_size", 1))


def get_model_parallel_rank() -> int:
    """The mpu's, or 0."""
    return int(_of_mpu("get_model_parallel_rank", 0))


def get_model_parallel_group() -> Any:
    """The mpu's; without one this rank alone has no group: None."""
    return _of_mpu("get_model_parallel_group", None)


def _get_data_parallel_group_ranks() -> list[int]:
    return list(dist.get_process_group_ranks(get_data_parallel_group()))


def _get_broadcast_src_rank() -> int:
    return _get_data_parallel_group_ranks()[0]


def _one() -> int:
    """Sequence- and expert-parallel ranks."""
    return 1


def _zero() -> int:
    return 0


_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
get_tensor_model_parallel_group = get_model_parallel_group
get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = get_model_parallel_world_size
_get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size, _get_sequence_parallel_rank = _one, _zero
