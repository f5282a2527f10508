#!/usr/bin/env python3
"""The numpy model of the outer optimizers against its specification: sequences, identities, convergence, bad input.

Sections and numbers are those of co2-overlap.md.

usage: outer_model_test.py
"""
import copy
import sys

import numpy as np

import outer_bad_input
import outer_codec_checks
import outer_convergence
import outer_exact as known
from model import f32
from outer_arithmetic import apply, mean_of_ranks, norm_squared, norms, penalty
from outer_model import InvalidState, Outer
from outer_settings import GAPS, Settings, preset
from outer_toy import CASES, GAMMA, SIZES, Toy, close, near, path, same_bits

# 15.1


def agrees(name, wanted, rank, exact, modelled):
    """One sequence against the fractions of section 4.1 and against the model."""
    for t, value in enumerate(wanted):
        assert exact[t][rank] == value, f"{name}, t = {t}: the formulas give {exact[t][rank]}, the sequence {value}"
        got, limit = float(modelled[t][rank]), known.ROUNDED.get(name, len(wanted))
        ok = got == float(value) if t < limit else abs(got - float(value)) <= 1e-6 * abs(float(value))
        assert ok, f"{name}, t = {t}: model {got!r}, wanted {float(value)!r}"


def sequences_common():
    for name, (settings, text) in known.COMMON.items():
        wanted = known.numbers(text)
        rounds = len(wanted) - 1
        agrees(name, wanted, 0, known.exact(settings, rounds), known.modelled(settings, rounds))
    assert known.modelled({}, 8, flush=0)[-1] == [0.828125] * 2, "C0, flush"
    for name, (settings, _) in known.COMMON.items():
        for steps in (0, 1):
            wanted, got = (float(run(settings, 3, flush=steps)[-1][0]) for run in (known.exact, known.modelled))
            assert abs(got - wanted) <= 1e-6 * abs(wanted), f"{name}, {steps} steps, then flush: {got}, {wanted}"


def sequences_own():
    for name, (settings, first, second, flushed) in known.OWN.items():
        rounds = len(known.numbers(second)) - 1
        exact, modelled = known.exact(settings, rounds), known.modelled(settings, rounds)
        if first is None:  # E3: of the mean
            exact, modelled = ([[None, sum(row) / 2] for row in rows] for rows in (exact, modelled))
        else:
            agrees(name, known.numbers(first), 0, exact, modelled)
        agrees(name, known.numbers(second), 1, exact, modelled)
        if flushed:
            wanted = known.numbers(flushed)[0]
            assert known.exact(settings, 4, flush=0)[-1] == [wanted] * 2, f"{name}, flush, formulas"
            assert known.modelled(settings, 4, flush=0)[-1] == [float(wanted)] * 2, f"{name}, flush"
    equal = {"alpha": known.F(1, 2), "beta": known.F(1, 2)}
    means = [sum(row) / 2 for row in known.exact({"freshness": 1, **equal}, 8)]
    assert means == [row[0] for row in known.exact({"delay": 0, **equal}, 8)], "E3 equals delay 0"
    means = [sum(row) / 2 for row in known.exact({"freshness": 1}, 8)]
    assert means == known.numbers(known.COMMON["S0"][1]), "the mean of E1 equals S0"


def sequences_alone():
    for name, (settings, text) in known.ALONE.items():
        wanted = known.numbers(text)
        rounds = len(wanted) - 1
        agrees(name, wanted, 0, known.exact(settings, rounds, known.U), known.modelled(settings, rounds, known.U))


# 15.2


