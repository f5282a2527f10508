#!/usr/bin/env python3
"""Runs libsotto and the numpy model side by side; parameters have to be equal bit for bit after every step.

usage: model_test.py LIBSOTTO
"""
import functools
import itertools
import json
import sys

import numpy as np

import model
from sotto_library import Library

f32 = np.float32
SIZES = [37, 1, 0, 1000, 129, 8193, 7]
STEPS = 48

CASES = {
    "Lion": (model.Lion, {}),
    "OneBitAdam": (model.OnebitAdam, {"freeze_step": 6}),
    "OneBitLamb": (model.OnebitLamb, {"freeze_step": 6, "max_coeff": 0.3, "min_coeff": 0.01, "coeff_beta": 0.9,
                                      "factor_max": 4.0, "factor_min": 0.5, "factor_threshold": 0.1}),
    "ZeroOneAdam": (model.ZeroOneAdam, {"var_freeze_step": 12, "var_update_scaler": 3, "local_step_scaler": 8,
                                        "local_step_clipper": 4}),
}


def start_values():
    rng = np.random.default_rng(7)
    return rng.standard_normal(sum(SIZES)).astype(f32)


NEVER_COMPRESSED = (1, 3, 6)  # tensors, in one variant of 1-bit Adam
UNUSED = slice(40, 60)  # of elements that never have a gradient, as position embeddings beyond the sequence
LATE = 6  # step of the first gradient of these, in one variant of 0/1 Adam: behind a compressed one


@functools.cache
def noise(step, rank, n):
    return np.random.default_rng(1000 * step + rank).standard_normal(n).astype(f32)


def gradients(step, rank, params, unused=True):
    g = f32(0.1) * params + f32(0.05) * noise(step, rank, len(params))
    if unused:
        g[UNUSED] = 0
    return g


def hyper_of(kind, weight_decay):
    return {"lr": 0.01, "b1": 0.9, "b2": 0.99, "eps": 1e-6, "wd": weight_decay, "chunk_align": 64, **CASES[kind][1]}


def config_of(kind, hyper, section=None):
    """The same as a DeepSpeed configuration. section: the library's own keys."""
    own = {key: hyper[key] for key in CASES[kind][1]}
    if kind != "Lion":
        own["eps"] = hyper["eps"]
    return json.dumps({"optimizer": {"type": kind, "params": {
        "lr": hyper["lr"], "betas": [hyper["b1"], hyper["b2"]], "weight_decay": hyper["wd"], **own}},
        "sotto": section or {"chunk_align": hyper["chunk_align"]}})


def compare(library, kind, world, weight_decay, variant):
    maker, hyper = CASES[kind][0], hyper_of(kind, weight_decay)
    compat = variant.startswith("compat")
    used_from = {"compat": 0, "compat, flat": 0, "used late": LATE}.get(variant, STEPS)
    section = {"mode": "compat"} if compat else {"chunk_align": hyper["chunk_align"]}
    if variant == "compat, flat":
        section["granularity"] = "flat"
    groups = [0] * len(SIZES)
    if variant == "partly compressed":
        hyper["non_freeze"] = NEVER_COMPRESSED
        section["param_groups"] = [{}, {"non_freeze": True}]
        groups = [int(t in NEVER_COMPRESSED) for t in range(len(SIZES))]
    mask = None
    if variant == "compat, masked":
        hyper["mask"] = mask = np.ones(sum(SIZES), bool)
        mask[UNUSED] = False
    hyper.update(section)
    start = start_values()
    reference = maker(start, SIZES, world, hyper)
    wanted, fed = [], []
    for step in range(STEPS):
        of_rank = [reference.params_of(r) if hasattr(reference, "params_of") else reference.p for r in range(world)]
        fed.append([gradients(step, r, of_rank[r], step < used_from) for r in range(world)])
        reference.step(fed[-1])
        wanted.append([(reference.params_of(r) if hasattr(reference, "params_of") else reference.p).copy()
                       for r in range(world)])
    config = config_of(kind, hyper, section)

    def body(comm, rank):
        p, g = start.copy(), np.zeros_like(start)
        tensors, at = [], 0
        for i, size in enumerate(SIZES):
            of_tensor = slice(at, at + size)
            of_mask = None if mask is None else mask[of_tensor]
            tensors.append((f"t{i}", groups[i], p[of_tensor], g[of_tensor], of_mask))
            at += size
        optimizer = library.optimizer(comm, config, tensors)
        for step in range(STEPS):
            g[:] = fed[step][rank]
            library.step(optimizer)
            differ = np.flatnonzero(p.view(np.uint32) != wanted[step][rank].view(np.uint32))
            if differ.size:
                i = differ[0]
                raise AssertionError(f"step {step}: {differ.size} parameters differ, the first is [{i}]: library {p[i]!r}, "
                                     f"model {wanted[step][rank][i]!r}")
        library.destroy(optimizer)

    library.run(world, body)


def report(comparisons, steps):
    """Makes them all, (name, function) each, and says how they ended. Returns the exit code."""
    failed = 0
    for name, compared in comparisons:
        try:
            compared()
            print(f"ok      {name}: {steps} steps", flush=True)
        except (AssertionError, RuntimeError) as error:
            failed += 1
            print(f"FAILED  {name}: {error}", flush=True)
    return 1 if failed else 0


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    library = Library(sys.argv[1])
    comparisons = []
    for kind in CASES:
        for world in (1, 2, 3, 4, 5, 8):
            variants = ["strict", "compat", "compat, masked"] + ["partly compressed"] * (kind == "OneBitAdam")
            variants += ["compat, flat"] * (kind != "OneBitLamb") + ["used late"] * (kind == "ZeroOneAdam")
            if kind == "Lion":  # which compresses nothing
                variants = ["strict"]
            for weight_decay, variant in itertools.product((0.0, 0.01), variants):
                name = f"{kind}, {variant}, {world} ranks, weight decay {weight_decay}"
                comparisons.append((name, functools.partial(compare, library, kind, world, weight_decay, variant)))
    sys.exit(report(comparisons, STEPS))


if __name__ == "__main__":
    main()
