"""Outer optimizers on plain buffers."""

import io
import subprocess
import sys

import numpy as np
import pytest
from ranks import resident_kb, run_ranks, sotto_run, thread_ranks

import sotto
from sotto.outer import CONSUMED, HELD, LAUNCHED, MEASURING, WAITED, Outer, OuterParam

f32 = np.float32
CENTRES = (-1.0, 3.0)
# Problem T of the specification: quadratics around -1 and 3, rate 1/2, two inner steps a round.
NEUTRAL = {"preset": "co2", "period": 2, "auto_floor": False, "penalty": "none", "clip": "none"}


def descend(x, rank):
    x -= f32(0.5) * (x - f32(CENTRES[rank]))


def train(comm, config, rounds, parameters=None):
    x = np.full(700, 5, f32)
    anchors = []
    with Outer([parameters(x) if parameters else x], config, comm=comm) as outer:
        for _ in range(rounds):
            for _ in range(2):
                descend(x, comm.rank)
                outer.step().wait()
            anchors.append(float(x[0]))
            assert (x == x[0]).all()
        outer.flush().wait()
        return anchors, float(x[0]), outer.info()


@pytest.mark.parametrize(
    ("more", "anchors", "flushed"),
    [
        ({"beta": 0}, [5, 2, -1, -1.75, -0.25, 1.8125, 2.75, 2.140625], 0.828125),
        ({"beta": 0, "delay": 0}, [2, 1.25, 1.0625, 1.015625], 1.015625),
    ],
)
def test_anchors_follow_the_exact_sequences(more, anchors, flushed):
    for found, last, info in thread_ranks(
        2, lambda comm: train(comm, {**NEUTRAL, **more}, len(anchors))
    ):
        assert found == anchors
        assert last == flushed
        assert (info.step, info.in_flight, info.fragments) == (2 * len(anchors), 0, 1)
        assert info.payload_bytes_next_launch == 700 * 4
        assert 0 <= info.overlap_ratio <= 1


def test_a_period_that_is_measured():
    def body(comm):
        x = np.full(9, 5, f32)
        with Outer([x], {"preset": "diloco", "period": "auto"}, comm=comm) as outer:
            for _ in range(20):
                assert outer.info().events & MEASURING
                assert (outer.info().period, outer.info().delay) == (4, 0)
                outer.step().wait()
            info = outer.info()
            assert not info.events & MEASURING
            outer.set(retune=True)
            return info.period, info.delay, info.next_boundary

    first, second = thread_ranks(2, body)
    assert first == second
    assert first[1:] == (0, first[0])
    with (
        sotto.create_comm(world_size=1) as comm,
        Outer([np.zeros(3, f32)], {"period": 6}, comm=comm) as outer,
        pytest.raises(sotto.InvalidStateError, match=r'a period "auto" anew; the period here is 6'),
    ):
        outer.set(retune=True)


def test_events_and_evaluation():
    def body(comm):
        x = np.full(9, 5, f32)
        copy = np.zeros(9, np.float16)
        outer = Outer([OuterParam(x, "x", copy)], {**NEUTRAL, "beta": 0}, comm=comm)
        events = []
        for _ in range(4):
            descend(x, comm.rank)
            outer.step().wait()
            events.append(outer.info().events & ~WAITED)
        assert events == [0, LAUNCHED | HELD, 0, LAUNCHED | CONSUMED]
        assert outer.info().next_boundary == 2
        assert (copy == 2).all()
        descend(x, comm.rank)
        before = x.copy()
        with outer.evaluation():
            assert (x == 2).all()
            with pytest.raises(sotto.InvalidStateError, match="anchor is in the place"):
                outer.step()
            with (
                pytest.raises(sotto.InvalidStateError, match=r"evaluation\(\) inside"),
                outer.evaluation(),
            ):
                pass
        assert (x == before).all()
        outer.vote(1 << comm.rank)
        outer.set(lr=0.1, loss=2.0, weight=1)
        with pytest.raises(sotto.InvalidArgumentError, match=r"weight is 0.5; allowed: 0 or 1"):
            outer.set(weight=0.5)
        with pytest.raises(sotto.InvalidArgumentError, match="loss is '2'; allowed: a number"):
            outer.set(loss="2")
        for bits in (-1, 2**32, 1.0):
            with pytest.raises(sotto.InvalidArgumentError, match=f"bits is {bits}; allowed: a who"):
                outer.vote(bits)
        for _ in range(4):
            outer.step().wait()
        assert outer.info().votes == 3
        assert outer.info().loss == 2.0
        descend(x, comm.rank)
        before = x.copy()

        def close():
            with outer.evaluation():
                assert (x != before).all()
                try:
                    raise KeyError
                finally:
                    outer.close()

        with pytest.raises(KeyError):
            close()
        assert (x == before).all()

    thread_ranks(2, body)


