"""Outer steps on trees of JAX: bits of plain buffers, what is copied, states, what is refused."""

import warnings

import numpy as np
import pytest
from ranks import run_ranks, thread_ranks

import sotto
from sotto.outer import CONSUMED, HELD, LAUNCHED, MEASURING, WAITED, OuterParam
from sotto.outer import Outer as PlainOuter

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

import sotto.jax  # noqa: E402
from sotto.jax import trees  # noqa: E402

f32 = np.float32
CO2 = {"preset": "co2", "period": 3, "codec": "onebit"}
PRESETS = {
    "local_sgd": {"preset": "local_sgd", "period": 4},
    "co2": CO2,
    # Reads parameters behind a launch too, where nothing is launched or consumed.
    "co2_paper": {"preset": "co2_paper", "period": 3},
    "slowmo": {"preset": "slowmo", "period": 2},
    "streaming": {
        "preset": "streaming_diloco",
        "period": 4,
        "delay": 1,
        "fragments": 2,
    },
}
SHAPES = {"b": (7,), "w": (3, 500)}  # in the order of leaves


def start(dtype="float32"):
    rng = np.random.default_rng(3)
    return {k: jnp.asarray(rng.standard_normal(s), dtype) for k, s in SHAPES.items()}


@jax.jit
def update(params, rank, step):
    """The trainer's own, which knows nothing of sotto: towards values of the rank and the step."""
    return jax.tree.map(lambda p: p - (0.1 * (p - jnp.sin(rank + step))).astype(p.dtype), params)


def arrays(params):
    return {k: np.array(p) for k, p in params.items()}


def same(a, b):
    assert a.keys() == b.keys()
    for k in a:
        assert (a[k].shape, a[k].dtype) == (b[k].shape, b[k].dtype)
        assert np.asarray(a[k]).tobytes() == np.asarray(b[k]).tobytes(), k


def on_buffers(comm, config, steps, dtype="float32", between=lambda outer, step: None):
    """What sotto.outer.Outer makes of the same inner steps: parameters behind every step, flush."""
    live = arrays(start(dtype))
    masters = live if dtype == "float32" else {k: x.astype(f32) for k, x in live.items()}
    params = [OuterParam(masters[k], k, None if dtype == "float32" else live[k]) for k in live]
    seen = []
    with PlainOuter(params, config, comm=comm) as outer:
        for step in range(steps):
            for k, new in update(live, comm.rank, step).items():
                new = np.asarray(new)
                if dtype != "float32":  # elements that still have the master's value keep it
                    masters[k][...] = np.where(
                        masters[k].astype(new.dtype) == new, masters[k], new.astype(f32)
                    )
                live[k][...] = new
            between(outer, step)
            outer.step().wait()
            seen.append(arrays(live))
        with outer.evaluation():
            anchor = arrays(live)
        outer.flush().wait()
    return seen, anchor, arrays(live)


def on_trees(comm, config, steps, dtype="float32", between=lambda outer, step: None):
    params, seen, returned = start(dtype), [], []
    with sotto.jax.Outer(params, comm=comm, **config) as outer:
        for step in range(steps):
            params = update(params, comm.rank, step)
            between(outer, step)
            params = outer.step(params)
            returned.append(params)
            seen.append(arrays(params))
        with outer.evaluation() as anchor:
            values = arrays(anchor)
            same(arrays(returned[-1]), seen[-1])
        returned.append(anchor)
        seen.append(values)
        last = outer.flush(params)
        returned.append(last)
        seen.append(arrays(last))
        outer.step(update(last, 0, 0))
    # What was returned stays as it is, whatever the library writes later.
    for tree, then in zip(returned, seen):
        same(tree, then)
    return seen[:steps], values, seen[-1]


def both(comm, *arguments):
    return on_trees(comm, *arguments), on_buffers(comm, *arguments)


def check_both(found, allowed):
    for ours, theirs in zip(found[0], allowed[0]):
        same(ours, theirs)
    same(found[1], allowed[1])
    same(found[2], allowed[2])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("preset", PRESETS)
