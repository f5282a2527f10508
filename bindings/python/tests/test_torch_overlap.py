"""Gradients of PyTorch modules that are averaged during backward()."""

import copy
import io
import threading

import pytest
from ranks import thread_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from torch.optim.swa_utils import AveragedModel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402

torch.set_num_threads(1)
SMALL = {"bucket_mb": 0.02, "first_bucket_mb": 0.001}


def model(seed=0):
    """Ranks are threads, which share torch's own generator."""
    generator = torch.Generator().manual_seed(seed)
    layers = [m for _ in range(5) for m in (torch.nn.Linear(48, 48), torch.nn.Tanh())]
    net = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.15)
    return net


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 48, generator=generator)


def loss_of(net, rank, step):
    return net(batch(rank, step)).square().mean()


def means(net, size, step):
    """By hand: every rank's gradients, one after the other."""
    out = None
    for rank in range(size):
        net.zero_grad()
        loss_of(net, rank, step).backward()
        mine = [p.grad.clone() for p in net.parameters()]
        out = mine if out is None else [a + b for a, b in zip(out, mine)]
    net.zero_grad()
    return [total * torch.tensor(1 / size) for total in out]


@pytest.mark.parametrize("order", ["reversed", "observed"])
def test_gradients_are_means(order):
    def body(comm):
        net, alone = model(), model()
        with st.Overlap(net, order=order, comm=comm, **SMALL) as overlap:
            for step in range(3):
                net.zero_grad()
                loss_of(net, comm.rank, step).backward()
                overlap.wait()
                for p, wanted in zip(net.parameters(), means(alone, comm.size, step)):
                    torch.testing.assert_close(p.grad, wanted, rtol=1e-6, atol=1e-9)
            info = overlap.info()
            assert info.rounds == 3
            assert info.buckets > 2

    thread_ranks(2, body)


def test_optimizers_wait_and_ranks_stay_alike():
    def body(comm):
        nets = []
        for kind in ("overlap", "all_reduce"):
            net = model()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            overlap = st.Overlap(net, comm=comm, **SMALL) if kind == "overlap" else None
            for step in range(6):
                optimizer.zero_grad()
                loss_of(net, comm.rank, step).backward()
                if overlap is None:
                    comm.all_reduce([p.grad for p in net.parameters()], op="mean").wait()
                optimizer.step()
            if overlap is not None:
                overlap.close()
            nets.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
        assert (nets[0] == nets[1]).all()  # to the bit

    thread_ranks(3, body)


def test_micro_batches_and_unused_parameters():
    def body(comm):
        net, alone = model(), model()
        spare = torch.nn.Parameter(torch.ones(7))
        net.register_parameter("spare", spare)
        with st.Overlap(net, unused="zero", comm=comm, **SMALL) as overlap:
            with overlap.no_sync():
                (loss_of(net, comm.rank, 0) + spare.sum() * (comm.rank + 1)).backward()
            assert overlap.info().rounds == 0
            loss_of(net, comm.rank, 1).backward()  # without the spare one
            overlap.wait()
            wanted = [a + b for a, b in zip(means(alone, 2, 0), means(alone, 2, 1))]
            found = [p.grad for n, p in net.named_parameters() if n != "spare"]
            for a, b in zip(found, wanted):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)
            assert (spare.grad == 1.5).all()
            net.zero_grad()
            (loss_of(net, comm.rank, 2) + (spare.sum() if comm.rank == 0 else 0)).backward()
            overlap.wait()
            assert (spare.grad == 0.5).all()

    thread_ranks(2, body)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("inside", [True, False])
def test_an_exception_in_backward_ends_the_round_on_all_ranks(inside):
    def body(comm):
        net = model()
        with st.Overlap(net, comm=comm, **SMALL) as overlap:
            if comm.rank == 1:
                hidden = net[:4](batch(1, 0))
                loss = net[4:](Fails.apply(hidden)).square().mean()
                if inside:
                    with pytest.raises(RuntimeError, match="out of memory"), overlap.round():
                        loss.backward()
                else:
                    with pytest.raises(RuntimeError, match="out of memory"):
                        loss.backward()
            ends = overlap.wait if comm.rank == 1 else loss_of(net, comm.rank, 0).backward
            with pytest.raises(sotto.CancelledError, match="rank 1 has withdrawn") as error:
                ends()
            reason = "RuntimeError: out of memory" if inside else "has ended with an exception"
            assert reason in str(error.value)
            net.zero_grad()
            loss_of(net, comm.rank, 1).backward()
            overlap.wait()
            assert overlap.info().rounds == 1

    thread_ranks(2, body)