def test_states_continue_bit_for_bit():
    config = {"preset": "co2", "period": 3, "codec": "onebit", "dense_rounds": 1}

    def body(comm):
        rng = np.random.default_rng(4)
        start = rng.standard_normal(5000).astype(f32)
        steps = [rng.standard_normal(5000).astype(f32) * f32(0.01) + comm.rank for _ in range(14)]
        plain, resumed = start.copy(), start.copy()
        with Outer([plain], config, comm=comm) as outer:
            for step in steps:
                plain -= step
                outer.step().wait()
        outer = Outer([resumed], config, comm=comm)
        for step in steps:
            state = outer.export_state()
            outer.close()
            resumed[:] = 0
            outer = Outer([resumed], config, comm=comm)
            outer.import_state(state)
            resumed -= step
            outer.step().wait()
        assert (plain == resumed).all()
        with pytest.raises(sotto.InvalidArgumentError, match=r"'mean'; allowed: exact, common"):
            outer.export_state("mean")
        other = Outer([start.copy()], {**config, "period": 4}, comm=comm)
        with pytest.raises(sotto.InvalidArgumentError, match="period"):
            other.import_state(state)
        other.close()
        outer.close()

    thread_ranks(2, body)


def test_states_of_other_ranks():
    """Mode common takes them; error feedback starts at zero. Of another number: from the anchor."""
    config = {"preset": "co2", "period": 3, "codec": "onebit", "dense_rounds": 1}
    states = {}

    def save(comm):
        x = np.zeros(3000, f32)
        with Outer([x], config, comm=comm) as outer:
            for step in range(8):
                x += f32(0.1) * np.sin(np.arange(3000) + step + comm.rank).astype(f32)
                outer.step().wait()
            states[comm.rank] = outer.export_state("common"), x.copy()

    def load(comm):
        x = np.zeros(3000, f32)
        with Outer([x], config, comm=comm) as outer:
            theirs, _ = states[1 - comm.rank] if comm.size == 2 else states[0]
            with pytest.raises(
                sotto.InvalidArgumentError,
                match=rf"of rank \d of 2; this is rank {comm.rank} of {comm.size}",
            ):
                outer.import_state(theirs)
            if comm.size != 2:
                outer.import_state(theirs, "common")
                assert (outer.info().step, outer.info().in_flight) == (8, 0)
                with outer.evaluation():
                    anchor = x.copy()
                assert x.any()
                assert (x == anchor).all()
                return None
            outer.import_state(states[0][0], "exact" if comm.rank == 0 else "common")
            assert (x == states[0][1]).all()
            assert outer.info().step == 8
            assert outer.info().in_flight == 1
            x += comm.rank
            outer.step().wait()  # the average of before, and the next one is launched
            outer.flush().wait()
            return x

    thread_ranks(2, save)
    a, b = thread_ranks(2, load)
    assert (a == b).all()
    thread_ranks(3, load)


def next_average(outer):
    for _ in range(2):
        outer.step().wait()


