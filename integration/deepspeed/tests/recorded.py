"""Gradients for comparing two implementations of the 1-bit optimizers.

Rounding may flip the sign of a value that is nearly 0, and a flip is a difference of a whole scale.
So gradients are recorded with the numpy model of the optimizers, and elements whose value comes
near 0 before it is cut down to its sign, on any rank or server, are drawn again.
"""

import copy

import model
import numpy as np

MARGIN = 4e-3  # of the scale: four times what the comparison leaves out
f32 = np.float32


class Margins:
    """Notes, for every element, how near to 0 the compressed all-reduces of a step have come."""

    def __init__(self, n):
        self.least = np.full(n, np.inf)

    def _note(self, values, at):
        count = min(len(values), len(self.least) - at)
        if count > 0:
            scale = np.sqrt(np.mean(np.square(values, dtype=np.float64)))
            near = np.abs(values[:count]) / scale
            self.least[at : at + count] = np.minimum(self.least[at : at + count], near)

    def watched(self, compressor, inputs, valid):
        before = [inputs[r] + compressor.worker[r] for r in range(compressor.world)]
        out = model.Compressor.all_reduce(compressor, inputs, valid)
        for values in before:
            self._note(values, 0)
        for k in range(compressor.world):
            self._note(compressor.part(out, k) + compressor.server[k], k * compressor.chunk)
        return out


class Watched(model.PaddedCompressor):
    """A compressor in mode compat that notes margins."""

    margins = None

    def all_reduce(self, inputs, valid, padding=None):
        extra = np.zeros(self.n - self.real, f32) if padding is None else padding
        whole = [np.concatenate([x, extra]).astype(f32) for x in inputs]
        out = self.margins.watched(self, whole, np.ones(self.n, bool))
        if padding is not None:
            padding[:] = out[self.real :]
        return np.where(valid, out[: self.real], f32(0))


def record(kind, params, sizes, world, hyper, steps):
    """Gradients [step][rank] for an optimizer of the model, its class, from these start values.

    hyper["wire"] "fp16": they are numbers of 16 bits, and so are averages in full precision.
    """
    rng = np.random.default_rng(5)
    half = hyper.get("wire") == "fp16"

    def rounded(values):
        return values.astype(np.float16 if half else f32).astype(f32)

    n = len(params)
    run = kind(params, sizes, world, {**hyper, "mode": "compat"})
    run.compressor = run.compressor_of(lambda count: Watched(count, world))
    gradients = []

    def draw():
        common = 0.1 * rng.standard_normal(n)
        return [rounded(common + 0.05 * rng.standard_normal(n)) for _ in range(world)]

    for step in range(steps):
        mine = draw()
        for attempt in range(200):
            trial = copy.deepcopy(run)
            parts = getattr(trial.compressor, "parts", [trial.compressor])
            for part in parts:
                part.margins = Margins(part.real)
            trial.step(mine)
            bad = np.concatenate([part.margins.least for part in parts]) < MARGIN
            if not bad.any():
                break
            fresh = draw()
            # Larger draws as attempts fail: momentum moves by a tenth of the gradient alone.
            for old, new in zip(mine, fresh):
                old[bad] = rounded(new[bad] * f32(1 + attempt / 4))
        else:
            raise AssertionError(f"step {step}: {bad.sum()} elements stay near 0")
        run = trial
        gradients.append(mine)
    return gradients
