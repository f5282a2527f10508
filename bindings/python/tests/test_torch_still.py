"""Parameters that stand still, and numbers of groups that change, while the optimizer is in use."""

import pytest
from ranks import run_ranks, thread_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from test_torch_optim import KINDS, every_kind, loss_of, model, train  # noqa: E402

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


# ---- parameters that stand still -------------------------------------------------------------


def freeze(net):
    net[0].requires_grad_(False)


def thaw(net):
    net[0].requires_grad_(True)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["strict", "compat"])
@every_kind
def test_frozen_parameters_stand_still_and_train_again(kind, mode, dtype, set_to_none):
    """Frozen in the full-precision stage and over the switch, and again behind it."""

    def body(comm):
        net = model(dtype)
        optimizer = kind(
            net.parameters(), lr=0.01, weight_decay=0.1, mode=mode, comm=comm, **KINDS[kind]
        )

        def go(steps):
            for step in steps:
                loss_of(net, comm.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)

        go(range(2))
        for first in (2, 12):
            freeze(net)
            if kind is st.ZeroOneAdam:  # which is synchronised, so that ranks have the same
                go([100])
            before = [p.detach().clone() for p in net.parameters()]
            go(range(first, first + 6))
            now = list(net.parameters())
            assert torch.equal(now[0], before[0])
            assert torch.equal(now[1], before[1])
            assert not torch.equal(now[2], before[2])
            thaw(net)
            go(range(first + 6, first + 10))
            assert not torch.equal(now[0], before[0])
            assert all(p.isfinite().all() for p in now)
        optimizer.synchronize_parameters()  # 0/1 Adam
        out = [p.detach().clone() for p in net.parameters()]
        optimizer.close()
        return out

    a, b = thread_ranks(2, body)
    if not (kind is st.ZeroOneAdam and mode == "compat"):  # whose replicas drift apart by rounding
        assert all(torch.equal(p, q) for p, q in zip(a, b))


def test_a_step_without_a_parameter_that_trains_is_refused(comm):
    net = model().requires_grad_(False)
    optimizer = st.AdamW(net.parameters(), comm=comm)
    with pytest.raises(sotto.InvalidStateError, match="no parameter of the optimizer requires a"):
        optimizer.step()
    net.requires_grad_(True)
    train(net, optimizer, 0, range(2))
    optimizer.close()


def test_momentum_outlives_standing_still(comm):
    """As in torch: what moves on behind the pause is where it was before. No bias correction, since
    the step number is that of all parameters."""
    results = []
    for make in (
        lambda p: st.Adam(p, lr=0.01, weight_decay=0.1, bias_correction=False, comm=comm),
        None,
    ):
        net = model()
        if make is None:
            moments = {p: [torch.zeros_like(p), torch.zeros_like(p)] for p in net.parameters()}
            optimizer = None
        else:
            optimizer = make(net.parameters())
        for step in range(12):
            freeze(net) if 4 <= step < 8 else thaw(net)
            net.zero_grad()
            loss_of(net, 0, step).backward()
            if optimizer is not None:
                optimizer.step()
                continue
            with torch.no_grad():
                for p in (p for p in net.parameters() if p.grad is not None):
                    m, v = moments[p]
                    m.mul_(0.9).add_(p.grad, alpha=0.1)
                    v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                    p.sub_(0.01 * (m / (v.sqrt() + 1e-8) + 0.1 * p))
        results.append([p.detach().clone() for p in net.parameters()])
    for p, q in zip(*results):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@every_kind
def test_a_state_made_while_parameters_stand_still(kind):
    """Resumes bit for bit, and frozen parameters train on with the momentum that they had."""

    def body(comm):
        options = {"lr": 0.01, "comm": comm, "weight_decay": 0.1, **KINDS[kind]}
        net = model()
        optimizer = kind(net.parameters(), **options)
        train(net, optimizer, comm.rank, range(7))
        freeze(net)
        train(net, optimizer, comm.rank, range(7, 10))
        state = optimizer.state_dict()
        other = model()
        resumed = kind(other.parameters(), **options)
        resumed.load_state_dict(state)
        freeze(other)
        for a, o in ((net, optimizer), (other, resumed)):
            train(a, o, comm.rank, range(10, 12))
            thaw(a)
            train(a, o, comm.rank, range(12, 15))
        for p, q in zip(net.parameters(), other.parameters()):
            assert torch.equal(p, q)
        optimizer.close()
        resumed.close()

    thread_ranks(2, body)


def test_unused_parameters_are_as_torch_leaves_them(comm):
    results = []
    for make in (
        lambda p: st.AdamW(p, lr=0.01, weight_decay=0.5, comm=comm),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5),
    ):
        net = model()
        net.register_parameter("unused", torch.nn.Parameter(torch.ones(5)))
        train(net, make(net.parameters()), 0, range(5))
        results.append([p.detach().clone() for p in net.parameters()])
    assert (results[0][0] == 1).all() or (results[0][-1] == 1).all()
    for p, q in zip(*results):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_a_gradient_in_any_micro_batch_counts(comm):
    net = model()
    optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
    before = [p.detach().clone() for p in net.parameters()]
    loss_of(net, 0, 0).backward()
    optimizer.accumulate()
    optimizer.zero_grad()
    net[2](torch.ones(1, 30)).sum().backward()  # net[0] has none
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(net.parameters(), before))
    optimizer.close()


