"""Outer steps of processes: beside torch's own model averaging, DDP, kills and new processes."""

import os
import subprocess
import time
from pathlib import Path

import pytest
from ranks import HERE, meeting_file, python_of, run_ranks, sotto_run

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from test_torch_optim import model, train  # noqa: E402
from test_torch_outer import equal, made, values  # noqa: E402

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402

# ---- beside torch ------------------------------------------------------------------------------

STEPS, PERIOD, SWITCH = 60, 4, 20
INNER = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0),
}


class Given(torch.nn.Module):
    """A model whose gradients are what it is called with."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.w = torch.nn.Parameter(torch.randn(300, generator=generator))
        self.b = torch.nn.Parameter(torch.randn(7, generator=generator))

    def forward(self, w, b):
        return (self.w * w).sum() + (self.b * b).sum()


def gradients(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(n, generator=generator) for n in (300, 7)]


def step_of(net, optimizer, rank, step):
    optimizer.zero_grad()
    net(*gradients(rank, step)).backward()
    optimizer.step()


def local_sgd(comm, inner):
    """torch.distributed's PeriodicModelAverager behind the steps of a local optimizer."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    net, other = Given(), Given()
    theirs = INNER[inner](other.parameters())
    # It averages first behind step number warmup_steps, which is counted from 0.
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=PERIOD - 1)
    outer = st.Outer(INNER[inner](net.parameters()), preset="local_sgd", period=PERIOD, comm=comm)
    for step in range(STEPS):
        step_of(net, outer, comm.rank, step)
        step_of(other, theirs, comm.rank, step)
        averager.average_parameters(other.parameters())
        for p, q in zip(net.parameters(), other.parameters()):
            torch.testing.assert_close(p, q, rtol=0, atol=2e-6)
    outer.close()


def post_local_sgd(comm):
    """PostLocalSGDOptimizer and the hook for DistributedDataParallel that belongs to it."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    net, other = Given(), Given()
    alone, _ = dist.new_subgroups(1)
    wrapped = torch.nn.parallel.DistributedDataParallel(other)
    wrapped.register_comm_hook(
        hook.PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=SWITCH),
        hook.post_localSGD_hook,
    )
    theirs = PostLocalSGDOptimizer(
        INNER["sgd"](other.parameters()),
        PeriodicModelAverager(period=PERIOD, warmup_steps=SWITCH + PERIOD - 1),
    )
    inner = INNER["sgd"](net.parameters())
    outer = st.Outer(inner, preset="post_local_sgd", period=PERIOD, switch_step=SWITCH, comm=comm)
    compared = 0
    for step in range(STEPS):
        step_of(net, outer, comm.rank, step)
        step_of(wrapped, theirs, comm.rank, step)
        # Momentum there is that of mean gradients, here each rank's: means of parameters are equal.
        if step < SWITCH or (step + 1 - SWITCH) % PERIOD == 0:
            compared += 1
            for p, q in zip(net.parameters(), other.parameters()):
                torch.testing.assert_close(p, q, rtol=0, atol=2e-6)
    assert compared == SWITCH + (STEPS - SWITCH) // PERIOD
    with pytest.raises(sotto.UnsupportedError, match="PostLocalSGDOptimizer, which is not support"):
        st.Outer(theirs, comm=comm)
    outer.close()


def refuses_ddp(comm):
    import torch.distributed as dist

    def wrapped(group=None):
        net = model()
        ddp = torch.nn.parallel.DistributedDataParallel(net, process_group=group)
        return ddp, net

    ddp, net = wrapped()
    outer = made(net, comm, preset="local_sgd", period=2)
    before = values(net)
    with pytest.raises(sotto.InvalidStateError, match="has averaged the gradients in backward"):
        train(ddp, outer, comm.rank, [0])
    assert equal(values(net), before)
    st.no_sync_after_warmup(ddp, outer)
    train(ddp, outer, comm.rank, [0])
    assert not equal(values(net), before)
    outer.close()
    # A host's ranks average gradients, all of them parameters.
    alone, _ = dist.new_subgroups(1)
    for group, options in ((alone, {}), (None, {"ddp": True})):
        ddp, net = wrapped(group)
        outer = made(net, comm, preset="local_sgd", period=2, **options)
        train(ddp, outer, comm.rank, range(4))
        assert outer.info().round == 2
        outer.close()


def rank_trains_beside_torch(comm):
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=meeting_file(), rank=comm.rank, world_size=comm.size
    )
    for inner in INNER:
        local_sgd(comm, inner)
    post_local_sgd(comm)
    refuses_ddp(comm)
    with st.comm_of_process_group() as of_group:  # which knows torch's ranks
        refuses_ddp(of_group)
    dist.barrier()
    dist.destroy_process_group()
    print(f"as torch {comm.rank}")


def test_as_torch_averages_models():
    assert run_ranks(2, __file__, "rank_trains_beside_torch").count("as torch") == 2


# ---- beside torchft ----------------------------------------------------------------------------


class Manager:
    """What torchft's DiLoCo asks its manager for, where nobody joins or leaves: means over gloo."""

    _use_async_quorum = False

    def __init__(self):
        self.step = 0

    def allreduce(self, tensor, should_quantize=False):
        import torch.distributed as dist

        assert not should_quantize
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
        return self

    def wait(self):
        """Of allreduce, which has waited."""

    def current_step(self):
        return self.step

    def should_commit(self):
        self.step += 1
        return True

    def nothing(self, *_):
        """Nobody recovers from another rank."""

    start_quorum = register_state_dict_fn = nothing
    disallow_state_dict_read = allow_state_dict_read = nothing


