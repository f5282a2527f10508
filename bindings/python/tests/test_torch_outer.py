"""Outer steps around torch's optimizers."""

import copy
import io

import pytest
from ranks import thread_ranks as threads

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from test_torch_optim import loss_of, model, train  # noqa: E402

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402
from sotto.outer import CONSUMED, HELD, LAUNCHED, MEASURING, WAITED  # noqa: E402
from sotto.outer import Outer as PlainOuter  # noqa: E402

INNER = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "plain": lambda p: torch.optim.SGD(p, lr=0.05),
}
MEAN = {"preset": "local_sgd", "period": 2}


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


def thread_ranks(n, body):
    """As the others', with one thread per operation of torch: with several bits may differ."""

    def alone(comm):
        torch.set_num_threads(1)  # of this thread
        return body(comm)

    return threads(n, alone)


def values(net):
    return [p.detach().clone() for p in net.parameters()]


def equal(these, those):
    return all(map(torch.equal, these, those))


def made(net, comm, inner="plain", **keys):
    return st.Outer(INNER[inner](net.parameters()), comm=comm, **keys)


def saved_and_loaded(state):
    """Through a file that torch.load() takes without pickle."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(
    "keys",
    [
        {"preset": "co2", "period": 3, "codec": "onebit"},
        {"preset": "slowmo", "period": 4},
        {"preset": "streaming_diloco", "period": 4, "delay": 2, "fragments": 2, "codec": "int8"},
        {"preset": "post_local_sgd", "period": 3, "switch_step": 5},
    ],
    ids=lambda keys: keys["preset"],
)
def test_equals_the_outer_optimizer_on_plain_buffers(inner, keys):
    def body(comm):
        net, other = model(), model()
        outer = made(net, comm, inner, **keys)
        assert isinstance(outer, torch.optim.Optimizer)
        theirs = INNER[inner](other.parameters())
        plain = PlainOuter([p.detach() for p in other.parameters()], keys, comm=comm)
        for step in range(14):
            train(net, outer, comm.rank, [step])
            train(other, theirs, comm.rank, [step])
            plain.set(lr=0.01 if inner == "adamw" else 0.05)
            plain.step().wait()
            assert equal(values(net), values(other)), step
        mine, theirs = outer.info(), plain.info()
        assert mine[1:7] == theirs[1:7]
        assert (mine.step, mine.events & ~WAITED) == (14, theirs.events & ~WAITED)
        outer.flush()
        plain.flush().wait()
        assert equal(values(net), values(other))
        plain.close()
        outer.close()
        return values(net)

    a, b = thread_ranks(2, body)
    assert equal(a, b)


def local_steps(inner, rounds, move):
    """Two ranks in a loop of torch's: move(anchor, deltas) gives the next anchor."""
    nets = [model(), model()]
    optimizers = [INNER[inner](net.parameters()) for net in nets]
    anchor = values(nets[0])
    for done in range(rounds):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers)):
            train(net, optimizer, rank, range(3 * done, 3 * done + 3))
        lives = list(zip(*map(values, nets)))
        anchor = move(anchor, lives)
        for net in nets:
            for p, q in zip(net.parameters(), anchor):
                p.detach().copy_(q)
    return anchor


def test_equals_loops_of_torch():
    """Local SGD bit for bit; DiLoCo up to rounding: torch's SGD with Nesterov momentum is outer."""

    def mean(_, lives):
        return [(a + b) * 0.5 for a, b in lives]

    def diloco():
        outer = []

        def move(anchor, lives):
            if not outer:
                outer.extend(a.clone().requires_grad_() for a in anchor)
                outer.append(torch.optim.SGD(list(outer), lr=0.7, momentum=0.9, nesterov=True))
            *params, optimizer = outer
            for p, a, (one, two) in zip(params, anchor, lives):
                p.grad = a - (one + two) * 0.5
            optimizer.step()
            return values(torch.nn.ParameterList(params))

        return move

    def body(comm):
        found, wanted = [], []
        for preset, inner, move in (("local_sgd", "adamw", mean), ("diloco", "plain", diloco())):
            net = model()
            outer = made(net, comm, inner, preset=preset, period=3)
            train(net, outer, comm.rank, range(18))
            found.append(values(net))
            wanted.append(local_steps(inner, 6, move))
            outer.close()
        assert equal(found[0], wanted[0])
        for p, q in zip(found[1], wanted[1]):
            torch.testing.assert_close(p, q, rtol=0, atol=2e-6)

    thread_ranks(2, body)


