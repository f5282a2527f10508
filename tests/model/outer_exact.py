"""Problems T and U of co2-overlap.md, 15.1: its sequences, section 4.1 in exact fractions, and runs of the model."""
from fractions import Fraction as F

import numpy as np

from model import f32
from outer_model import Outer
from outer_settings import Settings

T = {"centres": (-1, 3), "tau": 2, "start": 5}
U = {"centres": (0,), "tau": 1, "start": 1}


def numbers(text):
    """Fractions from "5, 1/2, 11609/2^14"."""
    out = []
    for word in text.split(","):
        above, _, below = word.strip().partition("/")
        base, _, power = below.partition("^")
        out.append(F(above) / (F(base) ** int(power) if power else F(base or 1)))
    return out


# name: settings, then anchors x_{t,0} of rank 0 from t = 0 on.
COMMON = {
    "S0": ({"delay": 0}, "5, 2, 1.25, 1.0625, 1.015625, 1.00390625, 1.0009765625, 1.000244140625, 1.00006103515625"),
    "S1": ({"delay": 0, "beta": F(1, 2)},
           "5, 2, -0.25, -0.4375, 0.546875, 1.37890625, 1.5107421875, 1.193603515625, 0.88983154296875"),
    "S2": ({"delay": 0, "rule": "nesterov", "alpha": F(1, 2), "beta": F(1, 2)},
           "5, 2.75, 1.390625, 0.8193359375, 11609/2^14, 205319/2^18, 3723929/2^22, 64599239/2^26, 1073727449/2^30"),
    "C0": ({}, "5, 5, 2, -1, -1.75, -0.25, 1.8125, 2.75, 2.140625"),
    "C1": ({"alpha": F(1, 2), "beta": F(1, 4)},
           "5, 5, 3.5, 1.625, 0.21875, -0.3671875, -113/512, 673/2048, 7567/8192"),
    "C2": ({"penalty": "const", "lambda_const": 2}, "5, 5, 3.5, 2, 1.0625, 0.6875, 0.6640625, 0.78125, 0.9072265625"),
    "C2 alpha": ({"alpha": F(1, 2)}, "5, 5, 3.5, 2, 1.0625, 0.6875, 0.6640625, 0.78125, 0.9072265625"),
    "C3": ({"clip": "coord", "phi": 1}, "5, 5, 4, 3, 2, 1, 0.25, 0.25, 0.8125"),
    "C4": ({"form": "anchor_diff"}, "5, 5, 2, 2, 1.25, 1.25, 1.0625, 1.0625, 1.015625"),
    "C5": ({"form": "anchor_diff", "beta": F(1, 2)}, "5, 5, 2, 0.5, 0.5, 0.875, 1.0625, 1.0625, 1.015625"),
    "C5 delta": ({"beta": F(-1, 2)}, "5, 5, 2, 0.5, 0.5, 0.875, 1.0625, 1.0625, 1.015625"),
    "C6": ({"rule": "nesterov", "alpha": F(1, 2), "beta": F(1, 4)},
           "5, 5, 3.125, 1.15625, 11/256, -7/64, 2587/8192, 27931/32768, 315425/2^18"),
    "C7": ({"penalty": "gap_rel", "eps": 0}, "5, 5, 2, 0.5, 0.25, 0.475, 491/560"),
}
# name: settings, anchors of rank 0, anchors of rank 1 (E3: of the mean), both after a flush.
OWN = {
    "E1": ({"freshness": 1}, "5, 1/2, 7/8, -5/32, 55/128, -29/512", "5, 7/2, 13/8, 73/32, 205/128, 1057/512", "65/64"),
    "E2": ({"freshness": F(1, 2)}, "5, 11/4, 19/32, -121/256, -245/2048", "5, 17/4, 49/32, 173/256, 1945/2048",
           "385/512"),
    "E3": ({"freshness": 1, "alpha": F(1, 2), "beta": F(1, 2)}, None, "5, 3.5, 1.8125, 0.6640625, 0.2158203125", None),
    "E4": ({"freshness": F(1, 2), "rule": "nesterov", "alpha": F(1, 2), "beta": F(1, 2)},
           "5, 53/16, 643/512, -3595/2^14", "5, 71/16, 1153/512, 13991/2^14", None),
}
ALONE = {
    "U delta": ({}, "1, 1, .5, 0, -.25, -.25, -.125, 0, .0625"),
    "U anchor_diff": ({"form": "anchor_diff"}, "1, 1, .5, .5, .25, .25, .125, .125, .0625"),
    "U lambda 1": ({"freshness": 1}, "1, .5, .25, .125, .0625"),
}
ROUNDED = {"S2": 7, "C7": 5}  # how many entries float32 holds exactly, where not all; the rest to 1e-6


