"""Modules that change under an Overlap: frozen, replaced and added parameters, compiled ones."""

import copy
import pickle
import warnings

import pytest
from ranks import thread_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from test_torch_overlap import SMALL, batch, loss_of, means, model  # noqa: E402

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402

torch.set_num_threads(1)


def assert_means(net, alone, comm, step):
    for p, wanted in zip(net.parameters(), means(alone, comm.size, step)):
        torch.testing.assert_close(p.grad, wanted, rtol=1e-6, atol=1e-9)


def test_a_parameter_that_requires_a_gradient_later_is_an_error():
    def body(comm):
        net, alone = model(), model()
        net[0].requires_grad_(False)
        overlap = st.Overlap(net, comm=comm, **SMALL)
        loss_of(net, comm.rank, 0).backward()
        net[0].requires_grad_(True)
        with pytest.raises(sotto.InvalidStateError, match='"0.weight" requires a gradient now'):
            loss_of(net, comm.rank, 1)
        overlap.close()
        net.zero_grad()
        with st.Overlap(net, comm=comm, **SMALL):
            loss_of(net, comm.rank, 1).backward()
        assert_means(net, alone, comm, 1)

    thread_ranks(2, body)


def test_ranks_that_train_other_parameters_are_told_which():
    """Here they are of one size: the averages would mix gradients of different parameters."""

    def body(comm):
        net = model()
        net[2 * comm.rank].requires_grad_(False)
        wanted = 'parameter "0.weight" is frozen on rank 0, float32 .48, 48. on rank 1'
        for keys in ({}, {"unused": "zero"}):
            with pytest.raises(sotto.ProtocolError, match=wanted):
                st.Overlap(net, comm=comm, **keys, **SMALL)
        net = model()
        if comm.rank == 1:
            net[4] = torch.nn.Linear(12, 192)
        shapes = r'"4.weight" is float32 \[48, 48\] on rank 0, float32 \[192, 12\] on rank 1'
        with pytest.raises(sotto.ProtocolError, match=shapes):
            st.Overlap(net, comm=comm, **SMALL)
        net = model()
        if comm.rank == 1:
            net.spare = torch.nn.Linear(3, 3)
        with pytest.raises(sotto.ProtocolError, match="not there on rank 0, float32 .3, 3. on"):
            st.Overlap(net, comm=comm, **SMALL)
        net = model()
        layers = net if comm.rank == 0 else torch.nn.ModuleDict(reversed(net._modules.items()))
        with pytest.raises(sotto.ProtocolError, match='0 is "0.weight" on rank 0, "8.weight" on'):
            st.Overlap(layers, comm=comm, **SMALL)
        with st.Overlap(net, comm=comm, **SMALL):
            loss_of(net, comm.rank, 1).backward()
        assert_means(net, model(), comm, 1)

    thread_ranks(2, body)


def test_ranks_that_freeze_other_parameters_of_an_optimizer_are_told_which():
    def body(comm):
        net = model()
        optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
        loss_of(net, comm.rank, 0).backward()
        optimizer.step()
        net[0].requires_grad_(comm.rank != 1)
        wanted = 'parameter "[^"]*" is float32 .48, 48. on rank 0, frozen on rank 1'
        with pytest.raises(sotto.ProtocolError, match=wanted):
            st.Overlap(net, optimizer=optimizer, unused="zero")
        optimizer.close()

    thread_ranks(2, body)


def test_added_parameters_are_an_error():
    def body(comm):
        net = model()
        with st.Overlap(net, comm=comm, **SMALL):
            net.append(torch.nn.Linear(48, 48))
            with pytest.raises(sotto.InvalidStateError, match='"10.weight" was not in the model'):
                loss_of(net, comm.rank, 0)
            with torch.no_grad():
                loss_of(net, comm.rank, 0)  # an evaluation averages nothing
            del net[10]
            loss_of(net, comm.rank, 0).backward()
            assert_means(net, model(), comm, 0)

    thread_ranks(2, body)


def assigned(net):
    net.load_state_dict({name: v.clone() for name, v in net.state_dict().items()}, assign=True)


