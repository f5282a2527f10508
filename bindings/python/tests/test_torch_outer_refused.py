"""What outer optimizers around torch's refuse."""

import pytest
from ranks import thread_ranks as ranks_of_threads

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from test_torch_optim import model, train  # noqa: E402
from test_torch_outer import INNER, MEAN, equal, made, thread_ranks, values  # noqa: E402

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Of the name of torch's."""


def test_bad_input(comm):
    net = model()
    sgd = INNER["plain"](net.parameters())
    for inner, error, text in (
        (list(net.parameters()), sotto.InvalidArgumentError, "is of type list; it has to be a"),
        (st.Outer(sgd, comm=comm), sotto.InvalidArgumentError, "inner_optimizer is an Outer"),
        (
            st.ZeroOneAdam(net.parameters(), comm=comm),
            sotto.UnsupportedError,
            "is a ZeroOneAdam, which is not supported: 0/1 Adam has local steps",
        ),
        (
            ZeroRedundancyOptimizer(net.parameters()),
            sotto.UnsupportedError,
            "is a ZeroRedundancyOptimizer, which is not supported: every rank updates a shard",
        ),
    ):
        with pytest.raises(error, match=text):
            st.Outer(inner, comm=comm)
    for keys, error, text in (
        ({"perid": 3}, sotto.InvalidArgumentError, "perid: unknown key; the nearest one is period"),
        ({"period": 0}, sotto.InvalidArgumentError, "period: found 0"),
        ({"period": torch.tensor(0)}, sotto.InvalidArgumentError, "period: found 0"),
        ({"beta": {0.5}}, sotto.InvalidArgumentError, "outer.beta is of type set; allowed: a"),
        (
            {"period": 4, "delay": 5},
            sotto.InvalidArgumentError,
            "found delay 5 with period 4, allowed is 0 to the period",
        ),
        ({"preset": "local_sgd"}, sotto.InvalidArgumentError, "period: missing"),
        ({"preset": "co3"}, sotto.InvalidArgumentError, 'preset: found "co3", allowed is one of'),
        (
            {"freshness": 1, "form": "anchor_diff"},
            sotto.InvalidArgumentError,
            "found form anchor_diff with freshness",
        ),
    ):
        with pytest.raises(error, match=text):
            st.Outer(sgd, comm=comm, **keys)
    for p in net.parameters():
        p.requires_grad_(False)
    with pytest.raises(sotto.InvalidStateError, match="nothing to train"):
        st.Outer(sgd, comm=comm).step()
    double = torch.nn.Linear(2, 2).double()
    with pytest.raises(sotto.UnsupportedError, match="is torch.float64; allowed: float32"):
        made(double, comm).step()


def test_flat_parameters_are_refused(comm):
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
        with pytest.raises(sotto.UnsupportedError, match="belongs to FSDP: .* use fully_shard of"):
            made(net, comm)
    finally:
        dist.destroy_process_group()


def test_groups_are_added_before_the_first_step_alone(comm):
    net = model()
    outer = st.Outer(INNER["plain"](net[0].parameters()), comm=comm)
    outer.add_param_group({"params": net[2].parameters(), "lr": 0.5})
    assert [len(group["params"]) for group in outer.inner.param_groups] == [2, 2]
    train(net, outer, 0, range(1))
    assert len(outer._tensors) == 4
    with pytest.raises(sotto.InvalidStateError, match="after the first step"):
        outer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
    state = outer.state_dict()
    outer.inner.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
    before = values(net)
    for call in (outer.step, outer.flush, outer.state_dict, lambda: outer.load_state_dict(state)):
        with pytest.raises(sotto.InvalidStateError, match='"param4" of group 2 was added after'):
            call()
    assert equal(values(net), before)  # no inner step
    outer.inner.param_groups.pop()
    train(net, outer, 0, range(1))
    outer.inner.param_groups[0]["params"][1] = torch.zeros(20, requires_grad=True)
    with pytest.raises(sotto.InvalidStateError, match='"param1" of group 0 was added after'):
        outer.step()
    outer.close()


