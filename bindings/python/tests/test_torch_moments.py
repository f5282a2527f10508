"""States of torch's own optimizers, from which those here go on."""

import copy

import pytest
from ranks import thread_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from test_torch_optim import loss_of, model, train  # noqa: E402

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402

ADAM = {"lr": 0.02, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.1}


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


def trained_together(net, optimizer, size, steps):
    """All ranks' batches on one rank."""
    for step in steps:
        optimizer.zero_grad()
        for rank in range(size):
            (loss_of(net, rank, step) / size).backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def begun(kind=torch.optim.AdamW, steps=4, net=None, **options):
    """A model with what has trained it so far, on two ranks' batches."""
    net = model() if net is None else net
    optimizer = kind(net.parameters(), **{**ADAM, **options})
    trained_together(net, optimizer, 2, range(steps))
    return net, optimizer


@pytest.mark.parametrize(
    ("before", "kind", "options"),
    [
        (torch.optim.AdamW, st.AdamW, {}),
        (torch.optim.AdamW, st.OnebitAdam, {"freeze_step": 100}),
        (torch.optim.Adam, st.Adam, {"adam_w_mode": False}),
    ],
    ids=["AdamW", "OnebitAdam", "Adam"],
)
def test_a_training_goes_on(before, kind, options):
    net, old = begun(before)
    state, weights = copy.deepcopy((old.state_dict(), net.state_dict()))  # it goes on
    wanted = trained_together(net, old, 2, range(4, 9))

    def body(comm):
        mine = model()
        mine.load_state_dict(weights)
        optimizer = kind(mine.parameters(), lr=1.0, comm=comm, **options)  # the state has another
        optimizer.load_state_dict(state)
        assert optimizer.info().step == 4
        assert [p.tolist() for p in mine.parameters()] == [w.tolist() for w in weights.values()]
        assert optimizer.param_groups[0]["lr"] == 0.02
        assert "amsgrad" not in optimizer.param_groups[0]
        out = train(mine, optimizer, comm.rank, range(4, 9))
        optimizer.close()
        return out

    outs = thread_ranks(2, body)
    if kind is not st.OnebitAdam:  # which has no bias correction
        for p, q in zip(outs[0], wanted):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(p, q) for p, q in zip(*outs))


def test_the_moments_are_those_of_the_state():
    """By what another state of the same numbers makes of them: array by array."""
    net, old = begun()
    state, weights = old.state_dict(), net.state_dict()

    def body(comm):
        outs = []
        for by_hand in (True, False):
            mine = model()
            mine.load_state_dict(weights)
            optimizer = st.OnebitLamb(mine.parameters(), comm=comm, freeze_step=6, **ADAM)
            if by_hand:
                optimizer.import_arrays(
                    {
                        f"param{i}/{key}": value.reshape(-1)
                        + (key == "step")  # as DeepSpeed counts
                        for i, values in state["state"].items()
                        for key, value in values.items()
                    }
                )
            else:
                optimizer.load_state_dict(state)
            outs.append(train(mine, optimizer, comm.rank, range(4, 10)))
            assert optimizer.info().stage == 1
            optimizer.close()
        assert all(torch.equal(p, q) for p, q in zip(*outs))

    thread_ranks(2, body)


def test_schedulers_groups_and_steps_of_a_group(comm):
    """As apex has it: one step number for a group. Other keys of a group are kept."""
    net = model()
    params = list(net.parameters())
    groups = [{"params": params[:1], "lr": 0.1}, {"params": params[1:]}]
    old = torch.optim.AdamW(groups, **ADAM)
    schedule = torch.optim.lr_scheduler.StepLR(old, 3, gamma=0.5)
    trained_together(net, old, 2, range(2))
    schedule.step()
    state = old.state_dict()
    for values in state["state"].values():
        del values["step"]
    for group in state["param_groups"]:
        group["step"] = 2
    mine = copy.deepcopy(net)
    params = list(mine.parameters())
    optimizer = st.AdamW([{"params": params[:1]}, {"params": params[1:]}], comm=comm)
    optimizer.load_state_dict(state)
    assert optimizer.info().step == 2
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 0.02]
    again = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5, last_epoch=0)
    again.load_state_dict(schedule.state_dict())
    again.step()
    again.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
    assert "step" not in optimizer.param_groups[0]
    optimizer.close()


