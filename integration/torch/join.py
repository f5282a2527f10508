"""Joining the other ranks, by Sotto, by PyTorch with gloo, or both."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

import sotto
from sotto.launch import detect, rendezvous


class Ranks:
    """This rank and what the ranks do beside training: counting, agreeing, meeting."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.comm: sotto.Comm | None = None  # of optimizer steps
        self._aside: sotto.Comm | None = None  # so that the comm's counters are those of steps

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self._aside is not None:
            self._aside.barrier().wait()
        else:
            dist.barrier()

    def _all_gather(self, values: torch.Tensor) -> torch.Tensor:
        out = torch.empty(self.size * values.numel(), dtype=values.dtype)
        if self._aside is not None:
            self._aside.all_gather(values, out).wait()
        else:
            dist.all_gather(list(out.chunk(self.size)), values)
        return out.view(self.size, -1)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, which JSON can hold."""
        text = json.dumps(value).encode()
        lengths = self._all_gather(torch.tensor([len(text)])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self._all_gather(padded)
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, lengths)]

    def together(self, what: str, work: Callable[[], Any]) -> None:
        """Runs work() on every rank; an error of one is one of all, so that none waits for ever.

        Errors: this rank's own; sotto.SottoError that names the other one."""
        failure = None
        try:
            work()
        except Exception as error:
            failure = error
        failed = [rank for rank, bad in enumerate(self.gather(failure is not None)) if bad]
        if failed:
            # A rank that ended now would be lost to others, which have not all been told yet.
            with contextlib.suppress(sotto.SottoError, RuntimeError):
                self.barrier()
        if failure is not None:
            raise failure
        if failed:
            raise sotto.SottoError(f"{what} failed on rank {failed[0]}, which says why")

    def leave(self) -> None:
        """The end of a run that went well."""
        for comm in (self._aside, self.comm):
            if comm is not None:
                comm.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _join_gloo(rank: int, size: int, comm: sotto.Comm | None) -> None:
    """torchrun's variables are enough for PyTorch. Started by others, ranks meet through Sotto and
    rank 0 tells them a port that was free."""
    by_torchrun = "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ
    if by_torchrun and "SOTTO_RENDEZVOUS" not in os.environ:
        dist.init_process_group("gloo", rank=rank, world_size=size)
        return
    where = rendezvous(os.environ)
    host = (urlsplit(where).hostname if where else None) or "127.0.0.1"
    met = comm if comm is not None else sotto.create_comm(rank=rank, world_size=size)
    port, store = torch.zeros(1, dtype=torch.int64), None
    if rank == 0:
        store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
        port[0] = store.port
    met.broadcast(port).wait()
    if store is None:
        store = dist.TCPStore(host, int(port), size, is_master=False)
    if met is not comm:
        met.close()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def join(with_sotto: bool, with_gloo: bool) -> Ranks:
    """Ranks as torchrun, sotto-run, mpirun or srun have started them; alone without a launcher."""
    found = detect(os.environ)
    rank, size = (found.rank, found.world_size) if found else (0, 1)
    ranks = Ranks(rank, size)
    if with_sotto:
        ranks.comm = sotto.init_process_group(world_size=None if found else 1)
        ranks._aside = ranks.comm.split(0)
    if with_gloo:
        _join_gloo(rank, size, ranks.comm)
    return ranks
