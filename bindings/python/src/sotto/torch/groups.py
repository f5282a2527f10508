"""Comms and start values for PyTorch programs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ..comm import Comm
from ..errors import InvalidArgumentError, InvalidStateError, UnsupportedError
from ..group import create_comm, meet
from .meeting import Meeting


def comm_of_process_group(
    group: dist.ProcessGroup | None = None,
    *,
    listen: str | None = None,
    transport: str | None = None,
    timeout: float | None = None,
    cpu_threads: int = 0,
    max_ops: int = 0,
) -> Comm:
    """A comm of the same ranks as a torch.distributed process group, which meet over its store.

    Collective over the group. Its collectives are not used, and it goes on as before: the order of
    closing does not matter. Ranks on several machines find each other by the interface that leads
    to the store's host, unless listen or SOTTO_LISTEN names another one on rank 0.

    group: None: the default one. timeout: seconds; None: of the set-up the group's own, of
    operations SOTTO_TIMEOUT_US, 300 s. The rest as for init_process_group().
    Errors: InvalidStateError (torch.distributed is not initialised), InvalidArgumentError (this
    rank is not in the group), OperationTimeoutError (names the ranks that did not come),
    that of a rank which failed first, TransportError, UnsupportedError (a group without store).
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidStateError(
            "torch.distributed is not initialised: call its init_process_group() first"
        )
    if group is None:
        group = dist.group.WORLD
    if dist.get_rank(group) < 0:
        raise InvalidArgumentError(
            f"rank {dist.get_rank()} of the world is not in this process group; only its members "
            "make a comm of it"
        )
    if dist.get_world_size(group) == 1:
        return create_comm(
            world_size=1,
            transport=transport,
            timeout=timeout,
            cpu_threads=cpu_threads,
            max_ops=max_ops,
        )
    return _comm_of(
        Meeting.of_group(group, timeout),
        listen=listen,
        transport=transport,
        timeout=timeout,
        cpu_threads=cpu_threads,
        max_ops=max_ops,
    )


def comm_of_torchrun(timeout: float | None, **options: Any) -> Comm:
    """A comm of all ranks that torchrun has started, which meet over the store of its agent.

    No port beside torchrun's has to be free. Options and errors as for comm_of_process_group().
    """
    return _comm_of(Meeting.of_torchrun(timeout), timeout=timeout, **options)


def _comm_of(meeting: Meeting, *, listen: str | None, **options: Any) -> Comm:
    with meeting.told():
        found = meeting.listen_at()
        comm = create_comm(
            rank=meeting.rank,
            world_size=meeting.size,
            all_gather=meeting.all_gather,
            listen=listen or found,
            **options,
        )
    comm._torch_ranks = meeting.ranks
    return comm


def _tensors_of(source: torch.nn.Module | Iterable[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors of a module (parameters and buffers) or of a list."""
    if isinstance(source, torch.nn.Module):
        tensors = [*source.named_parameters(), *source.named_buffers()]
    else:
        tensors = [(f"tensor {i}", tensor) for i, tensor in enumerate(source)]
    for name, tensor in tensors:
        if tensor.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"{name} is on {tensor.device}; allowed: cpu, cuda")
    return tensors


def broadcast_parameters(
    source: torch.nn.Module | Iterable[torch.Tensor],
    root: int = 0,
    *,
    comm: Comm | None = None,
) -> None:
    """Gives all ranks the root's values, in place. Collective; waits for completion.

    source: a module (its parameters and buffers), or tensors: any dtype, any strides, all in host
    memory or all on one CUDA device, of the same shapes in the same order on all ranks. Optimizers
    need equal parameters at their first step. comm: None: as for the optimizers.
    Errors: UnsupportedError (device), ProtocolError (ranks have other tensors).
    """
    comm = meet(comm)
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
    comm = meet(comm)
    tensors = _tensors_of(source)
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
            f"{len(names)} of {len(tensors)} tensors differ between ranks: {', '.join(names[:3])}"
            f"{more}; make the same model on all ranks (same seed, same checkpoint), or call "
            "sotto.torch.broadcast_parameters()"
        )