@pytest.mark.parametrize("steps", [0, 3])
def test_closed_ones_do_nothing(steps, comm):
    """Least of all a state that has nothing, or a new outer optimizer."""
    net = model()
    outer = made(net, comm)
    train(net, outer, 0, range(steps))
    state = outer.state_dict()
    outer.close()
    outer.close()
    before = values(net)
    for call in (
        outer.step,
        outer.flush,
        outer.state_dict,
        outer.gather_state,
        lambda: outer.load_state_dict(state),
        lambda: outer.evaluation().__enter__(),
        lambda: outer.set(weight=0),
        lambda: outer.vote(1),
        outer.info,
        lambda: outer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]}),
    ):
        with pytest.raises(sotto.InvalidStateError, match="this outer optimizer is closed"):
            call()
    assert equal(values(net), before)


@pytest.mark.parametrize("steps", [0, 3])
def test_dcp_has_no_place_for_states(steps, comm):
    """It makes a step to have a state, and keeps nothing of one but torch's own entries."""
    from torch.distributed.checkpoint import state_dict as dcp

    net = model()
    theirs = dcp.get_optimizer_state_dict(net, INNER["plain"](net.parameters()))
    for optimizer in (
        made(net, comm),
        made(net, comm, "sgd"),
        st.AdamW(net.parameters(), comm=comm),
    ):
        train(net, optimizer, 0, range(steps))
        optimizer.zero_grad()
        before = values(net)
        rate = optimizer.param_groups[0]["lr"]
        for call in (
            lambda one: dcp.get_state_dict(net, one),
            lambda one: dcp.get_optimizer_state_dict(net, one),
            lambda one: dcp.set_optimizer_state_dict(net, one, theirs),
        ):
            with pytest.raises(sotto.UnsupportedError, match=r"save state_dict\(\) itself"):
                call(optimizer)
        assert optimizer.param_groups[0]["lr"] == rate
        assert equal(values(net), before)
        assert optimizer.info().step == steps
        optimizer.close()


def test_an_overlap_averages_what_inner_steps_need():
    def body(comm):
        net = model()
        outer = made(net, comm, **MEAN)
        with pytest.raises(sotto.InvalidArgumentError, match="is of type Outer; allowed is one of"):
            st.Overlap(net, optimizer=outer)
        alone = comm.split(comm.rank)
        for ranks, ddp in ((comm, False), (comm, True), (alone, False)):
            other = st.Outer(INNER["plain"](net.parameters()), comm=comm, ddp=ddp, **MEAN)
            with st.Overlap(net, comm=ranks):
                before = values(net)
                if ranks is comm and not ddp:
                    with pytest.raises(
                        sotto.InvalidStateError, match="averages the gradients .*ddp=True"
                    ):
                        train(net, other, comm.rank, [0])
                    assert equal(values(net), before)
                else:
                    train(net, other, comm.rank, range(2))
                    assert other.info().step == 2
            other.close()
        alone.close()

    thread_ranks(2, body)


def test_ranks_that_differ_are_told():
    def body(comm):
        net = model()
        with torch.no_grad():
            net[2].bias.add_(comm.rank)
        outer = made(net, comm, **MEAN)
        before = values(net)
        with pytest.raises(sotto.ProtocolError, match="param3"):
            train(net, outer, comm.rank, [0])
        assert equal(values(net), before)  # no inner step
        st.broadcast_parameters(net, comm=comm)
        train(net, outer, comm.rank, [0])
        outer.close()

    thread_ranks(2, body)


def test_learning_rates_that_differ_are_told():
    def body(comm):
        net = model()
        inner = torch.optim.SGD(net.parameters(), lr=(0.5, 0.25)[comm.rank])
        outer = st.Outer(inner, preset="slowmo", period=2, comm=comm)
        mine = f"learning rate of group 0 is {inner.param_groups[0]['lr']}, and ranks have to"
        with pytest.raises(sotto.ProtocolError, match=mine):
            train(net, outer, comm.rank, range(2))
        outer.close()

    thread_ranks(2, body)


def test_a_load_on_one_rank_alone_is_told():
    def body(comm):
        net = model()
        outer = made(net, comm, **MEAN)
        train(net, outer, comm.rank, range(3))
        calls = (
            lambda: outer.load_state_dict(outer.state_dict()),
            lambda: train(net, outer, comm.rank, range(3, 5)),
        )
        with pytest.raises(sotto.OperationTimeoutError) as told:
            calls[comm.rank]()
        outer.close()
        return str(told.value)

    loads, _ = ranks_of_threads(2, body, timeout=1)
    assert loads.startswith("load_state_dict() is collective, and not every rank has called it")
