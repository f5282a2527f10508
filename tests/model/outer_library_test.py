"""The library's outer optimizers against the numpy model, bit for bit.

Usage: outer_library_test.py LIBSOTTO [PART OF A NAME]
"""
import ctypes as c
import dataclasses
import json
import sys
import threading

import numpy as np

import sotto_library
from outer_codecs import TopK, payload_bytes
from outer_settings import PRESETS, Settings, preset
from outer_toy import CASES, GAMMA, SIZES, Toy, close, same_bits

STEPS = 23  # the last round is a short one: the flush sends it
WORLDS = (1, 2, 3, 4, 5, 8)
# More ranks than are added at once: with and without a codec, norms of ranks, averages of parameters, flushes.
GROUPED_WORLDS = (11, 17)
GROUPED = ("co2", "co2_paper", "slowmo", "half fresh", "post_local_sgd", "onebit", "sparse_loco")
# What the library refuses: a first inner step per tensor.
WITHOUT = {"per tensor"}
# Beside what the model's own checks use: forms, merges, clips and units with each other.
MORE = {
    "anchor_diff, params": lambda w: close(payload="params", form="anchor_diff", beta=0.5),
    "late params": lambda w: close(payload="params", beta=0.2, penalty="gap_rel"),
    "late params, nesterov": lambda w: close(payload="params", rule="nesterov", alpha=0.5, beta=0.3, clip="coord", phi=0.02),
    "anchor_diff, none": lambda w: close(form="anchor_diff", rule="none", alpha=0.75),
    "nesterov per element": lambda w: close(rule="nesterov", alpha=0.5, beta=0.3, penalty="gap_rel", granularity="element"),
    "const, norm": lambda w: close(beta=0.3, penalty="const", lambda_const=1.7, clip="norm", phi=0.05),
    "lerp, late": lambda w: close(beta=0.2, merge="lerp", merge_a=0.3, penalty="gap_ema"),
    "pull, delta": lambda w: close(beta=0.2, merge="pull", merge_a=0.6),
    "progress, late": lambda w: close(beta=0.2, merge="add_progress"),
    "progress, params, early": lambda w: close(delay=3, payload="params", rule="none", merge="add_progress"),
    "normalised, late": lambda w: close(beta=0.4, lr_normalised=True, clip="rms", phi=2),
    "clip by gamma": lambda w: close(beta=0.4, clip="coord", clip_units="grad", phi=0.5),
    "delay 0, rms": lambda w: close(delay=0, beta=0.6, clip="rms", phi=1.5),
    "gap_ema per tensor": lambda w: close(beta=0.2, penalty="gap_ema", granularity="tensor"),
    "gap_rel, norm": lambda w: close(alpha=0.5, beta=0.1, penalty="gap_rel", clip="norm", phi=0.03),
    "period 1": lambda w: close(period=1, delay=1, beta=0.1, alpha=0.5),
    "period 1, delay 0": lambda w: close(period=1, delay=0, beta=0.9),
    "bf16": lambda w: close(beta=0.1, codec="bf16"),
    "int4": lambda w: close(beta=0.1, alpha=0.5, codec="int4", chunk_align=128),
    "onebit, delay 1": lambda w: close(delay=1, beta=0.1, codec="onebit", chunk_align=8, dense_rounds=2),
    "fp16, residual": lambda w: preset("co2", w, period=4, codec={"type": "fp16", "residual": True}),
    "int8, lerp": lambda w: close(beta=0.2, codec="int8", chunk_align=256, merge="lerp", merge_a=0.25),
    "int4, warm": lambda w: close(beta=0.1, codec="int4", chunk_align=128, warmup_steps=3),
    "warm": lambda w: close(beta=0.2, warmup_steps=5),
    "nothing to send at the flush": lambda w: preset("diloco", w, period=4, delay=3, alpha=0.5, beta=0.1),
    "fresh, onebit": lambda w: preset("eager_diloco", w, period=4, alpha=0.2, codec="onebit", chunk_align=64),
    "fresh, bf16, 3 dense": lambda w: close(freshness=1.0, beta=0.2, codec="bf16", dense_rounds=3),
    "fresh, int4, none dense": lambda w: close(freshness=0.5, beta=0.1, penalty="gap_ema", codec="int4", chunk_align=128,
                                               dense_rounds=0),
    "fresh, topk": lambda w: sparse(w, {"freshness": 0.5, "delay": 4, "alpha": 0.5}, block=32, k=4, dense_below=10),
    "fresh, topk, fragments": lambda w: sparse(w, {"freshness": 1.0, "delay": 4, "alpha": 0.5, "warmup_steps": 3, "beta": 0.1,
                                                   "fragments": [[3, 0], [4, 1, 2]], "dense_rounds": 1}, block=32, k=4,
                                               average="contributors"),
    "topk, contributors": lambda w: sparse(w, block=32, k=3, average="contributors"),
    "topk, packed, 4 bits": lambda w: sparse(w, block=64, k=8, bits=4, index="packed"),
    "topk, 8 bits, some dense": lambda w: sparse(w, block=16, k=3, bits=8, dense_below=10),
    "topk, 32 bits, all": lambda w: sparse(w, block=64, k=64, bits=32),
    "topk, no decay": lambda w: sparse(w, block=128, k=9, error_decay=1.0),
    "topk, only the newest": lambda w: sparse(w, block=8, k=1, error_decay=0.0),
    "topk, median clip": lambda w: sparse(w, block=32, k=4, median_clip=True),
    "topk, median clip, contributors, 4 bits, some dense":
        lambda w: sparse(w, block=16, k=3, bits=4, average="contributors", dense_below=10, median_clip=True),
    "topk, two phases": lambda w: sparse(w, block=32, k=4, exchange="two_phase"),
    "topk, two phases, contributors, 4 bits, some dense":
        lambda w: sparse(w, block=16, k=3, bits=4, average="contributors", dense_below=10, exchange="two_phase", k_server=7),
    "topk, two phases, packed, all from servers": lambda w: sparse(w, block=8, k=2, index="packed", exchange="two_phase",
                                                                   k_server=8),
    "topk, two phases, fragments, delay 1": lambda w: sparse(w, {"fragments": [[3, 0], [4, 1, 2]], "delay": 1, "alpha": 0.5},
                                                             block=64, k=8, bits=8, exchange="two_phase"),
    "fresh, topk, two phases": lambda w: sparse(w, {"freshness": 0.5, "delay": 4, "alpha": 0.5}, block=32, k=4,
                                                exchange="two_phase"),
    "topk, delay 4": lambda w: sparse(w, {"delay": 4, "alpha": 0.5}, block=32, k=4),
    "topk, delay 1, lerp": lambda w: sparse(w, {"delay": 1, "merge": "lerp", "merge_a": 0.25}, block=32, k=4),
    "topk, fragments": lambda w: sparse(w, {"fragments": [[3, 0], [4, 1, 2]], "dense_rounds": 1}, block=32, k=4),
    "topk, momentum": lambda w: close(beta=0.1, alpha=0.5, codec={"type": "topk", "block": 4096}),
    "topk, warm": lambda w: sparse(w, {"warmup_steps": 3}, block=32, k=4),
}
# Presets that the library is given by name, with the keys of a file: theirs are its own.
NAMED = {name: {"period": 4} for name in PRESETS}
NAMED["bmuf"].update(alpha=1.5, beta=0.75)
NAMED["post_local_sgd"].update(switch_step=5)
NAMED["streaming_diloco"].update(delay=3, fragments=[[3, 0], [4, 1, 2]])
# A rank's parameters become NaN in one inner step: it is left out of that average, which has another rank or none.
POISONED = {
    "topk, NaN": (lambda w: sparse(w, block=32, k=4), 6),
    "topk, contributors, NaN": (lambda w: sparse(w, block=32, k=4, average="contributors", dense_below=10), 10),
    "topk, median clip, NaN": (lambda w: sparse(w, block=32, k=4, median_clip=True), 6),
    "topk, two phases, NaN": (lambda w: sparse(w, block=32, k=4, exchange="two_phase"), 6),
    "topk, two phases, delay 4, NaN": (lambda w: sparse(w, {"delay": 4, "alpha": 0.5}, block=32, k=4, exchange="two_phase"), 6),
    "topk, delay 4, NaN": (lambda w: sparse(w, {"delay": 4, "alpha": 0.5}, block=32, k=4), 6),
    "fresh, topk, NaN": (lambda w: sparse(w, {"freshness": 0.5, "delay": 4, "alpha": 0.5}, block=32, k=4), 6),
    # Codecs that divide by all ranks: the rank that is left out sends what it has kept of earlier rounds.
    "int8, NaN": (lambda w: close(codec="int8", chunk_align=256), 6),
    "bf16, NaN": (lambda w: close(codec="bf16"), 6),
    "onebit, NaN": (lambda w: close(codec="onebit", chunk_align=64), 6),
    "onebit, delay 4, NaN": (lambda w: close(delay=4, alpha=0.5, codec="onebit", chunk_align=64), 6),
    "progress, params, NaN": (lambda w: close(payload="params", rule="none", merge="add_progress"), 6),
    "late, NaN": (lambda w: close(beta=0.2, penalty="gap_ema", clip="rms"), 6),
    "late, NaN everywhere": (lambda w: close(beta=0.2, penalty="gap_ema", clip="rms"), 6),
    "half fresh, NaN": (lambda w: close(freshness=0.5, beta=0.2, penalty="gap_ema", clip="rms"), 6),
    "half fresh, NaN everywhere": (lambda w: close(freshness=0.5, beta=0.2, penalty="gap_ema", clip="rms"), 6),
    "all fresh, NaN everywhere": (lambda w: close(freshness=1, beta=0), 6),
}
ALL_POISONED = {name for name in POISONED if name.endswith("everywhere")}
# Learning rates that are no power of two are rounded wherever they come in. Rule none is not here: without momentum
# nothing is in units of gradients, so the library neither divides by the rate nor multiplies with it.
RATES = {
    "slowmo, 0.037": (lambda w: preset("slowmo", w, period=4), 0.037),
    "normalised, nesterov, anchor_diff, 0.3": (lambda w: close(lr_normalised=True, rule="nesterov", form="anchor_diff", beta=0.2),
                                               0.3),
    "normalised, gap_rel, rms, 0.05": (lambda w: close(lr_normalised=True, penalty="gap_rel", beta=0.2, clip="rms", phi=1.0), 0.05),
    "norm by gamma, 0.001": (lambda w: close(clip="norm", clip_units="grad", phi=0.5, beta=0.3), 0.001),
}