def o1_slowmo_local_sgd_and_synchronous():
    def slowmo(beta, rounds=6):  # 1910.00643, with gradient units
        toy = Toy(Settings(period=99), world=4)
        u = np.zeros(sum(SIZES), f32)
        x0 = toy.vector()
        for _ in range(rounds):
            for _ in range(4):
                toy.inner()
            mean = mean_of_ranks([toy.vector(r) for r in range(4)])
            u = f32(beta) * u + (x0 - mean) * f32(1 / GAMMA)
            x0 = x0 - f32(GAMMA) * u
            for mine in toy.live:
                Outer.put([mine], range(len(SIZES)), [x0])
        return x0
    same_bits(Toy(preset("slowmo", period=4)).run(24).anchor(), slowmo(0.5))
    dense = Toy(preset("local_sgd", period=4)).run(24).anchor()
    near(dense, slowmo(0.0), 3e-7)
    near(Toy(Settings(period=4)).run(24).anchor(), dense, 3e-7)
    averaged = known.modelled({"delay": 0, "payload": "params", "rule": "none"}, 8)
    assert averaged == known.modelled({"delay": 0}, 8), "Local SGD on problem T"
    synchronous = Toy(Settings(period=99))
    for _ in range(24):  # averages gradients
        before = synchronous.vector()
        synchronous.inner()
        step = mean_of_ranks([before - synchronous.vector(r) for r in range(4)])
        for mine in synchronous.live:
            Outer.put([mine], range(len(SIZES)), [before - step])
    near(Toy(preset("local_sgd", period=1)).run(24).anchor(), synchronous.vector(), 1e-6)


def o2_diloco_family():
    base = {"period": 4, "alpha": 0.7, "beta": 0.9}
    near(path(preset("diloco", period=4, alpha=1.0, beta=0.0)), path(preset("local_sgd", period=4)), 3e-7)
    stream = {**base, "fragments": [[0, 1, 2, 3, 4]], "merge_a": 0.0}
    same_bits(path(preset("streaming_diloco", delay=0, **stream)), path(preset("diloco", **base)))
    delayed = path(preset("delayed_diloco", **base))
    same_bits(path(preset("streaming_diloco", delay=4, **stream)), delayed)
    co2 = preset("co2", rule="nesterov", penalty="none", auto_floor=False, clip="none", **base)
    same_bits(path(co2), delayed)
    same_bits(path(preset("eager_diloco", world=4, freshness=0.0, **base)), delayed)


def o3_bmuf_and_units():
    block = preset("bmuf", period=4, alpha=1.0, beta=0.5)
    same_bits(path(block), path(preset("slowmo", period=4, lr_normalised=False)))
    same_bits(path(block), path(preset("slowmo", period=4)))  # gamma is a power of two
    near(path(block, gamma=0.03), path(preset("slowmo", period=4), gamma=0.03), 1e-6)


def o4_constant_ratio_and_clip():
    for beta in (0.0, 0.25):
        for phi in (0.01, 0.5):
            ratio = {"penalty": "const", "lambda_const": 4.0, "clip": "coord", "beta": beta}
            same_bits(path(close(alpha=0.5, phi=phi, **ratio)),
                      path(close(alpha=0.125, phi=4 * phi, clip="coord", beta=beta)))
    for mode in ("coord", "norm", "rms"):
        same_bits(path(close(beta=0.2, clip=mode, phi=np.inf)), path(close(beta=0.2)))
    for mode in ("coord", "norm"):
        frozen = Toy(close(beta=0.2, clip=mode, phi=0.0)).run(24)
        same_bits(frozen.anchor(), np.concatenate(frozen.start))
    averaging = close(rule="nesterov", beta=0.5, clip="coord", phi=0.0)
    same_bits(path(averaging), path(close(beta=0.0)))


def o5_zero_staleness():
    for mode in GAPS:
        toy = Toy(close(penalty=mode, alpha=1e-30))
        ratios = [float(e.ratio.max()) for _ in range(24) for e in toy.step() if e.consumed]
        assert ratios == [1.0] * 5, f"{mode}: {ratios}"
        still = Toy(close(penalty=mode), gamma=0.0)
        assert [float(e.ratio[0]) for _ in range(12) for e in still.step() if e.consumed] == [1.0, 1.0], mode
    first = Toy(close(penalty="gap_ema", beta=0.2)).run(4)
    assert [e.ratio[0] for _ in range(4) for e in first.step()] == [1.0], "the first consumption"
    assert penalty("gap_rel", 0.0, 0.0) == 1.0
    assert penalty("gap_rel", 1.0, 0.0, 0.0, 16.0) == 16.0
    assert penalty("gap_rel", 1.0, 1.0, 0.0, 16.0, 3.0) == 3.0
    assert np.isnan(penalty("gap_rel", np.nan, 1.0))


