"""Comms and start values for PyTorch programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ..comm import Comm
from ..errors import InvalidStateError, UnsupportedError
from ..group import create_comm, default_comm


def comm_of_process_group(
    group: dist.ProcessGroup | None = None,
    *,
    transport: str | None = None,
    timeout: float | None = None,
) -> Comm:
    """A comm of the same ranks as a torch.distributed process group, which they meet over.

    Collective over the group, which is used here alone: the order of closing does not matter.
    group: None: the default one. transport, timeout: as for init_process_group().
    Errors: InvalidStateError (torch.distributed is not initialised).
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidStateError(
            "torch.distributed is not initialised: call its init_process_group() first"
        )
    size = dist.get_world_size(group)

    def all_gather(mine: bytes) -> list[bytes]:
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, mine, group=group)
        return parts

    return create_comm(
        rank=dist.get_rank(group),
        world_size=size,
        all_gather=all_gather,
        transport=transport,
        timeout=timeout,
    )


def broadcast_parameters(
    source: torch.nn.Module | Iterable[torch.Tensor],
    root: int = 0,
    *,
    comm: Comm | None = None,
) -> None:
    """Gives all ranks the root's values, in place. Collective; waits for completion.

    source: a module (its parameters and buffers), or tensors: any dtype, any strides, in host
    memory, of the same shapes in the same order on all ranks. Optimizers need equal parameters at
    their first step. Errors: UnsupportedError (device), ProtocolError (ranks have other tensors).
    """
    comm = default_comm() if comm is None else comm
    if isinstance(source, torch.nn.Module):
        tensors = [*source.parameters(), *source.buffers()]
    else:
        tensors = list(source)
    flat = []
    for i, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"tensor {i} is on {tensor.device}; this version takes host memory (cpu) alone"
            )
        flat.append(tensor.detach().contiguous().view(-1))
    comm.broadcast([values.view(torch.uint8) for values in flat], root).wait()
    for tensor, values in zip(tensors, flat):
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values.view(tensor.shape))
