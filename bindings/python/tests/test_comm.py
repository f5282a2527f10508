"""Collectives on two and four ranks, against numpy."""

import array
import json
import math

import numpy as np
import pytest
from ranks import run_ranks, thread_ranks

import sotto

f32 = np.float32


def values(rank, n=1000, dtype=f32):
    return (np.arange(n) % 7 + rank).astype(dtype)


def stack(size, n=1000, dtype=f32):
    return np.stack([values(r, n, dtype) for r in range(size)])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("op", "of"),
    [
        (None, np.sum),
        ("sum", np.sum),
        ("mean", np.mean),
        ("min", np.min),
        ("max", np.max),
        ("prod", np.prod),
    ],
)
def test_all_reduce(size, op, of):
    def body(comm):
        x, out = values(comm.rank), np.empty(1000, f32)
        comm.all_reduce(x, out, op=op).wait()
        np.testing.assert_array_equal(x, values(comm.rank))
        comm.all_reduce(x, op=op).wait()
        np.testing.assert_array_equal(x, out)
        return out

    for out in thread_ranks(size, body):
        np.testing.assert_allclose(out, of(stack(size), axis=0), rtol=1e-6)


@pytest.mark.parametrize(
    "dtype",
    [
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float64",
    ],
)
def test_dtypes(dtype):
    def body(comm):
        x = values(comm.rank, 33, dtype)
        comm.all_reduce(x).wait()
        return x

    for x in thread_ranks(2, body):
        np.testing.assert_array_equal(x, stack(2, 33, dtype).sum(0).astype(dtype))


def test_several_arrays_of_several_kinds_are_one_operation():
    def body(comm):
        a, b, c = (
            np.full((2, 3), comm.rank, f32),
            array.array("d", [comm.rank, 1]),
            bytearray([comm.rank]),
        )
        comm.all_reduce([a, b, c]).wait()
        assert comm.counters().ops_completed == 1
        return a, b, c

    for a, b, c in thread_ranks(3, body):
        assert (a == 3).all()
        assert (b.tolist(), bytes(c)) == ([3, 3], b"\x03")


def test_bit_or():
    def body(comm):
        x = np.array([1 << comm.rank], np.uint32)
        comm.all_reduce(x, op="bit_or").wait()
        return x[0]

    assert thread_ranks(3, body) == [7, 7, 7]


