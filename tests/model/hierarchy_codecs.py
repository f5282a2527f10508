"""Codecs in two levels: every type, sizes down to one element, values without a number, and invariants of what is kept.

Part of hierarchy_test.py, which has the layouts of ranks.
"""
import json

import numpy as np

import hierarchy_model as two
from model_test import SIZES, noise

f32 = np.float32
NONFINITE = -13

CODECS = {
    "onebit": {"type": "onebit", "chunk_align": 64},
    "int8": {"type": "int8"},
    "int8, blocks of 32": {"type": "int8", "block": 32, "chunk_align": 32},
    "int4": {"type": "int4"},
    "int4, blocks of 512": {"type": "int4", "block": 512},
    "int4 without residual": {"type": "int4", "residual": False, "chunk_align": 128},
    "bf16": {"type": "bf16", "chunk_align": 8},
    "bf16 with residual": {"type": "bf16", "residual": True},
    "fp16": {"type": "fp16"},
    "fp16 with residual": {"type": "fp16", "residual": True, "chunk_align": 24},
}
# Elements of tensors: fewer than ranks, one more than whole blocks, several tensors and an empty one, and shards that are empty.
COUNTS = [[1], [2, 0, 1], [513], SIZES]
# On rank 0: the mean of a host of two or three ranks has a number, that of one rank does not.
LARGE = {"onebit": 1e20, "int8": 3.402e38, "int4": 3.402e38, "bf16": 3.402e38, "fp16": 65520.0}
STEPS = 16


def align_of(settings):
    return settings.get("chunk_align", 512)


