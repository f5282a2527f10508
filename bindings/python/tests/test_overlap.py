"""Overlaps on plain buffers."""

import threading

import numpy as np
import pytest
from ranks import thread_ranks

import sotto
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