def test_the_other_collectives():
    def body(comm):
        me, size = comm.rank, comm.size
        whole = stack(size, 10)
        comm.barrier().wait()

        x = values(me, 10)
        comm.broadcast(x, root=2).wait()
        np.testing.assert_array_equal(x, values(2, 10))

        out = np.empty((size, 10), f32)
        comm.all_gather(values(me, 10), out).wait()
        np.testing.assert_array_equal(out, whole)

        part = np.empty(10, f32)
        comm.reduce_scatter(np.tile(whole[me], size), part).wait()
        np.testing.assert_array_equal(part, whole.sum(0))

        out = np.empty((size, 10), f32) if me == 1 else None
        comm.gather(values(me, 10), out, root=1).wait()
        if me == 1:
            np.testing.assert_array_equal(out, whole)
        comm.scatter(out, part, root=1).wait()
        np.testing.assert_array_equal(part, whole[me])

        sent = np.arange(size, dtype=np.int32) + 10 * me
        got = np.empty(size, np.int32)
        comm.all_to_all(sent, got).wait()
        np.testing.assert_array_equal(got, 10 * np.arange(size) + me)

        # Rank r sends r + 1 elements to everybody.
        sent, got = np.full((me + 1) * size, me, f32), np.empty(size * (size + 1) // 2, f32)
        comm.all_to_all(
            sent, got, in_counts=[me + 1] * size, out_counts=[r + 1 for r in range(size)]
        ).wait()
        np.testing.assert_array_equal(got, np.repeat(np.arange(size), np.arange(size) + 1))

    thread_ranks(4, body)


def test_reduce_and_unequal_counts():
    def body(comm):
        me, size = comm.rank, comm.size
        whole = stack(size, 10)
        x, out = values(me, 10), np.empty(10, f32) if me == 1 else None
        comm.reduce(x, out, root=1, op="max").wait()
        if me == 1:
            np.testing.assert_array_equal(out, whole.max(0))
            np.testing.assert_array_equal(x, whole[1])
        comm.reduce(x, root=2).wait()
        np.testing.assert_array_equal(x, whole.sum(0) if me == 2 else whole[me])

        # Rank r has r elements.
        counts = list(range(size))
        out = np.empty(sum(counts), f32)
        comm.all_gather_v(np.full(me, me, f32), out, counts).wait()
        np.testing.assert_array_equal(out, np.repeat(counts, counts))
        part = np.empty(me, f32)
        comm.reduce_scatter_v(np.arange(len(out), dtype=f32), part, counts).wait()
        first = sum(counts[:me])
        np.testing.assert_array_equal(part, size * np.arange(first, first + me))
        # Two arrays, and the mean of integers, which does not overflow.
        big = np.full(size * (size - 1) // 2, 32767, np.int16)
        parts = [np.empty(me, f32), np.empty(me, np.int16)]
        comm.reduce_scatter_v([out, big], parts, [counts, counts], op="mean").wait()
        np.testing.assert_array_equal(parts[0], np.full(me, me))
        np.testing.assert_array_equal(parts[1], np.full(me, 32767))

    thread_ranks(4, body)


def test_send_and_receive():
    def body(comm):
        x = values(comm.rank)
        if comm.rank == 0:
            comm.send(x, 1, tag=5).wait()
        else:
            comm.recv(x, 0, tag=5).wait()
        return x

    np.testing.assert_array_equal(thread_ranks(2, body)[1], values(0))


def test_a_group_lets_a_ring_progress():
    def body(comm):
        sent, got = values(comm.rank), np.empty(1000, f32)
        with comm.group() as work:
            assert comm.send(sent, (comm.rank + 1) % comm.size) is work
            comm.recv(got, (comm.rank - 1) % comm.size)
            with pytest.raises(sotto.InvalidStateError, match="has not been started"):
                work.wait()
        work.wait()
        np.testing.assert_array_equal(got, values((comm.rank - 1) % comm.size))

    thread_ranks(3, body)


def test_a_group_that_raises_starts_nothing():
    def body(comm):
        x = values(comm.rank)

        def failing():
            with comm.group():
                comm.all_reduce(x)
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            failing()
        np.testing.assert_array_equal(x, values(comm.rank))
        comm.all_reduce(x).wait()  # the comm is as before

    thread_ranks(2, body)


def test_split():
    def body(comm):
        with comm.split(comm.rank % 2, key=-comm.rank) as half:
            assert (half.size, half.rank) == (2, 1 - comm.rank // 2)
            x = np.array([comm.rank])
            half.all_reduce(x).wait()
            assert x[0] == 2 + 2 * (comm.rank % 2)
        assert comm.split(None) is None

    thread_ranks(4, body)


@pytest.mark.parametrize("kind", ["onebit", "int4", "int8", "bf16", "fp16", "topk"])
def test_codecs(kind):
    options = {"residual": True} if kind in ("bf16", "fp16") else {"chunk_align": 512}
    if kind == "topk":
        options = {"k": 1024}

    def body(comm):
        x = np.random.default_rng(comm.rank).standard_normal(5000).astype(f32)
        total = np.zeros(5000)
        with comm.codec(kind, x, **options) as codec:
            for _ in range(20):
                y = x.copy()
                comm.all_reduce(y, codec=codec).wait()
                total += y
            exported = codec.export_state("mean")
            codec.import_state(exported, "mean")
            codec.import_state(codec.export_state())
        predicted = comm.plan(
            "all_reduce", dtype="fp32", counts=[5000], in_place=True, codec={"type": kind}
        )
        return total / 20, bytes(exported), predicted["payload_bytes_sent"]

    results = thread_ranks(2, body)
    mean = np.mean(
        [np.random.default_rng(r).standard_normal(5000).astype(f32) for r in range(2)], 0
    )
    # The means of 20 calls are off by what the last one left over.
    bound = {"onebit": 0.2, "int4": 0.02, "int8": 0.002, "bf16": 0.002, "fp16": 0.0002, "topk": 0.1}
    assert np.abs(results[0][0] - mean).mean() < bound[kind]
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert 0 < results[0][2] < 4 * 5000 * 2 / (1.9 if kind in ("bf16", "fp16") else 3.8)


def test_a_codec_may_be_a_dict():
    x = np.arange(5000, dtype=f32)
    with sotto.create_comm(world_size=1, timeout=30) as comm:
        with comm.codec({"type": "topk", "k": 64}, x) as codec:
            assert codec.settings == {"type": "topk", "k": 64}
            comm.all_reduce(x, codec=codec).wait()
        with pytest.raises(
            sotto.InvalidArgumentError, match=r"options \(k\) are given beside a dict"
        ):
            comm.codec({"type": "topk"}, x, k=64)
        with pytest.raises(sotto.InvalidArgumentError, match="typ"):
            comm.codec({"typ": "topk"}, x)


def test_codec_state_continues_bit_for_bit():
    def body(comm):
        def run(codec, first, last):
            out = []
            for step in range(first, last):
                x = np.random.default_rng([comm.rank, step]).standard_normal(3000).astype(f32)
                comm.all_reduce(x, codec=codec).wait()
                out.append(x)
            return out

        like = np.empty(3000, f32)
        with comm.codec("onebit", like) as codec:
            run(codec, 0, 3)
            state = codec.export_state()
            wanted = run(codec, 3, 6)
        with comm.codec("onebit", like) as codec:
            codec.import_state(state)
            np.testing.assert_array_equal(run(codec, 3, 6), wanted)
            with pytest.raises(sotto.InvalidArgumentError):
                codec.import_state(state[:-9])

    thread_ranks(2, body)


def test_works():
    def body(comm):
        x = np.zeros(1000, f32)
        if comm.rank == 0:
            work = comm.recv(x, 1)
            assert not work.is_completed()
            with pytest.raises(TimeoutError, match="recv is still in flight after 0.05 s"):
                work.wait(0.05)
            assert work.error() is None
            other = comm.recv(x[:1], 1)
            with pytest.raises(TimeoutError, match="none of 2 operations"):
                sotto.wait_any([work, other], 0.05)
            with pytest.raises(TimeoutError, match="none of 1 operation ended"):
                sotto.wait_any([work], 0.05)
            with pytest.raises(TimeoutError, match="not all of 2 operations"):
                sotto.wait_all([work, other], 0.05)
            comm.send(np.zeros(1, np.int8), 1).wait()
            assert sotto.wait_any([work, other], 50) == 0
            other.wait(50)
            sotto.wait_all([work, other])
            work.wait()
            work.wait()
            assert work.is_completed()
            stats = work.stats()
            assert 0 < stats.launch_ns <= stats.start_ns <= stats.end_ns
        else:
            comm.recv(np.zeros(1, np.int8), 0).wait()
            comm.send(np.ones(1000, f32), 0).wait()
            comm.send(np.ones(1, f32), 0).wait()
        comm.all_reduce(x, timeout=math.inf).wait(math.inf)

    thread_ranks(2, body)


def test_wait_all_raises_the_first_error():
    def body(comm):
        good, bad = np.zeros(8, f32), np.full(8, np.nan, f32)
        codec = comm.codec("onebit", bad)
        works = [comm.barrier(), comm.all_reduce(bad, codec=codec), comm.all_reduce(good)]
        with pytest.raises(sotto.NonfiniteError):
            sotto.wait_all(works)
        assert [work.error() is None for work in works] == [True, False, True]
        sotto.wait_all([])

    thread_ranks(2, body)


def test_reports_and_counters():
    def body(comm):
        x = np.zeros(1000, f32)
        plan = comm.plan(
            "all_reduce", dtype="fp32", counts=[np.int64(1000)], op="sum", in_place=True
        )
        comm.all_reduce(x).wait()
        counters = comm.counters()
        assert (
            counters.payload_bytes_sent
            == plan["payload_bytes_sent"]
            == counters.payload_bytes_planned
        )
        assert comm.error() is None
        assert (
            comm.report("counters")["peers"][0]["payload_bytes_sent"] == counters.payload_bytes_sent
        )
        assert comm.report()["rank"] == comm.rank
        with pytest.raises(sotto.InvalidArgumentError, match="known: all"):
            comm.report("weather")
        assert repr(comm) == f"<sotto.Comm rank {comm.rank} of 2>"

    thread_ranks(2, body)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda c, x: c.all_reduce(x, op="avg"), "op is 'avg'; allowed: sum, mean"),
        (lambda c, x: c.all_reduce(x, x[:1].copy()), "count"),
        (lambda c, x: c.all_reduce(x, [x.copy(), x.copy()]), "x has 1 array and out has 2"),
        (lambda c, x: c.all_reduce(x, x.astype("f8")), "fp32 but"),
        (lambda c, x: c.all_reduce(x, op="bit_or"), "BIT_OR"),
        (lambda c, x: c.all_reduce(x, tag=0, timeout=-2), "timeout is -2"),
        (lambda c, x: c.broadcast(x, root=9), "root"),
        (lambda c, x: c.send(x, 0), "peer"),
        (lambda c, x: c.gather(x), "out is None"),
        (lambda c, x: c.scatter(None, x), "x is None"),
        (lambda c, x: c.all_to_all(x, x, in_counts=[8]), "one of in_counts and out_counts is None"),
        (
            lambda c, x: c.all_to_all(x, x, in_counts=[1, 2], out_counts=[8]),
            r"in_counts is \[1, 2\]",
        ),
        (lambda c, x: c.all_gather_v(x, x, [4]), "in.0..count is 8 but parts.0..out_counts.0."),
        (lambda c, x: c.all_gather_v(x, x, [4, 4]), r"out_counts is \[4, 4\]"),
        (lambda c, x: c.reduce_scatter_v([x], [x], [[8], [8]]), "2 in_counts for 1 arrays"),
        (lambda c, x: c.reduce(x, root=1), "root is 1"),
        # What C would cut to 32 or 64 bits, and then take.
        (lambda c, x: c.broadcast(x, root=2**32), "root is 4294967296; allowed: .* 0 to 0"),
        (lambda c, x: c.reduce(x, root=1.0), "root is 1.0; allowed: a whole number"),
        (lambda c, x: c.gather(x, x, root=None), "root is None"),
        (lambda c, x: c.scatter(x, x, root=-(2**32)), "root is -4294967296"),
        (lambda c, x: c.send(x, 2**32), "peer is 4294967296"),
        (lambda c, x: c.recv(x, 2**32), "peer is 4294967296"),
        (lambda c, x: c.barrier(tag=2**64), "tag is 18446744073709551616"),
        (lambda c, x: c.barrier(tag=-1), "tag is -1"),
        (lambda c, x: c.all_reduce(x, priority=2**32), "priority is 4294967296"),
        (lambda c, x: c.split(-3), "color is -3"),
        (lambda c, x: c.split(2**32), "color is 4294967296; allowed: .* 0 to 2147483647"),
        (lambda c, x: c.split(2**32 - 1), "color is 4294967295"),
        (lambda c, x: c.split(0, key=2**31), "key is 2147483648"),
        (lambda c, x: c.codec("zip", x), "zip"),
        (lambda c, x: c.codec("onebit", x, colour=1), "colour"),
        (
            lambda c, x: c.all_reduce(x, op="sum", codec=c.codec("onebit", x)),
            "with a codec the result is the mean",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_callers_mistakes(call, text):
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        with pytest.raises((sotto.InvalidArgumentError, sotto.UnsupportedError), match=text):
            call(comm, np.zeros(8, f32))
        comm.barrier().wait()


def test_a_closed_comm_says_so():
    comm = sotto.create_comm(world_size=1, cpu_threads=1)
    comm.close()
    assert comm.closed
    with pytest.raises(sotto.InvalidStateError, match="this comm is closed"):
        comm.barrier()


def test_ranks_that_differ_are_told_on_all():
    def body(comm):
        x = np.zeros(10, f32 if comm.rank else np.float64)
        with pytest.raises(sotto.ProtocolError, match="fp64"):
            comm.all_reduce(x).wait()
        assert isinstance(comm.error(), sotto.ProtocolError)

    thread_ranks(2, body)


def test_abort():
    def body(comm):
        if comm.rank == 0:
            comm.abort("out of coffee")
        else:
            with pytest.raises(sotto.AbortedError, match="out of coffee"):
                comm.recv(np.zeros(1), 0).wait()

    thread_ranks(2, body)


def test_a_rank_that_does_not_come_is_named():
    with (
        sotto.UniqueId(cpu_threads=1) as unique_id,
        pytest.raises(sotto.OperationTimeoutError, match="rank 1"),
    ):
        sotto.create_comm(rank=0, world_size=2, unique_id=unique_id, timeout=0.3)


def test_meeting_over_another_library():
    import threading

    barrier, box = threading.Barrier(2), [b"", b""]

    def start(rank, out):
        def all_gather(mine):
            barrier.wait()
            box[rank] = mine
            barrier.wait()
            return list(box)

        with sotto.create_comm(
            rank=rank, world_size=2, all_gather=all_gather, timeout=60, cpu_threads=1
        ) as comm:
            x = np.array([1.0])
            comm.all_reduce(x).wait()
            out.append(x[0])

    out = []
    threads = [threading.Thread(target=start, args=(r, out)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out == [2, 2]


def test_an_error_of_the_callers_all_gather_is_the_callers():
    def all_gather(mine):
        raise ConnectionResetError("my network")

    with pytest.raises(ConnectionResetError, match="my network"):
        sotto.create_comm(rank=0, world_size=2, all_gather=all_gather, timeout=5)
    with pytest.raises(sotto.InvalidArgumentError, match="all_gather returned parts"):
        sotto.create_comm(rank=0, world_size=2, all_gather=lambda mine: [mine, b""], timeout=5)


def rank_collectives(comm):
    x = np.full((100, 100), comm.rank, f32)
    comm.all_reduce(x, op="mean").wait()
    assert (x == (comm.size - 1) / 2).all()
    out = np.empty(comm.size, np.int64)
    comm.all_gather(np.array([comm.rank]), out).wait()
    assert out.tolist() == list(range(comm.size))
    print("done", comm.report("routes")["peers"] != [])


@pytest.mark.parametrize("size", [2, 4])
def test_processes(size):
    assert run_ranks(size, __file__, "rank_collectives").count("done True") == size


def rank_other_dtype(comm):
    x = np.zeros(10, f32 if comm.rank else np.float64)
    with pytest.raises(sotto.ProtocolError, match="fp64"):
        comm.all_reduce(x).wait()


def test_dtypes_that_differ_between_processes():
    run_ranks(2, __file__, "rank_other_dtype")


def test_an_error_that_nobody_has_heard_of_is_raised_by_close():
    def body(comm):
        x = np.zeros(10, f32 if comm.rank else np.float64)
        comm.all_reduce(x)
        with pytest.raises(sotto.ProtocolError, match="fp64"):
            comm.close()
        assert comm.closed

    thread_ranks(2, body)


def test_spans_are_in_the_time_line(tmp_path, monkeypatch):
    monkeypatch.setenv("SOTTO_TRACE", str(tmp_path / "run"))
    comm = sotto.create_comm(rank=0, world_size=1)
    part = comm.split(0)
    with comm.span("forward é"), part.span("layer"):
        comm.all_reduce(values(0)).wait()
    with pytest.raises(ZeroDivisionError), comm.span("a block that raises"):
        _ = 1 // 0
    part.close()
    with pytest.raises(sotto.InvalidStateError, match="this comm is closed"), part.span("late"):
        pytest.fail("the block has run")
    comm.close()
    with open(tmp_path / "run.rank0.json", encoding="utf-8") as file:
        events = json.load(file)
    spans = {event["name"]: event for event in events if event.get("ph") == "X"}
    forward, layer = spans["forward é"], spans["layer"]
    assert "a block that raises" in spans
    assert "late" not in spans
    assert forward["ts"] <= layer["ts"]
    assert layer["ts"] + layer["dur"] <= forward["ts"] + forward["dur"]
    assert forward["tid"] == layer["tid"]


def test_a_span_needs_the_context(monkeypatch):
    monkeypatch.delenv("SOTTO_TRACE", raising=False)
    unique_id = sotto.UniqueId()
    comm = sotto.create_comm(unique_id=unique_id, rank=0, world_size=1)
    with comm.span("without SOTTO_TRACE"):
        pass
    unique_id.close()
    with pytest.raises(sotto.InvalidStateError, match="this unique id is closed"), comm.span("x"):
        pytest.fail("the block has run")
    comm.close()
