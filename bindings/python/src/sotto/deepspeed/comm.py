"""deepspeed.comm: torch.distributed's functions with DeepSpeed's arguments, and its log of them.

As in DeepSpeed they are those of torch's process group, and groups are torch's: programs use both
beside each other. Gradients go another way, over the comm of the engine.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ..errors import InvalidArgumentError, InvalidStateError
from . import ranks
from .accelerator import get_accelerator
from .logs import logger
from .sections import check_keys

__path__: list[str] = []  # deepspeed.comm.comm is found below: see modules.py
TORCH_DISTRIBUTED_DEFAULT_PORT = ranks.DEFAULT_PORT
default_pg_timeout = ranks.DEFAULT_TIMEOUT
NCCL_BACKEND, GLOO_BACKEND, MPI_BACKEND, CCL_BACKEND = "nccl", "gloo", "mpi", "ccl"
# Arguments by which DeepSpeed's functions name themselves in the log.
LOGGED = ("prof", "log_name", "debug")


# ---- setting up --------------------------------------------------------------------------------


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Makes torch's process group and the comm that averages, if they are not there. Collective.

    dist_backend:       of torch's process group; None: "gloo", "nccl" on CUDA
    auto_mpi_discovery: whether launchers other than torchrun are looked for: sotto-run, Open MPI,
                        MPICH, Slurm
    distributed_port:   takes the place of MASTER_PORT where the launcher has none
    timeout:            a timedelta, of the set-up and of operations
    init_method:        as for torch.distributed.init_process_group; with it rank and world_size
    dist_init_required: None: as needed; False: there has to be a group; True: as None, since a
                        group that is there serves
    config:             an object or dict with "comms_logger": see configure(); "sotto":
                        {"transport"} of a dict is that of the comm
    Errors: InvalidStateError (dist_init_required is False and there is no group),
    InvalidArgumentError (backend, timeout; no launcher: lists what was looked for).
    """
    configure(deepspeed_config=config)
    if not isinstance(timeout, timedelta):
        raise InvalidArgumentError(
            f"timeout is of type {type(timeout).__qualname__}; a datetime.timedelta is needed"
        )
    if ranks.joined():
        if verbose and dist.get_rank() == 0:
            logger.info("torch's process group is there already")
        return
    if dist_init_required is False:
        raise InvalidStateError(
            "dist_init_required is False, but torch's process group is not there: leave it None, "
            "or call init_distributed() or torch.distributed.init_process_group() first"
        )
    backend = dist_backend or get_accelerator().communication_backend_name()
    ranks.join(
        backend,
        port=distributed_port,
        timeout=None if timeout == default_pg_timeout else timeout,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        discover=auto_mpi_discovery,
        transport=ranks.transport_in(config),
    )
    if verbose and dist.get_rank() == 0:
        logger.info("%d ranks, torch's process group by %s", dist.get_world_size(), backend)


def is_available() -> bool:
    """Always."""
    return True


def is_initialized() -> bool:
    """Whether torch's process group is there."""
    return ranks.joined()


def _group_is_there() -> None:
    if not ranks.joined():
        raise InvalidStateError(
            "there is no process group: call deepspeed.init_distributed() or "
            "deepspeed.initialize() first"
        )


def destroy_process_group(group: Any = None) -> None:
    """Ends torch's process group; the comm of the engines stays."""
    _group_is_there()
    dist.destroy_process_group(group)


def new_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """As torch.distributed.new_group. Collective over all ranks."""
    _group_is_there()
    return dist.new_group(ranks, **options)


def get_world_group() -> Any:
    """The group of all ranks."""
    _group_is_there()
    return dist.group.WORLD


def get_world_size(group: Any = None) -> int:
    """Ranks of a group; None: of all."""
    _group_is_there()
    return dist.get_world_size(group)


def get_rank(group: Any = None) -> int:
    """This rank in a group; -1 outside."""
    _group_is_there()
    return dist.get_rank(group)