def test_assigned_parameters_are_averaged():
    def body(comm):
        net, alone = model(), model()
        with st.Overlap(net, comm=comm, **SMALL) as overlap:
            for step in range(3):
                net.zero_grad()
                loss_of(net, comm.rank, step).backward()
                assert_means(net, alone, comm, step)
                assigned(net if step else net[2])  # all of it, or a part
            assert overlap.info().rounds == 3
            net[8] = copy.deepcopy(alone[8])  # another module with parameters of its own
            net.zero_grad()
            loss_of(net, comm.rank, 0).backward()
            assert_means(net, alone, comm, 0)
            net[0].weight = torch.nn.Parameter(torch.zeros(48, 3))
            with pytest.raises(sotto.InvalidStateError, match='"0.weight" has shape'):
                loss_of(net, comm.rank, 0)

    thread_ranks(2, body)


@pytest.mark.parametrize("leaves", [False, True])
def test_tensors_in_the_place_of_parameters_are_none(leaves):
    """An inner step of meta-learning: they are there during a call alone."""

    def loss(net, rank, step):
        values = {name: p * 2 for name, p in net.named_parameters()}
        if leaves:
            values = {name: torch.nn.Parameter(v.detach()) for name, v in values.items()}
        torch.nn.Linear(1, 1)  # any module has new parameters: the next forward() looks for them
        first = torch.func.functional_call(net, values, batch(rank, step)).square().mean()
        return first + loss_of(net, rank, step)

    def body(comm):
        net, alone = model(), model()
        wanted = [torch.zeros_like(p) for p in alone.parameters()]
        for rank in range(2):
            alone.zero_grad()
            loss(alone, rank, 0).backward()
            wanted = [w + p.grad / 2 for w, p in zip(wanted, alone.parameters())]
        with st.Overlap(net, comm=comm, **SMALL) as overlap:
            loss(net, comm.rank, 0).backward()
            for p, w in zip(net.parameters(), wanted):
                torch.testing.assert_close(p.grad, w, rtol=1e-5, atol=1e-8)
            assert overlap.info().rounds == 1

    thread_ranks(2, body)


def test_assigned_parameters_of_an_optimizer_are_averaged_in_backward():
    def body(comm):
        net = model()
        optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
        with st.Overlap(net, optimizer=optimizer) as overlap:
            for step in range(3):
                optimizer.zero_grad()
                loss_of(net, comm.rank, step).backward()
                optimizer.step()
                assigned(net if step else net[2])
            assert overlap.info().rounds == 3
        optimizer.close()

    thread_ranks(2, body)


def test_parameters_added_to_an_optimizer_are_an_error():
    def body(comm):
        net = model()
        optimizer = st.AdamW(net[:8].parameters(), lr=0.01, comm=comm)
        with st.Overlap(net, optimizer=optimizer):
            optimizer.add_param_group({"params": list(net[8].parameters())})
            with pytest.raises(sotto.InvalidStateError, match="other parameters.*add_param_group"):
                loss_of(net, comm.rank, 0).backward()
        optimizer.zero_grad()
        with st.Overlap(net, optimizer=optimizer) as overlap:
            loss_of(net, comm.rank, 0).backward()
            optimizer.step()
            assert overlap.info().rounds == 1
        optimizer.close()

    thread_ranks(2, body)


def test_frozen_parameters_have_no_gradient():
    """Zeros would let weight decay and momentum move them."""

    def body(comm):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
        with st.Overlap(net, unused="zero", comm=comm, **SMALL):
            for step in range(3):
                net[0].requires_grad_(step != 1)
                before = net[0].weight.clone()
                optimizer.zero_grad()
                loss_of(net, comm.rank, step).backward()
                optimizer.step()
                assert torch.equal(net[0].weight, before) == (step == 1)

    thread_ranks(2, body)


def test_a_parameter_that_one_rank_alone_has_frozen_is_told_there():
    """It would move on the others only."""

    def body(comm):
        net = model()
        with st.Overlap(net, unused="zero", comm=comm, **SMALL):
            loss_of(net, comm.rank, 0).backward()
            net.zero_grad()
            net[2].weight.requires_grad_(comm.rank == 0)
            if comm.rank == 0:
                loss_of(net, comm.rank, 1).backward()
                return
            with pytest.raises(
                sotto.InvalidStateError, match='"2.weight" is frozen on this rank and has a'
            ):
                loss_of(net, comm.rank, 1).backward()
            assert net[2].weight.grad is None

    thread_ranks(2, body)