def rank_freezes_alone(comm):
    net = model()
    optimizer = st.OnebitAdam(net.named_parameters(), lr=0.01, freeze_step=2, comm=comm)
    train(net, optimizer, comm.rank, range(4))
    if comm.rank == 1:
        freeze(net)
    with pytest.raises(sotto.ProtocolError) as error:
        train(net, optimizer, comm.rank, [4])
    text = str(error.value)
    assert "torch.zeros_like(p)" in text
    assert ('"0.weight", "0.bias" had no gradient' in text) == (comm.rank == 1), text


def test_ranks_that_disagree_are_told():
    run_ranks(2, __file__, "rank_freezes_alone")


# ---- hyper-parameters of steps -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (lambda p, c: st.AdamW(p, comm=c), lambda p: torch.optim.AdamW(p, weight_decay=0.0)),
        (lambda p, c: st.Adam(p, adam_w_mode=False, comm=c), lambda p: torch.optim.Adam(p)),
    ],
    ids=["AdamW", "Adam"],
)
def test_one_cycle(mine, theirs, comm):
    """OneCycleLR moves lr and the first beta."""
    results, betas = [], []
    for make in (lambda p: mine(p, comm), theirs):
        net = model()
        optimizer = make(net.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.05, total_steps=12, base_momentum=0.5, max_momentum=0.95
        )
        for step in range(12):
            train(net, optimizer, 0, [step])
            if step < 11:
                schedule.step()
            betas.append(optimizer.param_groups[0]["betas"][0])
        results.append([p.detach().clone() for p in net.parameters()])
    assert len(set(betas)) > 6
    for p, q in zip(*results):
        torch.testing.assert_close(p, q, rtol=2e-4, atol=2e-5)


@every_kind
def test_every_number_of_a_group_acts(kind, comm):
    """Changed behind the first step: as if the optimizer had been made with it then."""
    changes = {"betas": (0.5, 0.7), "eps": 0.3, "weight_decay": 0.4, "lr": 0.002}
    changes.update(max_coeff=0.02, min_coeff=9.0)
    own = kind([torch.zeros(3, requires_grad=True)], comm=comm).param_groups[0]
    for key, value in changes.items():
        if key not in own:
            continue
        nets = []
        for changed in (False, True):
            net = model()
            optimizer = kind(net.parameters(), lr=0.01, comm=comm, **KINDS[kind])
            train(net, optimizer, 0, range(2))
            if changed:
                for group in optimizer.param_groups:
                    group[key] = value
            train(net, optimizer, 0, range(2, 4))
            found = optimizer.report("groups")["groups"][0][key]
            assert (found == pytest.approx(value)) == changed, key
            nets.append([p.detach().clone() for p in net.parameters()])
            optimizer.close()
        assert not all(torch.equal(p, q) for p, q in zip(*nets)), key


def test_a_change_that_cannot_act_is_an_error(comm):
    net = model()
    optimizer = st.OnebitAdam(net.parameters(), lr=0.01, freeze_step=2, comm=comm)
    train(net, optimizer, 0, range(5))
    group = optimizer.param_groups[0]
    for key, value, error, text in (
        ("eps", 0.1, sotto.InvalidStateError, "eps of group 0 cannot change"),
        ("non_freeze", True, sotto.InvalidStateError, "non_freeze of group 0 was changed"),
        ("betas", (1.0, 0.9), sotto.InvalidArgumentError, "beta1 is 1; allowed"),
        ("weight_decay", -1.0, sotto.InvalidArgumentError, "weight_decay is -1"),
        ("amsgrad", True, sotto.InvalidArgumentError, "amsgrad of group 0 is True; it is one for"),
        ("freeze_step", 9, sotto.InvalidArgumentError, "freeze_step of group 0 is 9"),
    ):
        had = key in group
        before, group[key] = group.get(key), value
        with pytest.raises(error, match=text):
            train(net, optimizer, 0, [5])
        if had:
            group[key] = before
        else:
            del group[key]
    train(net, optimizer, 0, [5])
    optimizer.close()


def test_a_group_cannot_have_what_is_the_constructors(comm):
    p = torch.zeros(3, requires_grad=True)
    with pytest.raises(sotto.InvalidArgumentError, match="bias_correction of group 0 is False"):
        st.AdamW([{"params": [p], "bias_correction": False}], comm=comm)
    with pytest.raises(sotto.InvalidArgumentError, match="momentum of group 0 is 0.9"):
        st.AdamW([{"params": [p], "momentum": 0.9}], comm=comm)
    st.AdamW([{"params": [p], "bias_correction": True, "momentum": 0}], comm=comm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_kind
def test_a_graph_from_before_a_step_is_refused(kind, dtype, comm):
    """As with torch's optimizers: its gradients would be of other values than were computed with.

    But for what goes through parameters that stood still.
    """
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))).to(dtype)
    optimizer = kind(net[1:].parameters(), lr=0.01, comm=comm, **KINDS[kind])
    for _ in range(3):  # the last two do not count the library's own writes as others'
        start = torch.ones(2, 4, dtype=dtype, requires_grad=True)
        out = net(start).square().mean()
        out.backward(retain_graph=True)
        net[1].zero_grad()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()
        optimizer.zero_grad()
    versions = [p._version for p in net[1].parameters()]
    assert versions == [p._version for p in net[0].parameters()]
    state = optimizer.state_dict()
    out = net(start).square().mean()
    optimizer.load_state_dict(state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
    optimizer.close()