class Part(torch.nn.Module):
    def __init__(self, *parameters):
        super().__init__()
        self.parts = torch.nn.ParameterList(parameters)


def diloco(comm, inner, fragments):
    """torchft's DiLoCo behind the steps of a local optimizer. fragments: of the two tensors."""
    from torchft.local_sgd import DiLoCo

    net, other = Given(), Given()
    # Its first fragment is the one that is due first, ours the one that is due at the end.
    lists = [[0], [1]] if fragments == 2 else [[0, 1]]
    tensors = list(other.parameters())
    parts = [Part(*(tensors[i] for i in fragment)) for fragment in reversed(lists)]
    theirs = INNER[inner](tensors)
    steps = [torch.optim.SGD(p.parameters(), 0.7, momentum=0.9, nesterov=True) for p in parts]
    outer = st.Outer(
        INNER[inner](net.parameters()), preset="diloco", period=PERIOD, fragments=lists, comm=comm
    )
    with DiLoCo(Manager(), parts, theirs, steps, sync_every=PERIOD):
        for step in range(STEPS):
            step_of(net, outer, comm.rank, step)
            step_of(other, theirs, comm.rank, step)
            for p, q in zip(net.parameters(), other.parameters()):
                torch.testing.assert_close(p, q, rtol=0, atol=2e-6)
    outer.close()


def rank_trains_beside_torchft(comm):
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=meeting_file(), rank=comm.rank, world_size=comm.size
    )
    for inner in INNER:
        for fragments in (1, 2):
            diloco(comm, inner, fragments)
    dist.barrier()
    dist.destroy_process_group()
    print(f"as torchft {comm.rank}")


def test_as_torchft_makes_outer_steps():
    pytest.importorskip("torchft", reason="torchft is not installed in this Python")
    assert run_ranks(2, __file__, "rank_trains_beside_torchft").count("as torchft") == 2


# ---- several hosts -----------------------------------------------------------------------------


def rank_averages_between_hosts():
    os.environ["SOTTO_HOST_ID"] = f"host {int(os.environ['SOTTO_RANK']) // 2}"
    with sotto.init_process_group(timeout=60) as comm:
        results = {}
        for hierarchy in ("flat", "sharded", "leader", "auto"):
            net = model()
            outer = made(net, comm, "adamw", preset="co2", period=3, hierarchy=hierarchy)
            train(net, outer, comm.rank, range(7))
            outer.flush()
            results[hierarchy] = values(net)
            outer.close()
        for p, q in zip(results["flat"], results["sharded"]):
            torch.testing.assert_close(p, q, rtol=0, atol=2e-6)
        assert equal(results["leader"], results["sharded"])
        assert equal(results["auto"], results["sharded"])
        net = model()
        outer = made(net, comm, preset="co2", period=2, codec="int8", hierarchy="sharded")
        train(net, outer, comm.rank, range(5))
        outer.close()
        with pytest.raises(sotto.InvalidArgumentError, match="sotto.hierarchy: found .*tree"):
            made(net, comm, hierarchy="tree")
        print(f"levels {comm.rank}")