def test_parameters_that_had_no_gradient_and_halves(comm):
    """Moments of zero where torch has none; masters go on from what the model has."""
    net = model(torch.bfloat16)
    net.register_parameter("spare", torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
    net, old = begun(net=net)
    state = old.state_dict()
    assert len(state["state"]) == len(list(net.parameters())) - 1
    mine = copy.deepcopy(net)
    optimizer = st.AdamW(mine.parameters(), comm=comm, **ADAM)
    optimizer.load_state_dict(state)
    for step in range(4, 6):
        optimizer.zero_grad()
        (loss_of(mine, 0, step) + mine.spare.sum()).backward()
        optimizer.step()
    assert optimizer.info().step == 6
    assert not torch.equal(mine.spare, net.spare)
    optimizer.close()


def test_a_state_before_the_first_step(comm):
    net = model()
    optimizer = st.AdamW(net.parameters(), comm=comm)
    optimizer.load_state_dict(torch.optim.AdamW(net.parameters(), **ADAM).state_dict())
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    train(net, optimizer, 0, range(2))
    assert optimizer.info().step == 2
    optimizer.close()


def test_stages_that_need_more_than_moments(comm):
    net, old = begun()
    state = old.state_dict()
    optimizer = st.OnebitAdam(net.parameters(), comm=comm, freeze_step=3)
    optimizer.load_state_dict(state)  # a variance is enough
    assert (optimizer.info().step, optimizer.info().stage) == (4, 1)
    optimizer.close()
    optimizer = st.OnebitLamb(net.parameters(), comm=comm, freeze_step=5)
    with pytest.raises(
        sotto.InvalidArgumentError, match="freeze_step is 5, and the state's next step is 5"
    ):
        optimizer.load_state_dict(state)
    optimizer.close()
    optimizer = st.ZeroOneAdam(net.parameters(), comm=comm)
    with pytest.raises(sotto.InvalidArgumentError, match="no intervals and counters of 0/1 Adam"):
        optimizer.load_state_dict(state)
    optimizer.close()


def changed(state, change):
    state = copy.deepcopy(state)
    change(state)
    return state


def test_states_that_do_not_fit_change_nothing(comm):
    net, old = begun()
    state = old.state_dict()
    size = {i: v["exp_avg"].shape for i, v in state["state"].items()}
    turned = next(i for i, shape in size.items() if len(shape) == 2 and shape[0] != shape[1])
    mine = model()
    optimizer = st.AdamW(mine.parameters(), lr=0.01, comm=comm)
    train(mine, optimizer, 0, range(3))
    before, there = [p.tolist() for p in mine.parameters()], optimizer.state_dict()["sotto"]["blob"]
    l2 = torch.optim.Adam(net.parameters(), **ADAM).state_dict()
    n = len(list(net.parameters()))
    bad = [
        *(
            (other, r'no entry "sotto", and not "state" and "param_groups" as torch has them')
            for other in (
                {"model": {}},
                [],
                {"state": {}, "param_groups": [{"lr": 1.0}]},
                {"state": {0: 3}, "param_groups": state["param_groups"]},
            )
        ),
        (l2, r"decoupled_weight_decay of group 0 is False in the state, with weight_decay 0.1"),
        (
            changed(state, lambda s: s["param_groups"][0]["params"].pop()),
            rf"the state's groups have \[{n - 1}\] tensors, this optimizer's \[{n}\]",
        ),
        (
            changed(
                state,
                lambda s: s["state"][turned].update(exp_avg=state["state"][turned]["exp_avg"].T),
            ),
            rf'exp_avg of parameter "param{turned}" has shape .* the state is of another model',
        ),
        (
            changed(state, lambda s: s["state"][0].pop("exp_avg_sq")),
            '"param0/exp_avg_sq" is missing',
        ),
        (changed(state, lambda s: s["state"][0].update(step=torch.tensor(3.0))), "step"),
        (
            changed(state, lambda s: s["param_groups"][0].update(amsgrad=True)),
            "amsgrad of group 0 is True",
        ),
        (
            changed(
                state,
                lambda s: [v.update(max_exp_avg_sq=v["exp_avg_sq"]) for v in s["state"].values()],
            ),
            'AdamW has no array "param0/max_exp_avg_sq"',
        ),
    ]
    for made, text in bad:
        with pytest.raises(sotto.InvalidArgumentError, match=text):
            optimizer.load_state_dict(made)
        assert [p.tolist() for p in mine.parameters()] == before
        assert torch.equal(optimizer.state_dict()["sotto"]["blob"], there)
        assert optimizer.param_groups[0]["lr"] == 0.01
    train(mine, optimizer, 0, range(3, 5))
    assert optimizer.info().step == 5
    optimizer.close()
