"""Checks of averages and codecs of the outer optimizers: co2-overlap.md, 7, 13, O12; sparse-loco.md, 5, 8, 11, 12."""
import numpy as np

from model import Compressor, f32
from outer_arithmetic import mean_of_ranks
from outer_codecs import Blocks, OneBit, TopK, codec_of, payload_bytes, selected, to_bf16, two_bit_levels
from outer_settings import CODECS, Settings, preset
from outer_toy import SIZES, Toy, close, near, path, same_bits


def top(**keys):
    return {**CODECS["topk"], "type": "topk", **keys}


def row(text):
    return np.array([float(word) for word in text.replace("|", " ").split()], f32)


def equal(got, wanted, what):
    assert np.array_equal(got, wanted), f"{what}: {got}, wanted {wanted}"


def rounds_of(codec, deltas):
    """Encodes and averages on all ranks, round after round."""
    out = []
    for values in deltas:
        for r, delta in enumerate(values):
            assert codec.encode(r, delta)
        out.append(codec.average(range(len(values))))
    return out


def normal(count, world, n, seed=3):
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal(n).astype(f32) for _ in range(world)] for _ in range(count)]


def averages():
    """Section 13: groups of 8 ranks, start 0, times fl(1/W)."""
    x = [values[0] for values in normal(17, 1, 99)]
    groups = []
    for first, last in ((0, 8), (8, 16), (16, 17)):
        total = np.zeros(99, f32)
        for r in range(first, last):
            total = total + x[r]
        groups.append(total)
    same_bits(mean_of_ranks(x), ((groups[0] + groups[1]) + groups[2]) * (f32(1) / f32(17)))
    plain = np.zeros(99, f32)
    for value in x:
        plain = plain + value
    assert not np.array_equal(mean_of_ranks(x), plain * (f32(1) / f32(17)))
    same_bits(mean_of_ranks([x[0], None, x[2]]), (x[0] + x[2]) * f32(0.5))
    assert mean_of_ranks([None, None]) is None


def one_bit_is_the_compressor():
    for world, n, align in ((2, 1, 8), (3, 700, 64), (9, 9001, 512)):
        codec, compressor, deltas = OneBit(n, world, align), Compressor(n, world, align), normal(3, world, n)
        for values, got in zip(deltas, rounds_of(codec, deltas)):
            same_bits(got, compressor.all_reduce(values, np.ones(n, bool)))
        same_bits(np.stack(codec.worker), np.stack(compressor.worker))
        same_bits(codec.server, np.concatenate(compressor.server))


def o12_exact_codecs():
    exact = {"codec": top(block=32, k=32, bits=32), "dense_rounds": 0}
    for keys in ({"beta": 0.2}, {"freshness": 0.5}, {"delay": 0, "rule": "nesterov", "beta": 0.5}):
        dense = path(close(**keys))
        same_bits(path(close(codec="none", **keys)), dense)
        same_bits(path(close(**exact, **keys)), dense)
        one = {"world": 2, "sizes": [1], "steps": 40}
        same_bits(path(close(codec="onebit", dense_rounds=0, **keys), **one), path(close(**keys), **one))
    for codec in CODECS:
        same_bits(path(close(codec=codec, dense_rounds=0), world=1), path(close(), world=1))


def dense_rounds_and_residuals():
    for codec in CODECS:
        settings = close(codec=codec, dense_rounds=2, beta=0.2)
        got, dense = path(settings, steps=16), path(close(beta=0.2), steps=16)
        same_bits(got[:15], dense[:15])  # launches of steps 4 and 8, used until 12
        assert not np.array_equal(got, dense), f"{codec}: the third launch is encoded"
        # Telescoping: averages, mean worker residual and server residual hold all that was put in.
        n, world = sum(SIZES), 3
        if codec in ("onebit", "int8", "int4", "topk"):
            coder = codec_of(Settings(period=1, codec=codec, chunk_align=256), SIZES, world)
            deltas = normal(6, world, n)
            out = np.sum(rounds_of(coder, deltas), axis=0, dtype=np.float64)
            left = out + np.mean(coder.worker, axis=0, dtype=np.float64) + coder.server
            near(left, np.sum([mean_of_ranks(values) for values in deltas], axis=0), 1e-6)


def freshness_with_codecs():
    for codec in CODECS:
        toy = Toy(close(freshness=1.0, codec=codec, chunk_align=256), world=3).run(42)
        assert toy.spread() > 1e-3, codec
        toy.outer.flush(toy.live)
        assert toy.spread() < 3e-6, f"{codec}: the corrections cancel: {toy.spread()}"
    # Corrections are made of what was sent, so the mean of the anchors has no delay: with gather Dbar is its mean.
    toy, total = Toy(close(freshness=1.0, codec=top(block=32, k=4), dense_rounds=0)), 0.0
    start = toy.anchor()
    for _ in range(40):
        if toy.step():
            total = total + toy.outer.fragments[0].pending.average.astype(np.float64)
            near(start - np.mean([toy.anchor(r) for r in range(4)], axis=0, dtype=np.float64), total, 1e-6)