def test_averages_of_two_levels():
    assert run_ranks(4, __file__, "rank_averages_between_hosts").count("levels") == 4


# ---- new processes -----------------------------------------------------------------------------

KEYS = {
    "onebit": {"preset": "co2", "period": 4, "delay": 3, "codec": "onebit"},
    "fragments": {
        "preset": "streaming_diloco",
        "period": 6,
        "delay": 3,
        "fragments": 3,
        "codec": {"type": "topk", "block": 64, "k": 8},
    },
}
LAST, KILLED = 13, 6  # in flight from step 4 on; two rounds of both


def state_file(name, rank):
    return Path(os.environ["OUTER_STATES"]) / f"{name}.rank{rank}.pt"


def resumed(comm, name, rank):
    net = model()
    outer = made(net, comm, "adamw", **KEYS[os.environ["OUTER_KEYS"]])
    outer.load_state_dict(torch.load(state_file(name, rank), weights_only=True))
    return net, outer


def dies_behind(comm):
    """Ends this rank once the others are as far: steps alone do not wait for it."""
    deadline = time.monotonic() + 60
    while not all(state_file("reached", rank).exists() for rank in range(comm.size - 1)):
        assert time.monotonic() < deadline, "the others did not come"
        time.sleep(0.01)
    os._exit(9)


def rank_saves_and_dies(comm):
    for life in ("whole", "killed"):
        net = model()
        outer = made(net, comm, "adamw", **KEYS[os.environ["OUTER_KEYS"]])
        for step in range(LAST):
            if life == "killed" and step == KILLED:
                dies_behind(comm) if comm.rank == 2 else state_file("reached", comm.rank).touch()
            try:
                train(net, outer, comm.rank, [step])
            except sotto.PeerLostError as error:
                print("told of rank 2", "rank 2" in str(error), flush=True)
                break
            if life == "whole":
                torch.save(outer.state_dict(), state_file(step + 1, comm.rank))
            elif step >= KILLED:
                time.sleep(0.2)
        else:
            assert life == "whole", "no error"
            torch.save(values(net), state_file("params", comm.rank))
            outer.close()
    live = values(net)
    state = outer.state_dict()
    assert state["sotto"]["blob"].numel() > 3 * 4 * sum(p.numel() for p in live)
    torch.save(state, state_file("survivor", comm.rank))
    torch.save(live, state_file("live", comm.rank))
    outer.close()
    print("saved", comm.rank, flush=True)


def rank_resumes(comm):
    wanted = torch.load(state_file("params", comm.rank), weights_only=True)
    for step in range(1, LAST):
        net, outer = resumed(comm, step, comm.rank)
        assert outer.info().step == step
        train(net, outer, comm.rank, range(step, LAST))
        assert equal(values(net), wanted), step
        outer.close()
    # What a survivor has exported, for all: the average under way is launched again.
    net, outer = resumed(comm, "survivor", 0)
    assert equal(values(net), torch.load(state_file("live", 0), weights_only=True))
    assert outer.info().step >= KILLED
    train(net, outer, comm.rank, range(outer.info().step, LAST))
    outer.flush()
    rows = torch.empty(comm.size, 20 * 30)
    comm.all_gather(net[0].weight.detach().reshape(-1).clone(), rows).wait()
    assert bool((rows == rows[0]).all())
    outer.close()
    print("resumed", comm.rank, flush=True)


@pytest.mark.parametrize("keys", KEYS)
def test_killed_and_resumed_in_new_processes(keys, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTER_STATES", str(tmp_path))
    monkeypatch.setenv("OUTER_KEYS", keys)
    words = [python_of(), str(HERE / "ranks.py"), str(Path(__file__)), "rank_saves_and_dies"]
    run = subprocess.run(
        [sotto_run(), "-n", "3", "--grace", "100", "--timeout", "200", "--", *words],
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
        env={**os.environ, "SOTTO_CPU_THREADS": "1"},
    )
    text = run.stdout + run.stderr
    assert run.returncode == 9, text
    assert run.stdout.count("told of rank 2 True") == 2, text
    assert run.stdout.count("saved") == 2, text
    assert run_ranks(3, __file__, "rank_resumes").count("resumed") == 3