def get_local_rank() -> int:
    """Which process of its machine this is."""
    _group_is_there()
    return ranks.local_rank(dist.get_rank())


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The rank among all of a rank of a group."""
    _group_is_there()
    chosen: Any = dist.group.WORLD if group is None else group
    return dist.get_global_rank(chosen, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The ranks among all of a group's."""
    _group_is_there()
    found = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    return list(found)


def get_world_size_from_launcher() -> int:
    """What the launcher says; without one 1."""
    return int(_launched().world_size)


def get_world_rank_from_launcher() -> int:
    """What the launcher says; without one 0."""
    return int(_launched().rank)


def get_local_rank_from_launcher() -> int:
    """What the launcher says; without one 0."""
    return ranks.local_rank(_launched().rank)


def _launched() -> Any:
    import os

    from ..launch import Launch, detect

    return detect(os.environ) or Launch("none", 0, 1)


def initialize_mesh_device(mesh_shape: Any, mesh_dim_names: Any) -> Any:
    """A DeviceMesh of torch."""
    _group_is_there()
    kind = get_accelerator().device_name()
    return dist.device_mesh.init_device_mesh(kind, mesh_shape, mesh_dim_names=mesh_dim_names)


# ---- the log -----------------------------------------------------------------------------------


class CommsLogger:
    """Counts calls, bytes and milliseconds, per function and size, while it is enabled.

    A logged call waits for its end.
    """

    def __init__(self) -> None:
        self.enabled = self.verbose = self.debug = False
        self.prof_all = True
        self.prof_ops: list[str] = []
        self.comms_dict: dict[str, dict[int, list[float]]] = {}

    def takes(self, name: str, prof: bool) -> bool:
        """Whether a call is logged."""
        return self.enabled and (self.prof_all or prof or name in self.prof_ops)

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """latency: in milliseconds; msg_size: bytes."""
        rows = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [])
        rows.append(latency)
        if self.verbose:
            logger.warning("%s | %.3f ms | %d bytes", record_name, latency, msg_size)

    def reset(self) -> None:
        """Forgets what was logged."""
        self.comms_dict.clear()

    def summary(self) -> dict[str, dict[int, dict[str, Any]]]:
        """By function and bytes: count, total and mean milliseconds, gigabits per second."""
        return {
            name: {
                size: {
                    "count": len(times),
                    "total_latency_ms": sum(times),
                    "avg_latency_ms": sum(times) / len(times),
                    "tput_avg_gbps": size * 8e-6 * len(times) / max(sum(times), 1e-9),
                    "msg_size_bytes": size,
                }
                for size, times in sorted(sizes.items())
            }
            for name, sizes in self.comms_dict.items()
        }


comms_logger = CommsLogger()


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Sets the log. deepspeed_config: a configuration, whose "comms_logger" is taken.

    Errors: InvalidArgumentError (a key of a section that the engine reads).
    """
    if isinstance(deepspeed_config, dict):
        check_keys(deepspeed_config)
        section = deepspeed_config.get("comms_logger") or {}
        known = {key: section[key] for key in ("enabled", *CONFIGURED) if key in section}
        configure(**known)
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops}
    given.update(verbose=verbose, debug=debug)
    for name, value in given.items():
        if value is not None:
            setattr(comms_logger, name, value)


CONFIGURED = ("prof_all", "prof_ops", "verbose", "debug")


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Rank 0 prints what was logged. Collective.

    show_straggler: adds the milliseconds of each function above the fastest rank's.
    Returns with return_dict {"summary", "straggler_analysis", "metadata"}.
    """
    _group_is_there()
    dist.barrier()
    summary, waited = comms_logger.summary(), None
    if show_straggler:
        mine = {n: sum(r["total_latency_ms"] for r in s.values()) for n, s in summary.items()}
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, mine)
        waited = {n: t - min(e.get(n, t) for e in everybody) for n, t in mine.items()}
    if dist.get_rank() == 0:
        print(f"{'Comm. Op':<24}{'Bytes':>14}{'Count':>8}{'Total ms':>12}{'Mean ms':>12}")
        for name, sizes in summary.items():
            for size, row in sizes.items():
                times = f"{row['total_latency_ms']:>12.2f}{row['avg_latency_ms']:>12.2f}"
                print(f"{name:<24}{size:>14}{row['count']:>8}{times}", flush=True)
    if not return_dict:
        return None
    metadata = {
        "world_size": dist.get_world_size(),
        "rank": dist.get_rank(),
        "timestamp": datetime.now().isoformat(),
    }
    return {"summary": summary, "straggler_analysis": waited, "metadata": metadata}


