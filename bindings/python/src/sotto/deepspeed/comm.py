"""Which ranks average: an existing comm, torch's process group, or the launcher's ranks."""

from __future__ import annotations

from typing import Any

from .. import group
from ..comm import Comm
from ..torch.groups import comm_of_process_group


def meet(comm: Comm | None, mpu: Any, timeout: float | None = None) -> Comm:
    """The comm of the data-parallel ranks; made, collectively, if there is none.

    In this order: comm; mpu.get_data_parallel_group(), a process group of torch; the default comm;
    the ranks of torch's process group, if it is initialised; those that the launcher started
    (torchrun, sotto-run, Open MPI, MPICH, Slurm). The last two become the default comm.
    """
    if comm is None and mpu is not None:
        return comm_of_process_group(mpu.get_data_parallel_group(), timeout=timeout)
    return group.meet(comm, timeout)
