"""States that a rank makes alone, and those that all ranks gather."""

import copy
import io
import pickle

import pytest
from ranks import thread_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from test_torch_optim import KINDS, every_kind, model, train  # noqa: E402

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


COMPRESSED = {kind: KINDS[kind] for kind in (st.OnebitAdam, st.ZeroOneAdam, st.OnebitLamb)}


def test_a_state_of_a_closed_optimizer_is_told(comm):
    net = model()
    optimizer = st.AdamW(net.parameters(), comm=comm)
    train(net, optimizer, 0, range(3))
    optimizer.close()
    for state in (optimizer.state_dict, optimizer.gather_state):
        with pytest.warns(UserWarning, match=r"is closed: the state .* before close\(\)"):
            state()
    train(net, optimizer, 0, range(1))
    assert optimizer.state_dict()["sotto"]["blob"] is not None
    optimizer.close()


@every_kind
def test_a_rank_makes_a_state_alone_that_all_can_load(kind, recwarn):
    """As Trainer does it: rank 0 saves, every rank loads that."""

    def body(comm):
        options = {"lr": 0.01, "comm": comm, **KINDS[kind]}
        net = model()
        optimizer = kind(net.parameters(), **options)
        train(net, optimizer, comm.rank, range(9))
        if comm.rank == 0:
            states.append(optimizer.state_dict())
        wanted = train(net, optimizer, comm.rank, range(9, 12))
        comm.barrier().wait()
        other = model()
        resumed = kind(other.parameters(), **options)
        resumed.load_state_dict(states[0])
        assert resumed.info().step == 9
        loaded = [p.detach().clone() for p in other.parameters()]
        got = train(other, resumed, comm.rank, range(9, 12))
        if kind not in COMPRESSED:
            assert all(torch.equal(p, q) for p, q in zip(wanted, got))
        resumed.synchronize_parameters()
        out = [p.detach().clone() for p in other.parameters()]
        optimizer.close()
        resumed.close()
        return loaded, out

    states = []
    (loaded, out), (others_loaded, others_out) = thread_ranks(2, body)
    assert all(torch.equal(p, q) for p, q in zip(loaded, others_loaded))
    assert all(torch.equal(p, q) for p, q in zip(out, others_out))
    told = [str(w.message) for w in recwarn if "error feedback" in str(w.message)]
    assert len(told) == int(kind in COMPRESSED), told  # threads share what was warned of


@pytest.mark.parametrize("kind", COMPRESSED, ids=lambda k: k.__name__)
def test_gathered_states(kind, recwarn):
    """ "whole" goes on bit for bit, "mean" on any number of ranks; neither warns."""

    def body(comm):
        options = {"lr": 0.01, "comm": comm, **KINDS[kind]}
        net = model()
        optimizer = kind(net.parameters(), **options)
        train(net, optimizer, comm.rank, range(9))
        whole = optimizer.gather_state("whole")
        wanted = train(net, optimizer, comm.rank, range(9, 12))
        other = model()
        resumed = kind(other.parameters(), **options)
        resumed.load_state_dict(copy.deepcopy(whole))
        got = train(other, resumed, comm.rank, range(9, 12))
        assert all(torch.equal(p, q) for p, q in zip(wanted, got))
        resumed.synchronize_parameters()
        mean = resumed.gather_state()
        with pytest.raises(sotto.InvalidArgumentError, match="mode is 'exact'; allowed: mean"):
            resumed.gather_state("exact")
        optimizer.close()
        resumed.close()
        return mean, [p.detach().clone() for p in other.parameters()]

    (mean, params), (same, _) = thread_ranks(2, body)
    assert torch.equal(mean["sotto"]["blob"], same["sotto"]["blob"])

    def elsewhere(comm):
        net = model()
        optimizer = kind(net.parameters(), lr=0.01, comm=comm, **KINDS[kind])
        optimizer.load_state_dict(mean)
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), params))
        out = train(net, optimizer, comm.rank, range(12, 14))
        optimizer.close()
        return out

    assert len(thread_ranks(3, elsewhere)) == 3
    assert not [w for w in recwarn if "error feedback" in str(w.message)]


def test_error_feedback_without_a_mean():
    """Of outer steps: what would hold it is told, which is not what is given already."""

    def body(comm):
        net = model()
        keys = {"outer": {"preset": "co2", "period": 3, "codec": "onebit"}}
        optimizer = st.Adam(net.parameters(), comm=comm, checkpoint="exact", sotto=keys)
        train(net, optimizer, comm.rank, range(4))
        with pytest.raises(sotto.UnsupportedError, match=r'gather_state\("whole"\)') as raised:
            optimizer.gather_state()
        assert 'checkpoint="exact"' not in str(raised.value)
        optimizer.load_state_dict(optimizer.gather_state("whole"))
        optimizer.close()

    thread_ranks(2, body)


