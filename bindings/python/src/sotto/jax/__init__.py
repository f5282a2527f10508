"""Sotto for JAX: collectives, optimizers and outer steps on arrays and trees of them.

Arrays of JAX are never written: every function returns new ones. A program for sotto-run, torchrun,
mpirun or srun, one device per rank:

    import jax, jax.numpy as jnp
    import sotto, sotto.jax

    sotto.init_process_group()
    params = sotto.jax.broadcast({"w": jnp.zeros(4), "b": jnp.zeros(())})
    gradient = jax.jit(jax.grad(lambda p, x: jnp.mean((x @ p["w"] + p["b"] - x.sum(1)) ** 2)))
    optimizer = sotto.jax.Optimizer(params, kind="OneBitAdam", lr=1e-2, freeze_step=20)
    for step in range(40):
        x = jax.random.normal(jax.random.key(step), (8, 4))  # this rank's batch
        params = optimizer.step(gradient(params, x))  # collective: averages, clips, updates

all_reduce, all_reduce_async,  collectives on trees; with an optimizer of optax, averages of its
broadcast, all_gather,         gradients: sotto.jax.all_reduce(grads, op="mean")
reduce_scatter, reduce,
send, recv, codec
Optimizer                      those of ``sotto.optim``: in full precision, or in one bit
Outer                          outer steps around inner ones of your own: local SGD, DiLoCo, CO2

Calls stand between jitted functions, not inside one: what is traced there has no values, and is
refused with an error. Arrays lie on one device each, in host memory or on a CUDA device. Nothing in
``sotto`` imports this; JAX is not a dependency.
"""

from __future__ import annotations

from .collectives import (
    Pending,
    all_gather,
    all_reduce,
    all_reduce_async,
    broadcast,
    codec,
    recv,
    reduce,
    reduce_scatter,
    send,
)
from .optim import Optimizer
from .outer import Outer

__all__ = [
    "Optimizer",
    "Outer",
    "Pending",
    "all_gather",
    "all_reduce",
    "all_reduce_async",
    "broadcast",
    "codec",
    "recv",
    "reduce",
    "reduce_scatter",
    "send",
]