def test_gradients_of_an_earlier_backward_stay():
    """Two losses, each of which reaches a part of the model."""

    def losses(net, rank):
        x = torch.full((3, 48), 1.0 + rank)
        return net[:4](x).square().mean(), net[4:](x).square().mean()

    def body(comm):
        net, alone = model(), model()
        wanted = [torch.zeros_like(p) for p in alone.parameters()]
        for rank in range(2):
            alone.zero_grad()
            sum(losses(alone, rank)).backward()
            wanted = [w + p.grad / 2 for w, p in zip(wanted, alone.parameters())]
        with st.Overlap(net, unused="zero", comm=comm, **SMALL):
            for loss in losses(net, comm.rank):
                loss.backward()
        for p, w in zip(net.parameters(), wanted):
            torch.testing.assert_close(p.grad, w, rtol=1e-5, atol=1e-8)

    thread_ranks(2, body)


def test_a_parameter_has_one_overlap():
    def body(comm):
        net = model()
        optimizer = st.AdamW(net.parameters(), comm=comm)
        with st.Overlap(net, comm=comm):
            for beside in (net, net[0]):
                with pytest.raises(sotto.InvalidStateError, match='weight" has an Overlap already'):
                    st.Overlap(beside, comm=comm)
            with pytest.raises(sotto.InvalidStateError, match="has an Overlap already"):
                st.Overlap(net, optimizer=optimizer)
        st.Overlap(net, comm=comm).close()
        optimizer.close()

    thread_ranks(1, body)


def test_gradients_that_cannot_be_averaged_are_named():
    def body(comm):
        net = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 4))
        refused = pytest.raises(sotto.UnsupportedError, match='"0.weight" has a gradient with lay')
        with st.Overlap(net, comm=comm), refused:
            net(torch.arange(3)).sum().backward()
        net = model()
        net[2].weight.grad = torch.zeros(48, 48).t()
        refused = pytest.raises(sotto.UnsupportedError, match='"2.weight" has a gradient with str')
        with st.Overlap(net, comm=comm), refused, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of the same gradient
            loss_of(net, comm.rank, 0).backward()

    thread_ranks(1, body)


def narrower(net):
    net[8].weight.data, net[8].bias.data = torch.zeros(7, 48), torch.zeros(7)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda net: net.bfloat16(), "elements of torch.bfloat16, and had .* of torch.float32"),
        (narrower, "7 elements of torch.float32, and had 48 of torch.float32"),
    ],
    ids=["dtype", "size"],
)
def test_gradients_of_another_kind_are_named(change, text):
    def body(comm):
        net = model()
        refused = f'"8.bias" has a gradient of .*{text} when the Overlap was made'
        with st.Overlap(net, bucket_mb=0, first_bucket_mb=0, comm=comm):
            change(net)
            x = batch(comm.rank, 0).to(net[0].weight.dtype)
            with pytest.raises(sotto.InvalidStateError, match=refused):
                net(x).square().mean().backward()

    thread_ranks(1, body)


def test_a_compiled_module_is_one_graph():
    def body(comm):
        net, alone = model(), model()
        with st.Overlap(net, comm=comm, **SMALL) as overlap:
            compiled = torch.compile(net, backend="eager", fullgraph=True)
            for step in range(2):
                net.zero_grad()
                loss_of(compiled, comm.rank, step).backward()
                assert_means(net, alone, comm, step)
            assert overlap.info().rounds == 2

    thread_ranks(1, body)


def test_arguments():
    with sotto.create_comm(rank=0, world_size=1) as comm:
        for wrong in (-1, float("nan"), float("inf"), "25"):
            with pytest.raises(sotto.InvalidArgumentError, match="^bucket_mb is .*; allowed"):
                st.Overlap(model(), bucket_mb=wrong, comm=comm)
        with st.Overlap(model(), comm=comm) as overlap:
            for copied in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="cannot be pickled or copied: save its state"):
                    copied(overlap)