def test_a_codec_says_nothing_of_states(comm, capfd):
    net = model()
    optimizer = made(net, comm, preset="co2", period=2, codec="onebit")
    train(net, optimizer, 0, range(2))
    optimizer.load_state_dict(optimizer.state_dict())  # which has the error feedback
    optimizer.close()
    assert capfd.readouterr().err == ""


def test_schedulers_closures_and_hooks():
    """slowmo needs the learning rate, of the inner step before a boundary."""

    def body(comm):
        net, other = model(), model()
        outer = made(net, comm, preset="slowmo", period=3)
        on_outer = torch.optim.lr_scheduler.LambdaLR(outer, lambda step: (step % 4) / 4)
        theirs = INNER["plain"](other.parameters())
        on_theirs = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: (step % 4) / 4)
        keys = {"preset": "slowmo", "period": 3}
        plain = PlainOuter([p.detach() for p in other.parameters()], keys, comm=comm)
        seen = []
        outer.register_step_post_hook(lambda *_: seen.append("step"))
        outer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
        for step in range(9):

            def closure(step=step):
                outer.zero_grad()
                loss = loss_of(net, comm.rank, step)
                loss.backward()
                return loss

            lr = outer.param_groups[0]["lr"]
            if step == 8:
                assert lr == 0
                with pytest.raises(sotto.InvalidStateError, match="lr is 0"):
                    outer.step(closure)
                break
            assert outer.step(closure).item() > 0
            train(other, theirs, comm.rank, [step])
            if step in (2, 5):
                plain.set(lr=lr)
            plain.step().wait()
            on_outer.step()
            on_theirs.step()
            assert outer.param_groups[0] is outer.inner.param_groups[0]
        assert equal(values(net), values(other))
        assert len(seen) == 8
        assert outer.state_dict()["mine"] == 1
        outer.param_groups[0]["lr"] = 0.1
        outer.step(closure)
        outer.param_groups[0]["lr"] = 0.0  # as schedules end
        outer.flush()
        outer.close()
        plain.close()

    thread_ranks(2, body)


def test_evaluation_votes_and_figures():
    def body(comm):
        net = model()
        outer = made(net, comm, "sgd", preset="co2", period=2, beta=0)
        start = values(net)
        with outer.evaluation():  # before the first step there is nothing to swap
            assert equal(values(net), start)
        outer.flush()
        events = []
        for step in range(5):
            train(net, outer, comm.rank, [step])
            events.append(outer.info().events & ~WAITED)
            if step == 0:
                outer.vote(1 << comm.rank)
        assert events == [0, LAUNCHED | HELD, 0, LAUNCHED | CONSUMED, 0]
        live = values(net)
        with outer.evaluation():
            anchor = values(net)
            for what, call in (
                ("step", outer.step),
                ("flush", outer.flush),
                ("state_dict", outer.state_dict),
                ("load_state_dict", lambda: outer.load_state_dict({})),
            ):
                with pytest.raises(
                    sotto.InvalidStateError, match=rf"{what}\(\) inside evaluation\(\)"
                ):
                    call()
            with (
                pytest.raises(sotto.InvalidStateError, match=r"evaluation\(\) inside"),
                outer.evaluation(),
            ):
                pass
            moved = net[0].weight
            moved.data = moved.data.clone()
        assert equal(values(net), live)
        assert not equal(anchor, live)

        def evaluate():
            with outer.evaluation():
                moved.data = moved.data.clone()
                raise KeyError

        with pytest.raises(KeyError):
            evaluate()
        assert equal(values(net), live)
        with pytest.raises(sotto.InvalidStateError, match="dtype of parameter"), outer.evaluation():
            net.half()
        assert equal(values(net), [p.half() for p in live])
        net.float()
        with torch.no_grad():
            for p, q in zip(net.parameters(), live):
                p.copy_(q)
        outer.set(loss=1.5, weight=1)
        with pytest.raises(sotto.InvalidArgumentError, match="weight is 2; allowed: 0 or 1"):
            outer.set(weight=2)
        assert outer.info().votes == 3
        with pytest.raises(TypeError, match="save its state_dict"):
            copy.deepcopy(outer)

        def close():
            with outer.evaluation():
                moved.data = moved.data.clone()
                try:
                    raise KeyError
                finally:
                    outer.close()

        with pytest.raises(KeyError):
            close()
        assert equal(values(net), live)
        return anchor

    a, b = thread_ranks(2, body)
    assert equal(a, b)


