"""Data-parallel training in JAX: sotto-run -n 4 -- python3 train.py

A network with two layers learns a function of 16 numbers with 1-bit Adam; every rank has samples of
its own. Loss and gradient are jitted; between two of them stands the step, which averages.
"""

import jax
import jax.numpy as jnp

import sotto
import sotto.jax

INPUTS, HIDDEN, BATCH, STEPS = 16, 32, 64, 60


def init(key):
    first, second = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(first, (INPUTS, HIDDEN)) / 4, "b": jnp.zeros(HIDDEN)},
        "out": {"w": jax.random.normal(second, (HIDDEN, 1)) / 6, "b": jnp.zeros(1)},
    }


def loss(params, x):
    y = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    error = y @ params["out"]["w"] + params["out"]["b"] - jnp.sin(x.sum(1, keepdims=True) / 4)
    return jnp.mean(error**2)


def main():
    with sotto.init_process_group(timeout=60) as comm:
        params = sotto.jax.broadcast(init(jax.random.key(0)))
        loss_and_gradient = jax.jit(jax.value_and_grad(loss))
        losses, config = [], {"lr": 5e-3, "freeze_step": 30}
        with sotto.jax.Optimizer(params, kind="OneBitAdam", **config) as optimizer:
            for key in jax.random.split(jax.random.key(1 + comm.rank), STEPS):
                value, grads = loss_and_gradient(params, jax.random.normal(key, (BATCH, INPUTS)))
                params = optimizer.step(grads)  # collective: averages, clips, updates
                losses.append(sotto.jax.all_reduce(value, op="mean"))
        print(
            f"rank {comm.rank} of {comm.size}: loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True
        )


if __name__ == "__main__":
    main()
