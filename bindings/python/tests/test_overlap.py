"""Overlaps on plain buffers."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ranks import thread_ranks

import sotto
from sotto.optim import Optimizer
from sotto.overlap import Moving, Overlap

f32 = np.float32
SMALL = {"first_bucket_bytes": 100, "bucket_bytes": 3000}


def test_rounds_are_means():
    def body(comm):
        gradients = [np.zeros(n, f32) for n in (7, 900, 1, 300)]
        gradients.append(np.zeros(50, np.float16))
        with Overlap(gradients, SMALL, comm=comm) as overlap:
            for op, wanted in (("mean", 1.5), ("sum", 3.0)):
                for g in gradients:
                    g[:] = comm.rank + 1
                work = overlap.begin(op=op)
                overlap.ready([4, 2])
                assert overlap.info().missing == 3
                threads = [threading.Thread(target=overlap.ready, args=([i],)) for i in (0, 1, 3)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                overlap.finish()
                work.wait()
                assert all((g == wanted).all() for g in gradients)
            info = overlap.info()
            assert (info.rounds, info.missing) == (2, 0)
            assert info.exposed_ns <= info.network_ns
            assert len(overlap.report("buckets")) == info.buckets
            assert overlap.report()["settings"]["order"] == "reversed"

    thread_ranks(2, body)


def test_gradients_move_and_may_be_unused():
    def body(comm):
        like = [Moving(400), Moving(30, "float16"), Moving(5)]
        with Overlap(like, {"unused": "zero", **SMALL}, comm=comm) as overlap:
            for k in range(3):
                work = overlap.begin()
                g = [np.full(400, comm.rank + k, f32), np.full(30, k, np.float16)]
                overlap.ready([0, 1], g)
                if comm.rank == 0:
                    last = np.full(5, 8, f32)
                    overlap.ready([2], [last])
                overlap.finish()
                work.wait()
                assert (g[0] == k + 0.5).all()
                assert (g[1] == k).all()
                if comm.rank == 0:
                    assert (last == 4).all()

    thread_ranks(2, body)


def test_withdraw():
    def body(comm):
        gradient = np.ones(1000, f32)
        with Overlap([gradient], comm=comm) as overlap:
            work = overlap.begin()
            if comm.rank == 1:
                overlap.withdraw("no memory")
            else:
                overlap.ready([0])
                overlap.finish()
            with pytest.raises(sotto.CancelledError, match="rank 1 has withdrawn: no memory"):
                work.wait()
            gradient[:] = comm.rank
            work = overlap.begin()
            overlap.ready([0])
            overlap.finish()
            work.wait()
            assert (gradient == 0.5).all()

    thread_ranks(2, body)


def test_codecs_keep_error_feedback():
    def body(comm):
        gradient = np.zeros(5000, f32)
        rng = np.random.default_rng(comm.rank)
        with Overlap([gradient], {"codec": "int4"}, comm=comm) as overlap:

            def round_of(values):
                gradient[:] = values
                work = overlap.begin()
                overlap.ready([0])
                overlap.finish()
                work.wait()
                return gradient.copy()

            first, second = rng.standard_normal((2, 5000)).astype(f32)
            round_of(first)
            state = overlap.export_state()
            wanted = round_of(second)
            assert (round_of(second) != wanted).any()
            overlap.import_state(state)
            assert (round_of(second) == wanted).all()
            overlap.import_state(overlap.export_state("mean"), "mean")
            overlap.import_state(state, "reset")
        with (
            Overlap([gradient], comm=comm) as overlap,
            pytest.raises(sotto.InvalidStateError, match="this overlap has no codec"),
        ):
            overlap.export_state()

    thread_ranks(2, body)


KINDS = {
    "sgd": {"type": "SGD", "params": {"momentum": 0.9}},
    "adam": {"type": "Adam"},
    "adamw": {"type": "AdamW"},
    "lamb": {"type": "Lamb"},
    "lion": {"type": "Lion"},
    "onebit_adam": {"type": "OneBitAdam", "params": {"freeze_step": 9}},
    "onebit_lamb": {"type": "OneBitLamb", "params": {"freeze_step": 9}},
    "zeroone": {
        "type": "ZeroOneAdam",
        "params": {"var_freeze_step": 12, "local_step_scaler": 6, "local_step_clipper": 3},
    },
}
CODECS = ("fp16", "bf16", "int8", "int4", "onebit", "onebit buckets", "topk", "topk two phases")
BUCKETS = {"granularity": "bucket", "bucket_elements": 8192}


def file_of(kind):
    """An optimizer's, or that of AdamW with a codec."""
    word, _, rest = kind.partition(" ")
    section, optimizer = {}, KINDS.get(word, KINDS["adamw"])
    if word not in KINDS:
        codec = {"type": word}
        if word == "topk":
            codec.update(block=64, k=8, exchange="two_phase" if rest else "gather")
        elif rest:
            codec.update(BUCKETS)
        section["gradient_codec"] = codec
    elif rest:
        section.update(BUCKETS)
    optimizer = {**optimizer, "params": {"lr": 0.01, **optimizer.get("params", {})}}
    return {"optimizer": optimizer, "sotto": section}


