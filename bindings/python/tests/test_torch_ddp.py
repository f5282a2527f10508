"""The communication hook for DistributedDataParallel."""

import contextlib
import pickle

import pytest
from ranks import meeting_file, run_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402

torch.set_num_threads(1)


def gloo(comm):
    """torch's own process group of the same ranks."""
    dist.init_process_group(
        "gloo", init_method=meeting_file(), rank=comm.rank, world_size=comm.size
    )


def model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)]).to(dtype)


def gradients(net, rank, step):
    torch.manual_seed(1000 * step + rank)
    net.zero_grad()
    net(torch.randn(8, 64).to(next(net.parameters()).dtype)).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()]).float()


def wrapped(dtype=torch.float32):
    return DistributedDataParallel(model(dtype=dtype), bucket_cap_mb=0.02)


def true_mean(comm, step, dtype=torch.float32):
    net = model(dtype=dtype)
    return torch.stack([gradients(net, r, step) for r in range(comm.size)]).mean(0)


def rank_codecs(comm):
    for dtype in (torch.float32, torch.bfloat16):
        for codec in (None, "bf16", "int8", "int4", "onebit"):
            state = st.DDPState(codec)
            net = wrapped(dtype)
            net.register_comm_hook(state, st.ddp_hook)
            first, wanted = gradients(net, comm.rank, 0), true_mean(comm, 0, dtype)
            torch.testing.assert_close(
                first, wanted, rtol=2e-2, atol=2e-3 if dtype == torch.bfloat16 else 1e-6
            )
            total, sum_of_means = 0, 0
            for step in range(1, 9):
                total = total + gradients(net, comm.rank, step)
                sum_of_means = sum_of_means + true_mean(comm, step, dtype)
            error = (total - sum_of_means).norm() / sum_of_means.norm()
            bound = {None: 0.01, "bf16": 0.01, "int8": 0.01, "int4": 0.1, "onebit": 0.8}[codec]
            assert error < bound, (codec, dtype, error)
            assert (len(state._codecs) > 1) == (codec is not None)
            state.close()
    with pytest.raises(RuntimeError, match="the DDPState of ddp_hook is closed"):
        gradients(net, comm.rank, 0)


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_are_the_mean_up_to_what_the_codec_leaves_over(done, size):
    done(size, "rank_codecs")


def rank_resumes(comm):

    def run(state, steps):
        net = wrapped()
        net.register_comm_hook(state, st.ddp_hook)
        return [gradients(net, comm.rank, step) for step in steps]

    def saved_after(steps, mode="exact"):
        state = st.DDPState("onebit")
        run(state, steps)
        out = state.state_dict(mode)
        state.close()
        return out

    halfway = saved_after(range(5))
    assert len(halfway["buckets"]) > 1
    state = st.DDPState("onebit")
    wanted = run(state, range(8))
    state.close()

    resumed = st.DDPState("onebit")
    resumed.load_state_dict(halfway)
    assert resumed.state_dict()["buckets"].keys() == halfway["buckets"].keys()
    got = run(
        resumed, [0, 5, 6, 7]
    )  # the first step of a process is exact and leaves residuals alone
    assert all(torch.equal(a, b) for a, b in zip(got[1:], wanted[5:]))
    resumed.close()

    mean = saved_after(range(5), "mean")
    other = st.DDPState("onebit")
    other.load_state_dict(mean)
    run(other, range(3))
    other.close()

    refused = st.DDPState("int8")
    with pytest.raises(sotto.InvalidArgumentError, match="the state is of codec onebit"):
        refused.load_state_dict(halfway)
    refused.close()

    wrong = st.DDPState("onebit")
    halfway["buckets"][0]["count"] += 1
    wrong.load_state_dict(halfway)
    with pytest.raises(Exception, match="the loaded residual of bucket 0"):
        run(wrong, range(2))
    wrong.close()


def test_residuals_are_saved_and_loaded(done):
    done(2, "rank_resumes")


def rank_meets_nan(comm):
    state = st.DDPState("int8")
    net = wrapped()
    net.register_comm_hook(state, st.ddp_hook)
    gradients(net, comm.rank, 0)
    for _ in range(2):
        with pytest.raises(sotto.NonfiniteError):
            (net(torch.randn(8, 64)).sum() * (float("nan") if comm.rank == 1 else 1)).backward()
        torch.testing.assert_close(
            gradients(net, comm.rank, 1), true_mean(comm, 1), rtol=0.1, atol=1e-2
        )
    state.close()


def test_errors_of_averages_keep_their_type(done):
    done(2, "rank_meets_nan")