def test_16_bit_parameters_have_float32_masters():
    """Inner steps write the parameters; the masters take what changes, and keep the rest."""

    def body(comm):
        for dtype in (torch.float16, torch.bfloat16):
            net = model(dtype)
            outer = made(net, comm, "plain", preset="co2", period=3, beta=0)
            for step in range(6):
                train(net, outer, comm.rank, [step])
                for t in outer._tensors:
                    assert torch.equal(t.p.detach(), t.master.to(dtype))
            finer = [t.master != t.p.detach().float() for t in outer._tensors]
            assert any(bool(differ.any()) for differ in finer)  # means are not of 16 bits
            with torch.no_grad():
                net[0].bias.zero_()  # by others
            live = values(net)
            with outer.evaluation():
                assert not equal(values(net), live)
            assert equal(values(net), live)
            assert not bool(outer._tensors[1].master.any())
            outer.flush()
            masters = [t.master.clone() for t in outer._tensors]
            outer.close()
        return masters, values(net)

    (a, p), (b, q) = thread_ranks(2, body)
    assert equal(a, b)
    assert equal(p, q)


def test_parameters_that_move_are_followed():
    """In memory, by load_state_dict(assign=True), and by hand; for a 16-bit one too."""

    def body(comm, moving):
        nets = [model(), model(torch.bfloat16)]
        outers = [made(net, comm, "sgd", preset="co2", period=2) for net in nets]
        for step in range(7):
            for net, outer in zip(nets, outers):
                train(net, outer, comm.rank, [step])
                if moving:
                    state = {k: v.clone() for k, v in net.state_dict().items()}
                    net.load_state_dict(state, assign=step % 3 == 1)
                    if step % 3 == 2:
                        net[2].weight.data = net[2].weight.data.clone()
                        net[0].bias = torch.nn.Parameter(net[0].bias.detach().clone())
        for net, outer in zip(nets, outers):
            assert outer.inner.state.keys() == set(net.parameters())
        if moving:
            nets[0][0].weight.data = torch.zeros(3)
            nets[0][0].weight.grad = None
            with pytest.raises(sotto.InvalidStateError, match=r'shape of parameter "param0"'):
                outers[0].step()
            nets[1].float()
            with pytest.raises(sotto.InvalidStateError, match=r'dtype of parameter "param0"'):
                outers[1].step()
        masters = [t.master.clone() for outer in outers for t in outer._tensors]
        for outer in outers:
            outer.close()
        return masters

    still = thread_ranks(2, lambda comm: body(comm, False))
    moved = thread_ranks(2, lambda comm: body(comm, True))
    assert all(map(equal, still, moved))


def test_frozen_parameters():
    def body(comm):
        net = model()
        net[2].weight.requires_grad_(False)
        outer = made(net, comm, "plain", preset="co2", period=2, delay=0)
        never = net[2].weight.detach().clone()
        train(net, outer, comm.rank, range(3))
        net[0].weight.requires_grad_(False)  # in the middle of a round
        frozen = []
        for step in range(3, 22):
            outer.zero_grad()
            loss_of(net, comm.rank, step).backward()
            outer.step()
            frozen.append(net[0].weight.detach().clone())
        assert torch.equal(never, net[2].weight)
        assert not torch.equal(frozen[0], frozen[-1])  # it was averaged
        assert (frozen[-1] - frozen[-3]).abs().max() < 1e-7  # and settles
        net[2].weight.requires_grad_(True)
        loss_of(net, comm.rank, 0).backward()
        with pytest.raises(sotto.InvalidStateError, match='"param2" has a gradient, but did not'):
            outer.step()
        outer.close()
        return values(net)

    a, b = thread_ranks(2, body)
    assert equal(a, b)


