"""The optimizers for PyTorch."""

import copy
import io
import pickle

import pytest
from ranks import run_ranks, thread_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402

KINDS = {
    st.Adam: {},
    st.AdamW: {},
    st.Lamb: {},
    st.Lion: {},
    st.OnebitAdam: {"freeze_step": 4},
    st.ZeroOneAdam: {
        "var_freeze_step": 5,
        "var_update_scaler": 2,
        "local_step_scaler": 4,
        "local_step_clipper": 2,
    },
    st.OnebitLamb: {"freeze_step": 4},
}
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)

torch.set_num_threads(1)
torch.manual_seed(3)
START = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))


def model(dtype=torch.float32):
    return copy.deepcopy(START).to(dtype)  # ranks are threads: they share torch's random numbers


def batch(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 20, generator=generator)
    return x.to(dtype), x[:, :5].to(dtype)


def loss_of(net, rank, step):
    x, y = batch(rank, step, next(net.parameters()).dtype)
    return torch.nn.functional.mse_loss(net(x), y)


def train(net, optimizer, rank, steps, scale=1.0):
    for step in steps:
        optimizer.zero_grad()
        (loss_of(net, rank, step) * scale).backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


def reference(make, steps):
    """A torch optimizer on the mean of two ranks' gradients."""
    net = model()
    optimizer = make(net.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        ((loss_of(net, 0, step) + loss_of(net, 1, step)) / 2).backward()
        optimizer.step()
    return list(net.parameters())


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (
            lambda p, c: st.AdamW(p, lr=0.01, weight_decay=0.1, comm=c),
            lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
        ),
        (
            lambda p, c: st.Adam(p, lr=0.01, weight_decay=0.1, adam_w_mode=False, comm=c),
            lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
        ),
    ],
    ids=["AdamW", "Adam"],
)
def test_two_ranks_train_as_torch_does_on_their_mean_gradient(mine, theirs):
    def body(comm):
        net = model()
        optimizer = mine(net.parameters(), comm)
        out = train(net, optimizer, comm.rank, range(10))
        optimizer.close()
        return out

    for params in thread_ranks(2, body):
        for p, q in zip(params, reference(theirs, 10)):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@every_kind
def test_every_kind_trains_alike_on_all_ranks(kind):
    def body(comm):
        net = model()
        optimizer = kind(net.parameters(), lr=0.01, comm=comm, **KINDS[kind])
        assert isinstance(optimizer, torch.optim.Optimizer)
        before = loss_of(net, 0, 999).item()
        train(net, optimizer, comm.rank, range(40))
        optimizer.synchronize_parameters()  # 0/1 Adam
        out = [p.detach().clone() for p in net.parameters()]
        assert loss_of(net, 0, 999).item() < 0.95 * before
        assert optimizer.info().stage == int(len(KINDS[kind]) > 0)
        optimizer.close()
        return out

    a, b = thread_ranks(2, body)
    assert all(torch.equal(p, q) for p, q in zip(a, b))


@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters_have_float32_masters(kind, dtype, comm):
    net = model(dtype)
    optimizer = kind(net.parameters(), lr=0.01, comm=comm, **KINDS[kind])
    pointers = [p.data_ptr() for p in net.parameters()]
    train(net, optimizer, 0, range(6))
    assert pointers == [p.data_ptr() for p in net.parameters()]
    for p, tensor in zip(net.parameters(), optimizer._tensors):
        assert tensor.master.dtype == torch.float32
        assert p.dtype == dtype
        if kind is not st.ZeroOneAdam or p.dtype == dtype:
            torch.testing.assert_close(p.detach().float(), tensor.copy.float(), rtol=0, atol=0)
    if kind is not st.ZeroOneAdam:  # whose masters stay at the last synchronisation
        for p, tensor in zip(net.parameters(), optimizer._tensors):
            assert torch.equal(p.detach(), tensor.master.to(dtype))
    optimizer.close()


def test_mixed_dtypes(comm):
    net = model(torch.bfloat16)
    net[2].float()
    optimizer = st.AdamW(net.parameters(), comm=comm)
    x, y = batch(0, 0)
    torch.nn.functional.mse_loss(net[2](net[1](net[0](x.bfloat16())).float()), y).backward()
    optimizer.step()
    assert optimizer._gradients._dtype == torch.float32
    optimizer.close()


