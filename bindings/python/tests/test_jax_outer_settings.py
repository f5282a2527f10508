"""What is set for the next outer steps on trees of JAX: what states keep of it, what is refused."""

import json
import threading

import numpy as np
import pytest
from ranks import thread_ranks

import sotto

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

import sotto.jax  # noqa: E402
from sotto.jax.outer import Outer  # noqa: E402

SLOWMO = {"preset": "slowmo", "period": 2}


def start(dtype="float32"):
    return {"w": jnp.linspace(-1, 1, 300).astype(dtype)}


def towards(params, rank, step):
    return jax.tree.map(lambda p: (p - 0.1 * (p - np.sin(rank + step))).astype(p.dtype), params)


def test_states_keep_what_is_set_in_plain_numbers():
    with sotto.create_comm(world_size=1) as comm, Outer(start(), comm=comm, **SLOWMO) as outer:
        outer.set(lr=jnp.float32(0.5), weight=jnp.int32(0))  # as a schedule of optax gives it
        state = outer.state_dict(start())
        del state["blob"]
        assert json.loads(json.dumps(state)) == state
        assert (state["lr"], state["weight"]) == (0.5, 0)


def test_a_weight_goes_on_with_its_rank():
    """Steps of a rank that has run out of samples do not count behind a resume either."""

    def run(comm, resumes):
        params, outer = start(), Outer(start(), comm=comm, **SLOWMO)
        for step in range(8):
            if step == 3:
                outer.set(weight=1 - comm.rank)
            params = outer.step(towards(params, comm.rank, step))
            if resumes and step == 4:
                state = outer.state_dict(params)
                outer.close()
                outer = Outer(start(), comm=comm, **SLOWMO)
                params = outer.load_state_dict(state)
        outer.close()
        return np.asarray(params["w"]).tobytes()

    unbroken, resumed = (thread_ranks(2, lambda comm, r=r: run(comm, r)) for r in (False, True))
    assert unbroken == resumed


def test_a_weight_is_not_taken_from_another_rank():
    with sotto.create_comm(world_size=1) as comm, Outer(start(), comm=comm, **SLOWMO) as outer:
        mine = outer.state_dict(start())
        with pytest.warns(UserWarning, match="was made by rank 1 of 2"):
            outer.load_state_dict({**mine, "rank": 1, "world_size": 2, "weight": 0})
        assert outer.state_dict(start())["weight"] == 1
        outer.set(weight=0)
        with pytest.raises(sotto.InvalidArgumentError, match="weight is 0.5"):
            outer.load_state_dict({**mine, "lr": 0.3, "weight": 0.5})
        state = outer.state_dict(start())
        assert (state["lr"], state["weight"]) == (1, 0)
        del mine["weight"]  # as older states are
        outer.load_state_dict(mine)
        assert outer.state_dict(start())["weight"] == 1


@pytest.mark.parametrize("name", ["state_dict", "flush", "step"])
def test_a_step_in_flight_keeps_its_memory(name):
    """An interrupt leaves a step; what is called before that has ended is refused, and writes
    nothing."""
    refused = threading.Event()

    def body(comm):
        params = start("bfloat16")
        with Outer(params, preset="diloco", period=2, comm=comm) as outer:
            params = outer.step(towards(params, comm.rank, 0))
            if comm.rank == 1:
                assert refused.wait(50)
            else:
                before = outer._masters[0].memory.copy()
                work = outer._outer.step()  # as when Ctrl-C has ended the wait for it
                with pytest.raises(sotto.BusyError, match="in flight"):
                    getattr(outer, name)(towards(params, 5, 5))
                assert outer._masters[0].memory.tobytes() == before.tobytes()
                refused.set()
                work.wait()
                return outer.info().step
            outer.step(params)
            return outer.info().step

    assert thread_ranks(2, body) == [2, 2]
