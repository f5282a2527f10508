"""Parameters that move, are written by others, or stand still while the optimizer is in use."""

import copy

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


def cast_and_back(net):
    net.double()
    net.float()


def assign(net):
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)


def vector(net):
    flat = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    torch.nn.utils.vector_to_parameters(flat.clone(), net.parameters())


def data(net):
    for p in net.parameters():
        p.data = p.data.clone()


def set_(net):
    with torch.no_grad():
        for p in net.parameters():
            p.set_(p.detach().clone())


def one(net):
    net[2].bias.data = net[2].bias.data.clone()


MOVES = [cast_and_back, vector, data, set_, one, assign]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
@every_kind
def test_parameters_that_move_train_on(kind, move):
    """In every stage, on two ranks: bit for bit as if they had stayed."""

    def body(comm):
        results = []
        for moves in (False, True):
            net = model()
            optimizer = kind(net.parameters(), lr=0.01, comm=comm, **KINDS[kind])
            for step in range(9):
                train(net, optimizer, comm.rank, [step])
                if moves and step in (0, 3, 6):
                    move(net)
            results.append([p.detach().clone() for p in net.parameters()])
            optimizer.close()
        return results

    for fixed, moving in thread_ranks(2, body):
        assert all(torch.equal(p, q) for p, q in zip(fixed, moving))


def test_values_in_new_memory_count(comm):
    net = model()
    optimizer = st.AdamW(net.parameters(), lr=0.0, weight_decay=0.0, comm=comm)
    train(net, optimizer, 0, range(2))
    flat = torch.full((sum(p.numel() for p in net.parameters()),), 0.25)
    torch.nn.utils.vector_to_parameters(flat, net.parameters())
    train(net, optimizer, 0, range(2))
    assert all((p == 0.25).all() for p in net.parameters())
    state = optimizer.state_dict()
    other = model()
    resumed = st.AdamW(other.parameters(), comm=comm)
    resumed.load_state_dict(state)
    assert all((p == 0.25).all() for p in other.parameters())
    optimizer.close()
    resumed.close()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda net: net.double(), 'dtype of parameter "0.weight" has changed from torch.float32'),
        (lambda net: net.half(), "changed from torch.float32 to torch.float16"),
        (
            lambda net: setattr(net[0].weight, "data", torch.zeros(3, 20)),
            r'shape of parameter "0.weight" has changed from \[30, 20\] to \[3, 20\]',
        ),
        (
            lambda net: setattr(net[0].weight, "data", net[0].weight.data[:3]),
            r'shape of parameter "0.weight" has changed',
        ),
        (
            lambda net: setattr(net[0].weight, "data", torch.zeros(20, 30).T),
            'parameter "0.weight" is not dense and contiguous',
        ),
    ],
)
def test_other_parameters_are_refused(change, text, comm):
    net = model()
    optimizer = st.AdamW(net.named_parameters(), lr=0.01, comm=comm)
    train(net, optimizer, 0, range(2))
    state = optimizer.state_dict()
    change(net)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises((sotto.InvalidStateError, sotto.UnsupportedError), match=text):
        optimizer.step()
    other = model()
    resumed = st.AdamW(other.named_parameters(), lr=0.01, comm=comm)
    resumed.load_state_dict(state)  # what the text says to do
    train(other, resumed, 0, range(2, 4))
    optimizer.close()
    resumed.close()