def roundings():
    equal(to_bf16(row("1 1.00390625 1.01171875 -0.3 3.4e38")), row("1 1 1.015625 -0.30078125 inf"), "bfloat16")
    blocks = Blocks(4, 2, 8, 4, True)
    assert blocks.encode(0, row("127 63.5 -1 -0.2"))
    equal(blocks.sent[0], row("127 64 -1 0"), "int8: scale 1, halves to even")
    equal(blocks.worker[0], row("0 -.5 0 -.2"), "int8: residual")
    assert not blocks.encode(1, row("3.4028235e38 0 0 inf")) or np.isfinite(blocks.worker[1]).all()
    # An overflow of 16 bits takes the rank out of the round.
    toy = Toy(close(codec="fp16", dense_rounds=0, delay=0), world=2, sizes=[3])
    toy.run(3)
    toy.inner()
    before, delta = toy.anchor(), None
    toy.live[1][0][0] = f32(1e6)
    delta = before - toy.vector(0)
    events = toy.outer.step(toy.live, toy.gamma)
    assert events[0].skipped == (1,)
    same_bits(toy.anchor(), before - delta.astype(np.float16).astype(f32))


# sparse-loco.md


def selection_and_levels():
    equal(selected(row("1 -4 2 0 3 -.5 4 -2"), 2), [1, 6], "the two largest")
    equal(selected(row("2 2 -2 2 0 0 0 0"), 2), [0, 1], "ties")
    equal(selected(row("0 0 0 8 -0.0 0 0 0"), 2), [0, 3], "zeros")
    tails = [TopK([m], 2, top(block=8, k=2)).code(np.ones(m, f32), 2)[1].sum() for m in (1, 2, 5, 6, 8, 13)]
    assert tails == [1, 1, 1, 2, 2, 3], "k_m, halves up"
    lo, hi, high = two_bit_levels(np.abs(row("1 -3 2.5 6")))
    assert (lo, hi, list(high)) == (2.171875, 6.0, [False, False, False, True])
    lo, hi, high = two_bit_levels(np.abs(row("-.7 .65 -.9 .55")))
    assert (lo, hi, list(high)) == (0.6328125, 0.8984375, [False, False, True, False])
    rng = np.random.default_rng(5)
    c = rng.standard_normal(4096).astype(f32)
    at = selected(c, 64)
    assert np.abs(c[at]).min() >= np.delete(np.abs(c), at).max()
    sizes = [(32, 48, 60), (64, 84, 116), (128, 148, 228), (256, 260, 452), (1024, 772, 1796), (4096, 1028, 1028)]
    for k, ef, packed in sizes:
        assert (payload_bytes(4096, k, 2), payload_bytes(4096, k, 2, "packed")) == (ef, packed)
    assert [payload_bytes(4096, 64, b) for b in (4, 8, 32)] == [100, 132, 320]
    assert payload_bytes(8, 2, 2) == 6, "the worked example"
    assert [TopK([8], w, top(k=64)).server_k() for w in (2, 31, 32)] == [128, 1984, 4096]


def worked_example():
    """Section 12, round 0 and 1, both averages and two_phase."""
    config = top(block=8, k=2, error_decay=0.5)
    first = [row("1 -4 2 0 3 -.5 4 -2 | 0 0 0 8 0 0 0 0"), row("2 2 -2 2 0 0 0 0 | 1 2 3 4 5 6 7 -8")]
    codec, y = TopK([16], 2, config), []
    y += rounds_of(codec, [first])
    equal(codec.sent[0], row("0 -4 0 0 0 0 4 0 | 0 0 0 8 0 0 0 0"), "q of worker 0")
    equal(codec.worker[0], row("1 0 2 0 3 -.5 0 -2 | 0 0 0 0 0 0 0 0"), "e of worker 0")
    equal(codec.sent[1], row("2 2 0 0 0 0 0 0 | 0 0 0 0 0 0 7 -8"), "q of worker 1")
    equal(codec.worker[1], row("0 0 -2 2 0 0 0 0 | 1 2 3 4 5 6 0 0"), "e of worker 1")
    equal(y[0], row("1 -1 0 0 0 0 2 0 | 0 0 0 4 0 0 3.5 -4"), "y")
    y += rounds_of(codec, [first[::-1]])
    equal(codec.sent[0], row("2.5 2 0 0 0 0 0 0 | 0 0 0 0 0 0 7 -8"), "q of worker 0, round 1")
    equal(codec.worker[0], row("0 0 -1 2 1.5 -.25 0 -1 | 1 2 3 4 5 6 0 0"), "e of worker 0, round 1")
    equal(codec.sent[1], row("0 -4 0 0 0 0 4 0 | 0 0 0 10 0 3 0 0"), "q of worker 1, round 1")
    equal(codec.worker[1], row("1 0 1 1 3 -.5 0 -2 | .5 1 1.5 0 2.5 0 0 0"), "e of worker 1, round 1")
    equal(y[1], row("1.25 -1 0 0 0 0 2 0 | 0 0 0 5 0 1.5 3.5 -4"), "y, round 1")
    equal(-y[0] - y[1], row("-2.25 2 0 0 0 0 -4 0 | 0 0 0 -9 0 -1.5 -7 8"), "A")
    codec = TopK([16], 2, {**config, "average": "contributors"})
    equal(rounds_of(codec, [first])[0], row("2 -1 0 0 0 0 4 0 | 0 0 0 8 0 0 7 -8"), "contributors")
    codec = TopK([16], 2, {**config, "exchange": "two_phase"})
    equal(rounds_of(codec, [first])[0],
          row("1.3359375 -1.3359375 0 0 0 0 1.3359375 0 | 0 0 0 3.828125 0 0 3.828125 -3.828125"), "two_phase")
    equal(codec.server, row("-.3359375 .3359375 0 0 0 0 .6640625 0 | 0 0 0 .171875 0 0 -.328125 -.171875"), "es")


