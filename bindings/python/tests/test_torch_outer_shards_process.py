"""Outer steps below FSDP: two replicas of two shards each, beside two ranks with all of it."""

import os
import warnings
from pathlib import Path

import pytest
from ranks import meeting_file, run_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")
pytest.importorskip("torch.distributed.tensor", reason="this torch is too old for DTensor")
if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
    pytest.skip("this torch is too old for fully_shard", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from test_torch_optim import batch  # noqa: E402
from test_torch_outer import INNER, equal  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402

STEPS = 30
COORD = {"clip": "coord", "phi": 0.01}
BY_ELEMENT = {"preset": "co2", "period": 4, "penalty": "gap_rel", "granularity": "element", **COORD}
STREAMING = {
    "preset": "streaming_diloco",
    "period": 4,
    "delay": 1,
    "fragments": [[0, 3], [1, 2, 4, 5]],
}
SETTINGS = (
    ("sgd", {"preset": "slowmo", "period": 4}),
    ("adamw", {"preset": "local_sgd", "period": 3}),
    ("adamw", {"preset": "diloco", "period": 5}),
    ("adamw", BY_ELEMENT),
    ("sgd", STREAMING),
)
IMPORTS = ("torch.distributed.fsdp",)


def network(dtype=torch.float32):
    """On two ranks its parameters are cut evenly, unevenly, and so that the second has none."""
    torch.manual_seed(6)
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    return torch.nn.Sequential(linear(20, 31), tanh(), linear(31, 5), linear(5, 1)).to(dtype)


def cut(net, mesh):
    fully_shard(net[0], mesh=mesh)
    return fully_shard(net, mesh=mesh)


class Ranks:
    """Two replicas of two shards."""

    def __init__(self, comm):
        dist.init_process_group(
            "gloo", init_method=meeting_file(), rank=comm.rank, world_size=comm.size
        )
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        self.whole_mesh, self.mesh = mesh, mesh["shard"]
        self.replica = mesh["replica"].get_local_rank()
        self.comm = st.comm_of_process_group(mesh["replica"].get_group())
        torch.set_num_threads(1)

    def close(self):
        self.comm.close()
        dist.barrier()
        dist.destroy_process_group()

    def outer(self, net, inner, **keys):
        return st.Outer(INNER[inner](net.parameters()), comm=self.comm, **keys)

    def loss(self, net, step):
        x, _ = batch(self.replica, step, next(net.parameters()).dtype)
        return net(x).square().mean()

    def train(self, net, outer, step):
        outer.zero_grad()
        self.loss(net, step).backward()
        outer.step()


def held(net):
    return [p._local_tensor.clone() for p in net.parameters()]


def parts(net, like):
    """What this rank would hold of whole parameters."""
    found = []
    for p, shard in zip(net.parameters(), like.parameters()):
        at = shard.__create_chunk_list__()[0].offsets[0]
        found.append(p.detach()[at : at + shard._local_tensor.shape[0]].clone())
    return found


class Pair:
    """The same model in shards and whole, with the same outer steps."""

    def __init__(self, ranks, inner, dtype=torch.float32, **keys):
        self.ranks = ranks
        self.nets = [cut(network(dtype), ranks.mesh), network(dtype)]
        self.outers = [ranks.outer(net, inner, **keys) for net in self.nets]

    def both(self, call):
        return [call(net, outer) for net, outer in zip(self.nets, self.outers)]

    def train(self, step):
        self.both(lambda net, outer: self.ranks.train(net, outer, step))
        self.check(step)

    def check(self, step):
        shards, whole = self.nets
        assert equal(held(shards), parts(whole, shards)), step

    def close(self):
        for outer in self.outers:
            outer.close()


def evaluated(net, outer):
    with outer.evaluation(), torch.no_grad():
        return net(torch.ones(3, 20, dtype=next(net.parameters()).dtype))


def with_bits(ranks):
    for inner, keys in SETTINGS:
        pair = Pair(ranks, inner, **keys)
        for step in range(STEPS):
            pair.train(step)
            if step % 7 == 6:
                mine, theirs = pair.both(evaluated)
                assert torch.equal(mine, theirs)
        mine, theirs = (outer.info() for outer in pair.outers)
        assert mine.round == theirs.round > 0
        assert mine.step == theirs.step == STEPS
        pair.both(lambda net, outer: ranks.loss(net, 99).item())  # gathers what flush() changes
        pair.both(lambda net, outer: outer.flush())
        pair.check("flushed")
        mine, theirs = pair.both(lambda net, outer: ranks.loss(net, 99).item())
        assert mine == theirs
        pair.close()


def with_16_bits(ranks):
    pair = Pair(ranks, "halves", torch.bfloat16, **BY_ELEMENT)
    for step in range(9):
        pair.train(step)
    pair.close()


def with_micro_batches(ranks):
    pair = Pair(ranks, "sgd", **BY_ELEMENT)
    for step in range(9):
        for net, outer in zip(pair.nets, pair.outers):
            outer.zero_grad()
            for micro in range(2):
                if net is pair.nets[0]:
                    net.set_requires_gradient_sync(micro == 1)
                ranks.loss(net, 2 * step + micro).backward()
            outer.step()
        pair.check(step)
    pair.close()


def with_scaled_gradients(ranks):
    """A replica overflows: all of its shards leave the inner step out."""
    pair = Pair(ranks, "plain", **BY_ELEMENT)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    for step in range(9):
        for net, outer, scaler in zip(pair.nets, pair.outers, scalers):
            outer.zero_grad()
            scaler.scale(ranks.loss(net, step)).backward()
            grad = net[0].weight.grad
            if ranks.replica == 1 and step == 2:
                if net is pair.nets[1]:
                    grad[0, 0] = float("inf")
                elif ranks.mesh.get_local_rank() == 0:
                    grad._local_tensor[0, 0] = float("inf")
            scaler.step(outer)
            scaler.update()
        pair.check(step)
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[0].get_scale() == 2.0 ** (10 - ranks.replica)
    pair.close()


def with_a_shard_that_is_not_finite(ranks):
    """One element of one shard: its replica is left out of the averages of all its shards."""
    pair = Pair(ranks, "plain", **{**BY_ELEMENT, "delay": 0})
    for step in range(13):
        for net, outer in zip(pair.nets, pair.outers):
            outer.zero_grad()
            ranks.loss(net, step).backward()
        if ranks.replica == 1 and step == 7:  # the last before a boundary: no forward spreads it
            shard, whole = (net[0].weight.grad for net in pair.nets)
            whole[0, 0] = float("nan")
            if ranks.mesh.get_local_rank() == 0:
                shard._local_tensor[0, 0] = float("nan")
        pair.both(lambda net, outer: outer.step())
        pair.check(step)
        assert all(bool(p.isfinite().all()) for p in held(pair.nets[0]))
    pair.both(lambda net, outer: outer.set(weight=ranks.replica))
    for step in range(13, 18):
        pair.train(step)
    pair.close()


def with_frozen_and_assigned_parameters(ranks):
    pair = Pair(ranks, "adamw", **STREAMING)
    for step in range(12):
        if step == 5:
            pair.both(lambda net, outer: net[2].bias.requires_grad_(False))
            pair.both(lambda net, outer: outer.zero_grad())
        if step == 7:
            for net in pair.nets:
                state = {name: p.detach().clone() for name, p in net.state_dict().items()}
                net.load_state_dict(state, assign=True)
                net[2].bias.requires_grad_(False)
        pair.train(step)
    assert list(pair.outers[0].inner.param_groups[0]["params"]) == list(pair.nets[0].parameters())
    pair.close()


WITH_NORMS = (
    ("adamw", {"preset": "co2", "period": 4}),
    ("sgd", {"preset": "co2", "period": 3, "penalty": "gap_rel", "clip": "norm", "phi": 0.01}),
    ("sgd", {"preset": "co2", "period": 4, "penalty": "gap_inner", "auto_floor": False}),
    ("adamw", {"preset": "co2", "period": 4, "codec": "bf16", "fragments": [[0, 3], [1, 2, 4, 5]]}),
)


def with_norms(ranks, comm):
    """Norms of the whole are sums over shards, which are added in another order."""
    world = comm.split(0)
    of_shard, of_replica = world.split(comm.rank % 2), world.split(comm.rank // 2)
    for inner, keys in WITH_NORMS:
        shards, whole = cut(network(), ranks.mesh), network()
        outers = [
            st.Outer(INNER[inner](shards.parameters()), comm=of_shard, shards=of_replica, **keys),
            st.Outer(INNER[inner](whole.parameters()), comm=of_shard, **keys),
        ]
        for step in range(STEPS):
            for net, outer in zip((shards, whole), outers):
                ranks.train(net, outer, step)
            for mine, theirs in zip(held(shards), parts(whole, shards)):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)
            if step == 17:  # an average is under way
                state = outers[0].state_dict()
                outers[0].load_state_dict(state)
        mine, theirs = (outer.info() for outer in outers)
        assert mine.round == theirs.round > 0
        for name in ("staleness", "gap", "unit", "step_norm", "clip_fraction"):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=1e-4), name
        assert mine.gap > 0
        assert mine.staleness > 1
        for outer in outers:
            outer.flush()
        for mine, theirs in zip(held(shards), parts(whole, shards)):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)
        for outer in outers:
            outer.close()
    for one in (of_shard, of_replica, world):
        one.close()


