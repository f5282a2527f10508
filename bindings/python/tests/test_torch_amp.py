"""Optimizers beside torch.amp.GradScaler."""

import pytest
from ranks import thread_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from test_torch_optim import KINDS, every_kind, loss_of, model  # noqa: E402

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402

SCALE = 2.0**10
OVERFLOWS = (2, 5)  # steps in which one rank's gradients do


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


def scaled_step(net, optimizer, scaler, rank, step, *, unscale=False, overflow=False):
    optimizer.zero_grad()
    scaler.scale(loss_of(net, rank, step)).backward()
    if overflow:
        net[0].weight.grad[0, 0] = float("inf")
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@every_kind
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscaled"])
def test_an_overflow_of_one_rank_is_left_out_by_all(kind, unscale):
    def body(comm):
        net, alone = model(), model()
        optimizer = kind(net.parameters(), lr=0.01, comm=comm, **KINDS[kind])
        plain = kind(alone.parameters(), lr=0.01, comm=comm, **KINDS[kind])
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
        for step in range(8):
            overflow = step in OVERFLOWS
            mine = overflow and comm.rank == step % 2
            before = [p.detach().clone() for p in net.parameters()]
            scaled_step(net, optimizer, scaler, comm.rank, step, unscale=unscale, overflow=mine)
            if overflow:
                assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before))
                continue
            plain.zero_grad()
            loss_of(alone, comm.rank, step).backward()
            plain.step()
        assert scaler.get_scale() == SCALE / 4  # on both ranks
        assert optimizer.info().step == plain.info().step == 6
        for p, q in zip(net.parameters(), alone.parameters()):
            assert torch.equal(p, q)  # the scale is a power of two
        assert not hasattr(optimizer, "found_inf")
        optimizer.close()
        plain.close()

    thread_ranks(2, body)


def test_another_scaler_and_a_failed_step(comm):
    """What a scaler has left behind from a step that failed does not count in the next one."""
    net, alone = model(), model()
    optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
    plain = st.AdamW(alone.parameters(), lr=0.01, comm=comm)
    first = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaled_step(net, optimizer, first, 0, 0)
    second = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(sotto.InvalidArgumentError, match="lr"):
        scaled_step(net, optimizer, second, 0, 1)
    optimizer.param_groups[0]["lr"] = 0.01
    third = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in (1, 2):
        scaled_step(net, optimizer, third, 0, step)
    for step in range(3):
        plain.zero_grad()
        loss_of(alone, 0, step).backward()
        plain.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), alone.parameters()))
    optimizer.zero_grad()
    loss_of(net, 0, 3).backward()
    optimizer.step()  # and without one
    assert optimizer.info().step == 4
    optimizer.close()
    plain.close()


def test_the_scaler_that_calls_is_told():
    """Not one that is left from a step which failed, and was not updated."""

    def body(comm):
        net = model()
        optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
        old = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer.param_groups[0]["lr"] = -1.0
        with pytest.raises(sotto.InvalidArgumentError, match="lr"):
            scaled_step(net, optimizer, old, comm.rank, 0)
        optimizer.param_groups[0]["lr"] = 0.01
        new = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaled_step(net, optimizer, new, comm.rank, 1, overflow=comm.rank == 0)
        assert new.get_scale() == 4  # on both ranks
        assert old.get_scale() == 4
        optimizer.close()

    thread_ranks(2, body)


def test_a_rank_without_gradients_is_told_by_all():
    def body(comm):
        net = model()
        optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(loss_of(net, comm.rank, 0)).backward()
        if comm.rank == 1:
            optimizer.zero_grad()
        with pytest.raises(sotto.ProtocolError, match="had no gradient"):
            scaler.step(optimizer)

    thread_ranks(2, body)


def test_a_disabled_scaler_does_nothing(comm):
    net = model()
    optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
    scaled_step(net, optimizer, torch.amp.GradScaler("cpu", enabled=False), 0, 0)
    assert optimizer.info().step == 1
    optimizer.close()


@pytest.mark.parametrize(
    ("dtype", "options", "text"),
    [
        (torch.float16, {}, "float16 parameters.*loss_scale='dynamic'"),
        (torch.float32, {"loss_scale": 8.0}, "a loss_scale of its own"),
    ],
    ids=["half", "loss_scale"],
)
def test_what_does_not_go_with_a_scaler(dtype, options, text, comm):
    net = model(dtype)
    optimizer = st.AdamW(net.parameters(), comm=comm, **options)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(sotto.UnsupportedError, match=text):
        scaled_step(net, optimizer, torch.amp.GradScaler("cpu", init_scale=2.0), 0, 0)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before))


def test_micro_batches_that_the_library_has_added_up(comm):
    net = model()
    optimizer = st.AdamW(net.parameters(), comm=comm)
    loss_of(net, 0, 0).backward()
    optimizer.accumulate()
    with pytest.raises(sotto.UnsupportedError, match=r"accumulate\(\) has added up"):
        scaled_step(net, optimizer, torch.amp.GradScaler("cpu"), 0, 1)
    optimizer.zero_grad()
    loss_of(net, 0, 1).backward()
    optimizer.step()
    assert optimizer.info().step == 1
    optimizer.close()


def test_an_overlap_sends_before_a_scaler_has_looked(comm):
    net = model()
    optimizer = st.AdamW(net.parameters(), comm=comm)
    with st.Overlap(net, optimizer=optimizer) as overlap:
        with pytest.raises(sotto.UnsupportedError, match="loss_scale='dynamic'"):
            scaled_step(net, optimizer, torch.amp.GradScaler("cpu"), 0, 0)
        assert overlap.info().rounds <= 1
    optimizer.close()