def sparse_invariants():
    sizes, world = [40, 0, 100, 7], 3
    n = sum(sizes)
    deltas = normal(8, world, n)
    for bits in (2, 4, 8, 32):
        config = top(block=32, k=4, bits=bits, error_decay=0.95)
        codec, rho = TopK(sizes, world, config), f32(0.95)
        held, given = np.zeros(n), np.zeros(n)
        for values in deltas:  # E1, E2
            c = [rho * codec.worker[r] + values[r] for r in range(world)]
            y = rounds_of(codec, [values])[0]
            for r in range(world):
                near(codec.sent[r].astype(np.float64) + codec.worker[r], c[r], 2e-7)
            held, given = float(rho) * held + y, float(rho) * given + np.mean(values, axis=0, dtype=np.float64)
        near(held + np.mean(codec.worker, axis=0, dtype=np.float64), given, 1e-6)
        scaled, negative = TopK(sizes, 2, config), TopK(sizes, 2, config)  # E4
        for r, factor in ((0, 1), (1, 0.25)):
            assert scaled.encode(r, deltas[0][0] * f32(factor))
            assert negative.encode(r, deltas[0][0] * f32(1 - 2 * r))
        same_bits(scaled.sent[1], scaled.sent[0] * f32(0.25))
        equal(negative.sent[1], -negative.sent[0], "E4")
    full = TopK(sizes, world, top(block=32, k=32, bits=32, exchange="two_phase"))  # E7
    for values, y in zip(deltas, rounds_of(full, deltas)):
        same_bits(y, mean_of_ranks(values))
    assert not np.any(full.worker)
    assert not np.any(full.server)
    same = TopK(sizes, world, top(block=32, k=4, average="contributors"))
    alone = TopK(sizes, 1, top(block=32, k=4, alone="encode"))
    for y, z in zip(rounds_of(same, [[v[0]] * world for v in deltas]), rounds_of(alone, [v[:1] for v in deltas])):
        near(y, z, 1e-6)
    small = TopK(sizes, world, top(block=32, k=4, dense_below=10))
    same_bits(rounds_of(small, deltas)[0][140:], mean_of_ranks(deltas[0])[140:])


def sparse_skips_and_clips():
    config, delta = top(block=8, k=2, error_decay=0.5), row("1 -4 2 0 3 -.5 4 -2")
    codec = TopK([8], 2, config)
    rounds_of(codec, [[delta, delta]])
    before = codec.worker[1].copy()
    codec.skip(1, row("nan 1 0 0 0 0 0 inf"))  # section 8: what was sent goes back, without x'
    equal(codec.worker[1], f32(0.5) * before, "the residual decays and is kept")
    codec = TopK([8], 3, {**config, "median_clip": True})
    y = rounds_of(codec, [[delta, delta, f32(8) * delta]])[0]
    near(y, codec.sent[0], 1e-6)
    # The preset: rule none, so beta plays no part; a worker that sends NaN is left out of one round.
    settings = preset("sparse_loco", 2, period=2, codec=top(block=32, k=4, error_decay=0.95))
    toy = Toy(settings, world=2).run(3)
    toy.inner()
    toy.live[1][0][:] = np.nan
    anchor = toy.anchor()
    assert toy.outer.step(toy.live, toy.gamma)[0].skipped == (1,)
    same_bits(toy.anchor(), anchor - toy.outer.fragments[0].codec.sent[0])
    same_bits(toy.vector(1), toy.anchor())
    assert np.isfinite(toy.outer.fragments[0].codec.worker[1]).all()


CHECKS = [averages, one_bit_is_the_compressor, o12_exact_codecs, dense_rounds_and_residuals, freshness_with_codecs,
          roundings, selection_and_levels, worked_example, sparse_invariants, sparse_skips_and_clips]
