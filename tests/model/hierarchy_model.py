"""Two levels in numpy (1-bit specification, 1.11): full precision inside hosts, a codec between them.

A host's mean takes the place of a rank's vector. In H2 (sharded) every shard is a codec of its own between as many ranks as
there are hosts; in H1 (leader) there is one shard.
"""
import numpy as np

import outer_codecs
from outer_arithmetic import sum_of_ranks
from model import Compressor, f32


def mean(vectors):
    """In full precision: added in order, divided by their number."""
    total = vectors[0].astype(f32)
    for x in vectors[1:]:
        total = total + x
    return total / f32(len(vectors))


def means_of_hosts(vectors, host_of):
    """host_of: by rank. The ranks of a host are added in ascending order."""
    return [mean([v for v, h in zip(vectors, host_of) if h == host]) for host in range(max(host_of) + 1)]


def mean_of_ranks(terms, host_of):
    """As outer_arithmetic's: the sum of the sums of hosts times fl(1/W)."""
    hosts = [[t for t, h in zip(terms, host_of) if h == host] for host in range(max(host_of) + 1)]
    return sum_of_ranks([sum_of_ranks(host) for host in hosts]) * (f32(1) / f32(len(terms)))


class Shards:
    """make(n, chunk): what compresses n elements of a shard between hosts, in chunks of so many elements."""

    def __init__(self, n, shards, hosts, align, make):
        chunk = align * -(-n // (align * shards * hosts))
        cuts = [min(n, s * hosts * chunk) for s in range(shards + 1)]
        self.slices = [slice(a, b) for a, b in zip(cuts, cuts[1:])]
        self.parts = [make(b - a, chunk) for a, b in zip(cuts, cuts[1:])]

    def each(self):
        return [(s, part) for s, part in zip(self.slices, self.parts) if s.stop > s.start]


class ShardedCompressor(Shards):
    """As model.Compressor, for optimizers: one vector per host."""

    def __init__(self, n, shards, hosts, align):
        def make(count, chunk):
            compressor = Compressor(count, hosts, align)
            compressor.chunk = chunk
            compressor.reset()
            return compressor
        super().__init__(n, shards, hosts, align, make)

    def reset(self):
        for part in self.parts:
            part.reset()

    def all_reduce(self, inputs, valid):
        out = np.zeros(len(valid), f32)
        for s, part in self.each():
            out[s] = part.all_reduce([x[s] for x in inputs], valid[s])
        return out


class HostsCompressor:
    """As model.Compressor, for optimizers whose ranks have values of their own: one vector per rank."""

    def __init__(self, between, host_of):
        self.between, self.host_of = between, host_of

    def reset(self):
        self.between.reset()

    def all_reduce(self, inputs, valid):
        means = means_of_hosts(inputs, self.host_of)
        if len(means) > 1:
            return self.between.all_reduce(means, valid)
        return np.where(valid, means[0], f32(0))


class OuterCodec:
    """As those of outer_codecs, for ranks on hosts that all take part."""

    def __init__(self, codec, host_of):
        self.codec, self.host_of, self.sent = codec, host_of, [None] * len(host_of)

    def encode(self, rank, delta):
        self.sent[rank] = delta
        return True

    def average(self, ranks):
        assert len(ranks) == len(self.host_of)
        return self.codec.all_reduce(means_of_hosts(self.sent, self.host_of))


class Refused(ArithmeticError):
    """What a codec has no number for (1-bit specification, 1.7). hosts: those in whose mean it is; none: it is in sums."""

    def __init__(self, hosts=()):
        super().__init__()
        self.hosts = list(hosts)


def residual_of(settings):
    """Whether a codec of these settings, as in JSON, has error feedback."""
    return settings.get("residual", settings["type"] not in ("bf16", "fp16"))


class ShardedCodec(Shards):
    """A codec of outer_codecs between hosts. settings: "type", "block" and "residual", as in JSON."""

    ROUNDINGS = {"bf16": outer_codecs.to_bf16, "fp16": outer_codecs.to_fp16}
    BITS_AND_BLOCK = {"int8": (8, 256), "int4": (4, 128)}

    def __init__(self, n, shards, hosts, align, settings):
        kind, residual = settings["type"], residual_of(settings)

        def make(count, chunk):
            if kind in self.BITS_AND_BLOCK:
                bits, block = self.BITS_AND_BLOCK[kind]
                return outer_codecs.Blocks(count, hosts, bits, settings.get("block", block), residual)
            if kind in self.ROUNDINGS:
                return outer_codecs.Cast(count, hosts, self.ROUNDINGS[kind], residual)
            codec = outer_codecs.OneBit(count, hosts, align)
            codec.chunks = [slice(min(k * chunk, count), min((k + 1) * chunk, count)) for k in range(hosts)]
            return codec
        super().__init__(n, shards, hosts, align, make)
        self.hosts = hosts

    def all_reduce(self, inputs):
        """One vector per host. Refused: nothing is averaged, and what was encoded is taken back."""
        before = [[(x[s], part.worker[host].copy()) for host, x in enumerate(inputs)] for s, part in self.each()]
        refused = set()
        for s, part in self.each():
            for host, x in enumerate(inputs):
                with np.errstate(all="ignore"):
                    if not part.encode(host, x[s]) or not np.isfinite(x[s]).all():
                        refused.add(host)
        if refused:
            self.take_back(before)
            raise Refused(sorted(refused))
        out = np.zeros(len(inputs[0]), f32)
        try:
            for s, part in self.each():
                out[s] = part.average(range(self.hosts))
        except outer_codecs.NonFinite:
            self.take_back(before)
            for _, part in self.each():
                part.server = np.zeros_like(part.server)
            raise Refused() from None
        return out

    def take_back(self, before):
        """Worker residuals: c - x', and 0 where c is not finite. before: of every part by host, the input and the residual."""
        for (_, part), hosts in zip(self.each(), before):
            for host, (x, e) in enumerate(hosts):
                if part.residual:
                    x = outer_codecs.finite_part(x)
                    with np.errstate(all="ignore"):
                        c = x + e
                        part.worker[host] = np.where(np.isfinite(c), c - x, f32(0)).astype(f32)