def sparse(world, keys=None, **codec):
    return preset("sparse_loco", world, period=4, codec={"type": "topk", "error_decay": 0.95, **codec}, **(keys or {}))


class Info(c.Structure):
    _fields_ = [("struct_size", c.c_uint32), ("events", c.c_uint32), ("step", c.c_uint64), ("round", c.c_uint64),
                ("next_boundary", c.c_uint64), ("fragments", c.c_uint32), ("in_flight", c.c_uint32), ("votes", c.c_uint32),
                ("reserved", c.c_uint32),
                *((name, c.c_double) for name in ("lambda", "gap", "unit", "clip_fraction", "delta_norm", "step_norm", "gain",
                                                  "overlap_ratio", "contention")),
                ("network_ns", c.c_int64), ("exposed_ns", c.c_int64), ("payload_bytes_next_launch", c.c_uint64),
                ("header_bytes_next_launch", c.c_uint64), ("state_bytes", c.c_uint64)]


def described(settings):
    """The settings as the library's JSON object."""
    out = {"preset": "co2"}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is not None and field.name not in NOT_KEYS:
            out[field.name] = value
    codec = out.get("codec")
    if codec is not None:
        codec = {"type": codec} if isinstance(codec, str) else dict(codec)
        if codec["type"] != "topk":
            codec.setdefault("chunk_align", settings.chunk_align)
        out["codec"] = codec
    else:
        del out["dense_rounds"]
    return json.dumps(out)