def test_channels_last_after_the_first_step_is_refused(comm):
    net = torch.nn.Conv2d(3, 4, 3)
    optimizer = st.AdamW(net.named_parameters(), comm=comm)
    net(torch.ones(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    net.to(memory_format=torch.channels_last)
    net(torch.ones(1, 3, 5, 5)).sum().backward()
    with pytest.raises(sotto.UnsupportedError, match='"weight" .* channels_last'):
        optimizer.step()
    net.to(memory_format=torch.contiguous_format)
    before = net.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(net.weight, before)
    optimizer.close()


# ---- parameters that others take the place of ----------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_kind
def test_assigned_values_are_trained(kind, dtype):
    """load_state_dict(assign=True) gives a module Parameters that no optimizer has seen. Before the
    first step, behind it and behind a backward pass it does what copying the values does."""

    def body(comm):
        results = []
        for assign, set_to_none in ((False, True), (True, True), (False, False), (True, False)):
            net = model(dtype)
            optimizer = kind(net.parameters(), lr=0.01, comm=comm, **KINDS[kind])
            values = {k: v.detach() + 0.125 for k, v in net.state_dict().items()}
            mine = list(net.parameters())
            for step in range(5):
                if step in (0, 2):
                    net.load_state_dict({k: v.clone() for k, v in values.items()}, assign=assign)
                optimizer.zero_grad(set_to_none=set_to_none)
                loss_of(net, comm.rank, step).backward()
                if step == 3:
                    net.load_state_dict({k: v.clone() for k, v in values.items()}, assign=assign)
                optimizer.step()
            assert any(p is q for p, q in zip(mine, net.parameters())) != assign
            state = optimizer.state_dict()["sotto"]
            results.append([*net.parameters(), state["blob"]])
            optimizer.close()
        return results

    for results in thread_ranks(2, body):
        for copied, assigned in (results[:2], results[2:]):
            assert all(torch.equal(p, q) for p, q in zip(copied, assigned))


def test_groups_have_the_assigned_parameters(comm):
    net = model()
    optimizer = st.AdamW(
        [{"params": [net[0].weight]}, {"params": [net[0].bias, *net[2].parameters()], "lr": 0.0}],
        lr=0.01,
        comm=comm,
    )
    for _ in range(2):  # before the library's optimizer is made, and behind
        assign(net)
        before = [p.detach().clone() for p in net.parameters()]
        train(net, optimizer, 0, [0])
        first, *rest = net.parameters()
        assert optimizer.param_groups[0]["params"][0] is first
        assert all(p is q for p, q in zip(optimizer.param_groups[1]["params"], rest))
        assert not torch.equal(first, before[0])
        assert all(torch.equal(p, q) for p, q in zip(rest, before[1:]))
    optimizer.close()


def test_one_assigned_parameter_is_trained(comm):
    net = model()
    optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
    train(net, optimizer, 0, range(2))
    net[2].bias = torch.nn.Parameter(torch.ones(5))
    train(net, optimizer, 0, range(2))
    assert not (net[2].bias == 1).any()
    optimizer.close()


def test_parameters_frozen_at_the_first_step_are_watched_when_assigned(comm):
    net = model()
    net[0].requires_grad_(False)
    optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
    train(net, optimizer, 0, range(2))
    assign(net)
    train(net, optimizer, 0, range(2))
    net[0].requires_grad_(True)
    with pytest.raises(sotto.InvalidStateError, match="did not require one at the first step"):
        train(net, optimizer, 0, range(2))
    optimizer.close()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (lambda v: v.double(), 'dtype of parameter "0.weight" has changed from torch.float32'),
        (lambda v: v.half(), "changed from torch.float32 to torch.float16"),
        (lambda v: v.t().contiguous().t(), 'parameter "0.weight" is not dense and contiguous'),
    ],
)
def test_assigned_parameters_that_cannot_be_trained_are_refused(values, text, comm):
    net = model()
    optimizer = st.AdamW(net.named_parameters(), lr=0.01, comm=comm)
    train(net, optimizer, 0, range(2))
    good = {k: v.clone() for k, v in net.state_dict().items()}
    net.load_state_dict({k: values(v) for k, v in good.items()}, assign=True)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(2):
        with pytest.raises((sotto.InvalidStateError, sotto.UnsupportedError), match=text):
            optimizer.step()
    net.load_state_dict({k: v.clone() for k, v in good.items()}, assign=True)
    train(net, optimizer, 0, range(2))
    assert not torch.equal(net[0].weight, good["0.weight"])
    optimizer.close()


def tied():
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(6, 6), "b": torch.nn.Linear(6, 6)})
    net["b"].weight = net["a"].weight
    return net


def run_tied(net, optimizer):
    optimizer.zero_grad()
    net["b"](net["a"](torch.ones(2, 6))).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("again", [True, False])
def test_tied_parameters_that_are_assigned(again, comm):
    """One parameter became two: tied again it is trained, else an error says what happened."""
    net = tied()
    optimizer = st.AdamW(net.named_parameters(), lr=0.01, comm=comm)
    run_tied(net, optimizer)
    assign(net)
    if again:
        net["b"].weight = net["a"].weight
        before = net["a"].weight.detach().clone()
        run_tied(net, optimizer)
        assert not torch.equal(net["a"].weight, before)
    else:
        for _ in range(2):
            with pytest.raises(sotto.InvalidStateError, match='"a.weight".*2 places.*tie'):
                run_tied(net, optimizer)
    optimizer.close()


def test_a_parameter_that_stays_elsewhere_is_kept(comm):
    """As in torch; and the one that took its place is not trained, which is said."""
    net = tied()
    optimizer = st.AdamW(net.named_parameters(), lr=0.01, comm=comm)
    run_tied(net, optimizer)
    net["b"].weight = torch.nn.Parameter(net["a"].weight.detach().clone())
    before = net["a"].weight.detach().clone()
    with pytest.warns(UserWarning, match='"a.weight" is still in use'):
        run_tied(net, optimizer)
    assert not torch.equal(net["a"].weight, before)
    assert torch.equal(net["b"].weight, before)
    optimizer.close()


def test_a_parameter_that_is_put_back_is_kept(comm):
    net = model()
    optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
    train(net, optimizer, 0, range(2))
    weight = net[0].weight
    net[0].weight = torch.nn.Parameter(torch.zeros_like(weight))
    net[0].weight = weight
    before = weight.detach().clone()
    train(net, optimizer, 0, range(2))
    assert net[0].weight is weight
    assert not torch.equal(weight, before)
    optimizer.close()