def test_a_state_that_one_rank_alone_imports():
    """The others find it at their next average, and are told what the rank has done."""

    def body(comm):
        x = np.full(700, 5, f32)
        with Outer([x], {**NEUTRAL, "delay": 0}, comm=comm) as outer:
            state = outer.export_state()
            for _ in range(4):
                outer.step().wait()
            if comm.rank == 0:
                outer.import_state(state)
            with pytest.raises(sotto.ProtocolError, match="sotto_outer_state_import") as told:
                next_average(outer)
            assert "rank 0" in str(told.value)
            assert "rank 1" in str(told.value)

    thread_ranks(2, body)


@pytest.mark.parametrize(
    "keys",
    [
        {"preset": "co2", "period": 1},
        {"preset": "eager_diloco", "period": 1, "codec": "onebit"},
        {"preset": "sparse_loco", "period": 1},
        {"preset": "streaming_diloco", "period": 3, "delay": 1, "fragments": 3, "codec": "int4"},
    ],
    ids=lambda keys: keys["preset"],
)
def test_memory_is_flat_over_2000_rounds(keys):
    def body(comm):
        tensors = [np.zeros(3000, f32) for _ in range(3)]
        with Outer(tensors, keys, comm=comm) as outer:

            def until(rounds):
                while outer.info().round < rounds:
                    for x in tensors:
                        x += f32(0.01 * comm.rank)
                    outer.step().wait()
                comm.barrier().wait()
                return outer.info().state_bytes, resident_kb()

            held, resident = until(100)
            still_held, still_resident = until(2100)
            assert still_held == held
            assert still_resident - resident < 500

    thread_ranks(2, body)


def test_bad_input():
    with sotto.create_comm(rank=0, world_size=1) as comm:
        x = np.zeros(4, f32)
        with pytest.raises(sotto.InvalidArgumentError, match="period: found 0"):
            Outer([x], {"period": 0}, comm=comm)
        with pytest.raises(sotto.InvalidArgumentError, match="perid"):
            Outer([x], {"perid": 3}, comm=comm)
        with pytest.raises(sotto.InvalidArgumentError, match="found ZeroOneAdam with sotto.outer"):
            sotto.optim.Optimizer(
                [(x, x.copy())],
                {"optimizer": {"type": "ZeroOneAdam"}, "sotto": {"outer": {"preset": "co2"}}},
                comm=comm,
            )
        for config, where in (
            ({"period": {3}}, "period is of type set"),
            ({"beta": np.zeros(2)}, "beta is of type ndarray"),
            ({"sotto": {"outer": {"fragments": [[0], [object]]}}}, r"outer.fragments\[1\]\[0\] is"),
        ):
            with pytest.raises(sotto.InvalidArgumentError, match=f"{where}.*; allowed: a number"):
                Outer([x], config, comm=comm)
        scalars = {"period": np.int64(3), "auto_floor": np.False_, "beta": np.array(0.5)}
        with Outer([x], scalars, comm=comm) as outer:
            assert outer.info().period == 3
        x.flags.writeable = False
        with pytest.raises(sotto.InvalidArgumentError, match="read-only"):
            Outer([x], comm=comm)


def rank_trains(comm):
    anchors, last, _ = train(comm, {**NEUTRAL, "beta": 0}, 4)
    assert anchors == [5, 2, -1, -1.75], anchors
    print(f"trained {last}")


def test_processes():
    assert run_ranks(2, __file__, "rank_trains").count("trained") == 2