def test_scaled_gradients():
    """An overflow leaves out one rank's inner step; both count it. fused ones, and those of ours,
    do it themselves."""

    def body(comm):
        alone = comm.split(comm.rank)
        for kind, keys in (
            (torch.optim.SGD, {"fused": False}),
            (torch.optim.SGD, {"fused": True}),
            (st.AdamW, {"comm": alone}),
        ):
            fused = keys.get("fused", False)
            net, other = model(), model()
            outer = st.Outer(kind(net.parameters(), lr=0.05, **keys), comm=comm, **MEAN)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            theirs = kind(other.parameters(), lr=0.05, **keys)
            plain = PlainOuter([p.detach() for p in other.parameters()], MEAN, comm=comm)
            for step in range(6):
                overflows = comm.rank == 1 and step == 2
                outer.zero_grad()
                scaler.scale(loss_of(net, comm.rank, step)).backward()
                if overflows:
                    net[0].weight.grad[0, 0] = float("inf")
                scaler.step(outer)
                scaler.update()
                if not overflows:
                    train(other, theirs, comm.rank, [step])
                plain.step().wait()
            assert scaler.get_scale() == 2.0 ** (10 - (comm.rank == 1))
            assert outer.info().step == 6
            assert not hasattr(outer.inner, "found_inf")
            for p, q in zip(values(net), values(other)):
                # Powers of two scale without rounding; fused ones have another order of operations.
                torch.testing.assert_close(p, q, rtol=0, atol=1e-6 * fused)
            for optimizer in (outer, plain, outer.inner, theirs):
                getattr(optimizer, "close", int)()
        alone.close()

    thread_ranks(2, body)


def test_optimizers_of_ours_are_inner_ones_on_one_rank():
    def body(comm):
        alone = comm.split(comm.rank)
        net, other = model(), model()
        mine = st.OnebitAdam(net.parameters(), lr=0.01, freeze_step=3, comm=alone)
        outer = st.Outer(mine, preset="co2", period=3, comm=comm)
        theirs = st.OnebitAdam(other.parameters(), lr=0.01, freeze_step=3, comm=alone)
        plain = PlainOuter(
            [p.detach() for p in other.parameters()], {"preset": "co2", "period": 3}, comm=comm
        )
        for step in range(8):
            if step == 4:
                net.load_state_dict(
                    {k: v.clone() for k, v in net.state_dict().items()}, assign=True
                )
            train(net, outer, comm.rank, [step])
            train(other, theirs, comm.rank, [step])
            plain.step().wait()
        assert equal(values(net), values(other))
        state = saved_and_loaded(outer.state_dict())
        train(net, outer, comm.rank, range(8, 11))
        again = model()
        inner = st.OnebitAdam(again.parameters(), lr=0.01, freeze_step=3, comm=alone)
        resumed = st.Outer(inner, preset="co2", period=3, comm=comm)
        resumed.load_state_dict(state)
        train(again, resumed, comm.rank, range(8, 11))
        assert equal(values(net), values(again))
        half = model(torch.bfloat16)
        refused = st.Outer(st.AdamW(half.parameters(), comm=alone), comm=comm)
        with pytest.raises(sotto.UnsupportedError, match='"param0" is torch.bfloat16, of which'):
            train(half, refused, comm.rank, [0])
        with pytest.raises(
            sotto.UnsupportedError, match=r'AdamW that averages over 2 ranks .*"out'
        ):
            st.Outer(st.AdamW(net.parameters(), comm=comm), comm=comm)
        for optimizer in (outer, resumed, plain, mine, theirs, inner):
            optimizer.close()
        alone.close()

    thread_ranks(2, body)


def test_a_period_that_is_measured():
    def body(comm):
        net = model()
        opt = made(net, comm, period="auto")
        train(net, opt, comm.rank, range(24))
        info = opt.info()
        assert not info.events & MEASURING
        state = saved_and_loaded(opt.state_dict())
        opt.set(retune=True)
        opt.close()
        again = made(net, comm, period="auto")
        again.load_state_dict(state)
        assert (again.info().period, again.info().delay) == (info.period,) * 2
        again.close()
        return info.period

    assert len(set(thread_ranks(2, body))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["flush", "load", "step"])
def test_a_graph_from_before_parameters_were_written_is_refused(how, dtype, comm):
    """By autograd, as behind a step of torch's. evaluation() brings the values back."""
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))).to(dtype)
    outer = made(net, comm, preset="local_sgd", period=2)
    start = torch.ones(2, 4, dtype=dtype, requires_grad=True)
    net(start).square().mean().backward()
    outer.step()
    out = net(start).square().mean()
    with outer.evaluation():
        net(start)
    out.backward(retain_graph=True)
    if how == "flush":
        outer.flush()
    elif how == "load":
        outer.load_state_dict(outer.state_dict())
    else:  # one whose inner step changes nothing
        outer.zero_grad()
        outer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
    outer.close()
