"""Linear regression with 1-bit Adam on several ranks, on the array module's buffers: needs sotto alone.

Rank, size and rendezvous come from the environment of whatever has started it.
"""

import array
import random

import sotto

INPUTS, BATCH, STEPS = 16, 64, 20
CONFIG = {"type": "OneBitAdam", "params": {"lr": 0.05, "freeze_step": 10, "betas": (0.8, 0.9)}}


def loss_and_gradient(weights, gradients, truth, rng):
    """Half the mean squared error of a fresh batch, whose gradient goes to gradients."""
    for i in range(INPUTS):
        gradients[i] = 0.0
    loss = 0.0
    for _ in range(BATCH):
        x = [rng.gauss(0, 1) for _ in range(INPUTS)]
        error = sum(a * (w - t) for a, w, t in zip(x, weights, truth))
        loss += error * error / (2 * BATCH)
        for i in range(INPUTS):
            gradients[i] += error * x[i] / BATCH
    return loss


def main():
    with sotto.init_process_group(timeout=60) as comm:
        weights, gradients = array.array("f", [0.0] * INPUTS), array.array("f", [0.0] * INPUTS)
        truth = [random.Random(i).gauss(0, 0.5) for i in range(INPUTS)]
        rng, losses = random.Random(100 + comm.rank), array.array("d")
        parameter = (weights, gradients, "weights")
        with sotto.optim.Optimizer([parameter], kind=CONFIG["type"], comm=comm, **CONFIG["params"]) as optimizer:
            for _ in range(STEPS):
                losses.append(loss_and_gradient(weights, gradients, truth, rng))
                optimizer.step().wait()
        low, high = array.array("f", weights), array.array("f", weights)
        comm.all_reduce(low, op="min").wait()
        comm.all_reduce(high, op="max").wait()
        assert low.tobytes() == high.tobytes(), "ranks have different weights"
        comm.all_reduce(losses, op="mean").wait()
        assert losses[-1] < 0.5 * losses[0], losses
        print(f"rank {comm.rank} of {comm.size}: {STEPS} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