def is_told(ranks, comm):
    """A comm of all ranks, and a mesh whose replicas average gradients themselves."""
    net = cut(network(), ranks.mesh)
    outer = st.Outer(INNER["plain"](net.parameters()), comm=comm, **BY_ELEMENT)
    before = held(net)
    with pytest.raises(
        sotto.ProtocolError,
        match=r'of parameter "param0": ranks 0, 2: shard 0 of 2, \[16, 20\] at \[0, 0\] of '
        r"\[31, 20\] by Shard\(dim=0\); ranks 1, 3: shard 1 of 2, \[15, 20\] at \[16, 0\]",
    ):
        ranks.train(net, outer, 0)
    assert equal(held(net), before)
    outer.close()
    net = cut(network(), ranks.whole_mesh)
    outer = ranks.outer(net, "plain", **BY_ELEMENT)
    with pytest.raises(sotto.InvalidStateError, match="replicated over the ranks .* averaged in"):
        ranks.train(net, outer, 0)
    outer.close()


def rank_trains(comm):
    INNER["halves"] = lambda p: torch.optim.SGD(p, lr=1 / 16)
    ranks = Ranks(comm)
    with_bits(ranks)
    with_16_bits(ranks)
    with_micro_batches(ranks)
    with_scaled_gradients(ranks)
    with_a_shard_that_is_not_finite(ranks)
    with_frozen_and_assigned_parameters(ranks)
    with_norms(ranks, comm)
    is_told(ranks, comm)
    ranks.close()
    print(f"equal {comm.rank}")


