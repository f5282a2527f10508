"""Comms and start values for PyTorch programs."""

from __future__ import annotations

import hashlib
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


def _tensors_of(source: torch.nn.Module | Iterable[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors of a module (parameters and buffers) or of a list."""
    if isinstance(source, torch.nn.Module):
        tensors = [*source.named_parameters(), *source.named_buffers()]
    else:
        tensors = [(f"tensor {i}", tensor) for i, tensor in enumerate(source)]
    for name, tensor in tensors:
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"{name} is on {tensor.device}; this version takes host memory (cpu) alone"
            )
    return tensors


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
    tensors = [tensor for _, tensor in _tensors_of(source)]
    flat = [tensor.detach().contiguous().view(-1) for tensor in tensors]
    comm.broadcast([values.view(torch.uint8) for values in flat], root).wait()
    for tensor, values in zip(tensors, flat):
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values.view(tensor.shape))


def check_parameters(
    source: torch.nn.Module | Iterable[torch.Tensor], *, comm: Comm | None = None
) -> None:
    """Compares values between the ranks by hash, bit by bit. Collective; waits for completion.

    source: as for :func:`broadcast_parameters`. Errors: InvalidStateError on every rank, with the
    tensors that differ; UnsupportedError (device), ProtocolError (ranks have other tensors).
    """
    comm = default_comm() if comm is None else comm
    tensors = _tensors_of(source)
    mine = torch.empty(len(tensors), dtype=torch.int64)
    for i, (_, tensor) in enumerate(tensors):
        values = tensor.detach().contiguous().view(-1).view(torch.uint8)
        digest = hashlib.blake2b(bytes(values.numpy().data), digest_size=8).digest()
        mine[i] = int.from_bytes(digest, "little", signed=True)
    everybody = torch.empty(comm.size * len(tensors), dtype=torch.int64)
    comm.all_gather(mine, everybody).wait()
    differs = (everybody.view(comm.size, -1) != everybody.view(comm.size, -1)[0]).any(0)
    names = [name for (name, _), differ in zip(tensors, differs.tolist()) if differ]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise InvalidStateError(
            f"{len(names)} of {len(tensors)} tensors differ between ranks: {', '.join(names[:3])}"
            f"{more}; make the same model on all ranks (same seed, same checkpoint), or call "
            "sotto.torch.broadcast_parameters()"
        )