def test_an_exception_before_backward_ends_the_round_on_all_ranks():
    """As of a batch that cannot be read: the other ranks are in their backward()."""

    def body(comm):
        net, alone, texts = model(), model(), []
        with st.Overlap(net, comm=comm, **SMALL) as overlap:
            for step in range(3):
                net.zero_grad()
                try:
                    with overlap.round():
                        if step == 1 and comm.rank == 1:
                            raise ValueError("no such file")
                        loss_of(net, comm.rank, step).backward()
                except (ValueError, sotto.CancelledError) as error:
                    texts.append(str(error))
                    continue
                for p, wanted in zip(net.parameters(), means(alone, 2, step)):
                    torch.testing.assert_close(p.grad, wanted, rtol=1e-6, atol=1e-9)
            withdrawn = "" if comm.rank == 1 else "rank 1 has withdrawn: ValueError: "
            assert len(texts) == 1
            assert f"{withdrawn}no such file" in texts[0]
            with pytest.raises(KeyError), overlap.no_sync(), overlap.round():
                raise KeyError("here nothing is averaged")
            assert overlap.info().rounds == 2

    thread_ranks(2, body)


def test_a_failed_backward_is_left_without_a_forward():
    """Modules are called by other ways than their own forward(), and compiled ones call no hook."""

    def body(comm):
        net = model()
        with st.Overlap(net, comm=comm, **SMALL) as overlap:
            if comm.rank == 1:
                with pytest.raises(RuntimeError, match="out of memory"):
                    net[4:](Fails.apply(net[:4](batch(1, 0)))).square().mean().backward()
            else:
                with pytest.raises(sotto.CancelledError, match="rank 1 has withdrawn"):
                    loss_of(net, 0, 0).backward()
            net.zero_grad()
            net[4:](net[:4](batch(comm.rank, 1))).square().mean().backward()
            for p, wanted in zip(net.parameters(), means(model(), 2, 1)):
                torch.testing.assert_close(p.grad, wanted, rtol=1e-6, atol=1e-9)
            assert overlap.info().rounds == 1

    thread_ranks(2, body)


def test_missing_gradients_are_named():
    def body(comm):
        net = model()
        net.register_parameter("spare", torch.nn.Parameter(torch.ones(7)))
        with st.Overlap(net, comm=comm, **SMALL) as overlap:
            with pytest.raises(sotto.InvalidStateError, match='1 of 11 parameters.*"spare"'):
                loss_of(net, comm.rank, 0).backward()
            with pytest.raises(sotto.CancelledError, match="withdrawn"):
                overlap.wait()

    thread_ranks(2, body)


def test_codecs_and_their_state():
    def body(comm):
        net = model()
        with st.Overlap(net, codec={"type": "int8", "block": 64}, comm=comm, **SMALL) as overlap:

            def gradients(step):
                net.zero_grad()
                loss_of(net, comm.rank, step).backward()
                overlap.wait()
                return torch.cat([p.grad.flatten() for p in net.parameters()])

            gradients(0)
            state = overlap.state_dict()
            wanted = gradients(1)
            assert (gradients(1) != wanted).any()
            overlap.load_state_dict(state)
            assert (gradients(1) == wanted).all()

    thread_ranks(2, body)


def stored_and_loaded(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, stored_and_loaded, AveragedModel])
def test_copies_of_the_module_are_not_averaged(copied):
    def body(comm):
        net, alone = model(), model()
        with st.Overlap(net, comm=comm, **SMALL) as overlap:
            other = copied(net)
            loss_of(net, comm.rank, 0).backward()
            loss_of(other, comm.rank, 1).backward()
            overlap.wait()
            for p, wanted in zip(net.parameters(), means(alone, 2, 0)):
                torch.testing.assert_close(p.grad, wanted, rtol=1e-6, atol=1e-9)
            assert overlap.info().rounds == 1
        alone.zero_grad()
        loss_of(alone, comm.rank, 1).backward()
        for p, q in zip(other.parameters(), alone.parameters()):
            assert torch.equal(p.grad, q.grad)

    thread_ranks(2, body)


def checkpointed(inner, x):
    """Every second layer by itself, the last one too."""
    for i, layer in enumerate(inner):
        x = checkpoint(layer, x, use_reentrant=True) if i % 2 == 0 else layer(x)
    return x