def o6_same_data():
    for keys in ({"beta": 0.5, "clip": "rms"}, {"freshness": 0.5, "beta": 0.2}, {"freshness": 1.0, "rule": "nesterov"},
                 {"penalty": "gap_rel", "form": "anchor_diff"}):
        alone = path(close(**keys), world=1, same=True)
        for world in (2, 4, 8):
            ranks = path(close(**keys), world=world, same=True)
            same_bits(ranks, np.repeat(ranks[:, :1], world, axis=1))
            if world < 8:
                same_bits(ranks[:, :1], alone)
            else:
                near(ranks[:, :1], alone, 1e-6)


def o7_forms():
    for alpha, beta in ((1.0, 0.5), (0.5, 0.75), (0.75, 0.25)):
        a = path(close(form="anchor_diff", alpha=alpha, beta=beta))
        b = path(close(alpha=alpha, beta=beta - alpha), checked=False)
        near(a, b, 1e-6)
    # Payload params with anchor_diff is A - mean(x) as such (4.1).
    near(path(close(form="anchor_diff", beta=0.5)), path(close(form="anchor_diff", beta=0.5, payload="params")), 1e-6)
    near(path(close(beta=0.2)), path(close(beta=0.2, payload="params")), 1e-6)
    d, m = np.array([1.0], f32), np.array([0.5], f32)
    assert apply(d, m, d, f32(1), 1.0, -0.5, "heavy_ball")[0] == 0.25, "the pure function takes a negative beta"


def o8_two_chains():
    run = known.modelled({"form": "anchor_diff"}, 8)
    chain = known.modelled({"delay": 0}, 4)
    assert run[1::2] == chain[:4]
    assert run[2::2] == chain[1:5]


def o10_save_and_load():
    for name, make in CASES.items():
        for world in (1, 3):
            for steps in range(9, 13):  # one round, with what is pending at each of its steps
                whole = Toy(make(world), world).run(steps)
                state, live = whole.outer.export_state(), copy.deepcopy(whole.live)
                whole.run(9)
                loaded = Toy(make(world), world)
                loaded.outer.import_state(state)
                loaded.live, loaded.t = live, steps
                loaded.run(9)
                for toy in (whole, loaded):
                    toy.outer.flush(toy.live)
                for r in range(world):
                    same_bits(loaded.vector(r), whole.vector(r), f"{name}, {world} ranks, saved after {steps} steps: ")


def o13_sum_rule():
    toy, total = Toy(close(), world=3), 0
    start = toy.vector()
    for _ in range(22):
        toy.inner()
        launched = toy.t % 4 == 0
        if launched:
            total = total + sum(toy.anchor() - toy.vector(r).astype(np.float64) for r in range(3)) / 3
        toy.outer.step(toy.live, toy.gamma)
    total = total + sum(toy.anchor() - toy.vector(r).astype(np.float64) for r in range(3)) / 3  # the short round
    toy.outer.flush(toy.live)
    near(start - toy.anchor(), total, 1e-6)


def o13_nothing_is_lost():
    """With alpha 1 and beta 0 the flushed anchor has moved by the mean of all inner steps, whatever the moment."""
    for keys in ({"delay": 0}, {}, {"payload": "params"}, {"freshness": 1.0}, {"merge": "add_progress"},
                 {"merge": "add_progress", "delay": 2}, {"payload": "params", "rule": "none", "merge": "add_progress"}):
        for steps in range(17, 23):
            toy = Toy(close(**keys), world=3)
            start, moved = toy.vector().astype(np.float64), 0
            for _ in range(steps):
                before = [toy.vector(r).astype(np.float64) for r in range(3)]
                toy.inner()
                moved = moved + sum(toy.vector(r) - before[r] for r in range(3)) / 3
                toy.outer.step(toy.live, toy.gamma)
            toy.outer.flush(toy.live)
            near(toy.anchor() - start, moved, 2e-6)