def test_steps_have_the_bits_of_plain_buffers(preset, ranks):
    def learning_rate(outer, step):
        if preset == "slowmo":
            outer.set(lr=0.1 / (1 + step))

    def body(comm):
        return both(comm, PRESETS[preset], 11, "float32", learning_rate)

    results = thread_ranks(ranks, body)
    for ours, theirs in results:
        check_both(ours, theirs)
    for ours, _ in results:
        same(ours[2], results[0][0][2])  # the anchor is that of all ranks
    assert results[0][0][0][4]["w"].tobytes() != results[0][0][0][5]["w"].tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_of_low_precision_have_masters(dtype):
    for ours, theirs in thread_ranks(2, lambda comm: both(comm, CO2, 8, dtype)):
        check_both(ours, theirs)
        assert ours[0][0]["w"].dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_a_device(monkeypatch, dtype):
    """What is done with arrays that JAX has allocated, as on a CUDA device."""
    monkeypatch.setattr(trees, "on_host", lambda sharding: False)
    for ours, theirs in thread_ranks(2, lambda comm: both(comm, CO2, 8, dtype)):
        check_both(ours, theirs)


def test_processes():
    assert run_ranks(2, __file__, "rank_trains", imports=("jax",)).count("same bits") == 2


def rank_trains(comm):
    ours, theirs = both(comm, CO2, 7)
    check_both(ours, theirs)
    print(f"rank {comm.rank}: same bits", flush=True)


# ---- what is copied ----------------------------------------------------------------------------


def test_steps_in_which_nothing_happens_copy_nothing(monkeypatch):
    made = []

    class Counted(trees.Room):
        def __init__(self, *arguments, **options):
            made.append(self)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(sotto.jax.outer, "Room", Counted)

    def body(comm):
        with sotto.jax.Outer(start(), preset="diloco", period=3, comm=comm) as outer:
            params, rooms = start(), []
            for step in range(6):
                before = len(made)
                given = update(params, 0, step)
                params = outer.step(given)
                rooms.append(len(made) - before)
                assert (params is given) == (step % 3 != 2)
            assert rooms == [0, 0, 2, 0, 0, 2]
            # The result is the memory that the library has written.
            assert params["w"].unsafe_buffer_pointer() == made[-1].memory.ctypes.data

    thread_ranks(1, body)


def test_arrays_may_be_donated():
    donating = jax.jit(lambda params: jax.tree.map(lambda p: p * 0.5, params), donate_argnums=0)

    def body(comm):
        params = start()
        with sotto.jax.Outer(params, preset="co2", period=2, comm=comm) as outer:
            for _ in range(5):
                params = donating(params)
                params = outer.step(params)
            return arrays(outer.flush(params))

    first, second = thread_ranks(2, body)
    same(first, second)


@pytest.mark.parametrize("committed", [False, True])
def test_results_are_where_the_parameters_were(committed):
    device = jax.local_devices(backend="cpu")[0]
    params = jax.device_put(start(), device if committed else None)
    with sotto.create_comm(world_size=1) as comm:
        with sotto.jax.Outer(params, preset="local_sgd", period=1, comm=comm) as outer:
            new = outer.step(params)
            with outer.evaluation() as anchor:
                pass
            loaded = outer.load_state_dict(outer.state_dict(new))
        for tree in (new, anchor, loaded):
            assert all(p.committed == committed for p in tree.values())


# ---- evaluation, figures -----------------------------------------------------------------------