@pytest.mark.parametrize("order", ["reversed", "observed"])
def test_backward_passes_inside_of_a_backward_pass(order):
    def body(comm):
        net, alone = model(), model()
        layers = torch.nn.Sequential(
            *(torch.nn.Sequential(*net[i : i + 2]) for i in (0, 2, 4, 6, 8))
        )
        with st.Overlap(net, order=order, comm=comm, **SMALL) as overlap:
            for step in range(3):
                net.zero_grad()
                x = batch(comm.rank, step).requires_grad_()
                checkpointed(layers, x).square().mean().backward()
                overlap.wait()
                for p, wanted in zip(net.parameters(), means(alone, 2, step)):
                    torch.testing.assert_close(p.grad, wanted, rtol=1e-6, atol=1e-9)
            assert overlap.info().rounds == 3

    thread_ranks(2, body)


class Twice(torch.nn.Module):
    """Its forward() has a part that a checkpoint computes again, inside backward()."""

    def __init__(self):
        super().__init__()
        self.net = model()

    def forward(self, x, first=False):
        return self.net[:4](x) if first else self.net[4:](x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_calls_the_module_inside_backward(use_reentrant):
    def body(comm):
        net, alone = Twice(), model()
        with st.Overlap(net, comm=comm, **SMALL) as overlap:
            for step in range(2):
                net.zero_grad()
                x = batch(comm.rank, step).requires_grad_()
                net(
                    checkpoint(net, x, True, use_reentrant=use_reentrant)
                ).square().mean().backward()
                for p, wanted in zip(net.parameters(), means(alone, 2, step)):
                    torch.testing.assert_close(p.grad, wanted, rtol=1e-6, atol=1e-9)
            assert overlap.info().rounds == 2

    thread_ranks(2, body)


def test_a_step_inside_backward_is_an_error():
    def body(comm):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net[4].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        inside = pytest.raises(sotto.InvalidStateError, match=r"step\(\) inside backward\(\)")
        with st.Overlap(net, comm=comm, **SMALL), inside:
            loss_of(net, comm.rank, 0).backward()

    thread_ranks(1, body)


@pytest.mark.parametrize("unused", ["error", "zero"])
def test_all_of_a_model_in_one_checkpoint(unused):
    """No gradient comes outside of the inner backward pass, and one never."""

    def body(comm):
        net, alone = model(), model()
        net.register_parameter("spare", torch.nn.Parameter(torch.ones(7)))
        with st.Overlap(net, unused=unused, comm=comm, **SMALL) as overlap:
            x = batch(comm.rank, 0).requires_grad_()
            checkpoint(net, x, use_reentrant=True).square().mean().backward()
            if unused == "error":
                with pytest.raises(sotto.InvalidStateError, match='1 of 11 parameters.*"spare"'):
                    overlap.wait()
                return
            overlap.wait()
            assert net.spare.grad.tolist() == [0] * 7
            found = [p.grad for n, p in net.named_parameters() if n != "spare"]
            for p, wanted in zip(found, means(alone, 2, 0)):
                torch.testing.assert_close(p, wanted, rtol=1e-6, atol=1e-9)

    thread_ranks(2, body)


def test_gradients_are_the_programs_when_backward_has_ended():
    """As with DistributedDataParallel: clipped, zeroed in place, dropped."""

    def body(comm):
        net, alone = model(), model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        with st.Overlap(net, comm=comm, **SMALL) as overlap:
            for step in range(6):
                loss_of(net, comm.rank, step).backward()
                for p, wanted in zip(alone.parameters(), means(alone, 2, step)):
                    p.grad = wanted
                if step % 3 == 2:  # this one is left out
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
                    continue
                for params, trained in ((net, optimizer), (alone, plain)):
                    torch.nn.utils.clip_grad_norm_(params.parameters(), 1e-2)
                    trained.step()
                    trained.zero_grad(set_to_none=step % 2 == 0)
            assert overlap.info().rounds == 6
        for p, q in zip(net.parameters(), alone.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)

    thread_ranks(2, body)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_a_scaler_has_the_means(fused):
    def body(comm):
        net, alone = model(), model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
        plain = torch.optim.SGD(alone.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with st.Overlap(net, comm=comm, **SMALL):
            for step in range(4):
                optimizer.zero_grad()
                loss = loss_of(net, comm.rank, step)
                overflows = step == 2
                scaler.scale(loss * float("inf" if overflows and comm.rank else 1)).backward()
                scaler.step(optimizer)
                scaler.update()
                if overflows:
                    continue
                for p, wanted in zip(alone.parameters(), means(alone, 2, step)):
                    p.grad = wanted
                plain.step()
        assert scaler.get_scale() == 4  # on both ranks
        for p, q in zip(net.parameters(), alone.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)

    thread_ranks(2, body)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    ],
    ids=["SGD", "LBFGS"],
)
def test_a_closure_has_the_means(make):
    """As Lightning trains with every optimizer."""

    def body(comm):
        net, alone = model(), model()
        optimizer, plain = make(net.parameters()), make(alone.parameters())
        with st.Overlap(net, comm=comm, **SMALL):
            for step in range(3):

                def closure():
                    optimizer.zero_grad()
                    loss = loss_of(net, comm.rank, step)  # noqa: B023
                    loss.backward()
                    return loss.detach() * 0  # line searches would see each rank's

                def together():
                    wanted = means(alone, 2, step)  # noqa: B023
                    for p, gradient in zip(alone.parameters(), wanted):
                        p.grad = gradient
                    return torch.zeros(())

                optimizer.step(closure)
                plain.step(together)
                for p, q in zip(net.parameters(), alone.parameters()):
                    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)

    thread_ranks(2, body)


