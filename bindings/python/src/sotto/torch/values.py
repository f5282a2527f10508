"""Start values of PyTorch programs: equal on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from .._text import counted
from ..comm import Comm
from ..errors import InvalidStateError, UnsupportedError
from ..group import meet
from .dtensors import is_dtensor, local
from .shards import agree


def _tensors_of(
    source: torch.nn.Module | Iterable[torch.Tensor], comm: Comm
) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors of a module (parameters and buffers) or of a list; of DTensors the shards.

    Collective if there is a DTensor: ranks of the comm hold the same shards.
    """
    if isinstance(source, torch.nn.Module):
        tensors = [*source.named_parameters(), *source.named_buffers()]
    else:
        tensors = [(f"tensor {i}", tensor) for i, tensor in enumerate(source)]
    for name, tensor in tensors:
        if tensor.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"{name} is on {tensor.device}; allowed: cpu, cuda")
    if any(is_dtensor(tensor) for _, tensor in tensors):
        agree(comm, tensors)
    return [(name, local(tensor)) for name, tensor in tensors]


def broadcast_parameters(
    source: torch.nn.Module | Iterable[torch.Tensor],
    root: int = 0,
    *,
    comm: Comm | None = None,
) -> None:
    """Gives all ranks the root's values, in place. Collective; waits for completion.

    source: a module (its parameters and buffers), or tensors: any dtype, any strides, all in host
    memory or all on one CUDA device, of the same shapes in the same order on all ranks. Optimizers
    need equal parameters at their first step. Of DTensors every rank gets the root's shard, which
    has to be its own too: comm is of the ranks that hold the same. comm: None: as for the
    optimizers.
    Errors: UnsupportedError (device), ProtocolError (ranks have other tensors, or other shards).
    """
    comm = meet(comm)
    tensors = [tensor for _, tensor in _tensors_of(source, comm)]
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
    comm = meet(comm)
    tensors = _tensors_of(source, comm)
    mine = torch.empty(len(tensors), dtype=torch.int64)
    for i, (_, tensor) in enumerate(tensors):
        values = tensor.detach().contiguous().view(-1).view(torch.uint8)
        digest = hashlib.blake2b(bytes(values.cpu().numpy().data), digest_size=8).digest()
        mine[i] = int.from_bytes(digest, "little", signed=True)
    everybody = torch.empty(comm.size * len(tensors), dtype=torch.int64)
    comm.all_gather(mine, everybody).wait()
    differs = (everybody.view(comm.size, -1) != everybody.view(comm.size, -1)[0]).any(0)
    names = [name for (name, _), differ in zip(tensors, differs.tolist()) if differ]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise InvalidStateError(
            f"{len(names)} of {counted(len(tensors), 'tensor')} differ between ranks: "
            f"{', '.join(names[:3])}{more}; make the same model on all ranks (same seed, same "
            "checkpoint), or call sotto.torch.broadcast_parameters()"
        )