def o16_post_local():
    for keys in ({"switch_step": 10}, {"warmup_steps": 10}):
        for make in (lambda **k: preset("post_local_sgd", period=4, **k), lambda **k: close(freshness=1.0, **k)):
            both = Toy(make(**keys)).run(10)
            every = Toy(preset("local_sgd", period=1)).run(10)
            for r in range(4):
                same_bits(both.vector(r), every.vector(r))
                same_bits(both.anchor(r), every.anchor())
            events = [bool(both.step()) for _ in range(8)]
            assert events == [False, False, False, True] * 2, "launches at switch_step + k * H"
    alone = Toy(Settings(period=4, warmup_steps=3, every_step="gradients"), world=1)
    plain = Toy(Settings(period=99), world=1)
    same_bits(alone.run(6).vector(), plain.run(6).vector())


def o18_cocod():
    written = Toy(Settings(period=99))
    starts = [written.vector(r) for r in range(4)]
    corrected, cocod = Toy(preset("delta_corrected", period=4, beta=0.0)), Toy(preset("cocod", period=4))
    for _ in range(6):
        for _ in range(4):
            written.inner()
            corrected.step()
            cocod.step()
        mean = mean_of_ranks(starts)
        starts = [mean - (starts[r] - written.vector(r)) for r in range(4)]
        for r in range(4):
            Outer.put([written.live[r]], range(len(SIZES)), [starts[r]])
            near(corrected.vector(r), starts[r], 1e-6)
            near(cocod.vector(r), starts[r], 1e-6)
    settings = {"payload": "params", "rule": "none", "merge": "add_progress"}
    live = [[np.array([5.0], f32)], [np.array([5.0], f32)]]
    outer = Outer(Settings(period=2, delay=2, **settings), live)
    wanted = list(zip(*(known.numbers(text) for text in known.OWN["E1"][1:3])))
    for t in range(1, 6):
        for _ in range(2):
            for x, c in zip(live, (-1, 3)):
                x[0][...] = x[0] - f32(0.5) * (x[0] - f32(c))
            outer.step(live)
        assert [x[0][0] for x in live] == [float(v) for v in wanted[t]], f"cocod is E1, t = {t}"


def o19_spread_after_flush():
    for freshness in (0.25, 1.0):
        for mode in ("none", "const", *GAPS):
            keys = {"freshness": freshness, "penalty": mode, "lambda_const": 2.0}
            spreads = []
            for rounds in (3, 12, 40):
                toy = Toy(close(**keys)).run(4 * rounds)
                assert toy.spread() > 1e-3, "the workers differ before"
                toy.outer.flush(toy.live)
                spreads.append(toy.spread())
            assert max(spreads) < 3e-6, f"lambda {freshness}, {mode}: {spreads}"
            toy = Toy(close(beta=0.5, **keys)).run(42)
            toy.outer.flush(toy.live)
            assert toy.spread() == 0, "beta > 0: averaged once"


# Parts of the engine against their formulas