def test_evaluation_events_and_votes():
    neutral = {"period": 2, "auto_floor": False, "penalty": "none", "clip": "none", "beta": 0}

    def body(comm):
        centre = (-1.0, 3.0)[comm.rank]
        params, events = jnp.full(9, 5.0), []
        outer = sotto.jax.Outer(params, preset="co2", comm=comm, **neutral)
        for _ in range(4):
            params = outer.step(params - 0.5 * (params - centre))
            events.append(outer.info().events & ~WAITED)
        assert events == [0, LAUNCHED | HELD, 0, LAUNCHED | CONSUMED]
        assert params.tolist() == [2] * 9
        params = params - 0.5 * (params - centre)
        before = np.asarray(params).tobytes()
        with outer.evaluation() as anchor:
            assert anchor.tolist() == [2] * 9
            for call in (
                lambda: outer.step(params),
                lambda: outer.flush(params),
                lambda: outer.state_dict(params),
                lambda: outer.load_state_dict({}),
                lambda: outer.evaluation().__enter__(),
            ):
                with pytest.raises(sotto.InvalidStateError, match=r"inside evaluation\(\)"):
                    call()
        with outer.evaluation() as again:
            assert np.asarray(again).tobytes() == np.asarray(anchor).tobytes()
        assert np.asarray(params).tobytes() == before
        outer.vote(1 << comm.rank)
        outer.set(loss=2.0, weight=1)
        with pytest.raises(sotto.InvalidArgumentError, match=r"weight is 0.5; allowed: 0 or 1"):
            outer.set(weight=0.5)
        with pytest.raises(sotto.InvalidStateError, match=r"the period here is 2"):
            outer.set(retune=True)
        for _ in range(4):
            params = outer.step(params)
        assert (outer.info().votes, outer.info().step) == (3, 8)
        flushed = outer.flush(params)
        assert outer.flush(flushed).tolist() == flushed.tolist()

        def close():
            with outer.evaluation():
                try:
                    raise KeyError
                finally:
                    outer.close()

        with pytest.raises(KeyError):
            close()
        outer.close()
        return flushed.tolist()

    first, second = thread_ranks(2, body)
    assert first == second


def test_a_period_that_is_measured():
    def body(comm):
        params = start()
        with sotto.jax.Outer(params, preset="diloco", period="auto", comm=comm) as outer:
            for step in range(20):
                assert outer.info().events & MEASURING
                params = outer.step(update(params, comm.rank, step))
            assert not outer.info().events & MEASURING
            outer.set(retune=True)
            return outer.info().period, arrays(params)

    (one, first), (other, second) = thread_ranks(2, body)
    assert one == other >= 1
    same(first, second)


def test_anchors_are_of_the_parameters_dtype():
    with (
        sotto.create_comm(world_size=1) as comm,
        sotto.jax.Outer(start("bfloat16"), comm=comm) as outer,
        outer.evaluation() as anchor,
    ):
        same(arrays(anchor), arrays(start("bfloat16")))


# ---- states ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["co2", "slowmo", "streaming", "co2_paper"])
def test_states_continue_bit_for_bit(preset, dtype):
    """After every step, with an average under way for most of them."""
    config = PRESETS[preset]

    def body(comm):
        params, in_flight = start(dtype), []
        seen, anchor, flushed = on_trees(
            comm, config, 10, dtype, lambda outer, step: step == 0 and outer.set(lr=0.3)
        )
        outer = sotto.jax.Outer(params, comm=comm, **config)
        outer.set(lr=0.3)
        for step in range(10):
            params = outer.step(update(params, comm.rank, step))
            state = outer.state_dict(params)
            assert set(map(type, state.values())) <= {str, int, float, np.ndarray}
            in_flight.append(outer.info().in_flight)
            outer.close()
            zeros = jax.tree.map(jnp.zeros_like, params)
            outer = sotto.jax.Outer(zeros, comm=comm, **config)
            loaded = outer.load_state_dict(state)
            same(arrays(loaded), arrays(params))
            same(arrays(params), seen[step])
            params = loaded
        with outer.evaluation() as now:
            same(arrays(now), anchor)
        same(arrays(outer.flush(params)), flushed)
        outer.close()
        return in_flight

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_flight = thread_ranks(2, body)
    assert any(in_flight[0]) == (preset != "slowmo")


def test_loading_a_state_leaves_arrays_of_before():
    with (
        sotto.create_comm(world_size=1) as comm,
        sotto.jax.Outer(start(), preset="local_sgd", period=1, comm=comm) as outer,
    ):
        first = outer.step(start())
        state = outer.state_dict(first)
        second = outer.step(update(first, 0, 0))
        before = arrays(second)
        third = outer.load_state_dict(state)
        same(arrays(second), before)
        same(arrays(third), arrays(first))
        outer.step(second)
        same(arrays(third), arrays(first))


