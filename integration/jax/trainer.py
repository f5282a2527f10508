"""A trainer in one page: linear regression with the optimizer of a DeepSpeed file, on ranks.

    sotto-run -n 4 -- python3 trainer.py CONFIG.json [RECORDING]

Every rank has samples of its own; Sotto averages what they learn from them. With RECORDING the
parameters and gradients are those that bindings/tests/record.c has written of another trainer to
RECORDING.rank<R>. Rank 0 prints a hash of the parameters at the end: equal hashes, equal
parameters, bit for bit.
"""

import sys
from collections import OrderedDict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import sotto
import sotto.jax

INPUTS, BATCH, STEPS = 64, 16, 900  # BATCH: samples per rank and step


def loss(params, x, truth):
    """The task: find the weights that made the targets."""
    return 0.5 * jnp.mean((x @ (params["weights"] - truth)) ** 2)


def train(comm, config):
    truth = 0.1 * jax.random.uniform(jax.random.key(12345), INPUTS, minval=-1.0)
    params, first = {"weights": jnp.full(INPUTS, 0.01)}, None
    optimizer = sotto.jax.Optimizer(params, config, comm=comm)
    loss_and_gradient = jax.jit(jax.value_and_grad(loss))
    for step, key in enumerate(jax.random.split(jax.random.key(comm.rank + 1), STEPS)):
        x = jax.random.uniform(key, (BATCH, INPUTS), minval=-1.0)
        value, grads = loss_and_gradient(params, x, truth)
        params = optimizer.step(grads)  # collective: averages, clips, updates
        if step % 100 == 0 or step + 1 == STEPS:
            mean = float(sotto.jax.all_reduce(value, op="mean", comm=comm))
            first = first or mean
            if comm.rank == 0:
                print(f"step {step:3}  loss {mean:.4f}", flush=True)
    if mean > 0.2 * first:
        raise SystemExit(f"the loss is {mean}, it was {first}")
    return optimizer, params


def numbers(file, n):
    return [int(number) for number in np.fromfile(file, np.uint64, n)]


def floats(file, n):
    return jnp.asarray(np.fromfile(file, np.float32, n))


def repeat(comm, config, path):
    """What record.c writes: tensors, then step by step the gradient of each."""
    params, groups = OrderedDict(), {}  # in this order, which the bits depend on
    with Path(path).open("rb") as file:
        for _ in range(numbers(file, 1)[0]):
            length, group, count = numbers(file, 3)
            name = file.read(length).decode()
            groups[name], params[name] = group, floats(file, count)
        optimizer = sotto.jax.Optimizer(params, config, comm=comm, group=groups.__getitem__)
        while file.tell() < Path(path).stat().st_size:
            grads = OrderedDict((name, floats(file, x.size)) for name, x in params.items())
            params = optimizer.step(grads)
    return optimizer, params


def params_hash(params):
    """FNV-1a over all parameters."""
    value = 0xCBF29CE484222325
    for byte in b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)):
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def main(config, recording=None):
    config = Path(config)
    with sotto.init_process_group() as comm:
        if recording is None:
            optimizer, params = train(comm, config)
        else:
            optimizer, params = repeat(comm, config, f"{recording}.rank{comm.rank}")
        with optimizer:
            info, sent = optimizer.base.info(), comm.counters().payload_bytes_sent
        if comm.rank == 0:
            what = f"{info.step} steps, stage {info.stage}, {sent} bytes"
            print(f"{what}, params_hash {params_hash(params)}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: trainer.py CONFIG.json [RECORDING]")
    main(*sys.argv[1:])
