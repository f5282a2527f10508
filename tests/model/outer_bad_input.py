"""Checks of presets, bad input and values that are not finite: co2-overlap.md, 3, 4.5 and 14; sparse-loco.md, 16."""
import numpy as np

from model import f32
from outer_codecs import NonFinite
from outer_model import InvalidState, Outer
from outer_settings import PRESETS, REQUIRED, Settings, preset
from outer_toy import Toy, close, near, same_bits

NAN = float("nan")
TOPK = {"type": "topk"}
REFUSED = [  # key that the message names, settings beside period 4
    ("period", {"period": 0}), ("period", {"period": 2.5}), ("period", {"period": True}), ("delay", {"delay": 5}),
    ("delay", {"delay": -1}), ("delay", {"merge": "add_progress"}), ("delay", {"merge": "pull", "delay": 3}),
    ("alpha", {"alpha": 0.0}), ("alpha", {"alpha": NAN}), ("alpha", {"alpha": float("inf")}), ("alpha", {"alpha": "1"}),
    ("beta", {"beta": 1.0}), ("beta", {"beta": -0.5}), ("beta", {"beta": NAN}), ("phi", {"phi": -1.0}),
    ("phi", {"phi": NAN}), ("freshness", {"delay": 4, "freshness": 1.5}), ("freshness", {"delay": 4, "freshness": NAN}),
    ("freshness", {"freshness": 0.5}), ("freshness", {"delay": 4, "freshness": 0.5, "form": "anchor_diff"}),
    ("freshness", {"delay": 4, "freshness": 0.5, "merge": "lerp"}),
    ("freshness", {"delay": 4, "freshness": 0.5, "payload": "params"}),
    ("freshness", {"delay": 4, "freshness": 0.5, "lr_normalised": True}), ("merge_a", {"merge_a": 1.5}),
    ("granularity", {"granularity": "element", "penalty": "gap_ema"}),
    ("granularity", {"granularity": "element", "penalty": "gap_inner"}),
    ("granularity", {"granularity": "element", "penalty": "gap_rel", "freshness": 0.5, "delay": 4}),
    ("granularity", {"granularity": "element", "penalty": "gap_rel", "consensus_scalars": True}),
    ("lambda_const", {"lambda_const": 0.5}), ("lambda_max", {"lambda_max": 0.0}), ("eps", {"eps": -1.0}),
    ("codec", {"codec": "onebit", "payload": "params"}), ("codec", {"codec": TOPK, "payload": "params"}),
    ("codec", {"codec": TOPK, "merge": "pull", "delay": 4}), ("codec.type", {"codec": "gzip"}),
    ("codec.type", {"codec": 3}), ("codec.level", {"codec": {"type": "onebit", "level": 2}}),
    ("codec.k", {"codec": {**TOPK, "k": 5000}}), ("codec.block", {"codec": {**TOPK, "block": 100}}),
    ("codec.bits", {"codec": {**TOPK, "bits": 1}}), ("codec.k_server", {"codec": {**TOPK, "k_server": 65}}),
    ("codec.error_decay", {"codec": {**TOPK, "error_decay": NAN}}),
    ("codec.shape", {"codec": {**TOPK, "shape": "row"}}),
    ("codec.median_clip", {"codec": {**TOPK, "median_clip": True, "exchange": "two_phase"}}),
    ("codec.block", {"codec": {"type": "int8", "block": 48}}), ("chunk_align", {"chunk_align": 12}),
    ("fragments", {"fragments": [[0], [1], [2]]}), ("fragments", {"fragments": 2}), ("fragments", {"fragments": [[]]}),
    ("warmup_steps", {"warmup_steps": 2, "switch_step": 3}), ("rule", {"rule": "adam"}), ("payload", {"payload": 1}),
    ("nonfinite", {"nonfinite": "clamp"}), ("auto_floor", {"auto_floor": 1}),
]


def raised(kind, work):
    try:
        work()
    except kind as error:
        return str(error)
    return None


def bad_settings():
    for key, keys in REFUSED:
        text = raised(ValueError, lambda keys=keys: Settings(**{"period": 4, **keys}).validate())
        assert text is not None, f"{keys} passes"
        assert text.startswith(f"{key}: found "), f"{keys}: {text}"
        assert ", allowed is " in text or "no such key" in text, text
    for name, keys in REQUIRED.items():
        text = raised(ValueError, lambda name=name: preset(name))
        assert text.startswith(keys[0]), text
    assert raised(ValueError, lambda: preset("co3")).startswith("preset: found 'co3'")
    assert raised(ValueError, lambda: preset("co2", tau=3)).startswith("tau: ")


def bad_tensors():
    zeros, ones = np.zeros(3, f32), np.ones(3, f32)
    text = raised(ValueError, lambda: Outer(close(), [[zeros, zeros], [zeros, ones]]))
    assert text == "MISMATCH: tensor 1 differs between rank 0 and rank 1"
    for fragments in ([[0], [0]], [[0], [2]]):
        text = raised(ValueError, lambda f=fragments: Outer(close(fragments=f), [[zeros, ones]]))
        assert text.startswith("fragments: found"), text


def presets():
    given = {"period": 8, "alpha": 1.0, "beta": 0.5, "delay": 2, "fragments": [[0]]}
    for name in PRESETS:
        settings = preset(name, 4, **{key: given[key] for key in REQUIRED.get(name, ())})
        assert settings.period == PRESETS[name].get("period", 8)
    co2, paper, sparse = preset("co2"), preset("co2_paper", 64), preset("sparse_loco")
    assert (co2.period, co2.delay, co2.beta, co2.phi, co2.lambda_max) == (48, 48, 0.2, 10.0, 16.0)
    assert (paper.beta, paper.phi, paper.lambda_max, paper.floor) == (0.5, 1.0, 2.0, 0.0)
    assert [preset("co2_paper", w).beta for w in (16, 17, 65)] == [0.0, 0.2, 0.6]
    assert preset("eager_diloco", 8).freshness == 0.125
    assert (sparse.delay, sparse.dense_rounds, sparse.codec["k"], sparse.codec["error_decay"]) == (0, 0, 64, 0.95)
    assert preset("co2", period=12).delay == 12
    assert co2.floor == 1.25 / 0.8