@pytest.mark.parametrize("checkpoint", ["exact", "mean", "reset"])
@every_kind
def test_state_dict(kind, checkpoint):
    def body(comm):
        options = {"lr": 0.01, "comm": comm, "checkpoint": checkpoint, **KINDS[kind]}
        net = model()
        optimizer = kind(net.parameters(), **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for step in range(6):
            train(net, optimizer, comm.rank, [step])
            schedule.step()
        file = io.BytesIO()
        torch.save([optimizer.state_dict(), schedule.state_dict()], file)
        wanted = train(net, optimizer, comm.rank, range(6, 9))
        optimizer.close()

        file.seek(0)
        saved, lr = torch.load(file, weights_only=True)
        other = model()
        resumed = kind(other.parameters(), **options)
        resumed.load_state_dict(saved)
        schedule = torch.optim.lr_scheduler.StepLR(resumed, 2)
        schedule.load_state_dict(lr)
        assert resumed.info().step == 6
        assert resumed.info().lr == pytest.approx(1e-5)
        got = train(other, resumed, comm.rank, range(6, 9))
        resumed.close()
        exact = checkpoint == "exact" or kind in (st.Adam, st.AdamW, st.Lamb, st.Lion)
        for p, q in zip(got, wanted):
            if exact:
                assert torch.equal(p, q)
            else:
                assert (p - q).abs().mean() < 0.01

    thread_ranks(2, body)


def test_state_of_an_optimizer_that_made_no_step(comm):
    optimizer = st.AdamW(model().parameters(), lr=0.5, comm=comm)
    other = st.AdamW(model().parameters(), lr=0.1, comm=comm)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.5


def test_loaded_hyper_parameters_count(comm):
    net = model()
    optimizer = st.AdamW(net.parameters(), betas=(0.5, 0.6), weight_decay=0.3, comm=comm)
    train(net, optimizer, 0, range(2))
    other = st.AdamW(model().parameters(), comm=comm)
    train(model(), other, 0, range(1))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["betas"] == (0.5, 0.6)
    assert other.report("groups")["groups"][0]["betas"] == [0.5, 0.6]
    optimizer.close()
    other.close()


def test_another_model_is_refused_with_names(comm):
    net = model()
    optimizer = st.AdamW(net.named_parameters(), comm=comm)
    train(net, optimizer, 0, range(1))
    state = optimizer.state_dict()
    assert state["sotto"]["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    wider = torch.nn.Sequential(torch.nn.Linear(20, 31), torch.nn.Tanh(), torch.nn.Linear(31, 5))
    other = st.AdamW(wider.named_parameters(), comm=comm)
    text = r'"0.weight" \[31, 20\] here, "0.weight" \[30, 20\] in the state'
    with pytest.raises(sotto.InvalidArgumentError, match=text):
        other.load_state_dict(state)
    fewer = st.AdamW(torch.nn.Sequential(net[0]).named_parameters(), comm=comm)
    with pytest.raises(sotto.InvalidArgumentError, match=r'"2.weight" \[5, 30\] only in the state'):
        fewer.load_state_dict(state)
    with pytest.raises(
        sotto.InvalidArgumentError, match="the state is of AdamW, this optimizer is Lamb"
    ):
        st.Lamb(model().named_parameters(), comm=comm).load_state_dict(state)
    with pytest.raises(sotto.InvalidArgumentError, match='no entry "sotto"'):
        other.load_state_dict(wider.state_dict())
    optimizer.close()


def test_a_state_that_is_refused_changes_nothing(comm):
    net = model()
    optimizer = st.AdamW(net.parameters(), lr=0.5, comm=comm)
    train(net, optimizer, 0, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    state["sotto"]["blob"][100] ^= 1
    state["param_groups"][0]["lr"] = 0.25
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(sotto.InvalidArgumentError):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before))
    optimizer.close()


def test_exact_state_of_another_rank_is_refused():
    states = [None, None]

    def body(comm):
        net = model()
        optimizer = st.OnebitAdam(net.parameters(), freeze_step=2, checkpoint="exact", comm=comm)
        train(net, optimizer, comm.rank, range(4))
        states[comm.rank] = optimizer.state_dict()
        comm.barrier().wait()
        with pytest.raises(sotto.InvalidArgumentError, match="rank"):
            optimizer.load_state_dict(states[1 - comm.rank])
        optimizer.close()

    thread_ranks(2, body)


def test_groups_and_schedulers(comm):
    net = model()
    optimizer = st.AdamW(
        [
            {"params": net[0].parameters(), "lr": 0.0},
            {"params": net[2].parameters(), "weight_decay": 0.5},
        ],
        lr=0.01,
        comm=comm,
    )
    start = [p.detach().clone() for p in net.parameters()]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 if epoch < 2 else 0.0)
    for step in range(4):
        train(net, optimizer, 0, [step])
        schedule.step()
        if step == 1:
            middle = [p.detach().clone() for p in net.parameters()]
    assert [torch.equal(p, q) for p, q in zip(net.parameters(), start)] == [
        True,
        True,
        False,
        False,
    ]
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), middle))
    optimizer.close()


