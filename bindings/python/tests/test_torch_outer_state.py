"""States of outer steps around torch's optimizers."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from test_torch_optim import model, train  # noqa: E402
from test_torch_outer import (  # noqa: E402
    INNER,
    MEAN,
    equal,
    made,
    saved_and_loaded,
    thread_ranks,
    values,
)

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_continue_bit_for_bit_from_every_step(dtype):
    keys = {"preset": "co2", "period": 3, "codec": "onebit", "dense_rounds": 1}

    def schedule_of(outer):
        return torch.optim.lr_scheduler.LinearLR(outer, 1.0, 0.2, 14)

    def body(comm):
        net = model(dtype)
        outer = made(net, comm, "adamw", **keys)
        schedule = schedule_of(outer)
        for step in range(14):
            train(net, outer, comm.rank, [step])
            schedule.step()
        other = model(dtype)
        resumed = made(other, comm, "adamw", **keys)
        schedule = schedule_of(resumed)
        for step in range(14):
            whole = step % 5 == 4
            state = resumed.gather_state() if whole else resumed.state_dict()
            state = saved_and_loaded({"optimizer": state, "schedule": schedule.state_dict()})
            resumed.close()
            other = model(dtype)
            if step:  # as from a checkpoint of this rank's model
                for p in other.parameters():
                    p.detach().add_(comm.rank)
            resumed = made(other, comm, "adamw", **keys)
            schedule = schedule_of(resumed)
            schedule.load_state_dict(state["schedule"])
            resumed.load_state_dict(state["optimizer"])
            train(other, resumed, comm.rank, [step])
            schedule.step()
        assert equal(values(net), values(other))
        assert resumed.info().step == 14
        outer.close()
        resumed.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        thread_ranks(2, body)


@pytest.mark.parametrize("whole", [False, True])
def test_states_have_the_weight_of_the_rank(whole):
    def body(comm):
        net = model()
        outer = made(net, comm, "adamw", preset="slowmo", period=3)
        train(net, outer, comm.rank, range(4))
        outer.set(weight=1 - comm.rank)
        state = saved_and_loaded(outer.gather_state() if whole else outer.state_dict())
        other = model()
        resumed = made(other, comm, "adamw", preset="slowmo", period=3)
        resumed.load_state_dict(state)
        for one, of in ((net, outer), (other, resumed)):
            train(one, of, comm.rank, range(4, 11))
            of.flush()
            of.close()
        assert equal(values(net), values(other))

    thread_ranks(2, body)


def test_a_state_of_one_rank_is_loaded_by_all(recwarn):
    """As Trainer does it: rank 0 saves."""
    keys = {"preset": "co2", "period": 3, "codec": "onebit"}
    states = {}

    def save(comm):
        net = model()
        outer = made(net, comm, "adamw", **keys)
        train(net, outer, comm.rank, range(7))
        states[comm.rank] = saved_and_loaded(outer.state_dict()), values(net)
        states["moments", comm.rank] = outer.state[net[0].weight]["exp_avg"].clone()
        states["whole"] = outer.gather_state()
        with outer.evaluation():
            states["anchor"] = values(net)
        outer.close()

    def load(comm):
        state, params = states[0]
        for given in (state, states["whole"]):
            net = model()
            outer = made(net, comm, "adamw", **keys)
            outer.load_state_dict(given)
            assert equal(values(net), params if given is state else states[comm.rank][1])
            assert outer.info().step == 7
            assert outer.info().in_flight == 1
            train(net, outer, comm.rank, range(7, 12))
            outer.flush()
            out = values(net)
            outer.close()
        return out

    thread_ranks(2, save)
    assert not equal(states[0][1], states[1][1])
    a, b = thread_ranks(2, load)
    assert equal(a, b)
    told = {str(w.message) for w in recwarn if "the state was made by" in str(w.message)}
    assert len(told) == 1
    assert "made by rank 0 of 2, and this is rank 1 of 2" in told.pop()

    def elsewhere(comm):
        """The anchor is everybody's; the inner optimizer's state that of a rank."""
        net = model()
        outer = made(net, comm, "adamw", **keys)
        outer.load_state_dict(states["whole"])
        loaded = values(net)
        moments = outer.state[net[0].weight]["exp_avg"].clone()
        assert outer.info().in_flight == 0
        assert outer.info().step == 7
        train(net, outer, comm.rank, range(7, 12))
        outer.flush()
        out = values(net)
        outer.close()
        return loaded, moments, out

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = thread_ranks(3, elsewhere)
    for rank, (loaded, moments, out) in enumerate(found):
        assert equal(loaded, states["anchor"])
        assert equal(out, found[0][2])
        assert torch.equal(moments, states["moments", rank % 2])


def test_states_that_do_not_fit_change_nothing():
    def body(comm):
        net = model()
        outer = made(net, comm, "sgd", **MEAN)
        early = outer.state_dict()
        assert early["sotto"]["blob"] is None
        train(net, outer, comm.rank, range(3))
        state = copy.deepcopy(outer.state_dict())
        before = values(net)
        other = made(model(), comm, "sgd", preset="local_sgd", period=3)
        with pytest.raises(sotto.InvalidArgumentError, match="period"):
            other.load_state_dict(state)
        assert not other.state  # the inner optimizer is as it was
        assert equal([p for g in other.param_groups for p in g["params"]], values(model()))
        with pytest.raises(sotto.InvalidArgumentError, match=r'"sotto" of the state is no entry'):
            outer.load_state_dict(INNER["sgd"](model().parameters()).state_dict())
        for entry, found in ((1, "is 1, it"), ({"kind": "Adam"}, "is 'Adam', it")):
            with pytest.raises(sotto.InvalidArgumentError, match=found):
                outer.load_state_dict({**state, "sotto": entry})
        smaller = st.Outer(INNER["sgd"](net[0].parameters()), comm=comm, **MEAN)
        with pytest.raises(sotto.InvalidArgumentError, match='"param2" .* only in the state'):
            smaller.load_state_dict(state)
        broken = {**state, "sotto": {**state["sotto"], "blob": state["sotto"]["blob"][:-9]}}
        momentum = outer.state[net[0].weight]["momentum_buffer"].clone()
        train(net, outer, comm.rank, range(3, 4))
        with pytest.raises(sotto.InvalidArgumentError):
            outer.load_state_dict(broken)
        assert not torch.equal(momentum, outer.state[net[0].weight]["momentum_buffer"])
        outer.load_state_dict(state)
        assert equal(values(net), before)
        assert torch.equal(momentum, outer.state[net[0].weight]["momentum_buffer"])
        outer.load_state_dict(early)  # of before the first step: the parameters stay
        assert outer.state_dict()["sotto"]["blob"] is None
        assert not outer.state
        for made_here in (other, smaller, outer):
            made_here.close()

    thread_ranks(2, body)