def test_a_rank_that_is_lost():
    """The others keep what they have; with the states of both all go on as if nothing had been."""
    config = {"preset": "diloco", "period": 3}
    states, unbroken = {}, {}

    def steps(comm, outer, params, some):
        for step in some:
            params = outer.step(update(params, comm.rank, step))
        return params

    def whole(comm):
        with sotto.jax.Outer(start(), comm=comm, **config) as outer:
            params = steps(comm, outer, start(), range(10))
            unbroken[comm.rank] = arrays(outer.flush(params))

    def broken(comm):
        with sotto.jax.Outer(start(), comm=comm, **config) as outer:
            params = steps(comm, outer, start(), range(8))
            if comm.rank == 0:
                with pytest.raises(sotto.SottoError, match="rank 1"):
                    outer.step(update(params, comm.rank, 8))
                assert outer.info().step == 8
            states[comm.rank] = outer.state_dict(params)

    def resumed(comm):
        with sotto.jax.Outer(start(), comm=comm, **config) as outer:
            params = outer.load_state_dict(states[comm.rank])
            params = steps(comm, outer, params, range(8, 10))
            same(arrays(outer.flush(params)), unbroken[comm.rank])

    for body in (whole, broken, resumed):
        thread_ranks(2, body)


def test_making_a_state_changes_nothing():
    def body(comm, saves, dtype):
        params, seen = start(dtype), []
        with sotto.jax.Outer(params, comm=comm, **CO2) as outer:
            for step in range(8):
                params = outer.step(update(params, comm.rank, step))
                if saves:
                    outer.state_dict(params)
                    with outer.evaluation():
                        pass
                seen.append(arrays(params))
        return seen

    for dtype in ("float32", "bfloat16"):
        one, other = (
            thread_ranks(2, lambda comm, s=saves, d=dtype: body(comm, s, d))
            for saves in (False, True)
        )
        for a, b in zip(one[0] + one[1], other[0] + other[1]):
            same(a, b)


def test_states_of_other_ranks():
    states = {}

    def save(comm):
        params = start()
        with sotto.jax.Outer(params, comm=comm, **CO2) as outer:
            for step in range(8):
                params = outer.step(update(params, comm.rank, step))
            states[comm.rank] = outer.state_dict(params), arrays(params)

    def load(comm):
        with sotto.jax.Outer(start(), comm=comm, **CO2) as outer:
            with warnings.catch_warnings(record=True):
                params = outer.load_state_dict(states[0][0])
            if comm.size == 2:
                same(arrays(params), states[0][1])
                assert (outer.info().step, outer.info().in_flight) == (8, 1)
                params = outer.step(update(params, comm.rank, 8))
            else:
                assert (outer.info().step, outer.info().in_flight) == (8, 0)
                with outer.evaluation() as anchor:
                    same(arrays(params), arrays(anchor))
            return arrays(outer.flush(params))

    thread_ranks(2, save)
    for ranks in (2, 3):
        results = thread_ranks(ranks, load)
        for result in results:
            same(result, results[0])
    with (
        sotto.create_comm(world_size=1) as comm,
        sotto.jax.Outer(start(), comm=comm, **CO2) as outer,
        pytest.warns(UserWarning, match="made by rank 1 of 2, and this is rank 0 of 1: param"),
    ):
        outer.load_state_dict(states[1][0])


def test_states_that_do_not_fit_are_refused():
    with sotto.create_comm(world_size=1) as comm:
        with sotto.jax.Outer(start(), comm=comm, **CO2) as outer:
            params = outer.step(start())
            state = outer.state_dict(params)
            cases = [
                ({}, '"kind" of the state is None'),
                ({**state, "kind": "Outer"}, '"kind" of the state is .* allowed: .sotto.jax.Outer'),
                ({**state, "format": 7}, '"format" of the state is 7; allowed: 1'),
                ({"kind": state["kind"], "format": 1, "lr": 1}, "entries blob, rank, world_size"),
                ({**state, "blob": state["blob"].astype(int)}, "dtype int64; allowed: uint8"),
                ({**state, "lr": 0.5, "blob": state["blob"][:-1]}, "state"),
                ({**state, "lr": float("nan")}, "lr is nan"),
            ]
            for bad, text in cases:
                with pytest.raises(sotto.InvalidArgumentError, match=text):
                    outer.load_state_dict(bad)
            as_jax = {k: jnp.asarray(v) if k != "kind" else v for k, v in state.items()}
            same(arrays(outer.load_state_dict(as_jax)), arrays(params))
            assert (outer.info().step, outer.state_dict(params)["lr"]) == (1, 1.0)
            same(arrays(outer.flush(params)), arrays(params))
        more = {**start(), "x": jnp.ones(2)}
        for changed, params, text in (
            ({"period": 4}, start(), "period"),
            ({}, more, "parameters"),
        ):
            with (
                sotto.jax.Outer(params, comm=comm, **{**CO2, **changed}) as outer,
                pytest.raises(sotto.InvalidArgumentError, match=text),
            ):
                outer.load_state_dict(state)