def warnings():
    assert preset("delayed_diloco").warnings() == [("GAIN_TOO_HIGH", 1.0 - 0.9)]
    assert preset("eager_diloco", 4).warnings() == [("GAIN_TOO_HIGH", 1.0 - 0.9)]
    for settings in (preset("co2"), preset("co2_paper"), preset("delta_corrected"), preset("diloco"), preset("cocod"),
                     preset("overlap_local_sgd"), preset("sparse_loco"), close(alpha=0.5, beta=0.5)):
        assert settings.warnings() == [], settings
    assert close(codec="topk", alpha=0.5, beta=0.5).warnings() == [("MOMENTUM_AND_ERROR_FEEDBACK", None)]


def gamma_too_small():
    toy = Toy(preset("slowmo", period=2)).run(3)
    toy.inner()
    before, anchor = toy.vector(), toy.anchor()
    assert raised(InvalidState, lambda: toy.outer.step(toy.live, 0.0)).startswith("lr: found 0.0")
    same_bits(toy.vector(), before)
    same_bits(toy.anchor(), anchor)
    assert toy.outer.step(toy.live, toy.gamma)[0].consumed, "the step can be made again"


def poisoned(settings, ranks, world=3):
    """A toy whose `ranks` have a NaN at the second launch, before the engine's step."""
    toy = Toy(settings, world=world).run(7)
    toy.inner()
    for r in ranks:
        toy.live[r][1][5] = NAN
    return toy


def not_finite_skip():
    for keys in ({"delay": 0}, {}, {"payload": "params", "delay": 0, "rule": "none"}, {"beta": 0.5, "codec": "onebit"}):
        toy = poisoned(close(**keys), [1])
        assert toy.outer.step(toy.live, toy.gamma)[0].skipped == (1,)
        assert np.isfinite(toy.vector(1)).all(), "reset: the anchor is back"
        assert np.isfinite(toy.run(24).anchor()).all()
    # The others' mean, divided by their number.
    toy = poisoned(close(delay=0), [1])
    anchor, deltas = toy.anchor(), [toy.anchor() - toy.vector(r) for r in (0, 2)]
    toy.outer.step(toy.live, toy.gamma)
    same_bits(toy.anchor(), anchor - (deltas[0] + deltas[1]) * f32(0.5))
    # All ranks: anchor and momentum stay, the round counts.
    for keys in ({"delay": 0, "beta": 0.5}, {"beta": 0.5}):
        toy = poisoned(close(**keys), [0, 1, 2])
        late = "delay" not in keys
        if late:
            toy.outer.step(toy.live, toy.gamma)
            toy.run(3)
            toy.inner()
        fragment = toy.outer.fragments[0]
        anchor, momentum = toy.anchor(), fragment.momenta[0].copy()
        event = toy.outer.step(toy.live, toy.gamma)[0]
        assert event.launched
        assert event.consumed
        same_bits(toy.anchor(), anchor)
        same_bits(fragment.momenta[0], momentum)
        same_bits(toy.vector(2), anchor)
    toy = poisoned(close(freshness=0.5), [1])
    toy.outer.step(toy.live, toy.gamma)
    toy.run(13)
    toy.outer.flush(toy.live)
    assert toy.spread() < 3e-6, "a skipped rank's corrections telescope as well"


def not_finite_error_and_pass():
    for keys in ({}, {"codec": "topk"}, {"delay": 0}):
        toy = poisoned(close(nonfinite="error", **keys), [1])
        before, state = toy.vector(0), toy.outer.export_state()[:2]
        assert raised(NonFinite, lambda toy=toy: toy.outer.step(toy.live, toy.gamma)).endswith("ranks [1]")
        same_bits(toy.vector(0), before)
        assert toy.outer.export_state()[:2] == state
        toy.live[1][1][5] = 0
        assert toy.outer.step(toy.live, toy.gamma), "the step can be made again"
    toy = poisoned(close(nonfinite="pass", delay=0), [1])
    toy.outer.step(toy.live, toy.gamma)
    assert np.isnan(toy.anchor()).sum() == 1, "never made a number"
    toy = poisoned(close(nonfinite="pass", delay=0, clip="rms", beta=0.2), [1])
    toy.outer.step(toy.live, toy.gamma)
    assert np.isnan(toy.anchor()).any()
    toy = poisoned(close(nonfinite="pass", codec="onebit"), [1])
    assert raised(NonFinite, lambda: toy.outer.step(toy.live, toy.gamma))


def not_finite_while_every_step_is_synchronised():
    toy = Toy(preset("local_sgd", period=4, warmup_steps=9), world=3).run(4)
    toy.inner()
    rest = [toy.vector(r) for r in (0, 2)]
    toy.live[1][0][0] = NAN
    toy.outer.step(toy.live, toy.gamma)
    near(toy.vector(1), (rest[0] + rest[1]) * f32(0.5), 1e-7)
    same_bits(toy.vector(1), toy.vector(0))


CHECKS = [bad_settings, bad_tensors, presets, warnings, gamma_too_small, not_finite_skip, not_finite_error_and_pass,
          not_finite_while_every_step_is_synchronised]
