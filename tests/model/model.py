"""The 1-bit collective and the optimizers in numpy, written from their specification.

Independent of the library: nothing here is shared with it. Element arithmetic is float32 with one rounding per operation,
norms follow the fixed order of the specification (section 1.6), per-tensor scalars are float64. So results are compared
bit for bit.
"""
import math

import numpy as np

f32 = np.float32
BLOCK, LANES = 8192, 64


def block_sum(terms):
    """Sum of at most 8192 float32 terms: 64 lanes in ascending order, folded by halves."""
    padded = np.zeros(LANES + -(-len(terms) // LANES) * LANES, f32)
    padded[LANES : LANES + len(terms)] = terms
    lanes = np.add.accumulate(padded.reshape(-1, LANES))[-1]  # row by row, from zeros
    half = LANES // 2
    while half:
        lanes = lanes[:half] + lanes[half:]
        half //= 2
    return lanes[0]


def sum_of_squares(runs):
    """Blocks of every run, added in float64. Masked elements are zeros in their place."""
    total = 0.0
    for run in runs:
        for at in range(0, len(run), BLOCK):
            x = run[at : at + BLOCK].astype(f32, copy=False)
            total += float(block_sum(x * x))
    return total


def rms(runs, count):
    """float32 root mean square over `count` elements."""
    return f32(math.sqrt(sum_of_squares(runs) / count)) if count else f32(0)


def signed(bits, scale):
    return np.where(bits, f32(scale), -f32(scale)).astype(f32, copy=False)


class Compressor:
    """Error-compensated 1-bit all-reduce (section 1.1) of n elements over `world` ranks."""

    def __init__(self, n, world, align):
        self.n, self.world = n, world
        self.chunk = align * -(-n // (align * world))
        self.reset()

    def reset(self):
        n, world = self.n, self.world
        self.worker = [np.zeros(n, f32) for _ in range(world)]
        self.server = [np.zeros(self.count(k), f32) for k in range(world)]

    def count(self, k):
        return min(max(self.n - k * self.chunk, 0), self.chunk)

    def part(self, x, k):
        return x[k * self.chunk : k * self.chunk + self.count(k)]

    def all_reduce(self, inputs, valid):
        """inputs: one vector per rank. valid: elements that take part. Returns the common result."""
        world = self.world
        if world == 1:
            return inputs[0].copy()
        bits, scales = [], []
        for r in range(world):
            c = np.where(valid, inputs[r] + self.worker[r], f32(0)).astype(f32)
            scale = rms([self.part(c, k) for k in range(world)], int(valid.sum()))
            b = c >= 0
            self.worker[r] = np.where(valid, c - signed(b, scale), f32(0)).astype(f32)
            bits.append(b)
            scales.append(scale)
        out = np.zeros(self.n, f32)
        share = f32(1) / f32(world)
        for k in range(world):
            mask = self.part(valid, k)
            total = np.zeros(self.count(k), f32)
            for group in range(0, world, 8):
                partial = np.zeros(self.count(k), f32)
                for r in range(group, min(group + 8, world)):
                    partial = partial + signed(self.part(bits[r], k), scales[r] * share)
                total = total + partial
            a = np.where(mask, total + self.server[k], f32(0)).astype(f32)
            scale = rms([a], int(mask.sum()))
            b = a >= 0
            self.server[k] = np.where(mask, a - signed(b, scale), f32(0)).astype(f32)
            self.part(out, k)[:] = np.where(mask, signed(b, scale), f32(0))
        return out


class PaddedCompressor(Compressor):
    """The same in mode compat: n is rounded up to a multiple of world * lcm(world, 8), and the padding is data."""

    def __init__(self, n, world):
        unit = world * math.lcm(world, 8)
        self.real = n
        super().__init__(unit * -(-n // unit), world, math.lcm(world, 8))

    def all_reduce(self, inputs, valid, padding=None):
        """valid is a mask for the result only. padding: what lies there on every rank; None: zeros."""
        if self.world == 1:
            return np.where(valid, inputs[0], f32(0))
        extra = np.zeros(self.n - self.real, f32) if padding is None else padding
        out = super().all_reduce([np.concatenate([x, extra]).astype(f32) for x in inputs], np.ones(self.n, bool))
        if padding is not None:
            padding[:] = out[self.real:]
        return np.where(valid, out[: self.real], f32(0))


class TensorByTensor:
    """A compressor for every tensor, each with scales and error feedback of its own."""

    def __init__(self, parts, sizes):
        self.parts, self.cuts = parts, np.cumsum(sizes)[:-1]

    def reset(self):
        for part in self.parts:
            part.reset()

    def all_reduce(self, inputs, valid):
        split = [np.split(x, self.cuts) for x in inputs]
        masks = np.split(valid, self.cuts)
        return np.concatenate([part.all_reduce([x[i] for x in split], masks[i]) for i, part in enumerate(self.parts)])


class Base:
    """State that all optimizers have. Tensors are slices of one vector, in order of registration."""

    # What DeepSpeed's optimizer compresses as one, in mode compat: a tensor that it was given, or everything. 16-bit
    # training gives 1-bit Adam and 0/1 Adam a whole parameter group as one tensor.
    published_granularity = "tensor"

    def __init__(self, params, sizes, world, hyper):
        self.p = params.astype(f32).copy()
        self.sizes, self.world, self.h = sizes, world, hyper
        self.m = np.zeros(len(params), f32)
        self.v = np.zeros(len(params), f32)
        self.t = hyper.get("step_offset", 1)
        self.compat = hyper.get("mode") == "compat"
        n = len(params)
        self.compressor = (self.compressor_of(lambda count: PaddedCompressor(count, world)) if self.compat else
                           Compressor(n, world, hyper["chunk_align"]))
        # Elements that take part; in mode compat what averages are multiplied with.
        self.valid = np.ones(n, bool)
        if self.compat and "mask" in hyper:
            self.valid = hyper["mask"].copy()
        starts = np.cumsum([0] + list(sizes))
        self.tensors = [slice(starts[i], starts[i + 1]) for i in range(len(sizes)) if sizes[i]]

    def compressor_of(self, make):
        """make(n): a compressor in mode compat. hyper["units"]: elements that are compressed as one each."""
        if self.h.get("granularity", self.published_granularity) == "flat":
            return make(len(self.p))
        sizes = self.h.get("units", [size for size in self.sizes if size])
        return TensorByTensor([make(size) for size in sizes], sizes)

    def mean(self, gradients):
        """Full-precision mean: ranks added in order, divided by their number."""
        total = gradients[0].astype(f32)
        for g in gradients[1:]:
            total = total + g
        mean = total / f32(self.world)
        return mean.astype(np.float16).astype(f32) if self.h.get("wire") == "fp16" else mean

    def ema(self, old, beta, x):
        return f32(beta) * old + f32(1 - beta) * x

    def square_ema(self, old, beta, g):
        return f32(beta) * old + (f32(1 - beta) * g) * g

    def moments(self, g):
        self.m = self.ema(self.m, self.h["b1"], g)
        self.v = self.square_ema(self.v, self.h["b2"], g)

    def den(self):
        return np.sqrt(self.v) + f32(self.h["eps"])

    def decayed(self, u, p):
        wd = self.h["wd"]
        return u + f32(wd) * p if wd > 0 else u

    def mask_zero_variance(self):
        if not self.compat:
            self.valid = self.v != 0


class Lion(Base):
    """arXiv 2302.06675, algorithm 2."""

    def step(self, gradients):
        h, g = self.h, self.mean(gradients)
        c = self.ema(self.m, h["b1"], g)
        self.p = f32(1 - h["lr"] * h["wd"]) * self.p - f32(h["lr"]) * np.sign(c)
        self.m = self.ema(self.m, h["b2"], g)


class OnebitAdam(Base):
    """Section 5. hyper["non_freeze"]: tensors that are never compressed (2.8)."""

    compressed = False

    def __init__(self, params, sizes, world, hyper):
        super().__init__(params, sizes, world, hyper)
        self.dense = np.zeros(len(params), bool)
        starts = np.cumsum([0] + list(sizes))
        for t in hyper.get("non_freeze", ()):
            self.dense[starts[t]:starts[t + 1]] = True
        if self.dense.any():
            self.compressor = Compressor(int((~self.dense).sum()), world, hyper["chunk_align"])

    def mask_zero_variance(self):
        super().mask_zero_variance()
        self.valid |= self.dense

    def step(self, gradients):
        self.t += 1
        h, dense = self.h, self.dense
        if not self.compressed:
            self.moments(self.mean(gradients))
        else:
            locals_ = [self.ema(self.m, h["b1"], g)[~dense] for g in gradients]
            self.m[~dense] = self.compressor.all_reduce(locals_, self.valid[~dense]) * self.valid[~dense]
            g = self.mean(gradients)
            self.m[dense] = self.ema(self.m, h["b1"], g)[dense]
            self.v[dense] = self.square_ema(self.v, h["b2"], g)[dense]
        u = self.m / self.den()
        self.p = self.p - f32(h["lr"]) * self.decayed(u, self.p)
        if not self.compressed and self.t >= h["freeze_step"]:
            self.compressed = True
            self.mask_zero_variance()


class OnebitLamb(Base):
    """Section 7."""

    published_granularity = "flat"
    compressed = False

    def __init__(self, params, sizes, world, hyper):
        super().__init__(params, sizes, world, hyper)
        n = len(self.tensors)
        self.c_avg, self.last, self.scaling = [0.0] * n, [1.0] * n, [1.0] * n
        # Part of the fused momentum: keeps what is averaged there.
        self.padding = np.zeros(self.compressor.n - len(params), f32) if self.compat else None

    def norm(self, x):
        return math.sqrt(sum_of_squares([x]))

    def warm_up(self, gradients):
        h = self.h
        self.moments(self.mean(gradients))
        u = self.decayed(self.m / self.den(), self.p)
        for i, s in enumerate(self.tensors):
            wn, un = self.norm(self.p[s]), self.norm(u[s])
            c = 1.0
            if wn != 0 and un != 0:
                c = max(min(wn / un, h["max_coeff"]), h["min_coeff"])
            if c != 1:
                self.c_avg[i] = h["coeff_beta"] * self.c_avg[i] + (1 - h["coeff_beta"]) * c
            self.p[s] = self.p[s] - f32(h["lr"] * c) * u[s]

    def counted(self):
        """Elements that count in norms, maxima and the fresh variance."""
        return np.ones(len(self.p), bool) if self.compat else self.valid

    def start(self):
        self.mask_zero_variance()
        self.vf, self.frozen_den = self.v.copy(), self.den()
        scales = []
        counted = self.counted()
        for s in self.tensors:
            count = int(counted[s].sum())
            m = np.where(counted[s], self.m[s], f32(0))
            scales.append(self.norm(m) / math.sqrt(count) if count else 0.0)
        used = [s for s in scales if s != 0]
        united = 0.0
        for s in used:
            united += s
        united = united / len(used) if used else 0.0
        self.scaling = [united / s if s else 1.0 for s in scales]
        self.compressed = True

    def step(self, gradients):
        self.t += 1
        h = self.h
        if not self.compressed:
            self.warm_up(gradients)
            if self.t >= h["freeze_step"]:
                self.start()
            return
        old = np.where(self.counted(), self.m, f32(0))
        locals_ = [self.ema(old, h["b1"], g) for g in gradients]
        for x in locals_:
            for i, s in enumerate(self.tensors):
                x[s] = x[s] * f32(self.scaling[i])
        padding = () if self.padding is None else (self.padding,)
        common = self.compressor.all_reduce(locals_, self.valid, *padding)
        for i, s in enumerate(self.tensors):
            self.tensor_step(i, s, old, common)

    def tensor_step(self, i, s, old, common):
        h, valid, den = self.h, self.counted()[s], self.frozen_den[s]
        m = np.where(self.valid[s], common[s] / f32(self.scaling[i]), f32(0))
        self.m[s] = m
        g = (m - f32(h["b1"]) * old[s]) / f32(1 - h["b1"])
        self.vf[s] = np.where(valid, self.square_ema(self.vf[s], h["b2"], g), self.vf[s])
        u0 = np.where(valid, m / den, f32(0))
        u = self.decayed(u0, self.p[s])
        ratio = den / (np.sqrt(self.vf[s]) + f32(h["eps"]))
        if valid.any():
            factor = float(ratio[valid].max())
            if h["wd"] > 0:
                un = self.norm(u)
                q = 1.0 if un == 0 else min(1.0, self.norm(u0) / un)
                factor = factor * q + (1 - q)
            factor = max(min(factor, h["factor_max"]), h["factor_min"])
            factor = min(factor, self.last[i] * (1 + h["factor_threshold"]))
            factor = max(factor, self.last[i] * (1 - h["factor_threshold"]))
            self.last[i] = factor
        self.p[s] = self.p[s] - f32(h["lr"] * (self.c_avg[i] * self.last[i])) * u


class ZeroOneAdam(Base):
    """Section 6, anchor form; mode compat: in place. One entry of `locals` per rank once the variance is frozen."""

    def __init__(self, params, sizes, world, hyper):
        super().__init__(params, sizes, world, hyper)
        self.frozen = False
        self.var_interval, self.var_counter = 1, 0
        self.local_interval, self.local_counter = 1, 0
        self.lr_sum, self.d = 0.0, 1.0

    def phase_a(self, gradients):
        h = self.h
        full = self.t % self.var_interval == 0
        if full:
            self.moments(self.mean(gradients))
            u = self.m / self.den()
        else:
            self.mask_zero_variance()
            if not self.compat or self.world > 1:  # as published, one rank leaves this gradient out
                g = self.compressor.all_reduce([x.astype(f32) for x in gradients], self.valid)
                self.m = self.ema(self.m, h["b1"], np.where(self.valid, g, f32(0)))
            u = self.m / self.den()
        self.p = self.p - f32(h["lr"]) * self.decayed(u, self.p)
        if full:
            self.var_counter += 1
            if self.var_counter == h["var_update_scaler"]:
                self.var_counter, self.var_interval = 0, self.var_interval * 2
        if self.t > h["var_freeze_step"]:
            self.freeze()

    def freeze(self):
        self.frozen = True
        self.mask_zero_variance()
        self.frozen_den = self.den()
        self.anchor = self.p.copy()
        n = len(self.p)
        self.compressor.reset()
        self.ms = [self.m.copy() for _ in range(self.world)]
        self.sums = [np.zeros(n, f32) for _ in range(self.world)]
        self.ps = [self.p.copy() for _ in range(self.world)]

    def working(self, total):
        step = np.where(self.valid, total / self.frozen_den, f32(0))
        return f32(self.d) * self.anchor + step

    def synchronised(self, m, p):
        """After a synchronisation all ranks start from the same momentum; parameters are given per rank."""
        self.ms = [m.copy() for _ in range(self.world)]
        self.sums = [np.zeros_like(m) for _ in range(self.world)]
        self.ps = p
        self.lr_sum, self.d = 0.0, 1.0

    def phase_b_in_place(self, gradients):
        """Mode compat: weight decay is part of what is summed up, and p goes back by that sum."""
        lr, den = f32(self.h["lr"]), self.frozen_den
        self.lr_sum += self.h["lr"]
        for r in range(self.world):
            self.ms[r] = self.ema(self.ms[r], self.h["b1"], gradients[r])
            step = lr * self.decayed(self.ms[r] / den, self.ps[r])
            self.ps[r], self.sums[r] = self.ps[r] - step, self.sums[r] - step
        if self.t % self.local_interval or self.lr_sum <= 0:
            return
        everything = np.ones(len(self.p), bool)
        y = self.compressor.all_reduce([b * den for b in self.sums], everything if self.world == 1 else self.valid)
        self.synchronised(-y / f32(self.lr_sum), [(p - b) + y / den for p, b in zip(self.ps, self.sums)])

    def phase_b(self, gradients):
        h = self.h
        lr = f32(h["lr"])
        self.lr_sum += h["lr"]
        self.d *= 1 - h["lr"] * h["wd"]
        moved = []
        for r in range(self.world):
            m = self.ema(self.ms[r], h["b1"], gradients[r])
            moved.append((m, self.sums[r] - lr * m))
        if self.t % self.local_interval == 0 and self.lr_sum > 0:
            y = self.compressor.all_reduce([b for _, b in moved], self.valid)
            self.anchor = self.working(y)
            m = np.where(self.valid, -y / f32(self.lr_sum), f32(0))
            self.synchronised(m, [self.anchor.copy() for _ in range(self.world)])
        else:
            for r, (m, b) in enumerate(moved):
                self.ms[r] = np.where(self.valid, m, f32(0))
                self.sums[r] = np.where(self.valid, b, f32(0))
                self.ps[r] = self.working(self.sums[r])

    def count_local(self):
        h = self.h
        self.local_counter += 1
        if self.local_counter == h["local_step_scaler"]:
            self.local_counter = 0
            self.local_interval = min(h["local_step_clipper"], 2 * self.local_interval)

    def step(self, gradients):
        self.t += 1
        if not self.frozen:
            return self.phase_a(gradients)
        self.phase_b_in_place(gradients) if self.compat else self.phase_b(gradients)
        self.count_local()

    def params_of(self, rank):
        return self.ps[rank] if self.frozen else self.p
