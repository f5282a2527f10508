"""Ranks that train quadratics, for checks of the outer optimizers."""
import numpy as np

from model import f32
from outer_model import Outer
from outer_settings import Settings, preset

SIZES = [5, 130, 0, 1, 64]  # tensors of the toy
GAMMA = 2.0**-5


class Toy:
    """Ranks with quadratics of their own: x -= gamma * (eig * (x - c_r) + noise of rank and step)."""

    def __init__(self, settings, world=4, sizes=SIZES, same=False, gamma=GAMMA, checked=True, seed=0):
        rng = np.random.default_rng(seed)
        self.world, self.same, self.gamma, self.seed = world, same, gamma, seed
        start = [rng.standard_normal(n).astype(f32) for n in sizes]
        self.eig = [rng.uniform(0.1, 2, n).astype(f32) for n in sizes]
        self.live = [[x.copy() for x in start] for _ in range(world)]
        self.start = start
        self.outer = Outer(settings, self.live, checked)
        self.t = 0

    def inner(self):
        """One inner step of every rank."""
        self.t += 1
        for r, mine in enumerate(self.live):
            for x, gradient in zip(mine, self.gradients(r)):
                x -= f32(self.gamma) * gradient

    def gradients(self, rank):
        """Those of inner step t on a rank."""
        who = 0 if self.same else rank
        rng = np.random.default_rng([self.seed, who, self.t])
        return [eig * (x - f32(0.25 * who)) + f32(0.2) * rng.standard_normal(x.size).astype(f32)
                for x, eig in zip(self.live[rank], self.eig)]

    def inner_together(self):
        """One inner step with the mean of all ranks' gradients: their sum in ascending order over their number."""
        self.t += 1
        every = [self.gradients(r) for r in range(self.world)]
        for mine in self.live:
            for x, *parts in zip(mine, *every):
                total = parts[0]
                for part in parts[1:]:
                    total = total + part
                x -= f32(self.gamma) * (total / f32(self.world))

    def step(self):
        self.inner()
        return self.outer.step(self.live, self.gamma)

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self

    def vector(self, rank=0):
        """Live values of a rank."""
        return np.concatenate(self.live[rank])

    def anchor(self, rank=0):
        return np.concatenate(self.outer.anchor(rank))

    def spread(self):
        anchors = np.stack([self.anchor(r) for r in range(self.world)])
        return float(np.abs(anchors - anchors[0]).max())  # NaN if one is


def path(settings, steps=24, **toy):
    """Live values of all ranks after every step, as one array."""
    toy, out = Toy(settings, **toy), []
    for _ in range(steps):
        toy.step()
        out.append([toy.vector(r) for r in range(toy.world)])
    return np.array(out)


def same_bits(a, b, what=""):
    differ = np.argwhere(a.view(np.uint32) != b.view(np.uint32))
    if differ.size:
        first = tuple(differ[0])
        raise AssertionError(f"{what}{len(differ)} values differ, the first is {first}: {a[first]!r}, {b[first]!r}")


def near(a, b, tolerance):
    error = float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
    assert error <= tolerance, f"off by {error:.3g}, allowed is {tolerance:.3g}"


def close(**keys):
    """Settings of a delay of one period, 4."""
    return Settings(**{"period": 4, "delay": 4, **keys})


CASES = {
    "co2": lambda w: preset("co2", w, period=4),
    "co2_paper": lambda w: preset("co2_paper", w, period=4),
    "paper, nesterov": lambda w: preset("co2_paper", w, period=4, rule="nesterov", clip="norm", phi=0.05),
    "delta_corrected": lambda w: preset("delta_corrected", w, period=4),
    "eager": lambda w: preset("eager_diloco", w, period=4),
    "half fresh": lambda w: close(freshness=0.5, beta=0.2, penalty="gap_ema", clip="rms"),
    "per tensor": lambda w: close(beta=0.2, penalty="gap_inner", granularity="tensor"),
    "per element": lambda w: close(beta=0.2, penalty="gap_rel", granularity="element", auto_floor=True),
    "slowmo": lambda w: preset("slowmo", w, period=4),
    "local_sgd": lambda w: preset("local_sgd", w, period=4),
    "post_local_sgd": lambda w: preset("post_local_sgd", w, period=4, switch_step=3),
    "diloco": lambda w: preset("diloco", w, period=4),
    "streaming": lambda w: preset("streaming_diloco", w, period=4, delay=1, fragments=[[3, 0], [4, 1, 2]]),
    "streaming, delayed": lambda w: preset("streaming_diloco", w, period=4, delay=4, fragments=[[0, 1], [2, 3, 4]]),
    "overlap_local_sgd": lambda w: preset("overlap_local_sgd", w, period=4),
    "cocod": lambda w: preset("cocod", w, period=4),
    "progress": lambda w: close(delay=2, beta=0.5, merge="add_progress"),
    "params, consensus": lambda w: close(payload="params", beta=0.2, penalty="gap_rel", consensus_scalars=True,
                                         warmup_steps=2),
    "onebit": lambda w: preset("co2", w, period=4, codec="onebit", chunk_align=64),
    "fp16": lambda w: preset("delta_corrected", w, period=4, codec={"type": "fp16", "residual": True}),
    "int8": lambda w: close(freshness=0.25, beta=0.2, codec="int8", chunk_align=256),
    "sparse_loco": lambda w: preset("sparse_loco", w, period=4, codec={"type": "topk", "block": 32, "k": 4}),
}
