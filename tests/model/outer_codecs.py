"""Codecs of outer payloads (co2-overlap.md, section 7): 1 bit, casts, integers by blocks, and chunked top-k.

A codec sees a fragment as one vector per rank. A round is encode(rank, delta) on every rank that takes part, then
average(ranks). What rank r sent is sent[r]. Ranks that are skipped call skip instead.
"""
import math

import numpy as np

from model import f32, rms, signed
from outer_arithmetic import mean_of_ranks, sum_of_ranks
from outer_settings import BLOCK_CODECS

SMALLEST_AMAX = f32(2.0**-120)  # blocks whose largest magnitude is below have scale 0


class NonFinite(ArithmeticError):
    """A value that is not finite, where the policy or the codec does not allow it."""


def finite_part(x):
    return np.where(np.isfinite(x), x, f32(0)).astype(f32)


def to_bf16(x):
    """To nearest even, as float32."""
    bits = np.asarray(x, f32).view(np.uint32).astype(np.int64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(f32)


def to_fp16(x):
    with np.errstate(all="ignore"):
        return x.astype(np.float16).astype(f32)


def quantized(x, bits):
    """A block of integers (kernels/quant.h): numbers and scale, and whether the scale is finite."""
    limit = f32((1 << (bits - 1)) - 1)
    amax = np.abs(x).max(initial=f32(0))
    if amax < SMALLEST_AMAX:
        return np.zeros(len(x), f32), f32(0), True
    with np.errstate(all="ignore"):
        scale = amax * (f32(1) / limit)
        if not np.isfinite(scale * limit):
            return np.zeros(len(x), f32), f32(0), False
    # Numbers are stored as integers, so there is no -0.
    return np.rint(x * (limit / amax)).astype(np.int32).astype(f32), scale, True


class TwoPhase:
    """Encode, average on servers, encode again. Subclasses: code(c) and, where it differs, serve(a).

    code returns the value that stands for c, whether it is finite, and term(share): the value times fl(1/W) as the
    servers form it before they add.
    """

    def __init__(self, n, world, residual=True):
        self.world, self.residual = world, residual
        self.worker = [np.zeros(n, f32) for _ in range(world)]
        self.server = np.zeros(n, f32)
        self.sent, self.terms = [None] * world, [None] * world

    def encode(self, rank, delta):
        """Whether all is finite; if not the residual is what it was, to rounding (1-bit specification, 1.7)."""
        x = finite_part(delta)
        c = x + self.worker[rank] if self.residual else x
        value, finite, term = self.code(c)
        self.terms[rank] = term if finite else lambda share: np.zeros(len(c), f32)
        self.sent[rank] = value
        if self.residual:
            self.worker[rank] = c - value
            if not finite:
                c = self.worker[rank] + value
                self.worker[rank] = np.where(np.isfinite(c), c - x, f32(0)).astype(f32)
        return finite

    def skip(self, rank, delta):
        """Decided: a rank that is skipped encodes zeros, so what waits in its residual is sent."""
        self.encode(rank, np.zeros_like(delta))

    def average(self, ranks):
        """Decided: servers divide by all ranks; receivers multiply with their number over that of those that count."""
        a = sum_of_ranks([term(f32(1) / f32(self.world)) for term in self.terms])
        if self.residual:
            a = a + self.server
        y, finite = self.serve(a)
        # Decided: a sum of finite values that is not finite ends the step, whatever the policy.
        if not finite:
            raise NonFinite("the average of the codec is not finite")
        if self.residual:
            self.server = a - y
        return y if len(ranks) == self.world else y * f32(self.world / len(ranks))

    def serve(self, a):
        return self.code(a)[:2]


class OneBit(TwoPhase):
    """Section 1.1 of the 1-bit specification, strict, scale l2: one worker scale, a server scale per chunk."""

    def __init__(self, n, world, align):
        super().__init__(n, world)
        chunk = align * -(-n // (align * world))
        self.chunks = [slice(min(k * chunk, n), min((k + 1) * chunk, n)) for k in range(world)]

    def code(self, c):
        scale = rms([c[chunk] for chunk in self.chunks], len(c))
        bits = c >= 0
        return signed(bits, scale), bool(np.isfinite(scale)), lambda share: signed(bits, scale * share)

    def serve(self, a):
        y, finite = np.zeros(len(a), f32), True
        for chunk in self.chunks:
            scale = rms([a[chunk]], len(a[chunk]))
            y[chunk] = signed(a[chunk] >= 0, scale)
            finite = finite and bool(np.isfinite(scale))
        return y, finite


class Cast(TwoPhase):
    """16-bit floats (kernels/quant.h). Decided: servers add fl(v * fl(1/W)), as the codec of the library does."""

    def __init__(self, n, world, rounding, residual):
        super().__init__(n, world, residual)
        self.rounding = rounding

    def code(self, c):
        value = self.rounding(c)
        finite = np.isfinite(value)
        value = np.where(finite, value, f32(0)).astype(f32)
        return value, bool(finite.all()), lambda share: value * share


class Blocks(TwoPhase):
    """Integers with one float32 scale per block (kernels/quant.h). chunk_align is a multiple of the block, so chunks
    of ranks cut nothing."""

    def __init__(self, n, world, bits, block, residual):
        super().__init__(n, world, residual)
        self.bits, self.block = bits, block

    def code(self, c):
        numbers, scales, finite = np.zeros(len(c), f32), np.zeros(len(c), f32), True
        for at in range(0, len(c), self.block):
            part = slice(at, at + self.block)
            numbers[part], scales[part], ok = quantized(c[part], self.bits)
            finite = finite and ok
        return numbers * scales, finite, lambda share: numbers * (scales * share)


def lane_sum(a):
    """S of sparse-loco.md, section 4: 8 float64 lanes, folded by 4, 2, 1."""
    lanes = np.zeros(8)
    for at in range(0, len(a), 8):
        lanes[: len(a) - at] += a[at : at + 8]
    for half in (4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    return float(lanes[0])


def selected(c, k):
    """Indices of the k largest magnitudes, ascending; of equal ones the lower index is selected first."""
    key = (c.view(np.uint32) & 0x7FFFFFFF).astype(np.int64)
    return np.sort(np.lexsort((np.arange(len(c)), -key))[:k])


def two_bit_levels(a):
    """lo, hi and which elements are high (sparse-loco.md, section 4, b = 2)."""
    mean = f32(lane_sum(a) / len(a))
    high = a > (f32(0) if (a == 0).any() else mean)
    count = int(high.sum())
    lo = to_bf16(f32(lane_sum(np.where(high, f32(0), a)) / (len(a) - count)))
    hi = to_bf16(f32(lane_sum(np.where(high, a, f32(0))) / count)) if count else lo
    return lo, hi, high


def values_of(v, bits):
    """What the codes of selected values stand for, and whether that is finite."""
    if bits == 32:
        return v.copy(), True
    if bits == 2:
        lo, hi, high = two_bit_levels(np.abs(v))
        magnitude = np.where(high, hi, lo).astype(f32)
        ok = bool(np.isfinite(lo) and np.isfinite(hi))
        return (np.where(v >= 0, magnitude, -magnitude).astype(f32), ok) if ok else (np.zeros(len(v), f32), False)
    numbers, scale, ok = quantized(v, bits)
    return numbers * scale, ok


def payload_bytes(m, k, bits, index="ef"):
    """P(m, k) of sparse-loco.md, section 5."""
    if k == m:
        places = 0
    elif index == "packed":
        places = -(-k * math.ceil(math.log2(m)) // 8)
    else:
        low = int(math.log2(m // k))
        upper = k + ((m - 1) >> low)
        places = min(-(-k * low // 8) + -(-upper // 8), -(-m // 8))
    return places + -(-k * bits // 8) + (0 if bits == 32 else 4)


class TopK:
    """sparse-loco.md: shape flat, levels of blocks, both exchanges, both averages."""

    def __init__(self, sizes, world, config):
        self.world, self.config = world, config
        self.rho = f32(config["error_decay"])
        starts = np.cumsum([0, *sizes])
        self.tensors = [slice(int(at), int(at) + size) for at, size in zip(starts, sizes)]
        self.dense = np.zeros(int(starts[-1]), bool)
        self.blocks = []
        for tensor in self.tensors:
            if tensor.stop - tensor.start < config["dense_below"]:
                self.dense[tensor] = True
                continue
            for at in range(tensor.start, tensor.stop, config["block"]):
                self.blocks.append(slice(at, min(at + config["block"], tensor.stop)))
        n = len(self.dense)
        self.worker = [np.zeros(n, f32) for _ in range(world)]
        self.server = np.zeros(n, f32)
        self.sent, self.chosen = [None] * world, [None] * world

    def code(self, c, k):
        """The value that is sent for c, which elements are, and whether it is finite. Dense tensors stay zero."""
        block, bits = self.config["block"], self.config["bits"]
        q, chosen, finite = np.zeros(len(c), f32), np.zeros(len(c), bool), bool(np.isfinite(c).all())
        for part in self.blocks:
            m = part.stop - part.start
            at = part.start + selected(c[part], min(max((2 * m * k + block) // (2 * block), 1), m))
            q[at], ok = values_of(c[at], bits)
            chosen[at] = True
            finite = finite and ok
        return q, chosen, finite

    def encode(self, rank, delta):
        x = finite_part(delta)
        c = self.rho * self.worker[rank] + x
        q, chosen, finite = self.code(c, self.config["k"])
        q = np.where(self.dense, x, q)
        e = np.where(chosen, c - q, c)
        self.worker[rank] = np.where(self.dense, f32(0), e).astype(f32)
        self.sent[rank], self.chosen[rank] = q, chosen | self.dense
        if not finite or not np.isfinite(delta).all():
            # Section 8, SKIP_RANK: the payload is ignored, what was sent goes back.
            self.worker[rank] = np.where(self.dense, f32(0), (self.worker[rank] + q) - x).astype(f32)
            return False
        return True

    def skip(self, rank, delta):
        """Decided: a rank that is skipped is known before anything is encoded (14), so its x' is 0 and nothing is
        taken out: section 8, SKIP_RANK, without its roundings."""
        self.worker[rank] = np.where(self.dense, f32(0), self.rho * self.worker[rank]).astype(f32)

    def clip_to_median(self, ranks):
        """Section 7, median_clip: what the receivers add for each rank."""
        out = {r: self.sent[r].copy() for r in ranks}
        for tensor in self.tensors:
            size = {}
            for r in ranks:
                squares = 0.0
                for part in self.blocks:
                    if tensor.start <= part.start < tensor.stop:
                        q = self.sent[r][part][self.chosen[r][part]].astype(np.float64)
                        squares += lane_sum(q * q)
                size[r] = f32(math.sqrt(squares))
            median = sorted(size.values())[(len(ranks) - 1) // 2]
            for r in ranks:
                if size[r] > median:
                    factor = f32(float(median) / (float(size[r]) + 1e-8))
                    out[r][tensor] = np.where(self.dense[tensor], out[r][tensor], factor * out[r][tensor])
        return out

    def average(self, ranks):
        """Section 6.3, then 6.2 for two_phase."""
        terms = self.clip_to_median(ranks) if self.config["median_clip"] else {r: self.sent[r] for r in ranks}
        total = sum_of_ranks([terms.get(r) for r in range(self.world)])
        counts = np.full(len(self.dense), len(ranks))
        if self.config["average"] == "contributors":
            counts = np.sum([self.chosen[r] for r in ranks], axis=0)
        y = total * (f32(1) / np.maximum(counts, 1).astype(f32))
        return y if self.config["exchange"] == "gather" or self.world == 1 else self.serve(y)

    def server_k(self):
        """k_s of 6.2."""
        block, k, bits, index = (self.config[key] for key in ("block", "k", "bits", "index"))
        if self.config["k_server"]:
            return self.config["k_server"]
        k_s = min(self.world * k, block)
        return block if payload_bytes(block, k_s, bits, index) >= payload_bytes(block, block, bits, index) else k_s

    def serve(self, y):
        a = y + self.server
        q, chosen, finite = self.code(a, self.server_k())
        if not finite:
            raise NonFinite("the average of the codec is not finite")
        self.server = np.where(self.dense, f32(0), np.where(chosen, a - q, a)).astype(f32)
        return np.where(self.dense, y, q)


class Identity:
    """What is sent is the value: section 13, "Average". Also every codec on one rank (1-bit specification, 1.7)."""

    mean_of_ranks = staticmethod(mean_of_ranks)

    def __init__(self, world):
        self.world, self.sent = world, [None] * world

    def encode(self, rank, delta):
        self.sent[rank] = delta
        return True

    def skip(self, rank, delta):
        """Nothing is kept."""

    def average(self, ranks):
        return self.mean_of_ranks([self.sent[r] if r in ranks else None for r in range(self.world)])


def codec_of(settings, sizes, world):
    """The codec of a fragment with tensors of `sizes` elements."""
    config, n = settings.codec, sum(sizes)
    if config is None or (world == 1 and config.get("alone") != "encode"):
        return Identity(world)
    kind = config["type"]
    if kind == "topk":
        return TopK(sizes, world, config)
    if kind == "onebit":
        return OneBit(n, world, settings.chunk_align)
    if kind in BLOCK_CODECS:
        return Blocks(n, world, BLOCK_CODECS[kind][0], config["block"], config["residual"])
    return Cast(n, world, to_bf16 if kind == "bf16" else to_fp16, config["residual"])