def test_closure(comm):
    net = model()
    optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(net, 0, 0)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    optimizer.close()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_wherever_they_lie(set_to_none, comm):
    results = []
    for make in (
        lambda p: st.AdamW(p, lr=0.01, weight_decay=0.0, comm=comm),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0),
    ):
        net = model()
        optimizer = make(net.parameters())
        for step in range(5):
            loss_of(net, 0, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        results.append([p.detach().clone() for p in net.parameters()])
    for p, q in zip(*results):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_gradients_that_need_a_copy(comm):
    """Not contiguous, absent, of another dtype: as if they were plain."""
    results = []
    for odd in (False, True):
        net = model()
        optimizer = st.AdamW(net.parameters(), lr=0.01, comm=comm)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(net, 0, step).backward()
            weight, bias = net[0].weight, net[2].bias
            bias.grad = None if odd else torch.zeros_like(bias)
            if odd:
                weight.grad = weight.grad.T.contiguous().T
                assert not weight.grad.is_contiguous()
            optimizer.step()
        results.append([p.detach().clone() for p in net.parameters()])
        optimizer.close()
    assert all(torch.equal(p, q) for p, q in zip(*results))


def test_accumulated_micro_batches(comm):
    net = model()
    optimizer = st.OnebitLamb(net.parameters(), lr=0.01, freeze_step=3, comm=comm)
    other = model()
    by_hand = st.OnebitLamb(other.parameters(), lr=0.01, freeze_step=3, comm=comm)
    for step in range(5):
        for part in range(3):
            optimizer.zero_grad()
            loss_of(net, part, step).backward()
            if part < 2:
                optimizer.accumulate()
        assert optimizer.info().micro_batches == 2
        optimizer.step()
        by_hand.zero_grad()
        (sum(loss_of(other, part, step) for part in range(3)) / 3).backward()
        by_hand.step()
    for p, q in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    optimizer.close()
    by_hand.close()


def test_masks(comm):
    net = model()
    mask = torch.ones(30, 20)
    mask[10:] = 0
    groups = [
        {"params": [net[0].weight], "exp_avg_mask": mask},
        {"params": [net[0].bias, *net[2].parameters()]},
    ]
    optimizer = st.OnebitLamb(groups, lr=0.01, freeze_step=3, comm=comm)
    before = net[0].weight.detach().clone()
    train(net, optimizer, 0, range(6))
    assert torch.equal(net[0].weight[10:], before[10:])
    assert (net[0].weight[:10] != before[:10]).all()
    state = optimizer.state_dict()
    assert "exp_avg_mask" not in state["param_groups"][0]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["exp_avg_mask"] is mask
    optimizer.close()
    for wrong, text in ((mask[:3], "has 60 elements"), (mask + 0.5, "other values than 0 and 1")):
        groups[0]["exp_avg_mask"] = wrong
        with pytest.raises(sotto.InvalidArgumentError, match=text):
            st.OnebitLamb(groups, comm=comm).info()


def test_frozen_parameters_take_no_part(comm):
    net = model()
    net[0].requires_grad_(False)
    optimizer = st.AdamW(net.parameters(), lr=0.1, comm=comm)
    before = net[0].weight.clone()
    train(net, optimizer, 0, range(2))
    assert torch.equal(net[0].weight, before)
    net[0].requires_grad_(True)
    with pytest.raises(sotto.InvalidStateError, match='"param0" has a gradient'):
        train(net, optimizer, 0, range(1))
    optimizer.close()


def test_dynamic_loss_scale(comm):
    net = model(torch.float16)
    optimizer = st.AdamW(net.parameters(), lr=0.01, loss_scale="dynamic", comm=comm)
    assert optimizer.loss_scale == 65536
    before = [p.detach().clone() for p in net.parameters()]
    loss_of(net, 0, 0).backward()
    net[0].weight.grad[0, 0] = float("inf")
    optimizer.step()
    assert optimizer.loss_scale == 32768
    assert optimizer.info().skipped_steps == 1
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before))
    optimizer.close()