def rank_comm_of_group(comm):
    with st.comm_of_process_group(timeout=60) as other:
        assert (other.rank, other.size) == (comm.rank, comm.size)
        x = torch.ones(3)
        other.all_reduce(x).wait()
        assert (x == comm.size).all()


def test_a_comm_of_torchs_process_group(done):
    done(2, "rank_comm_of_group")


def trained(net, optimizer, rank, steps, around=contextlib.nullcontext, evaluate=False):
    for step in steps:
        optimizer.zero_grad()
        with around():
            torch.manual_seed(1000 * step + rank)
            net(torch.randn(8, 64)).square().mean().backward()
        if evaluate:
            with torch.no_grad():
                net(torch.randn(8, 64))
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def rank_who_averages(comm):
    """An optimizer that averages and DistributedDataParallel, on the same parameters."""

    def onebit(net, **options):
        return st.OnebitAdam(net.parameters(), lr=1e-4, freeze_step=4, **options)

    net = model()
    optimizer = onebit(net)
    wanted = trained(net, optimizer, comm.rank, range(8))
    optimizer.close()

    net = wrapped()
    optimizer = onebit(net)
    with pytest.raises(sotto.InvalidStateError, match="all-reduced twice.*no_sync_after_warmup"):
        trained(net, optimizer, comm.rank, range(1))
    st.no_sync_after_warmup(net, optimizer)
    before = comm.counters().payload_bytes_sent
    assert torch.equal(trained(net, optimizer, comm.rank, range(8)), wanted)
    assert comm.counters().payload_bytes_sent > before
    net.require_backward_grad_sync = True  # as if the helper had not been called
    with pytest.raises(sotto.InvalidStateError, match="all-reduced twice"):
        trained(net, optimizer, comm.rank, range(1))
    optimizer.close()

    net = wrapped()
    optimizer = onebit(net)  # torch's own way of leaving gradients local
    assert torch.equal(trained(net, optimizer, comm.rank, range(8), net.no_sync), wanted)
    optimizer.close()

    with comm.split(comm.rank) as alone:
        net = wrapped()  # DDP averages, the optimizer does not
        optimizer = st.AdamW(net.parameters(), lr=1e-4, comm=alone)
        mine = trained(net, optimizer, comm.rank, range(4))
        optimizer.close()
    everybody = [torch.empty_like(mine) for _ in range(comm.size)]
    dist.all_gather(everybody, mine)
    assert all(torch.equal(mine, other) for other in everybody)

    for module, text in ((model(), "of type Sequential"), (wrapped(), "none of the model's")):
        with pytest.raises(sotto.InvalidArgumentError, match=text):
            st.no_sync_after_warmup(module, optimizer)


def test_gradients_are_not_averaged_twice(done):
    done(2, "rank_who_averages")


def rank_nobody_averages(comm):
    net = wrapped()
    with comm.split(comm.rank) as alone:
        optimizer = st.AdamW(net.parameters(), lr=1e-4, comm=alone)
        with pytest.raises(sotto.InvalidArgumentError, match="has 2 ranks, the comm 1; make a"):
            st.no_sync_after_warmup(net, optimizer)
        with pytest.raises(sotto.InvalidStateError, match="nobody would average the gradients"):
            trained(net, optimizer, comm.rank, range(1), net.no_sync)
        # Whether DDP has averaged is not taken from a forward pass that came later.
        mine = trained(net, optimizer, comm.rank, range(2), evaluate=True)
        with pytest.raises(sotto.InvalidStateError, match="nobody would average the gradients"):
            trained(net, optimizer, comm.rank, range(1), net.no_sync, evaluate=True)
        optimizer.close()
    everybody = [torch.empty_like(mine) for _ in range(comm.size)]
    dist.all_gather(everybody, mine)
    assert torch.equal(everybody[0], everybody[1])
    optimizer = st.AdamW(net.parameters(), lr=1e-4, comm=comm)
    with pytest.raises(sotto.InvalidStateError, match="all-reduced twice"):
        trained(net, optimizer, comm.rank, range(1), evaluate=True)
    optimizer.close()


def test_gradients_are_averaged_by_somebody(done):
    done(2, "rank_nobody_averages")


