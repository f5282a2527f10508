#!/usr/bin/env python3
"""One rank of torch.distributed with gloo: fp32 is its all-reduce, 1bit a list of operations on top of its collectives
(eager_onebit.py). What it is told: sides.py. Argument: the control socket."""

import importlib.util
import json
import os
import socket
import sys
import time

import torch
import torch.distributed as dist

SLICE = 1 << 22  # elements of temporary arrays


def values(first, last, rank):
    """Elements first .. last - 1 of a rank's input, float64."""
    index = torch.arange(first, last, dtype=torch.int64)
    code = (index * 2654435761 + rank * 2246822519) & 0xFFFFFFFF
    code = ((code ^ code >> 15) * 3266489917) & 0xFFFFFFFF  # int64 wraps around, which its low bits do not see
    return (code >> 16).double() / 32768 - 1


def slices(n):
    return ((first, min(first + SLICE, n)) for first in range(0, n, SLICE))


class Rank:
    def __init__(self):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method="env://")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.data, self.eager = torch.zeros(1), None
        dist.all_reduce(self.data)  # connections are there before anything is timed

    def _fill(self):
        for first, last in slices(len(self.data)):
            self.data[first:last] = values(first, last, self.rank)

    def size(self, n):
        self.data = torch.zeros(int(n))
        self.eager = None
        return {}

    def _reduce(self, method):
        """fp32: sums. 1bit: means, whose residuals last until the size changes."""
        if method == "fp32":
            dist.all_reduce(self.data)
            return self.ranks
        if self.eager is None:
            from eager_onebit import EagerOneBit  # needs numpy, which the rest does not
            self.eager = EagerOneBit(len(self.data))
        self.eager.mean(self.data)
        return 1

    def check(self, method):
        self._fill()
        self.eager = None
        divisor = self._reduce(method)
        worst = squares = of_mean = 0.0
        checksum = 0
        for first, last in slices(len(self.data)):
            mean = sum(values(first, last, r) for r in range(self.ranks)) / self.ranks
            off = self.data[first:last].double() / divisor - mean
            worst = max(worst, float(off.abs().max()))
            squares += float((off * off).sum())
            of_mean += float((mean * mean).sum())
            # Words of the result times odd numbers, modulo 2^64.
            words = self.data[first:last].view(torch.int32).long()
            checksum += int((words * (2 * torch.arange(first, last) + 1)).sum())
        return {"checksum": f"{checksum % 2**64:016x}", "error_max": worst,
                "error_rms": (squares / of_mean) ** 0.5 if of_mean else 0.0}

    def series(self, method, dropped, counted):
        # In place, the sums of sums: a copy before each would be timed too.
        self._fill()
        for _ in range(int(dropped)):
            self._reduce(method)
        dist.barrier()
        start = time.perf_counter_ns()
        for _ in range(int(counted)):
            self._reduce(method)
        return {"ns": time.perf_counter_ns() - start}

    def singles(self, method, counted):
        times = []
        for _ in range(int(counted)):
            dist.barrier()
            start = time.perf_counter_ns()
            self._reduce(method)
            times.append(time.perf_counter_ns() - start)
        return {"ns": times}

    def obey(self, line):
        command, *words = line.split()
        if command == "size":
            return self.size(*words)
        if command in ("check", "series", "singles") and words and words[0] in ("fp32", "1bit"):
            return getattr(self, command)(*words)
        raise ValueError(f"a command that this rank does not know: {line}")


def main():
    control = socket.socket(socket.AF_UNIX)
    control.connect(sys.argv[1])

    def write(reply):
        control.sendall(json.dumps(reply).encode() + b"\n")

    try:
        rank = Rank()
        write({"rank": rank.rank, "pid": os.getpid(), "numpy": importlib.util.find_spec("numpy") is not None})
        for line in control.makefile("r", encoding="utf-8"):
            write(rank.obey(line.strip()))
    except Exception as error:  # whatever it is, it is the answer
        write({"error": f"{type(error).__name__}: {error}"})
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
