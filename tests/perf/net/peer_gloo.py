#!/usr/bin/env python3
"""One rank of torch.distributed with gloo. What it is told: sides.py. Argument: the control socket."""

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
        self.data = torch.zeros(1)
        dist.all_reduce(self.data)  # connections are there before anything is timed

    def _fill(self):
        for first, last in slices(len(self.data)):
            self.data[first:last] = values(first, last, self.rank)

    def size(self, n):
        self.data = torch.zeros(int(n))
        return {}

    def check(self):
        self._fill()
        dist.all_reduce(self.data)
        worst = squares = of_mean = 0.0
        checksum = 0
        for first, last in slices(len(self.data)):
            mean = sum(values(first, last, r) for r in range(self.ranks)) / self.ranks
            off = self.data[first:last].double() / self.ranks - mean
            worst = max(worst, float(off.abs().max()))
            squares += float((off * off).sum())
            of_mean += float((mean * mean).sum())
            # Words of the result times odd numbers, modulo 2^64.
            words = self.data[first:last].view(torch.int32).long()
            checksum += int((words * (2 * torch.arange(first, last) + 1)).sum())
        return {"checksum": f"{checksum % 2**64:016x}", "error_max": worst,
                "error_rms": (squares / of_mean) ** 0.5 if of_mean else 0.0}

    def series(self, dropped, counted):
        # In place, the sums of sums: a copy before each would be timed too.
        self._fill()
        for _ in range(int(dropped)):
            dist.all_reduce(self.data)
        dist.barrier()
        start = time.perf_counter_ns()
        for _ in range(int(counted)):
            dist.all_reduce(self.data)
        return {"ns": time.perf_counter_ns() - start}

    def singles(self, counted):
        times = []
        for _ in range(int(counted)):
            dist.barrier()
            start = time.perf_counter_ns()
            dist.all_reduce(self.data)
            times.append(time.perf_counter_ns() - start)
        return {"ns": times}

    def obey(self, line):
        command, *words = line.split()
        if command == "size":
            return self.size(*words)
        if command in ("check", "series", "singles") and words and words[0] == "fp32":
            return getattr(self, command)(*words[1:])
        raise ValueError(f"a command that this rank does not know: {line}")


def main():
    control = socket.socket(socket.AF_UNIX)
    control.connect(sys.argv[1])

    def write(reply):
        control.sendall(json.dumps(reply).encode() + b"\n")

    try:
        rank = Rank()
        write({"rank": rank.rank, "pid": os.getpid()})
        for line in control.makefile("r", encoding="utf-8"):
            write(rank.obey(line.strip()))
    except Exception as error:  # whatever it is, it is the answer
        write({"error": f"{type(error).__name__}: {error}"})
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
