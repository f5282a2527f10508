#!/usr/bin/env python3
"""Checkpoints of DeepSpeed's form, made by the numpy model in the middle of a run, imported into libsotto: both go on from
there, and parameters have to be equal bit for bit after every step.

usage: import_test.py LIBSOTTO
"""
import copy
import sys

import numpy as np

import model
from model_test import CASES, SIZES, config_of, gradients, hyper_of, start_values
from sotto_library import Library

f32 = np.float32
MORE = 14  # steps after the import


def number(value):
    return np.array([value], np.int64 if isinstance(value, int) else np.float64)


def per_parameter(name, vector):
    """`vector` cut into the parameters that have elements."""
    ends = np.cumsum(SIZES)
    return {f"t{i}/{name}": vector[end - size:end].copy() for i, (size, end) in enumerate(zip(SIZES, ends)) if size}


def of_parameters(name, values):
    """One number of each parameter that has elements, or one for all."""
    names = [f"t{i}" for i, size in enumerate(SIZES) if size]
    values = values if isinstance(values, list) else [values] * len(names)
    return {f"{tensor}/{name}": number(value) for tensor, value in zip(names, values)}


def checkpoint(run, flat):
    """What DeepSpeed would have saved. flat: groups are flattened, as under fp16."""
    frozen = getattr(run, "frozen", False)
    vectors = {"fp32": run.ps[0] if frozen else run.p, "exp_avg": run.ms[0] if frozen else run.m, "exp_avg_sq": run.v}
    numbers = {"step": run.t}
    if isinstance(run, model.OnebitLamb):
        vectors["exp_avg_sq_fresh"] = run.vf if run.compressed else np.zeros_like(run.v)
        numbers.update(lamb_coeff_freeze=run.c_avg, last_factor=run.last)
        if run.compressed:
            numbers["scaling_coeff"] = run.scaling
    if isinstance(run, model.ZeroOneAdam):
        numbers.update(var_interval=run.var_interval, var_counter=run.var_counter, local_step_interval=run.local_interval,
                       local_step_counter=run.local_counter, lrs=run.lr_sum)
        vectors["momentum_accumulator"] = run.ps[0] - run.anchor if frozen else np.zeros_like(run.p)
    out = {}
    for name, vector in vectors.items():
        out.update({f"group:0/{name}": vector.copy()} if flat else per_parameter(name, vector))
    for name, value in numbers.items():
        whole = flat and not isinstance(value, list)
        out.update({f"group:0/{name}": number(value)} if whole else of_parameters(name, value))
    return out


def reload(run, own):
    """The model as a load leaves it: no error feedback, and the stage that the new configuration says."""
    run.h.update(own)
    run.compressor = model.Compressor(len(run.p), run.world, run.h["chunk_align"])
    if isinstance(run, model.ZeroOneAdam):
        if run.frozen:
            frozen = run.t > run.h["var_freeze_step"]
            run.p, run.m, run.lr_sum, run.d = run.ps[0].copy(), run.ms[0].copy(), 0.0, 1.0
            run.frozen = False
            run.valid[:] = True
            if frozen:
                run.freeze()
        return
    late = run.t >= run.h["freeze_step"]
    if run.compressed and not late:
        run.compressed = False
        run.valid[:] = True
    if isinstance(run, model.OnebitLamb) and not late:
        n = len(run.tensors)
        run.c_avg, run.last, run.scaling = [0.0] * n, [1.0] * n, [1.0] * n
    if late and not run.compressed:
        if isinstance(run, model.OnebitLamb):
            run.start()
        run.compressed = True
        run.mask_zero_variance()


def params_of(run, rank):
    return run.params_of(rank) if hasattr(run, "params_of") else run.p


def go(run, steps, first):
    """Steps of the model; the gradients and then the parameters of every rank."""
    fed, wanted = [], []
    for step in range(first, first + steps):
        fed.append([gradients(step, r, params_of(run, r)) for r in range(run.world)])
        run.step(fed[-1])
        wanted.append([params_of(run, r).copy() for r in range(run.world)])
    return fed, wanted


def differ(got, wanted):
    return got.view(np.uint32) != wanted.view(np.uint32)