# ---- what is refused ---------------------------------------------------------------------------


def test_parameters_that_do_not_fit_are_refused():
    params = start()
    donated = {**params, "w": jnp.ones(SHAPES["w"])}
    donated["w"].delete()
    with (
        sotto.create_comm(world_size=1) as comm,
        sotto.jax.Outer(params, preset="local_sgd", period=2, comm=comm) as outer,
    ):
        for step in (1, 2):  # one in which nothing happens, one that averages
            for bad, text in (
                ({**params, "more": jnp.ones(3)}, "params is a tree of .* to be alike"),
                ({"w": params["w"]}, "to be alike"),
                (
                    {**params, "w": jnp.ones((500, 3))},
                    r'leaf "w", has shape \(500, 3\); allowed: \(3, 500\)',
                ),
                (
                    {**params, "b": jnp.ones(7, jnp.bfloat16)},
                    'leaf "b", is of dtype bfloat16; allowed: float32',
                ),
                ({**params, "b": np.ones(7, f32)}, 'leaf "b", is of type ndarray'),
                (donated, 'leaf "w", is deleted'),
            ):
                for call in (outer.step, outer.flush, outer.state_dict):
                    with pytest.raises(sotto.InvalidArgumentError, match=text):
                        call(bad)
            for function in (jax.jit(outer.step), jax.jit(outer.flush)):
                with pytest.raises(
                    sotto.InvalidArgumentError,
                    match=r'leaf "b", is traced by a transformation of JAX .* between jitted',
                ):
                    function(params)
            assert outer.info().step == step - 1
            params = outer.step(params)
        outer.close()
        for call in (
            lambda: outer.step(params),
            lambda: outer.flush(params),
            lambda: outer.state_dict(params),
            lambda: outer.evaluation().__enter__(),
            outer.info,
            lambda: outer.set(weight=0),
            lambda: outer.vote(1),
        ):
            with pytest.raises(sotto.InvalidStateError, match="outer optimizer is closed"):
                call()


def test_bad_settings():
    with sotto.create_comm(world_size=1) as comm:
        for params, keys, text in (
            ({"a": jnp.arange(3)}, {}, 'leaf "a", is of dtype int32; allowed: float32'),
            ({"a": jnp.zeros(3, bool)}, {}, 'leaf "a", is of dtype bool; allowed: float32, bf'),
            ({"a": jnp.ones(3), "b": [1.0]}, {}, 'leaf "b.0", is of type float'),
            ({}, {}, "n is 0"),
            (start(), {"period": 0}, "period: found 0"),
            (start(), {"perid": 3}, "perid"),
            (start(), {"preset": "co3"}, "co3"),
        ):
            with pytest.raises(sotto.InvalidArgumentError, match=text):
                sotto.jax.Outer(params, comm=comm, **keys)


def test_parameters_have_to_be_alike_on_all_ranks():
    def body(comm):
        params = {**start(), "b": jnp.full(7, 1.0 * comm.rank)}
        with pytest.raises(sotto.ProtocolError, match='"b"'):
            sotto.jax.Outer(params, comm=comm)

    thread_ranks(2, body)


def test_a_step_that_is_not_finite_updates_nothing():
    def body(comm):
        params = start()
        with sotto.jax.Outer(
            params, preset="diloco", period=2, nonfinite="error", comm=comm
        ) as outer:
            moved = outer.step(update(params, comm.rank, 0))
            bad = {**moved, "b": moved["b"].at[3].set(jnp.nan)} if comm.rank == 1 else moved
            with pytest.raises(sotto.NonfiniteError, match="rank 1; nothing was updated"):
                outer.step(bad)
            assert outer.info().step == 2
            with outer.evaluation() as anchor:
                same(arrays(anchor), arrays(params))
            return arrays(outer.step(outer.step(update(anchor, comm.rank, 1))))

    first, second = thread_ranks(2, body)
    same(first, second)
    assert first["b"].tobytes() != arrays(start())["b"].tobytes()