NOT_KEYS = {"every_step", "chunk_align"}  # the first has another word here, the second belongs to a codec


class Rank:
    """An outer optimizer of the library over numpy arrays."""

    def __init__(self, library, comm, text, tensors, gamma, blob=None):
        self.library = library
        params = (sotto_library.Param * len(tensors))()
        for i, (param, tensor) in enumerate(zip(params, tensors)):
            param.struct_size = c.sizeof(sotto_library.Param)
            param.name = f"t{i}".encode()
            param.param = sotto_library.buffer(tensor)
        self.handle = c.c_void_p()
        library.call("sotto_outer_create", comm, text.encode(), params, c.c_uint64(len(tensors)), c.byref(self.handle))
        self.call("set", b"lr", c.c_double(gamma))
        if blob is not None:
            self.call("state_import", 1, blob, c.c_uint64(len(blob)))

    def call(self, name, *arguments):
        self.library.call(f"sotto_outer_{name}", self.handle, *arguments)

    def export(self):
        length = c.c_uint64()
        self.call("state_export", 1, None, c.c_uint64(0), c.byref(length))
        blob = c.create_string_buffer(length.value)
        self.call("state_export", 1, blob, length, c.byref(length))
        return blob

    def info(self):
        info = Info(struct_size=c.sizeof(Info))
        self.call("get_info", c.byref(info))
        return info