def roughly_differ(got, wanted):
    """Where arithmetic is not the same: a sign of a 1-bit value may flip near 0, so a few elements are let off."""
    far = np.abs(got - wanted) > 1e-6 + 1e-5 * np.abs(wanted)
    return far if far.mean() > 2e-3 else np.zeros_like(far)


def follow(library, kind, run, arrays, first, differs=differ):
    """Imports into a fresh optimizer with other parameters and compares its steps with the model's."""
    fed, wanted = go(run, MORE, first)

    def body(comm, rank):
        p, g = np.full_like(run.p, 9), np.zeros_like(run.p)
        ends = np.cumsum(SIZES)
        tensors = [(f"t{i}", 0, p[end - size:end], g[end - size:end], None) for i, (size, end) in enumerate(zip(SIZES, ends))]
        optimizer = library.optimizer(comm, config_of(kind, run.h), tensors)
        library.import_arrays(optimizer, arrays)
        for step in range(MORE):
            g[:] = fed[step][rank]
            library.step(optimizer)
            where = np.flatnonzero(differs(p, wanted[step][rank]))
            if where.size:
                i = where[0]
                raise AssertionError(f"step {step} after the import: {where.size} parameters differ, the first is [{i}]: "
                                     f"library {p[i]!r}, model {wanted[step][rank][i]!r}")
        library.destroy(optimizer)

    library.run(run.world, body)


# Steps before the import (the switches are after 5 and after 12 steps), and what the new configuration changes.
ONEBIT_LOADS = [("in warm-up", 3, {}), ("at the switch", 5, {}), ("compressed", 10, {}),
                ("back to warm-up", 10, {"freeze_step": 18}), ("switch brought forward", 4, {"freeze_step": 3})]
LOADS = {
    "OneBitAdam": ONEBIT_LOADS,
    "OneBitLamb": ONEBIT_LOADS,
    "ZeroOneAdam": [("variance updated", 5, {}), ("at the freeze", 12, {}), ("frozen", 15, {}), ("between", 33, {}),
                    ("back to phase A", 15, {"var_freeze_step": 22})],
}
# What belongs together may be absent together: 0/1 Adam without local updates, 1-bit LAMB before its first compressed step.
WITHOUT = {"ZeroOneAdam": ("lrs", "momentum_accumulator"), "OneBitLamb": ("scaling_coeff", "exp_avg_sq_fresh", "last_factor")}


def without(arrays, kind):
    return {name: value for name, value in arrays.items() if name.split("/")[-1] not in WITHOUT[kind]}


def load(library, kind, world, weight_decay, flat, title, steps, own):
    run = CASES[kind][0](start_values(), SIZES, world, hyper_of(kind, weight_decay))
    go(run, steps, 0)
    assert title != "between" or run.lr_sum, "the run is not between synchronisations"
    arrays = checkpoint(run, flat)
    after = copy.deepcopy(run)
    reload(after, own)
    if kind == "ZeroOneAdam":
        follow(library, kind, after, without(arrays, kind), steps)
        if own or not run.frozen:
            return
        # Every rank goes on from what rank 0 was in the middle of.
        run.compressor = model.Compressor(len(run.p), world, run.h["chunk_align"])
        for mine in (run.ms, run.sums, run.ps):
            mine[:] = [mine[0].copy() for _ in range(world)]
        follow(library, kind, run, arrays, steps, roughly_differ if run.lr_sum else differ)
        return
    follow(library, kind, after, arrays, steps)
    if kind == "OneBitLamb" and steps == 5:
        follow(library, kind, copy.deepcopy(run), without(arrays, kind), steps)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    library = Library(sys.argv[1])
    failed = 0
    cases = [(kind, moment, world, flat, weight_decay) for kind, moments in LOADS.items() for world in (1, 2, 3)
             for moment in moments for flat in (False, True) for weight_decay in (0.0, 0.01)]
    for kind, (title, steps, own), world, flat, weight_decay in cases:
        name = f"{kind}, {world} ranks, {title}, {'groups' if flat else 'parameters'}, weight decay {weight_decay}"
        try:
            load(library, kind, world, weight_decay, flat, title, steps, own)
            print(f"ok      {name}")
        except (AssertionError, RuntimeError) as error:
            failed += 1
            print(f"FAILED  {name}: {error}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