def test_nonfinite_gradients(comm):
    net = model()
    optimizer = st.AdamW(net.parameters(), comm=comm)
    loss_of(net, 0, 0).backward()
    net[0].weight.grad[0, 0] = float("nan")
    with pytest.raises(sotto.NonfiniteError):
        optimizer.step()
    optimizer.zero_grad()
    train(net, optimizer, 0, range(1))
    optimizer.close()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p, c: st.AdamW(p, lr=-1.0, comm=c), "lr"),
        (lambda p, c: st.AdamW(p, amsgrad=True, comm=c), "amsgrad"),
        (lambda p, c: st.AdamW(p, mode="fast", comm=c), "mode is 'fast'"),
        (lambda p, c: st.OnebitAdam(p, mode="fast", comm=c), "mode"),
        (lambda p, c: st.OnebitAdam(p, object(), comm=c), "deepspeed is of type object"),
        (lambda p, c: st.OnebitAdam(p, max_grad_norm=1.0, comm=c), "use gradient_clipping"),
        (lambda p, c: st.OnebitAdam(p, freeze_step=0, comm=c), "freeze_step"),
        (lambda p, c: st.OnebitLamb(p, checkpoint="none", comm=c), "checkpoint"),
        (lambda p, c: st.OnebitLamb(p, sotto={"colour": 1}, comm=c), "colour"),
        (lambda p, c: st.AdamW(p, loss_scale="auto", comm=c), "loss_scale is 'auto'"),
        (lambda p, c: st.Lamb([{"params": list(p), "eps": None}], comm=c), "eps of a .* is None"),
        (lambda p, c: st.AdamW(p, betas=0.9, comm=c), "betas of a parameter group is 0.9; allowed"),
    ],
)
def test_wrong_arguments_are_told_by_the_constructor(make, text, comm):
    with pytest.raises(sotto.InvalidArgumentError, match=text):
        make(model().parameters(), comm)


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (torch.zeros(4, dtype=torch.float64), 'parameter "param0" is torch.float64'),
        (torch.zeros(4, 4).T[1:], "not dense and contiguous"),
        (torch.zeros(4, device="meta"), 'parameter "param0" is on meta'),
        (torch.zeros(4, dtype=torch.complex64), 'parameter "param0" is torch.complex64; allowed'),
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (
            torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "its memory format is channels_last; convert the model back",
        ),
        (torch.zeros(1, 4).expand(3, 4), r"shape \[3, 4\], strides \[0, 1\]; make it contiguous"),
        (torch.nn.LazyLinear(3).weight, "a lazy module"),
    ],
)
def test_wrong_parameters(p, text, comm):
    p = p if torch.nn.parameter.is_lazy(p) else p.requires_grad_(True)
    with pytest.raises(sotto.UnsupportedError, match=text):
        st.AdamW([p], comm=comm)
    good = torch.zeros(3, requires_grad=True)
    optimizer = st.AdamW([good], comm=comm)
    with pytest.raises(sotto.UnsupportedError, match=text.replace("param0", "param1")):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 1
    good.grad = torch.ones(3)
    optimizer.step()
    optimizer.close()