def streaming_written_out():
    """2501.18512: fragment p launches when (n - p*H/P) mod H is 0, is consumed D steps later, live = a*x + (1-a)*A."""
    period, delay, parts = 6, 2, [[0, 3], [1, 2, 4]]
    settings = preset("streaming_diloco", period=period, delay=delay, fragments=parts, merge_a=0.25)
    engine, plain = Toy(settings, world=3), Toy(Settings(period=99), world=3)
    anchors, momenta = [x.copy() for x in plain.start], [np.zeros_like(x) for x in plain.start]
    pending = {}
    for n in range(1, 25):
        events = engine.step()
        plain.inner()
        wanted = []
        for p, members in enumerate(parts):
            since = (n - p * period // 2) % period
            if since == 0:
                pending[p] = [mean_of_ranks([anchors[i] - plain.live[r][i] for r in range(3)]) for i in members]
                wanted.append((p, True, False))
            if since == delay and p in pending:
                for i, d in zip(members, pending.pop(p)):
                    momenta[i] = f32(0.9) * momenta[i] + d
                    anchors[i] = anchors[i] - f32(0.4) * (f32(0.9) * momenta[i] + d)
                    for r in range(3):
                        plain.live[r][i][...] = f32(0.25) * plain.live[r][i] + f32(0.75) * anchors[i]
                wanted.append((p, False, True))
        assert [(e.fragment, e.launched, e.consumed) for e in events] == wanted, f"step {n}"
        for r in range(3):
            same_bits(engine.vector(r), plain.vector(r))


def pull_written_out():
    """2002.09539: at a boundary x = (1-a)*x + a*z, then z's next average is of x; anchor momentum."""
    engine, plain = Toy(preset("overlap_local_sgd", period=3)), Toy(Settings(period=99))
    z, m, pending = plain.vector(), np.zeros(sum(SIZES), f32), None
    for n in range(1, 19):
        engine.step()
        plain.inner()
        if n % 3:
            continue
        if pending is not None:
            m = f32(0.7) * m + (z - pending)
            z = z - m
        for mine in plain.live:
            Outer.put([mine], range(len(SIZES)), [f32(1 - 0.6) * np.concatenate(mine) + f32(0.6) * z])
        pending = mean_of_ranks([plain.vector(r) for r in range(4)])
        for r in range(4):
            same_bits(engine.vector(r), plain.vector(r))


def constant_delta(count=60, **keys):
    """Lambda of every consumption where every round brings the same Delta."""
    live, ratios = [[np.ones(3, f32)]], []
    outer = Outer(Settings(period=1, delay=1, eps=0.0, **keys), live)
    for _ in range(count):
        live[0][0] -= f32(0.25)
        ratios += [float(e.ratio[0]) for e in outer.step(live) if e.consumed]
    return ratios


def penalties():
    for beta in (0.0, 0.2, 0.5):  # Lambda(Lambda - 1) = 1/(1 - beta)
        steady = 0.5 + np.sqrt(0.25 + 1 / (1 - beta))
        assert abs(constant_delta(penalty="gap_rel", beta=beta)[-1] - steady) < 1e-3, f"gap_rel, beta {beta}"
    assert abs(constant_delta(penalty="gap_ema", beta=0.2)[-1] - 2) < 0.05, "gap_ema"
    # alpha 1, Lambda 1 at t = 1, so s is Delta then; gap over H * ||x_1 - x_0||, and Delta is that first step.
    assert constant_delta(3, penalty="gap_inner") == [1.0, 2.0], "gap_inner, tau 1"
    floor = 1.25 / (1 - 0.5)
    assert min(constant_delta(9, penalty="gap_rel", beta=0.5, auto_floor=True)) == floor
    assert constant_delta(9, penalty="none", beta=0.5, auto_floor=True) == [floor] * 8
    assert constant_delta(9, penalty="const", lambda_const=20.0) == [20.0] * 8, "const is not clamped"
    assert constant_delta(9, beta=0.5, auto_floor=True, form="anchor_diff") == [1.0] * 8, "no floor for anchor_diff"
    # Consensus: the gap of the trailer is that of the update before the launch, one round old.
    own = constant_delta(4, penalty="gap_rel")
    late = constant_delta(4, penalty="gap_rel", consensus_scalars=True)
    assert own[:2] == [1.0, 2.0], f"{own}"
    assert late[:3] == [1.0, 1.0, 2.0], f"{late}"
    # Below a delay of one period the anchor has not moved (4.1).
    for keys in ({"delay": 1}, {"delay": 3, "merge": "lerp", "merge_a": 0.5}, {"merge": "pull", "payload": "params"}):
        toy = Toy(close(penalty="gap_rel", consensus_scalars=True, beta=0.5, **keys))
        assert {float(e.ratio[0]) for _ in range(24) for e in toy.step() if e.consumed} == {1.0}, keys


def penalties_from_anchors():
    """4.3 from what can be seen: anchors, deltas and first steps, in float64."""
    for mode in GAPS:
        for keys in ({}, {"form": "anchor_diff"}, {"payload": "params"}, {"payload": "params", "form": "anchor_diff"}):
            toy = Toy(close(penalty=mode, beta=0.3, alpha=0.4, **keys), world=3)
            anchors, units, average = [toy.anchor()] * 2, [], 0.0
            for t in range(9):
                first = []
                for k in range(4):
                    toy.inner()
                    if k == 0:
                        first = [np.linalg.norm(toy.vector(r) - toy.anchor()) for r in range(3)]
                    if k < 3:
                        toy.outer.step(toy.live, toy.gamma)
                delta = np.mean([anchors[-1] - toy.vector(r).astype(np.float64) for r in range(3)], axis=0)
                units.append((delta, 4 * np.mean(first)))
                event = toy.outer.step(toy.live, toy.gamma)[0]
                if t > 0:
                    s = anchors[-2].astype(np.float64) - anchors[-1]  # at launch minus at consumption
                    gap, delta = np.linalg.norm(s), units[-2][0]
                    average = 0.9 * average + 0.1 * gap if average else gap
                    measured = delta - s if len(keys) == 2 else delta
                    unit = {"gap_rel": np.linalg.norm(measured), "gap_ema": average, "gap_inner": units[-2][1]}[mode]
                    ratio = min(1 + gap / (unit + 1e-12), 16.0 if "form" not in keys else 2.0)
                    assert abs(event.ratio[0] - ratio) < 1e-4, f"{mode}, {keys}, t = {t}: {event.ratio}, {ratio}"
                anchors.append(toy.anchor())


def co2_written_out():
    """Preset co2, section 4.1 step by step, bit for bit."""
    toy, plain = Toy(preset("co2", period=4), world=3), Toy(Settings(period=99), world=3)
    whole = [[slice(sum(SIZES[:i]), sum(SIZES[: i + 1])) for i in range(len(SIZES))]]
    a, m, s = plain.vector(), np.zeros(sum(SIZES), f32), np.zeros(sum(SIZES), f32)
    average, handle = 0.0, None
    for _ in range(12):
        for _ in range(4):
            toy.step()
            plain.inner()
        dbar, handle = handle, mean_of_ranks([a - plain.vector(r) for r in range(3)])
        if dbar is not None:
            gap = norms(s, whole)[0]
            average = 0.9 * average + 0.1 * gap if average else gap
            ratio = 1.0 if gap == 0 else min(max(1 + gap / (average + 1e-12 * np.sqrt(len(a))), 1.0), 16.0)
            ratio = max(ratio, 1.25 * 1.0 / (1.0 - 0.2))
            m = f32(0.2) * m + dbar * f32(1 / ratio)
            phi = f32(10.0 * float(f32(np.sqrt(norm_squared(m, whole[0]) / len(m)))))
            m = np.minimum(np.maximum(m, -phi), phi)
            s = f32(1.0) * m
            a = a - s
        for r in range(3):
            Outer.put([plain.live[r]], range(len(SIZES)), [a])
            same_bits(toy.vector(r), a)


def penalties_of_ranks_and_parts():
    toy = Toy(close(penalty="gap_ema", freshness=0.5), world=3).run(40)
    kept = [f.averages for f in toy.outer.fragments]
    assert all(np.array_equal(c, kept[0][0]) for c in kept[0]), "0 < lambda < 1: Lambda is equal on all ranks"
    own = Toy(close(penalty="gap_ema", freshness=1.0), world=2).run(40).outer.fragments[0].averages
    assert own[0] != own[1], "lambda 1: every rank has its own"
    sizes = [16, 16]
    whole = {"penalty": "gap_rel", "beta": 0.2, "eps": 0.0}
    parts = path(close(granularity="tensor", **whole), sizes=sizes)
    split = path(close(fragments=[[0], [1]], **whole), sizes=sizes)
    same_bits(parts[:, :, :16], split[:, :, :16])  # fragment 0 has no offset
    one = path(close(granularity="element", **whole), sizes=[1])
    near(one, path(close(**whole), sizes=[1]), 1e-6)


def clips():
    for mode, phi in (("coord", 0.02), ("norm", 0.3), ("rms", 1.5)):
        toy, shares = Toy(close(beta=0.5, clip=mode, phi=phi)), []
        for _ in range(24):
            shares += [e.clipped for e in toy.step() if e.consumed]
            m = toy.outer.fragments[0].momenta[0].astype(np.float64)
            assert mode != "coord" or np.abs(m).max() <= f32(phi)
            assert mode != "norm" or np.sqrt((m * m).sum()) <= phi * (1 + 1e-6)
        assert max(shares) > 0, f"{mode} never bound"
        # A power of two: the same in units of gradients (rms has none).
        in_gradients = phi if mode == "rms" else phi / GAMMA
        same_bits(path(close(beta=0.5, clip=mode, phi=in_gradients, clip_units="grad")),
                  path(close(beta=0.5, clip=mode, phi=phi)))
        normalised = close(beta=0.5, clip=mode, phi=in_gradients, lr_normalised=True)
        same_bits(path(normalised), path(close(beta=0.5, clip=mode, phi=phi)))


def flush_and_swap():
    for name, make in CASES.items():
        for steps in (0, 1, 4, 6, 8, 9):
            toy = Toy(make(3), world=3).run(steps)
            before, anchors = toy.vector(1), toy.anchor(1)
            toy.outer.swap(toy.live)
            same_bits(toy.vector(1), anchors)
            try:
                toy.outer.step(toy.live, GAMMA)
                raise AssertionError("a step between the swaps")
            except InvalidState:
                toy.outer.swap(toy.live)
            same_bits(toy.vector(1), before)
            toy.outer.flush(toy.live)
            flushed = [toy.vector(r) for r in range(3)]
            for r in range(3):
                same_bits(flushed[r], toy.anchor(r))
            assert toy.outer.flush(toy.live) == [], f"{name}, {steps} steps: the second flush does nothing"
            toy.run(9)
            assert np.isfinite(toy.vector()).all(), name


def events_of_a_round():
    def kinds(settings, steps):
        toy, out = Toy(settings), []
        for _ in range(steps):
            out.append("".join("L" * e.launched + "C" * e.consumed + "H" * e.held for e in toy.step()))
        return out
    assert kinds(Settings(period=2, delay=2), 6) == ["", "LH", "", "LC", "", "LC"]
    assert kinds(Settings(period=2, delay=2, freshness=0.5), 4) == ["", "LC", "", "LC"]
    assert kinds(Settings(period=2), 4) == ["", "LC", "", "LC"]
    assert kinds(Settings(period=3, delay=1, merge="lerp"), 7) == ["", "", "L", "C", "", "L", "C"]
    assert kinds(preset("cocod", period=2), 4) == ["", "LH", "", "LC"]


CHECKS = [
    sequences_common, sequences_own, sequences_alone, o1_slowmo_local_sgd_and_synchronous, o2_diloco_family,
    o3_bmuf_and_units, o4_constant_ratio_and_clip, o5_zero_staleness, o6_same_data, o7_forms, o8_two_chains,
    o10_save_and_load, o13_sum_rule, o13_nothing_is_lost, o16_post_local, o18_cocod, o19_spread_after_flush,
    streaming_written_out, pull_written_out, co2_written_out, penalties, penalties_from_anchors,
    penalties_of_ranks_and_parts, clips, flush_and_swap, events_of_a_round, *outer_convergence.CHECKS,
    *outer_codec_checks.CHECKS, *outer_bad_input.CHECKS,
]


def main():
    if len(sys.argv) != 1:
        sys.exit(__doc__)
    failed = 0
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        try:
            check()
            print(f"ok      {name}", flush=True)
        except (AssertionError, RuntimeError, ValueError, ArithmeticError) as error:
            failed += 1
            print(f"FAILED  {name}: {error}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