def vectors(settings, step, host_of, n):
    """What ranks give in a step: magnitudes from 2^-30 to 2^6, those of 16-bit floats that have no exponent too."""
    scale = np.ldexp(f32(1), np.random.default_rng(step).integers(-30, 6, n)).astype(f32)
    x = [noise(step, rank, n) * scale for rank in range(len(host_of))]
    for rank, host in enumerate(host_of):
        if step == 0:  # 65488 as mean of two or four hosts, half way between two of fp16, so that servers owe 16
            x[rank][0] = 65472 + 32 * (host % 2)
        elif step == 1:  # with these 16, what fp16 has no number for
            x[rank][0] = 65504
        elif step == 7 and host == 0:  # its sum in a host is none of float32's
            x[rank][n - 1] = 3e38
    if step == 3:
        x[-1][n // 2] = np.nan
    elif step == 5:
        x[0][0] = LARGE[settings["type"]]
    return x


def expected(settings, host_of, shape, n):
    """By step, what ranks give, the result and how it is refused, or None. A refused call leaves the result before it."""
    shards, hosts = shape
    reference = two.ShardedCodec(n, shards, hosts, align_of(settings), settings)
    y, out = np.zeros(n, f32), []
    for step in range(STEPS):
        fed, refused = vectors(settings, step, host_of, n), None
        with np.errstate(all="ignore"):
            means = two.means_of_hosts(fed, host_of)
        try:
            y = means[0] if hosts == 1 else reference.all_reduce(means)
        except two.Refused as error:
            refused = error
        out.append((fed, y.copy(), refused))
    return out


def text_of(refused, host_of, levels):
    """What the error says."""
    if not refused.hosts:
        return "in the sums at rank "
    who = ", ".join(str(host_of.index(host)) for host in refused.hosts)
    return f"in the input of {'a rank on the host of ' if levels else ''}rank {who}; nothing was written"


def same(got, wanted):
    """Bits, but for those of a NaN."""
    return ((got.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(got) & np.isnan(wanted))).all()


def compare_calls(library, comm, rank, codec, counts, cases, levels, host_of):
    """All steps of a codec on one rank."""
    n = sum(counts)
    x, y = np.zeros(n, f32), np.zeros(n, f32)
    cuts = np.cumsum([0] + counts)
    parts = [slice(a, b) for a, b in zip(cuts, cuts[1:])]
    for step, (fed, wanted, refused) in enumerate(cases):
        x[:] = fed[rank]
        error = ""
        try:
            library.codec_all_reduce(comm, codec, [x[s] for s in parts], [y[s] for s in parts])
        except RuntimeError as raised:
            error = str(raised)
        text = f": {NONFINITE}: " if refused else ""
        where = f"{counts}, step {step}, rank {rank}"
        if bool(error) != bool(refused) or text not in error or (refused and text_of(refused, host_of, levels) not in error):
            raise AssertionError(f"{where}: {error or 'no error'}, expected {refused and text_of(refused, host_of, levels)}")
        if not same(y, wanted):
            at = np.flatnonzero(y.view(np.uint32) != wanted.view(np.uint32))
            raise AssertionError(f"{where}: {at.size} values differ, the first is [{at[0]}]: library {y[at[0]]!r}, "
                                 f"model {wanted[at[0]]!r}")


def compare(library, name, host_of, hierarchy, shape):
    """Calls with all sizes; hosts of one rank are one level, bit for bit."""
    settings = CODECS[name]
    cases = {str(counts): expected(settings, host_of, shape, sum(counts)) for counts in COUNTS}
    if settings["type"] == "fp16" and settings.get("residual") and shape[1] in (2, 4):
        assert all(case[1][2] and not case[1][2].hosts for case in cases.values()), "sums have numbers"
    levels = max(host_of) + 1 < len(host_of)
    words = (hierarchy,) if levels else (hierarchy, "flat")

    def body(comm, rank):
        for counts in COUNTS:
            for word in words:
                codec = library.codec(comm, json.dumps({**settings, "hierarchy": word}), counts)
                compare_calls(library, comm, rank, codec, counts, cases[str(counts)], levels, host_of)
                library.call("sotto_codec_destroy", codec)

    library.run(len(host_of), body, host_of)


class Kept:
    """What a codec keeps of a column of ranks, and what it made of what their hosts gave, one call after the other."""

    def __init__(self, n, host_of, shape, align):
        shards, hosts = shape
        self.chunk = align * -(-n // (align * shards * hosts))
        self.n, self.hosts, self.cut = n, hosts, self.chunk * hosts
        self.ranks = [[ranks[s] for ranks in ([r for r, h in enumerate(host_of) if h == host] for host in range(hosts))]
                      for s in range(shards)]
        self.servers = {rank for column in self.ranks for rank in column}

    def shards(self):
        """Of those that have elements: the slice, and its ranks by host."""
        for s, ranks in enumerate(self.ranks):
            if s * self.cut < self.n:
                yield slice(s * self.cut, min((s + 1) * self.cut, self.n)), ranks

    def check_sizes(self, states, flat):
        """1.11, "State per rank"."""
        for rank, state in enumerate(states):
            s = next((s for s, ranks in enumerate(self.ranks) if rank in ranks), None)
            own = 0 if s is None else max(0, min((s + 1) * self.cut, self.n) - s * self.cut)
            held = len(state["worker_error"]), len(state["server_error"])
            if held != (len(state["worker_error"]) if flat else own, self.chunk if s is not None else 0):
                raise AssertionError(f"rank {rank} keeps {held} elements of workers and servers, not {own} and {self.chunk}")


def off(got, wanted, unit):
    """Largest distance, in units in the last place of float32 numbers of this size."""
    return float(np.abs(np.float64(got) - np.float64(wanted)).max(initial=0.0)) / (np.float64(unit) * 2.0**-23)


def expect(value, limit, what):
    if not value <= limit:
        raise AssertionError(f"{what}: off by {value:.3g}, allowed is {limit:.3g}")


def check_one_bit(scale, what, c, e):
    """I1, I4 and I6 of what one encoding in 1 bit gave and left over. Returns its scale and its values."""
    c, e = np.float64(c), np.float64(e)
    one = np.abs(c).mean() if scale == "l1" else np.sqrt((c * c).mean())
    sent, squares = c - e, float(c @ c)
    q = np.where(sent >= 0, one, -one)
    expect(off(q + e, c, np.abs(c).max() + one), 1, f"I1 of {what}")
    sure = np.abs(c) > 1e-6 * one
    assert ((q >= 0) == (c >= 0))[sure].all(), f"{what}: a sign is another one"
    rho = np.abs(c).sum() / np.sqrt(len(c) * squares) if squares else 1.0
    left = 1 - rho * rho if scale == "l1" else 2 * (1 - rho)
    norm = rho if scale == "l1" else 1.0
    expect(abs(np.linalg.norm(sent) - norm * np.sqrt(squares)), 1e-6 * np.sqrt(squares), f"I4 of {what}")
    expect(abs(float(e @ e) - left * squares), 4e-6 * squares, f"I6 of {what}")
    return f32(one), f32(q)


# Codecs with error feedback. All keep I1 and I5; those of 1 bit have I4 and I6 too.
RESIDUALS = {
    "onebit": {"type": "onebit", "chunk_align": 64},
    "onebit, l1": {"type": "onebit", "chunk_align": 8, "scale": "l1"},
    "int8": {"type": "int8"},
    "int4": {"type": "int4", "block": 32, "chunk_align": 32},
    "bf16": {"type": "bf16", "residual": True, "chunk_align": 64},
    "fp16": {"type": "fp16", "residual": True, "chunk_align": 8},
}


def compare_residuals(library, name, host_of, hierarchy, shape):
    """I1, I4, I5 and I6 (1.8), from exported states alone: what is sent and what is kept is what was there."""
    settings, calls, n = RESIDUALS[name], 4, 2051
    ranks = range(len(host_of))
    fed = [[noise(call, rank, n) for rank in ranks] for call in range(calls)]
    results, states = [[None] * len(host_of) for _ in range(calls)], [[None] * len(host_of) for _ in range(calls)]

    def body(comm, rank):
        codec = library.codec(comm, json.dumps({**settings, "hierarchy": hierarchy}), [n])
        for call in range(calls):
            y = np.zeros(n, f32)
            library.codec_all_reduce(comm, codec, [fed[call][rank]], [y])
            results[call][rank], states[call][rank] = y, library.codec_state(codec)
        library.call("sotto_codec_destroy", codec)

    library.run(len(host_of), body, host_of)
    if shape[1] == 1:
        assert not any(v.any() for of_call in states for state in of_call for v in state.values()), "one host owes something"
        return
    kept = Kept(n, host_of, shape, align_of(settings))
    flat = max(host_of) + 1 == len(host_of)
    means = [np.array(two.means_of_hosts(vectors_of_ranks, host_of)) for vectors_of_ranks in fed]
    for call in range(calls):
        kept.check_sizes(states[call], flat)
        for part, column in kept.shards():
            m = part.stop - part.start
            workers, servers = residuals(states[call], column, kept, m)
            before = residuals(states[call - 1], column, kept, m) if call else (np.zeros_like(workers), np.zeros_like(servers))
            y = results[call][0][part]
            if settings["type"] == "onebit":
                check_column(kept, settings, means[call][:, part], before, (workers, servers), y, call)
            sums = [sum(np.float64(v[part]) for v in of_calls) for of_calls in
                    ([r[0] for r in results[: call + 1]], [x.mean(0, dtype=np.float64) for x in means[: call + 1]])]
            whole = sums[0] + workers.mean(0, dtype=np.float64) + servers
            expect(off(whole, sums[1], 8), call + 1, f"I5 after call {call}")


def residuals(states, column, kept, m):
    """Worker errors by host, and server errors of all chunks, of a shard of m elements."""
    workers = np.array([states[rank]["worker_error"][:m] for rank in column])
    servers = np.concatenate([states[rank]["server_error"] for rank in column])
    assert not servers[m:].any(), "padding owes something"
    return workers, servers[:m]


def check_column(kept, settings, means, before, after, y, call):
    """The encodings of a shard: one of each host, one of each chunk."""
    scale = settings.get("scale", "l2")
    a = np.zeros(len(y), f32)
    for host in range(kept.hosts):
        one, q = check_one_bit(scale, f"host {host} in call {call}", means[host] + before[0][host], after[0][host])
        a = a + np.sign(q) * (one * (f32(1) / f32(kept.hosts)))
    a = a + before[1]
    for at in range(0, len(y), kept.chunk):
        chunk = slice(at, at + kept.chunk)
        exact = y[chunk] + np.float64(after[1][chunk])
        expect(off(exact, a[chunk], 8), 1, f"I1 of the chunk at {at} in call {call}")
        check_one_bit(scale, f"the chunk at {at} in call {call}", exact, after[1][chunk])
