#!/usr/bin/env python3
"""Runs libsotto in two levels and the numpy model side by side: equal bit for bit on every rank, after every step.

usage: hierarchy_test.py LIBSOTTO [FILTER]   (FILTER: a part of the names of comparisons)
"""
import functools
import json
import sys

import numpy as np

import hierarchy_codecs as codecs
import hierarchy_model as two
import model_test as flat
import outer_library_test as outer
from outer_toy import close
from sotto_library import Library

f32 = np.float32
STEPS = 16
ALIGN = 64
# 0/1 Adam: steps that average gradients in one bit, local ones, and synchronisations.
STAGES = {"OneBitAdam": {"freeze_step": 5}, "OneBitLamb": {"freeze_step": 5},
          "ZeroOneAdam": {"var_freeze_step": 6, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 4}}

# By rank, the host: as many hosts as ranks, one host, neighbours, and in turn.
HOSTS = {"1 x 4": [0, 1, 2, 3], "4 x 1": [0, 0, 0, 0], "2 x 2": [0, 0, 1, 1], "2 x 2, in turn": [0, 1, 0, 1],
         "3 x 2": [0, 0, 0, 1, 1, 1], "2 x 3": [0, 1, 2, 2, 1, 0]}


def shape_of(host_of, kind):
    """Shards and hosts."""
    hosts = max(host_of) + 1
    local = len(host_of) // hosts
    return (local if kind == "sharded" and hosts > 1 else 1), hosts


def differ(step, rank, got, wanted):
    at = np.flatnonzero(got.view(np.uint32) != wanted.view(np.uint32))
    if at.size:
        raise AssertionError(f"step {step}, rank {rank}: {at.size} values differ, the first is [{at[0]}]: library "
                             f"{got[at[0]]!r}, model {wanted[at[0]]!r}")


class Reference:
    """An optimizer of the model in two levels. All hosts are alike, but for 0/1 Adam's local steps, which are of ranks."""

    def __init__(self, kind, hyper, host_of, hierarchy):
        self.host_of, self.of_ranks = host_of, kind == "ZeroOneAdam"
        shards, hosts = shape_of(host_of, hierarchy)
        start = flat.start_values()
        compressor = two.ShardedCompressor(len(start), shards, hosts, ALIGN)
        self.model = flat.CASES[kind][0](start, flat.SIZES, len(host_of) if self.of_ranks else hosts, hyper)
        if self.of_ranks:
            self.model.mean = lambda gradients: two.mean(two.means_of_hosts(gradients, host_of))
            self.model.compressor = two.HostsCompressor(compressor, host_of)
        elif hosts > 1:
            self.model.compressor = compressor

    def step(self, gradients):
        self.model.step(gradients if self.of_ranks else two.means_of_hosts(gradients, self.host_of))

    def params_of(self, rank):
        return self.model.params_of(rank) if self.of_ranks else self.model.p


def compare_optimizer(library, kind, host_of, hierarchy):
    hyper = {**flat.hyper_of(kind, 0.01), **STAGES[kind]}
    ranks = range(len(host_of))
    start = flat.start_values()
    reference = Reference(kind, hyper, host_of, hierarchy)
    fed, wanted = [], []
    for step in range(STEPS):
        fed.append([flat.gradients(step, r, reference.params_of(r)) for r in ranks])
        reference.step(fed[-1])
        wanted.append([reference.params_of(r).copy() for r in ranks])
    section = {"chunk_align": ALIGN, "hierarchy": hierarchy}
    config = json.loads(flat.config_of(kind, hyper, section))
    config["optimizer"]["params"].update(STAGES[kind])

    def body(comm, rank):
        p, g = start.copy(), np.zeros_like(start)
        cuts = np.cumsum([0] + flat.SIZES)
        tensors = [(f"t{i}", 0, p[a:b], g[a:b], None) for i, (a, b) in enumerate(zip(cuts, cuts[1:]))]
        optimizer = library.optimizer(comm, json.dumps(config), tensors)
        for step in range(STEPS):
            g[:] = fed[step][rank]
            library.step(optimizer)
            differ(step, rank, p, wanted[step][rank])
        library.destroy(optimizer)

    library.run(len(host_of), body, host_of)


def compare_codec(library, name, host_of, hierarchy):
    codecs.compare(library, name, host_of, hierarchy, shape_of(host_of, hierarchy))


def compare_residuals(library, name, host_of, hierarchy):
    codecs.compare_residuals(library, name, host_of, hierarchy, shape_of(host_of, hierarchy))