def test_a_failed_round_says_nothing_of_gradients():
    def body(comm):
        net = model()
        with st.Overlap(net, codec="int8", comm=comm, **SMALL) as overlap:
            with pytest.raises(sotto.NonfiniteError):
                (loss_of(net, comm.rank, 0) * float("inf" if comm.rank else 1)).backward()
            net.zero_grad(set_to_none=False)
            overlap.wait()  # there is nothing to wait for
            loss_of(net, comm.rank, 1).backward()
            overlap.wait()

    thread_ranks(2, body)


def test_an_evaluation_inside_a_round_leaves_it_alone():
    """As of a thread that acts while another one learns."""

    def body(comm):
        net = model()

        def evaluates(_):
            thread = threading.Thread(target=torch.no_grad()(net), args=(batch(0, 5),))
            thread.start()
            thread.join()

        net[4].weight.register_hook(evaluates)
        with st.Overlap(net, comm=comm, **SMALL) as overlap:
            for step in range(2):
                net.zero_grad()
                loss_of(net, comm.rank, step).backward()
            found = [p.grad for p in net.parameters()]
            for a, b in zip(found, means(model(), 2, 1)):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
            assert overlap.info().rounds == 2

    thread_ranks(2, body)


def test_a_round_that_was_interrupted_can_be_waited_for(monkeypatch):
    def body(comm):
        net = model()
        with st.Overlap(net, comm=comm, **SMALL) as overlap:
            wait = sotto.Work.wait

            def interrupted(work, timeout=None):
                monkeypatch.setattr(sotto.Work, "wait", wait)
                raise KeyboardInterrupt

            if comm.rank == 0:
                monkeypatch.setattr(sotto.Work, "wait", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    loss_of(net, 0, 0).backward()
                with pytest.raises(sotto.InvalidStateError, match=r"call wait\(\) or step\(\)"):
                    loss_of(net, 0, 1).backward()
                net.zero_grad()
            go_on.wait()
            if comm.rank == 1:
                loss_of(net, 1, 0).backward()
            overlap.wait()
            net.zero_grad()
            loss_of(net, comm.rank, 1).backward()
            for p, wanted in zip(net.parameters(), means(model(), 2, 1)):
                torch.testing.assert_close(p.grad, wanted, rtol=1e-6, atol=1e-9)

    go_on = threading.Barrier(2, timeout=60)
    thread_ranks(2, body)


def test_bad_use():
    with sotto.create_comm(rank=0, world_size=1) as comm:
        net = model()
        with pytest.raises(sotto.InvalidArgumentError, match="overlap.order"):
            st.Overlap(net, order="random", comm=comm)
        with pytest.raises(sotto.InvalidArgumentError, match="overlap.unused"):
            st.Overlap(net, unused="none", comm=comm)
        with pytest.raises(sotto.UnsupportedError, match="no parameter that requires"):
            st.Overlap(torch.nn.Tanh(), comm=comm)
        with pytest.raises(sotto.UnsupportedError, match='"weight" is torch.float64'):
            st.Overlap(torch.nn.Linear(2, 2).double(), comm=comm)
        with st.Overlap(net, comm=comm) as overlap:
            loss_of(net, 0, 0).backward()
            loss = None
            with torch.no_grad():
                loss_of(net, 0, 0)  # an evaluation leaves the round alone
            overlap.wait()
            net.zero_grad()
            loss = loss_of(net, 0, 0)
            loss.backward(retain_graph=True)
            once = [p.grad.clone() for p in net.parameters()]
            loss.backward()  # is added to the means of the first, and a mean again
            assert all(torch.equal(p.grad, 2 * q) for p, q in zip(net.parameters(), once))
            optimizer = st.Adam(net.parameters(), comm=comm)
            loss_of(net, 0, 1).backward()
            with pytest.raises(sotto.InvalidStateError, match="averaged twice"):
                optimizer.step()
            optimizer.close()
        overlap.close()
        loss_of(net, 0, 2).backward()  # the hooks are gone