def test_shards_have_the_bits_of_the_whole():
    assert run_ranks(4, __file__, "rank_trains", imports=IMPORTS).count("equal") == 4


# ---- new processes -----------------------------------------------------------------------------

KEYS = {**BY_ELEMENT, "delay": 3, "codec": "onebit"}
SAVED, LAST = (5, 6, 7, 8), 14


def state_file(name, rank):
    return Path(os.environ["OUTER_STATES"]) / f"{name}.rank{rank}.pt"


def rank_saves(comm):
    ranks = Ranks(comm)
    net = cut(network(), ranks.mesh)
    outer = ranks.outer(net, "adamw", **KEYS)
    for step in range(LAST):
        ranks.train(net, outer, step)
        if step + 1 in SAVED:
            torch.save(outer.state_dict(), state_file(step + 1, comm.rank))
            torch.save(outer.gather_state(), state_file(f"whole{step + 1}", comm.rank))
    torch.save(held(net), state_file("params", comm.rank))
    outer.close()
    ranks.close()
    print("saved", comm.rank)


def rank_resumes(comm):
    ranks = Ranks(comm)
    wanted = torch.load(state_file("params", comm.rank), weights_only=True)
    for name in (*SAVED, "whole6"):
        net = cut(network(), ranks.mesh)
        outer = ranks.outer(net, "adamw", **KEYS)
        # A whole state has all replicas' of a shard: any of them can have saved it.
        rank = (comm.rank + 2) % 4 if name == "whole6" else comm.rank
        outer.load_state_dict(torch.load(state_file(name, rank), weights_only=True))
        for step in range(outer.info().step, LAST):
            ranks.train(net, outer, step)
        assert equal(held(net), wanted), name
        outer.close()
    # All go on from one replica, as where one alone has saved.
    net = cut(network(), ranks.mesh)
    outer = ranks.outer(net, "adamw", **KEYS)
    state = torch.load(state_file(6, comm.rank % 2), weights_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outer.load_state_dict(state)
    ranks.train(net, outer, 6)
    outer.flush()
    st.check_parameters(net, comm=ranks.comm)
    outer.close()
    ranks.close()
    print("resumed", comm.rank)


def test_resumed_in_new_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTER_STATES", str(tmp_path))
    assert run_ranks(4, __file__, "rank_saves", imports=IMPORTS).count("saved") == 4
    assert run_ranks(4, __file__, "rank_resumes", imports=IMPORTS).count("resumed") == 4