def test_shards_are_refused(comm):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for net, text in (
            (fully_shard(model(), mesh=mesh), "is a DTensor: every rank has a shard"),
            (
                FullyShardedDataParallel(model(), device_id=torch.device("cpu")),
                "belongs to FSDP: every rank",
            ),
        ):
            with pytest.raises(sotto.UnsupportedError, match=text):
                st.AdamW(net.parameters(), comm=comm)
    finally:
        dist.destroy_process_group()


def test_groups_are_added_before_the_first_step_alone(comm):
    net = model()
    optimizer = st.AdamW(net[0].parameters(), comm=comm)
    optimizer.info()  # makes the library's optimizer
    optimizer.add_param_group({"params": net[2].parameters(), "lr": 0.5})
    train(net, optimizer, 0, range(1))
    with pytest.raises(sotto.InvalidStateError, match="after the first step"):
        optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
    optimizer.param_groups[1]["params"].append(torch.zeros(3, requires_grad=True))
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(sotto.InvalidStateError, match='"param4" of group 1 was added after'):
            call()
    optimizer.close()


def test_compat_mode_and_uncompressed_groups():
    def body(comm):
        out = []
        for mode in ("strict", "compat"):
            net = model()
            groups = [
                {"params": net[0].parameters()},
                {"params": net[2].parameters(), "non_freeze": True},
            ]
            optimizer = st.OnebitAdam(groups, freeze_step=3, mode=mode, comm=comm)
            out.append(train(net, optimizer, comm.rank, range(6)))
            optimizer.close()
        return out

    (strict, compat), others = thread_ranks(2, body)
    assert all(torch.equal(p, q) for p, q in zip(strict + compat, others[0] + others[1]))
    assert not torch.equal(strict[0], compat[0])


def test_pickling_is_refused(comm):
    optimizer = st.AdamW(model().parameters(), comm=comm)
    for way in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="save its state_dict"):
            way(optimizer)


def test_without_a_comm_it_says_so():
    with pytest.raises(sotto.InvalidStateError, match="call sotto.init_process_group"):
        st.AdamW(model().parameters())


def test_collectives_of_tensors():
    def body(comm):
        comm.all_reduce(x := torch.full((2, 3), float(comm.rank + 1))).wait()
        half = torch.ones(4, dtype=torch.bfloat16)
        comm.all_reduce(half).wait()
        with pytest.raises(sotto.InvalidArgumentError, match="Tensor.contiguous"):
            comm.all_reduce(torch.zeros(3, 3).T)
        with pytest.raises(sotto.UnsupportedError, match="on meta"):
            comm.all_reduce(torch.zeros(3, device="meta"))
        with pytest.raises(sotto.UnsupportedError, match="dtype bool"):
            comm.all_reduce(torch.zeros(3, dtype=torch.bool))
        with pytest.raises(sotto.UnsupportedError, match="layout torch.sparse_coo"):
            comm.all_reduce(torch.zeros(3).to_sparse())
        return x, half

    for x, half in thread_ranks(2, body):
        assert (x == 3).all()
        assert (half == 2).all()


def test_broadcast_parameters():
    def body(comm):
        net = model()
        with torch.no_grad():
            net[0].weight.fill_(comm.rank)
        net.register_buffer("seen", torch.tensor([comm.rank == 1, True]))
        strided = torch.full((3, 4), float(comm.rank)).T
        st.broadcast_parameters(net, root=1, comm=comm)
        st.broadcast_parameters([strided], root=1, comm=comm)
        assert (net[0].weight == 1).all()
        assert net.seen.tolist() == [True, True]
        assert (strided == 1).all()

    thread_ranks(2, body)


def rank_trains(comm):
    net = model()
    st.broadcast_parameters(net)
    optimizer = st.OnebitAdam(net.parameters(), lr=0.01, freeze_step=4, sotto={"chunk_align": 8})
    train(net, optimizer, comm.rank, range(4))
    before = comm.counters().payload_bytes_sent
    n = sum(p.numel() for p in train(net, optimizer, comm.rank, range(10)))
    sent = (comm.counters().payload_bytes_sent - before) / 10
    assert sent < 2.1 * n / 8 * (comm.size - 1) / comm.size + 500 * comm.size, sent
    optimizer.close()


@pytest.mark.parametrize("size", [2, 4])
def test_processes(size):
    run_ranks(size, __file__, "rank_trains")