def has_comm_data() -> bool:
    """Whether anything was logged."""
    return bool(comms_logger.comms_dict)


def get_logged_comm_ops() -> list[str]:
    """Functions that were logged."""
    return list(comms_logger.comms_dict)


def get_comm_operation_count(op_name: str) -> int:
    """Calls of a function that were logged."""
    return sum(map(len, comms_logger.comms_dict.get(op_name, {}).values()))


def reset_log() -> None:
    """Forgets what was logged."""
    comms_logger.reset()


# ---- operations --------------------------------------------------------------------------------


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes_of, value))
    return 0


def _served(function: Callable[..., Any], names: Sequence[str] = ()) -> Any:
    """torch.distributed's function; DeepSpeed's own arguments are taken out, and calls logged.

    names: of the first arguments, as DeepSpeed has them.
    """
    name = function.__name__
    theirs = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        _group_is_there()
        log = {key: options.pop(key) for key in LOGGED if key in options}
        for mine, other in zip(names, theirs):
            if mine in options:
                options[other] = options.pop(mine)
        if not comms_logger.takes(name, bool(log.get("prof"))):
            return function(*arguments, **options)
        start = time.perf_counter()
        result = function(*arguments, **options)
        if result is not None and hasattr(result, "wait"):
            result.wait()
        get_accelerator().synchronize()
        size = max(map(_bytes_of, [*arguments, *options.values()]), default=0)
        shown = f"{name} | {log['log_name']}" if comms_logger.debug and "log_name" in log else name
        comms_logger.append(name, shown, 1000 * (time.perf_counter() - start), size)
        return result

    return call


all_reduce = _served(dist.all_reduce)
reduce = _served(dist.reduce)
broadcast = _served(dist.broadcast)
all_gather = _served(dist.all_gather)
all_gather_into_tensor = _served(dist.all_gather_into_tensor, ("output_tensor", "tensor"))
reduce_scatter = _served(dist.reduce_scatter)
reduce_scatter_tensor = _served(dist.reduce_scatter_tensor, ("output_tensor", "tensor"))
all_to_all_single = _served(dist.all_to_all_single, ("output", "tensor"))
all_to_all = _served(dist.all_to_all)
gather = _served(dist.gather)
scatter = _served(dist.scatter)
send = _served(dist.send)
recv = _served(dist.recv)
isend = _served(dist.isend)
irecv = _served(dist.irecv)
barrier = _served(dist.barrier)
monitored_barrier = _served(dist.monitored_barrier)
all_gather_object = _served(dist.all_gather_object)
broadcast_object_list = _served(dist.broadcast_object_list)
allgather_fn = all_gather_into_tensor
reduce_scatter_fn = reduce_scatter_tensor
inference_all_reduce = all_reduce


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **log: Any,
) -> Any:
    """all_reduce() of several tensors; with async_op something to wait() for."""
    works = [all_reduce(tensor, op, group, async_op, **log) for tensor in tensors]
    return _Works(works) if async_op else None


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """all_gather_into_tensor() of several pairs; with async_op something to wait() for."""
    pairs = zip(output_tensors, input_tensors)
    works = [all_gather_into_tensor(out, x, group, async_op) for out, x in pairs]
    return _Works(works) if async_op else None


class _Works:
    """Several operations as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def has_all_gather_into_tensor() -> bool:
    """Always."""
    return True


has_reduce_scatter_tensor = has_all_gather_into_tensor
has_all_reduce_coalesced = has_all_gather_into_tensor


def has_coalescing_manager() -> bool:
    """Whether several calls can be one: not here."""
    return False