@contextlib.contextmanager
def steps_of(kind, count, comm):
    """Parameters and gradients, an optimizer of them, and its rounds."""
    x, g = np.zeros((2, count, 700), f32)
    json = None if "buckets" in kind else {"first_bucket_bytes": 100, "bucket_bytes": 6000}
    with (
        Optimizer(list(zip(x, g, strict=True)), file_of(kind), comm=comm) as optimizer,
        Overlap.of(optimizer, json) as overlap,
    ):
        yield x, g, optimizer, overlap


@pytest.mark.parametrize("kind", [*KINDS, "onebit_adam buckets", "onebit_lamb buckets", *CODECS])
def test_steps_in_any_order(kind):
    """40 steps, 120 orders of 24 gradients that 8 threads mark at once: 2160 of all kinds."""
    ranks, count, threads = 3, 24, 8

    def body(comm):
        random = np.random.default_rng(comm.rank)
        with (
            ThreadPoolExecutor(threads) as pool,
            steps_of(kind, count, comm) as (x, g, plain, _),
            steps_of(kind, count, comm) as (y, h, optimizer, overlap),
        ):
            for step in range(40):
                values = random.standard_normal(g.shape, f32)
                g[:] = values
                plain.step().wait()
                order = random.permutation(count)
                work = overlap.begin()

                def mark(k, order=order, values=values):
                    for i in order[k::threads]:
                        h[i] = values[i]
                        overlap.ready([int(i)])

                list(pool.map(mark, range(threads)))
                overlap.finish()
                work.wait()
                assert (x == y).all(), step
            assert optimizer.export_state("exact") == plain.export_state("exact")

    thread_ranks(ranks, body)


@pytest.mark.parametrize("kind", ["adamw", "int8", "topk", "onebit_adam buckets", "onebit_lamb"])
def test_an_abort_at_any_mark_changes_nothing(kind):
    """Whether buckets have been averaged, are under way or miss gradients."""

    def body(comm, marks):
        random = np.random.default_rng(comm.rank)
        with steps_of(kind, 12, comm) as (x, g, optimizer, overlap):

            def begin(n):
                g[:] = random.standard_normal(g.shape, f32)
                work = overlap.begin()
                for i in reversed(range(12 - n, 12)):
                    overlap.ready([i])
                return work

            for _ in range(11):
                work = begin(12)
                overlap.finish()
                work.wait()
            before, state = x.copy(), optimizer.export_state("exact")
            comm.barrier().wait()
            work = begin(marks)
            if comm.rank == 1:
                time.sleep(0.02)  # what is marked travels
                comm.abort("enough")
            with pytest.raises(sotto.AbortedError, match="enough"):
                work.wait()
            assert (x == before).all()
            assert optimizer.export_state("exact") == state

    for marks in range(12):
        thread_ranks(2, lambda comm, marks=marks: body(comm, marks))


def test_bad_input():
    with sotto.create_comm(rank=0, world_size=1) as comm:
        x = np.zeros(4, f32)
        with pytest.raises(sotto.InvalidArgumentError, match="nearest one is bucket_bytes"):
            Overlap([x], {"bucket_byte": 1}, comm=comm)
        with pytest.raises(sotto.UnsupportedError, match="like.0. is int32"):
            Overlap([np.zeros(4, np.int32)], comm=comm)
        with pytest.raises(sotto.UnsupportedError, match=r"gradients.0. is of dtype float"):
            Overlap([Moving(4, "float")], comm=comm)
        frozen = np.zeros(4, f32)
        frozen.flags.writeable = False
        with pytest.raises(sotto.InvalidArgumentError, match=r"gradients.0. is read-only"):
            Overlap([frozen], comm=comm)
        with Overlap([x, Moving(3)], comm=comm) as overlap:
            with pytest.raises(sotto.InvalidStateError, match="no round of this overlap is open"):
                overlap.ready([0])
            work = overlap.begin()
            with pytest.raises(sotto.BusyError, match="round 1 of this overlap is open"):
                overlap.begin()
            with pytest.raises(sotto.InvalidArgumentError, match="allowed: 0 to 1"):
                overlap.ready([2])
            with pytest.raises(sotto.InvalidArgumentError, match="1 gradients for 2 indices"):
                overlap.ready([0, 1], [x])
            with pytest.raises(sotto.InvalidArgumentError, match="where gradient 1 is was not"):
                overlap.ready([1])
            with pytest.raises(sotto.InvalidStateError, match="2 of 2 gradients are missing"):
                overlap.finish()
            overlap.ready([0])
            overlap.ready([1], [np.zeros(3, f32)])
            overlap.finish()
            work.wait()