def compare_invariants(library, kind, host_of, hierarchy):
    """Those of the specification's 1.8 that one bit keeps in two levels: I2, I3, I7 and I8; and hosts of one rank are one level."""
    shards, hosts = shape_of(host_of, hierarchy)
    n, calls = sum(flat.SIZES), 4
    signs = np.sign(flat.noise(0, 99, n)).astype(f32)
    signs[signs == 0] = 1
    magnitudes = [f32(0.5 * (rank + 1)) for rank in range(len(host_of))]
    found = [None] * len(host_of)

    def body(comm, rank):
        def results(inputs, level=hierarchy):
            codec = library.codec(comm, json.dumps({"type": kind, "chunk_align": ALIGN, "hierarchy": level}), [n])
            out = []
            for x in inputs:
                y = np.zeros(n, f32)
                library.codec_all_reduce(comm, codec, [x], [y])
                out.append(y)
            library.call("sotto_codec_destroy", codec)
            return out

        noise = [flat.noise(call, rank, n) for call in range(calls)]
        once, eight = results(noise), results([f32(8) * x for x in noise])
        for call, (a, b) in enumerate(zip(once, eight)):
            differ(call, rank, b, f32(8) * a)  # I7
            if hosts > 1 and len(np.unique(np.abs(a))) > shards * hosts:  # I3
                raise AssertionError(f"call {call}: {len(np.unique(np.abs(a)))} magnitudes in {shards * hosts} chunks")
        for call, y in enumerate(results([magnitudes[rank] * signs] * calls)):
            off = np.abs(y / (f32(np.mean(magnitudes)) * signs) - 1).max()
            if off > 2 ** -22:  # I8, up to the rounding of the mean
                raise AssertionError(f"call {call}: what loses nothing is off by {off}")
        if len(set(host_of)) == len(host_of):
            for call, y in enumerate(results(noise, "flat")):
                differ(call, rank, once[call], y)
        found[rank] = once

    library.run(len(host_of), body, host_of)
    for rank, ours in enumerate(found):
        for call, y in enumerate(ours):
            differ(call, rank, y, found[0][call])  # I2


# Averages of deltas, of parameters and of gradients' place, with a codec behind dense ones, of several fragments, at once.
OUTER = {
    "co2": lambda: close(beta=0.2, penalty="gap_rel"),
    "parameters": lambda: close(payload="params", beta=0.2, clip="rms", phi=1.5),
    "before outer steps": lambda: close(beta=0.2, warmup_steps=5),
    "half fresh": lambda: close(freshness=0.5, beta=0.2, penalty="gap_ema"),
    "onebit": lambda: close(beta=0.1, delay=1, codec="onebit", chunk_align=8, dense_rounds=2),
    "int8": lambda: close(beta=0.2, codec="int8", chunk_align=256, merge="lerp", merge_a=0.25),
    "bf16, fragments": lambda: close(beta=0.1, codec={"type": "bf16", "residual": False}, fragments=[[3, 0], [4, 1, 2]]),
}


def compare_outer(library, name, host_of, hierarchy):
    settings = OUTER[name]()
    shards, hosts = shape_of(host_of, hierarchy)
    mean = functools.partial(two.mean_of_ranks, host_of=host_of)

    def averages(engine):
        engine.mean_of_ranks = mean
        for fragment in engine.fragments:
            fragment.mean_of_ranks = fragment.dense.mean_of_ranks = mean
            fragment.codec = fragment.dense
            if settings.codec is not None and hosts > 1:
                given = settings.codec if isinstance(settings.codec, dict) else {"type": settings.codec}
                n = sum(t.stop - t.start for t in fragment.tensors)
                codec = two.ShardedCodec(n, shards, hosts, settings.chunk_align, given)
                fragment.codec = two.OuterCodec(codec, host_of)

    text = json.dumps({"sotto": {"hierarchy": hierarchy, "outer": json.loads(outer.described(settings))}})
    outer.compare(library, name, settings, len(host_of), averages=averages, text=text, host_of=host_of)


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    library = Library(sys.argv[1])
    cases = [(compare_codec, kind) for kind in codecs.CODECS]
    cases += [(compare_invariants, "onebit")]
    cases += [(compare_residuals, kind) for kind in codecs.RESIDUALS]
    cases += [(compare_optimizer, kind) for kind in STAGES]
    cases += [(compare_outer, kind) for kind in OUTER]
    comparisons = [(f"{compare.__name__[8:]} {kind}, {name}, {hierarchy}", functools.partial(compare, library, kind, host_of, hierarchy))
                   for compare, kind in cases for name, host_of in HOSTS.items() for hierarchy in ("sharded", "leader")]
    comparisons = [one for one in comparisons if sys.argv[2:] in ([], [""]) or sys.argv[2] in one[0]]
    if not comparisons:
        sys.exit(f"no comparison has {sys.argv[2]!r} in its name")
    sys.exit(flat.report(comparisons, STEPS))


if __name__ == "__main__":
    main()
