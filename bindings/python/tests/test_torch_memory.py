"""Parameters that move, or are written or replaced by others, while the optimizer is in use."""

import copy

import pytest
from ranks import thread_ranks

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
        assert kind in (st.Adam, st.AdamW, st.Lamb, st.Lion) or optimizer.info().stage == 1
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