def payload_of(codec, world, rank):
    """What a rank sends in a round: sparse-loco.md, sections 5, 6.1 and 6.2."""
    block = codec["block"]

    def sizes(k):
        """Of every block."""
        for size in SIZES:
            for at in range(0, size, block):
                m = min(block, size - at)
                selected = min(max((2 * m * k + block) // (2 * block), 1), m)
                yield 4 * m if size < codec["dense_below"] else payload_bytes(m, selected, codec["bits"], codec["index"])

    own = list(sizes(codec["k"]))
    if codec["exchange"] == "gather":
        return (world - 1) * sum(own)
    mine = slice(len(own) * rank // world, len(own) * (rank + 1) // world)
    return sum(own) - sum(own[mine]) + (world - 1) * sum(list(sizes(TopK(SIZES, world, codec).server_k()))[mine])


def compare(library, name, settings, world, poison=None, averages=None, text=None, host_of=None, gamma=GAMMA):
    """poison: an inner step that the last rank, or all of them, end with NaN. averages(Outer): gives the model others; text
    and host_of: the library's settings and hosts with them."""
    model, ours = (Toy(settings, world, gamma=gamma) for _ in range(2))
    if averages is not None:
        averages(model.outer)
    wanted = []

    def inner(toy):
        toy.inner()
        if toy.t == poison:
            for live in toy.live if name in ALL_POISONED else toy.live[world - 1:]:
                live[1][7:9] = np.nan

    for _ in range(STEPS):
        inner(model)
        model.outer.step(model.live, model.gamma)
        wanted.append([model.vector(r).copy() for r in range(world)])
    model.outer.flush(model.live)
    wanted.append([model.vector(r).copy() for r in range(world)])
    meet = threading.Barrier(world, timeout=60)  # an error of one rank must not keep the others
    text = text or described(settings)

    def body(comm, rank):
        try:
            train(comm, rank)
        except Exception:
            meet.abort()
            raise

    def train(comm, rank):
        mine = ours.live[rank]
        outer = Rank(library, comm, text, mine, gamma)
        for step in range(STEPS):
            if meet.wait() == 0:
                inner(ours)
            meet.wait()
            if step % 5 == 3:  # what an evaluation does
                before = [x.copy() for x in mine]
                outer.call("swap", None, None)
                outer.call("swap", None, None)
                same_bits(np.concatenate(before), np.concatenate(mine), "swapped twice: ")
            if step % 3 == 1:  # a new process continues from the state of the last one
                blob = outer.export()
                outer.call("destroy")
                for x in mine:
                    x[:] = np.nan
                outer = Rank(library, comm, text, mine, gamma, blob)
            outer.call("step", None, None)
            same_bits(wanted[step][rank], np.concatenate(mine), f"{name}, {world} ranks, rank {rank}, step {step + 1}: ")
        for what in ("flush", "flush again"):
            outer.call("flush", None, None)
            same_bits(wanted[STEPS][rank], np.concatenate(mine), f"{name}, {world} ranks, rank {rank}, {what}: ")
        info = outer.info()
        if settings.codec is not None and settings.codec["type"] == "topk" and not settings.fragments:
            sent = payload_of(settings.codec, world, rank)
            assert info.payload_bytes_next_launch == sent, (info.payload_bytes_next_launch, sent)
        assert (info.step, info.in_flight) == (STEPS, 0), (info.step, info.in_flight)
        outer.call("destroy")

    library.run(world, body, host_of)


def compare_gradients(library, world, **keys):
    """An optimizer of the library whose steps before outer steps average gradients, against toys that do."""
    before = 5
    settings = close(warmup_steps=before, every_step="gradients", **keys)
    model, wanted = Toy(settings, world), []
    for step in range(STEPS):
        (model.inner_together if step < before else model.inner)()
        model.outer.step(model.live, model.gamma)
        wanted.append([model.vector(r).copy() for r in range(world)])
    text = json.dumps({"optimizer": {"type": "SGD", "params": {"lr": GAMMA}},
                       "sotto": {"outer": {**json.loads(described(settings)), "every_step": "gradients"}}})

    def body(comm, rank):
        toy = Toy(Settings(period=99), world)  # of which this rank uses its own part
        mine, gradients = toy.live[rank], [np.zeros_like(x) for x in toy.live[rank]]
        optimizer = library.optimizer(comm, text, [(f"t{i}", 0, x, g, None) for i, (x, g) in enumerate(zip(mine, gradients))])
        for step in range(STEPS):
            toy.t += 1
            for at, gradient in zip(gradients, toy.gradients(rank)):
                at[:] = gradient
            library.step(optimizer)
            same_bits(wanted[step][rank], np.concatenate(mine), f"gradients, {world} ranks, rank {rank}, step {step + 1}: ")
        library.destroy(optimizer)

    library.run(world, body)


def main():
    library = sotto_library.Library(sys.argv[1])
    failed = 0
    cases = {name: (make, {}) for name, make in {**CASES, **MORE}.items() if name not in WITHOUT}
    cases.update({name: (make, {"poison": step}) for name, (make, step) in POISONED.items()})
    cases.update({name: (make, {"gamma": gamma}) for name, (make, gamma) in RATES.items()})
    for name, keys in NAMED.items():
        cases[f"by name: {name}"] = (lambda w, name=name, keys=keys: preset(name, w, **keys),
                                     {"text": json.dumps({"preset": name, **keys})})
    for name, (make, options) in cases.items():
        if len(sys.argv) > 2 and sys.argv[2] not in name:
            continue
        for world in WORLDS + (GROUPED_WORLDS if name in GROUPED else ()):
            try:
                compare(library, name, make(world), world, **options)
            except Exception as error:  # pylint: disable=broad-except
                failed += 1
                print(f"failed  {name}, {world} ranks: {str(error)[:300]}")
        print(f"ok      {name}")
    for world in WORLDS:
        for keys in ({"beta": 0.2, "clip": "rms", "penalty": "gap_ema"}, {"freshness": 0.5, "beta": 0.1}):
            try:
                compare_gradients(library, world, **keys)
            except Exception as error:  # pylint: disable=broad-except
                failed += 1
                print(f"failed  gradients, {world} ranks: {str(error)[:300]}")
    print("ok      gradients before outer steps")
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
