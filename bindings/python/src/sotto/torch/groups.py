"""Comms of PyTorch programs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..comm import Comm
from ..create import create_comm
from ..errors import InvalidArgumentError, InvalidStateError
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
    comm._framework_ranks = meeting.ranks
    return comm
