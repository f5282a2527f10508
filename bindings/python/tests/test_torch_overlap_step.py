"""Steps of this package's optimizers that begin in backward()."""

import contextlib

import pytest
from ranks import thread_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from test_torch_overlap import loss_of, model  # noqa: E402

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402

torch.set_num_threads(1)
BUCKETS = {"sotto": {"granularity": "bucket", "bucket_elements": 8192}}
MADE = {
    "adamw": lambda p, comm: st.AdamW(p, lr=0.01, comm=comm, gradient_clipping=0.5),
    "lamb": lambda p, comm: st.Lamb(p, lr=0.01, comm=comm),
    "int8": lambda p, comm: st.Adam(
        p, lr=0.01, comm=comm, sotto={"gradient_codec": {"type": "int8"}}
    ),
    "onebit_adam": lambda p, comm: st.OnebitAdam(p, lr=0.01, freeze_step=3, comm=comm, **BUCKETS),
    "onebit_lamb": lambda p, comm: st.OnebitLamb(p, lr=0.01, freeze_step=3, comm=comm),
    "zeroone": lambda p, comm: st.ZeroOneAdam(p, lr=0.01, var_freeze_step=4, comm=comm),
}


def flat(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def backward(net, optimizer, comm, step):
    optimizer.zero_grad()
    loss_of(net, comm.rank, step).backward()


@pytest.mark.parametrize("kind", MADE)
def test_steps_have_the_bits_of_steps_without(kind):
    def body(comm):
        trained = []
        for overlapped in (False, True):
            net = model()
            optimizer = MADE[kind](net.parameters(), comm)
            keys = {} if "onebit_adam" in kind else {"bucket_mb": 0.02, "first_bucket_mb": 0.001}
            overlap = st.Overlap(net, optimizer=optimizer, **keys) if overlapped else None
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            for step in range(8):
                backward(net, optimizer, comm, step)
                optimizer.step()
                schedule.step()
            if overlap is not None:
                assert overlap.info().rounds == 8
                overlap.close()
                assert optimizer.info().step == 8
                backward(net, optimizer, comm, 8)  # as without
            else:
                backward(net, optimizer, comm, 8)
            optimizer.step()
            trained.append(flat(net))
            optimizer.close()
        assert (trained[0] == trained[1]).all()

    thread_ranks(3, body)


def test_half_parameters_micro_batches_and_unused_ones():
    def body(comm):
        trained = []
        for overlapped in (False, True):
            net = model().bfloat16()
            spare = torch.nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
            net.register_parameter("spare", spare)
            optimizer = st.OnebitAdam(net.parameters(), lr=0.01, freeze_step=3, comm=comm)
            overlap = (
                st.Overlap(net, optimizer=optimizer, unused="zero", bucket_mb=0.01)
                if overlapped
                else None
            )
            for step in range(6):
                optimizer.zero_grad()
                for micro in range(2):
                    x = torch.randn(
                        6, 48, generator=torch.Generator().manual_seed(step * 2 + micro)
                    )
                    loss = net(x.bfloat16()).float().square().mean() / 2
                    if step % 2 == 0 and micro == 0:
                        loss = loss + spare.float().sum() * (1 + comm.rank)
                    if overlap is not None and micro == 0:
                        with overlap.no_sync():
                            loss.backward()
                    else:
                        loss.backward()
                if spare.grad is None and overlap is None:
                    spare.grad = torch.zeros_like(spare)
                optimizer.step()
            trained.append(flat(net))
            if overlap is not None:
                assert overlap.info().rounds == 6
                overlap.close()
            optimizer.close()
        assert (trained[0] == trained[1]).all()

    thread_ranks(2, body)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("out of memory")


def test_a_failed_backward_updates_nothing_on_any_rank():
    def body(comm):
        net = model()
        optimizer = st.OnebitAdam(net.parameters(), lr=0.01, freeze_step=2, comm=comm, **BUCKETS)
        with st.Overlap(net, optimizer=optimizer) as overlap:
            for step in range(4):
                backward(net, optimizer, comm, step)
                optimizer.step()
                before = flat(net)
                optimizer.zero_grad()
                if comm.rank == 1:
                    with pytest.raises(RuntimeError, match="out of memory"), overlap.round():
                        net[5:](Fails.apply(net[:5](torch.ones(2, 48)))).sum().backward()
                else:
                    loss_of(net, comm.rank, 50).backward()
                with pytest.raises(sotto.CancelledError, match="rank 1 has withdrawn.*out of mem"):
                    optimizer.step()
                assert (flat(net) == before).all()
        optimizer.close()

    thread_ranks(2, body)


@pytest.mark.parametrize("inside", [True, False])
def test_a_loop_goes_on_behind_a_step_that_has_failed(inside):
    """The rank whose backward() has failed does not come to step()."""

    def body(comm):
        net, other = model(), model()
        optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
        plain = st.AdamW(other.parameters(), lr=0.01, comm=comm)
        failed = []
        with st.Overlap(net, optimizer=optimizer) as overlap:
            for step in range(4):
                optimizer.zero_grad()
                try:
                    with overlap.round() if inside else contextlib.nullcontext():
                        if step == 1 and comm.rank == 1:
                            net[5:](Fails.apply(net[:5](torch.ones(2, 48)))).sum().backward()
                        loss_of(net, comm.rank, step).backward()
                    optimizer.step()
                except (RuntimeError, sotto.CancelledError):
                    failed.append(step)
                else:
                    backward(other, plain, comm, step)
                    plain.step()
            assert failed == [1]
            assert (flat(net) == flat(other)).all()
        optimizer.close()
        plain.close()

    thread_ranks(2, body)


def test_an_exception_behind_backward_leaves_the_step_as_it_is():
    """It has begun on all ranks, and the rank that fails does not come to step()."""

    def body(comm):
        net, other = model(), model()
        optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
        plain = st.AdamW(other.parameters(), lr=0.01, comm=comm)
        with st.Overlap(net, optimizer=optimizer) as overlap:
            for step in range(4):
                with contextlib.suppress(ValueError), overlap.round():
                    backward(net, optimizer, comm, step)
                    if step == 1 and comm.rank == 1:
                        raise ValueError("a log cannot be written")
                    optimizer.step()
                backward(other, plain, comm, step)
                plain.step()
            assert overlap.info().rounds == 4
        assert (flat(net) == flat(other)).all()
        optimizer.close()
        plain.close()

    thread_ranks(2, body)


@pytest.mark.parametrize("steps_too", [False, True])
def test_a_step_that_was_waited_for_is_not_made_again(steps_too):
    def body(comm):
        net, other = model(), model()
        optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
        plain = st.AdamW(other.parameters(), lr=0.01, comm=comm)
        with st.Overlap(net, optimizer=optimizer) as overlap:
            for step in range(3):
                backward(net, optimizer, comm, step)
                overlap.wait()
                loss_of(net, comm.rank, step)
                if steps_too:
                    optimizer.step()
                backward(other, plain, comm, step)
                plain.step()
        assert (flat(net) == flat(other)).all()
        optimizer.close()
        plain.close()

    thread_ranks(2, body)


def test_gradients_cannot_change_inside_a_round():
    def body(comm):
        net = model()
        optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
        with st.Overlap(net, optimizer=optimizer) as overlap:
            loss_of(net, comm.rank, 0).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            text = (
                r'gradient of "param0" was changed between backward\(\) and step\(\).*gradient_clip'
            )
            with pytest.raises(sotto.InvalidStateError, match=text):
                optimizer.step()
            for step in (1, 2):
                optimizer.zero_grad(set_to_none=False)
                loss_of(net, comm.rank, step).backward()
                optimizer.step()
            assert overlap.info().rounds == 3
        optimizer.close()

    thread_ranks(2, body)


def test_a_learning_rate_cannot_change_inside_a_round():
    def body(comm):
        net = model()
        optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
        with st.Overlap(net, optimizer=optimizer):
            backward(net, optimizer, comm, 0)
            optimizer.param_groups[0]["lr"] = 0.5
            with pytest.raises(sotto.InvalidStateError, match="lr was changed from 0.01 to 0.5"):
                optimizer.step()
            backward(net, optimizer, comm, 1)
            optimizer.step()
        optimizer.close()

    thread_ranks(2, body)


def test_state_and_moved_parameters():
    def body(comm):
        net = model()
        optimizer = st.OnebitLamb(net.parameters(), lr=0.01, freeze_step=3, comm=comm)
        overlap = st.Overlap(net, optimizer=optimizer, bucket_mb=0.02)
        for step in range(5):
            backward(net, optimizer, comm, step)
            optimizer.step()
        saved = optimizer.state_dict()
        other = model()
        again = st.OnebitLamb(other.parameters(), lr=0.01, freeze_step=3, comm=comm)
        beside = st.Overlap(other, optimizer=again, bucket_mb=0.02)
        again.load_state_dict(saved)
        for p in net.parameters():
            p.data = p.data.clone()
        for step in range(5, 8):
            for net_of, of in ((net, optimizer), (other, again)):
                backward(net_of, of, comm, step)
                of.step()
        assert (flat(net) == flat(other)).all()
        for each in (overlap, beside, optimizer, again):
            each.close()

    # Each rank loads what it has saved itself.
    thread_ranks(1, body)


def test_unused_parameters_keep_the_gradient_that_they_have():
    def body(comm):
        trained = []
        for overlapped in (False, True):
            net = model()
            net.register_parameter("spare", torch.nn.Parameter(torch.ones(7)))
            optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
            overlap = st.Overlap(net, optimizer=optimizer, unused="zero") if overlapped else None
            for step in range(3):
                loss = loss_of(net, comm.rank, step)
                (loss + net.spare.sum() if step == 0 else loss).backward()
                optimizer.step()
            trained.append(flat(net))
            if overlap is not None:
                overlap.close()
            optimizer.close()
        assert (trained[0] == trained[1]).all()

    thread_ranks(2, body)


@pytest.mark.parametrize("kind", MADE)
def test_frozen_parameters_stand_still(kind):
    def body(comm):
        trained = []
        for overlapped in (False, True):
            net = model()
            optimizer = MADE[kind](net.parameters(), comm)
            first = next(net.parameters())
            overlap = st.Overlap(net, optimizer=optimizer, unused="zero") if overlapped else None
            for step in range(9):
                first.requires_grad_(not 2 <= step < 6)
                before = first.detach().clone()
                backward(net, optimizer, comm, step)
                optimizer.step()
                if not first.requires_grad:
                    assert torch.equal(first, before)
            if overlap is not None:
                overlap.close()
            trained.append(flat(net))
            optimizer.close()
        assert torch.equal(*trained)

    thread_ranks(2, body)


def test_errors():
    def body(comm):
        net, other = model(), model(1)
        optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
        with pytest.raises(sotto.InvalidArgumentError, match="none of the model"):
            st.Overlap(other, optimizer=optimizer)
        with pytest.raises(sotto.InvalidArgumentError, match="both given"):
            st.Overlap(net, optimizer=optimizer, comm=comm)
        with pytest.raises(sotto.InvalidArgumentError, match="set sotto.gradient_codec"):
            st.Overlap(net, optimizer=optimizer, codec="int8")
        with st.Overlap(net, optimizer=optimizer) as overlap:
            with pytest.raises(sotto.InvalidStateError, match="has an Overlap already"):
                st.Overlap(net, optimizer=optimizer)
            assert overlap.report()["why"] == "the step sends no gradients"
        optimizer.close()

    thread_ranks(1, body)