def rank_other_groups(comm):
    """DistributedDataParallel over other ranks than the optimizer's comm."""
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    row = [dist.new_group(ranks) for ranks in rows][comm.rank // 2]
    column = [dist.new_group(ranks) for ranks in columns][comm.rank % 2]
    alone = [dist.new_group([r]) for r in range(4)][comm.rank]

    def ddp(group):
        return DistributedDataParallel(model(), process_group=group)

    def adamw(net, **options):
        return st.AdamW(net.parameters(), lr=1e-4, **options)

    with st.comm_of_process_group(row) as of_row, st.comm_of_process_group(column) as of_column:
        for net, other, text in (
            (ddp(row), of_column, rf"has 2 ranks, \[.*\], the comm \[{comm.rank % 2}, "),
            (ddp(row), comm, "has 2 ranks, the comm 4"),
            (ddp(None), of_row, r"has 4 ranks, \[0, 1, 2, 3\], the comm \["),
        ):
            optimizer = adamw(net, comm=other)
            with pytest.raises(sotto.InvalidArgumentError, match=text):
                st.no_sync_after_warmup(net, optimizer)
            with pytest.raises(sotto.InvalidStateError, match=f"not be averaged over the.*{text}"):
                trained(net, optimizer, comm.rank, range(1), net.no_sync)
            optimizer.close()
            net.register_comm_hook(st.DDPState(None, comm=other), st.ddp_hook)
            with pytest.raises(sotto.InvalidArgumentError, match=text):
                gradients(net, comm.rank, 0)
        net = ddp(row)
        optimizer = adamw(net, comm=of_row)
        st.no_sync_after_warmup(net, optimizer)
        mine = trained(net, optimizer, comm.rank, range(3))
        optimizer.close()
    everybody = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(everybody, mine)
    assert [torch.equal(everybody[0], other) for other in everybody] == [True, True, False, False]
    net = ddp(alone)  # which averages nothing
    optimizer, plain = adamw(net), model()
    by_hand = adamw(plain)
    trained(net, optimizer, comm.rank, range(3))
    trained(plain, by_hand, comm.rank, range(3))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), plain.parameters()))
    optimizer.close()
    by_hand.close()


def test_gradients_are_averaged_over_the_ranks_of_the_model(done):
    done(4, "rank_other_groups")


def rank_checks_parameters(comm):
    net = model()
    st.check_parameters(net)
    if comm.rank == 1:
        with torch.no_grad():
            net[2].weight[3, 4] += 1e-6
    with pytest.raises(sotto.InvalidStateError, match="1 of 12 tensors differ.*2.weight"):
        st.check_parameters(net)
    st.broadcast_parameters(net)
    st.check_parameters(net)


def test_parameters_are_compared(done):
    done(2, "rank_checks_parameters")


# ---- starting ranks ----------------------------------------------------------------------------

CHECKS = {
    2: (
        rank_codecs,
        rank_resumes,
        rank_meets_nan,
        rank_comm_of_group,
        rank_who_averages,
        rank_nobody_averages,
    ),
    4: (rank_codecs, rank_other_groups),
}


def ranks_check(comm):
    """All checks with as many ranks, one after another in the same processes."""
    if comm.size == 2:
        rank_checks_parameters(comm)  # before there is a process group of torch
        print("rank_checks_parameters: done", flush=True)
    gloo(comm)
    for check in CHECKS[comm.size]:
        check(comm)
        print(f"{check.__name__}: done", flush=True)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def done():
    """Fails unless a check has ended well on all ranks; those of as many ranks run together."""
    outputs = {}

    def ended(size, check):
        if size not in outputs:
            try:
                outputs[size] = run_ranks(size, __file__, "ranks_check", timeout=400)
            except AssertionError as error:
                outputs[size] = str(error)
        assert outputs[size].count(f"{check}: done") == size, outputs[size]

    return ended


def test_shards_are_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cpu = torch.device("cpu")
    try:
        for net, text in (
            (fully_shard(model(), mesh=init_device_mesh("cpu", (1,))), "is a DTensor: every rank"),
            (FullyShardedDataParallel(model(), device_id=cpu), "belongs to FSDP: every rank"),
        ):
            with pytest.raises(sotto.UnsupportedError, match=text):
                st.AdamW(net.parameters())
    finally:
        dist.destroy_process_group()


def test_wrong_arguments():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        for make, text in (
            (lambda: st.DDPState("zip", comm=comm), "zip"),
            (lambda: st.DDPState(None, comm=comm, scale="l1"), "without a codec"),
            (lambda: st.DDPState("onebit", comm=comm, colour=1), "colour"),
        ):
            with pytest.raises(sotto.SottoError, match=text):
                make()
        state = st.DDPState("onebit", comm=comm)
        with pytest.raises(TypeError, match="save its state_dict"):
            pickle.dumps(state)
        with pytest.raises(sotto.InvalidArgumentError, match="format None"):
            state.load_state_dict({})
        state.close()
    with pytest.raises(sotto.InvalidStateError, match="torch.distributed is not initialised"):
        st.comm_of_process_group()