def test_a_step_that_nothing_has_a_gradient_for_warns(comm):
    net = model()
    optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
    train(net, optimizer, 0, range(2))
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="no parameter of the optimizer had a gradient"):
        optimizer.step()
    optimizer.close()


# ---- masters ---------------------------------------------------------------------------------


def load(net, values):
    net.load_state_dict(values)


def fill(net, values):
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(values[name])


def replace(net, values):
    for name, p in net.named_parameters():
        p.data = values[name].clone()


def assigned(net, values):
    net.load_state_dict({k: v.clone() for k, v in values.items()}, assign=True)


@pytest.mark.parametrize("write", [load, fill, replace, assigned], ids=lambda write: write.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_take_what_is_written_into_the_model(write, dtype, comm):
    net = model(dtype)
    optimizer = st.AdamW(net.parameters(), lr=1e-3, comm=comm)
    train(net, optimizer, 0, range(3))
    values = {k: torch.full_like(v, 0.5) for k, v in net.state_dict().items()}
    write(net, values)
    train(net, optimizer, 0, range(3, 4))
    for p, tensor in zip(net.parameters(), optimizer._tensors):
        assert (p.float() - 0.5).abs().max() < 0.01
        assert (tensor.master - 0.5).abs().max() < 0.01
    optimizer.close()


def test_masters_keep_their_precision_where_nothing_new_is_written(comm):
    net = model(torch.bfloat16)
    optimizer = st.AdamW(net.parameters(), lr=1e-3, comm=comm)
    train(net, optimizer, 0, range(3))
    masters = [t.master.clone() for t in optimizer._tensors]
    net.load_state_dict(copy.deepcopy(net.state_dict()))
    with torch.no_grad():
        net[0].weight[0, 0] = 3.0
    optimizer.state_dict()
    for before, tensor in zip(masters[1:], optimizer._tensors[1:]):
        assert torch.equal(before, tensor.master)
    now = optimizer._tensors[0].master
    assert now[0, 0] == 3.0
    assert torch.equal(now.view(-1)[1:], masters[0].view(-1)[1:])
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_local_steps_do_not_undo_what_is_written(dtype):
    """0/1 Adam with a frozen variance would: it says so, on every rank."""

    def body(comm):
        net = model(dtype)
        optimizer = st.ZeroOneAdam(
            net.named_parameters(), lr=0.01, comm=comm, **KINDS[st.ZeroOneAdam]
        )
        train(net, optimizer, comm.rank, range(2))
        with torch.no_grad():  # as long as the variance moves parameters are the caller's
            net[2].bias.fill_(0.5)
        train(net, optimizer, comm.rank, range(2, 9))
        assert optimizer.info().stage == 1
        with torch.no_grad():
            net[0].bias.fill_(0.5)
        with pytest.raises(sotto.InvalidStateError, match='"0.bias" was written by others'):
            train(net, optimizer, comm.rank, [9])
        optimizer.close()

    thread_ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_kind
def test_a_loaded_state_has_the_parameters(kind, dtype):
    """Whatever was written into the model before, 0/1 Adam with a frozen variance included; a state
    that is refused leaves what was written to be noticed."""

    def body(comm):
        net = model(dtype)
        optimizer = kind(net.named_parameters(), lr=0.01, comm=comm, **KINDS[kind])
        train(net, optimizer, comm.rank, range(9))
        assert kind in (st.Adam, st.AdamW, st.Lamb) or optimizer.info().stage == 1
        state = optimizer.gather_state("whole")
        saved = {k: v.clone() for k, v in net.state_dict().items()}
        first = train(net, optimizer, comm.rank, range(9, 12))
        for write in (load, fill, replace, assigned) * 2:
            write(net, {k: torch.full_like(v, 0.5) for k, v in saved.items()})
            broken = {**state, "sotto": {**state["sotto"], "blobs": [torch.ones(9).byte()] * 2}}
            with pytest.raises(sotto.InvalidArgumentError):
                optimizer.load_state_dict(broken)
            if kind is st.ZeroOneAdam:
                with pytest.raises(sotto.InvalidStateError, match="was written by others"):
                    train(net, optimizer, comm.rank, range(9, 10))
            optimizer.load_state_dict(state)
            if kind is st.ZeroOneAdam or dtype == torch.float32:
                assert all(torch.equal(v, saved[k]) for k, v in net.state_dict().items())
            again = train(net, optimizer, comm.rank, range(9, 12))
            assert all(torch.equal(p, q) for p, q in zip(first, again))
        optimizer.close()

    thread_ranks(2, body)


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
    run_ranks(2, __file__, "rank_freezes_alone", timeout=60)


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
    if "max_coeff" in kind([torch.zeros(3, requires_grad=True)], comm=comm).param_groups[0]:
        changes.update(max_coeff=0.02, min_coeff=9.0)
    for key, value in changes.items():
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