class Exact:
    """Section 4.1 with section 5 in fractions, for f_i(x) = (x - c_i)^2 / 2 and gamma 1/2."""

    def __init__(self, settings, problem):
        self.s, self.centres = Settings(**settings), problem["centres"]
        self.alpha, self.beta, self.freshness = (F(x) for x in (self.s.alpha, self.s.beta, self.s.freshness))
        self.world = len(self.centres)
        self.anchors = [F(problem["start"])] * self.world
        self.m = [F(0)] * self.world
        self.s_before, self.sent, self.average = F(0), [F(0)] * self.world, None

    def ratio(self):
        if self.s.penalty == "const":
            return F(self.s.lambda_const)
        if self.s.penalty == "gap_rel" and self.s_before != 0:
            return min(max(1 + abs(self.s_before) / abs(self.average), F(1)), F(self.s.lambda_max))
        return F(1)

    def boundary(self, steps):
        """One boundary after `steps` inner steps; 0: the flush, with Delta = 0."""
        s, h = self.s, 1 - F(1, 2) ** steps
        fresh = [h * (a - c) for a, c in zip(self.anchors, self.centres)]
        mean = sum(fresh) / self.world
        if s.delay == 0:
            self.average = mean
        moved = [F(0)] * self.world
        if self.average is not None or self.freshness:
            base = self.average or F(0)
            if s.form == "anchor_diff":
                base -= self.s_before
            base /= self.ratio()
            for i in range(self.world):
                moved[i] = self.rule(i, base + self.freshness * (fresh[i] - self.sent[i]))
        self.s_before = moved[0]
        self.sent, self.average = fresh, mean

    def rule(self, i, g):
        s, phi = self.s, F(self.s.phi)
        self.m[i] = self.beta * self.m[i] + g
        if s.clip == "coord":
            self.m[i] = min(max(self.m[i], -phi), phi)
        moved = self.alpha * (self.beta * self.m[i] + g if s.rule == "nesterov" else self.m[i])
        self.anchors[i] -= moved
        return moved


def exact(settings, rounds, problem=T, flush=None):
    """Anchors of every rank at t = 0..rounds, and after a flush that comes `flush` inner steps later."""
    run = Exact({"period": problem["tau"], "delay": problem["tau"], **settings}, problem)
    out = [list(run.anchors)]
    for _ in range(rounds):
        run.boundary(problem["tau"])
        out.append(list(run.anchors))
    if flush is not None:
        if flush:
            run.boundary(flush)
        if run.s.delay:
            run.boundary(0)
        out.append(list(run.anchors))
    return out


def modelled(settings, rounds, problem=T, flush=None):
    """The same from the model in float32. Live values have to be the anchors after every boundary."""
    values = {key: float(value) if isinstance(value, F) else value for key, value in settings.items()}
    tau, centres = problem["tau"], problem["centres"]
    live = [[np.array([problem["start"]], f32)] for _ in centres]
    outer = Outer(Settings(**{"period": tau, "delay": tau, **values}), live, checked=False)
    ranks = range(len(centres))
    out = [[outer.anchor(r)[0][0] for r in ranks]]

    def train(steps):
        for _ in range(steps):
            for x, c in zip(live, centres):
                x[0][...] = x[0] - f32(0.5) * (x[0] - f32(c))
            outer.step(live, 0.5)
    for _ in range(rounds):
        train(tau)
        out.append([outer.anchor(r)[0][0] for r in ranks])
        assert [x[0][0] for x in live] == out[-1], "reset: live is the anchor"
    if flush is not None:
        train(flush)
        outer.flush(live)
        out.append([x[0][0] for x in live])
    return out