@pytest.mark.parametrize("kind", [st.OnebitAdam, st.OnebitLamb], ids=lambda k: k.__name__)
def test_reset_starts_from_any_state_without_error_feedback(kind, recwarn):
    def body(comm):
        def optimizer_of(net, checkpoint):
            options = {"lr": 0.01, "comm": comm, **KINDS[kind]}
            return kind(net.parameters(), checkpoint=checkpoint, **options)

        net = model()
        ended, states = [], []
        for checkpoint in ("mean", "exact", "reset"):
            optimizer = optimizer_of(net, checkpoint)
            if states:
                optimizer.load_state_dict(states[0])
            else:
                train(net, optimizer, comm.rank, range(9))
            states += [optimizer.state_dict(), optimizer.gather_state()]
            if checkpoint == "mean":
                states.append(optimizer.gather_state("whole"))
            optimizer.close()
        for state in states:
            net = model()
            optimizer = optimizer_of(net, "reset")
            optimizer.load_state_dict(state)
            ended.append(train(net, optimizer, comm.rank, range(9, 12)))
            optimizer.close()
        forms = [state["sotto"]["form"] for state in states]
        assert forms == ["rank", "mean", "whole", "exact", "mean", "reset", "reset"]
        assert all(torch.equal(p, q) for other in ended[1:] for p, q in zip(other, ended[0]))

    thread_ranks(2, body)
    assert not [w for w in recwarn if "error feedback" in str(w.message)]


def test_the_policy_is_for_what_belongs_to_one_rank(comm):
    def form_of(**options):
        net = model()
        optimizer = st.AdamW(net.parameters(), comm=comm, **options)
        train(net, optimizer, 0, range(2))
        form = optimizer.state_dict()["sotto"]["form"]
        optimizer.close()
        return form

    for section in ({"gradient_codec": {"type": "int8"}}, {"outer": {}}):
        for checkpoint, form in (("mean", "rank"), ("exact", "exact"), ("reset", "reset")):
            assert form_of(checkpoint=checkpoint, sotto=section) == form
            assert form_of(sotto={"checkpoint": checkpoint, **section}) == form
    assert form_of(sotto={"checkpoint": "exact"}) == form_of(checkpoint="exact") == "rank"
    with pytest.raises(sotto.InvalidArgumentError, match="checkpoint is 'never'; allowed: exact"):
        st.AdamW(model().parameters(), comm=comm, checkpoint="never")


def test_what_a_rank_loses_of_outer_steps_is_told():
    states = [None] * 2

    def body(comm):
        net = model()
        optimizer = st.AdamW(net.parameters(), comm=comm, sotto={"outer": {"period": 4}})
        train(net, optimizer, comm.rank, range(2))
        states[comm.rank] = optimizer.state_dict()
        comm.barrier().wait()
        for state in (states[comm.rank], states[0]):
            optimizer.load_state_dict(state)
        optimizer.close()

    with pytest.warns(UserWarning, match="had changed since the last launch is not in it") as told:
        thread_ranks(2, body)
    assert sum("rank 0 of 2, and this is rank 1 of 2" in str(one.message) for one in told) == 1
    assert len(told) == 1


def test_states_of_several_ranks_that_do_not_fit():
    """0/1 Adam between synchronisations: every rank has parameters of its own."""
    states = [None] * 3

    def save(comm):
        net = model()
        optimizer = st.ZeroOneAdam(net.parameters(), lr=0.01, comm=comm, **KINDS[st.ZeroOneAdam])
        train(net, optimizer, comm.rank, range(11))
        states[comm.rank] = optimizer.state_dict()
        optimizer.close()

    def load(comm):
        optimizer = st.ZeroOneAdam(model().parameters(), comm=comm, **KINDS[st.ZeroOneAdam])
        text = r"those of ranks \[0, 1\] are not their own" if comm.size == 2 else "never"
        with pytest.raises(sotto.InvalidArgumentError, match=text):
            optimizer.load_state_dict(states[1 - comm.rank])
        optimizer.close()

    thread_ranks(2, save)
    thread_ranks(2, load)


def test_states_move_between_devices_and_files(comm):
    """What Accelerate does with every state that it prepares or loads."""
    net = model()
    optimizer = st.OnebitAdam(net.parameters(), lr=0.01, freeze_step=2, comm=comm)
    train(net, optimizer, 0, range(4))
    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups", "sotto"}
    pickled = pickle.loads(pickle.dumps(state))
    file = io.BytesIO()
    torch.save(pickled, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for made in (state, pickled, loaded):
        other = model()
        resumed = st.OnebitAdam(other.parameters(), lr=0.01, freeze_step=2, comm=comm)
        resumed.load_state_dict(made)
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters()))
        resumed.close()
    optimizer.close()