def test_outer_steps_of_an_optimizer():
    def body(comm):
        x, g = np.full(700, 5, f32), np.empty(700, f32)
        config = {
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "sotto": {"outer": {**NEUTRAL, "beta": 0}},
        }
        anchors = []
        with (
            sotto.optim.Optimizer([(x, g)], config, comm=comm) as optimizer,
            Outer.of(optimizer) as outer,
        ):
            for _ in range(8):
                for _ in range(2):
                    g[:] = x - f32(CENTRES[comm.rank])
                    optimizer.step().wait()
                anchors.append(float(x[0]))
            with outer.evaluation(), pytest.raises(sotto.InvalidStateError):
                optimizer.step()
            with pytest.raises(sotto.InvalidStateError, match="sotto_optim_step"):
                outer.step()
            outer.flush().wait()
            assert outer.info().step == 16
        with (
            sotto.optim.Optimizer([(x, g)], {"optimizer": {"type": "SGD"}}, comm=comm) as plain,
            pytest.raises(sotto.InvalidStateError, match="no outer steps"),
        ):
            Outer.of(plain)
        return anchors, float(x[0])

    for anchors, last in thread_ranks(2, body):
        assert anchors == [5, 2, -1, -1.75, -0.25, 1.8125, 2.75, 2.140625]
        assert last == 0.828125


LEFT = """
import sys, time
import numpy as np, sotto
from sotto.outer import Outer
comm = sotto.init_process_group(timeout=60)
x = np.zeros(1000, np.float32)
config = {"optimizer": {"type": "SGD"}, "sotto": {"outer": {"preset": "co2", "period": 2}}}
if sys.argv[1] == "outer":
    outer = Outer([x], config["sotto"]["outer"], comm=comm)
else:
    outer = sotto.optim.Optimizer([(x, x.copy())], config, comm=comm)
for _ in range(2):
    outer.step().wait()
assert (outer if sys.argv[1] == "outer" else Outer.of(outer)).info().in_flight == 1
if sys.argv[1] != "handle":
    del outer
if comm.rank == 1:
    time.sleep(0.5)
comm.close()
"""


@pytest.mark.parametrize("left", ["outer", "optimizer", "handle"])
def test_one_that_is_dropped_lets_go_of_the_comm_with_an_average_under_way(left):
    """Else the other rank, which closes its comm later, would take this one for lost."""
    run = subprocess.run(
        [sotto_run(), "-n", "2", "--", sys.executable, "-W", "ignore", "-c", LEFT, left],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_states_are_not_of_an_evaluation():
    """One with the anchor in the place of the params could never step again where it is loaded."""
    x = np.full(5, 2, f32)
    with (
        sotto.create_comm(world_size=1, cpu_threads=1) as comm,
        Outer([x], {"preset": "diloco", "period": 3}, comm=comm) as outer,
    ):
        x -= 1
        outer.step().wait()
        state = outer.export_state()
        with outer.evaluation():
            for call in (outer.export_state, lambda: outer.import_state(state)):
                with pytest.raises(sotto.InvalidStateError, match=r"port_state\(\) inside eval"):
                    call()
            assert (x == 2).all()
        assert (x == 1).all()
        outer.import_state(outer.export_state())
        outer.step().wait()


def test_states_of_an_optimizer_are_not_of_an_evaluation():
    x, config = np.full(5, 2, f32), {"optimizer": {"type": "SGD"}, "sotto": {"outer": {}}}
    with (
        sotto.create_comm(world_size=1, cpu_threads=1) as comm,
        sotto.optim.Optimizer([(x, np.ones(5, f32))], config, comm=comm) as optimizer,
        Outer.of(optimizer) as outer,
        Outer.of(optimizer) as other,
    ):
        state = optimizer.export_state("exact")
        file = io.BytesIO(state)
        with outer.evaluation():
            for call in (
                lambda: optimizer.export_state("exact"),
                lambda: optimizer.import_state(state, "exact"),
                lambda: optimizer.write_state(file, "exact"),
                lambda: optimizer.read_state(file, "exact"),
                lambda: optimizer.import_arrays({"param0/param": x}),
                lambda: other.evaluation().__enter__(),
            ):
                with pytest.raises(sotto.InvalidStateError, match=r"\(\) inside evaluation\(\)"):
                    call()
            other.close()
            with pytest.raises(sotto.InvalidStateError):
                optimizer.step()
        optimizer.step().wait()
        optimizer.import_state(state, "exact")
