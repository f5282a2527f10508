"""Outer steps on DTensors: every rank averages the shard that it holds. Threads, without FSDP."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")
pytest.importorskip("torch.distributed.tensor", reason="this torch is too old for DTensor")

import torch.distributed as dist  # noqa: E402
from test_torch_outer import equal, saved_and_loaded, thread_ranks  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402
from sotto.outer import Outer as PlainOuter  # noqa: E402

STEPS = 14
INNER = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    # Of bfloat16 torch rounds products differently by position, but not those by a power of two.
    "plain": lambda p: torch.optim.SGD(p, lr=1 / 16),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}
# By dimension 0 of two ranks: even, uneven, empty on the second, and one by dimension 1.
SHAPES = ((20, 30), (7, 3), (1, 5), (4, 5))
CUT_BY = (0, 0, 0, 1)
COORD = {"clip": "coord", "phi": 0.01}
BY_ELEMENT = {"penalty": "gap_rel", "granularity": "element", **COORD}
SETTINGS = {
    "post_local_sgd": {"preset": "post_local_sgd", "period": 4, "switch_step": 6},
    "delayed_diloco": {"preset": "delayed_diloco", "period": 3},
    "eager_diloco": {"preset": "eager_diloco", "period": 3},
    "co2 by element": {"preset": "co2", "period": 4, **BY_ELEMENT},
    "co2 without penalty": {"preset": "co2", "period": 4, "penalty": "none", "clip": "none"},
    "streaming_diloco": {
        "preset": "streaming_diloco",
        "period": 4,
        "delay": 1,
        "fragments": [[0, 2], [1, 3]],
    },
    "cocod": {"preset": "cocod", "period": 3},
}
# test_torch_outer_shards_process.py has the others.
RUNS = [
    ("post_local_sgd", "sgd"),
    ("delayed_diloco", "adamw"),
    ("eager_diloco", "sgd"),
    ("co2 without penalty", "adamw"),
    ("cocod", "sgd"),
]
RUNS += [(name, "plain", torch.bfloat16) for name in ("co2 by element", "streaming_diloco")]


@pytest.fixture(scope="module")
def wholes():
    """Two ranks with all parameters, for every setting; made before there is a process group."""
    return {how: thread_ranks(2, lambda comm, how=how: trained(None, comm, *how)) for how in RUNS}


@pytest.fixture(scope="module", autouse=True)
def meshes(wholes):
    """Meshes on which this process is the shard of a number; torch's collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    found = {}
    for parts in (2, 4):
        for number in range(parts):
            ranks = list(range(parts))
            ranks[0], ranks[number] = ranks[number], 0
            found[number, parts] = DeviceMesh("cpu", ranks)
    found["elsewhere"] = DeviceMesh("cpu", [3, 0])  # shard 1 of 2, of another replica
    yield found
    dist.destroy_process_group()


def start(dtype=torch.float32):
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def gradients(replica, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + replica)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def cut(tensors, mesh):
    """What the rank of a mesh holds of whole tensors; without a mesh all of it."""
    if mesh is None:
        return list(tensors)
    return [
        distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None)
        for tensor, dim in zip(tensors, CUT_BY)
    ]


def parameters(mesh, dtype=torch.float32):
    return [torch.nn.Parameter(p) for p in cut(start(dtype), mesh)]


def locals_of(tensors):
    return [getattr(p, "_local_tensor", p).detach().clone() for p in tensors]


def made(params, comm, inner="sgd", **keys):
    return st.Outer(INNER[inner](params), comm=comm, **keys)


def step_of(params, outer, mesh, replica, step):
    dtype = params[0].dtype
    for p, grad in zip(params, cut(gradients(replica, step, dtype), mesh)):
        p.grad = grad if p.requires_grad else None
    outer.step()


def trained(mesh, comm, name, inner, dtype=torch.float32, steps=STEPS):
    """What the parameters of this rank were after every step, and the anchor in the end."""
    params = parameters(mesh, dtype)
    outer = made(params, comm, inner, **SETTINGS[name])
    seen = []
    for step in range(steps):
        step_of(params, outer, mesh, comm.rank, step)
        seen.append(locals_of(params))
    with outer.evaluation():
        seen.append(locals_of(params))
    outer.flush()
    seen.append(locals_of(params))
    outer.close()
    return seen


def assert_cut(whole, parts, mesh):
    """Every step of a shard is that of the whole."""
    assert len(whole) == len(parts)
    for step, (tensors, held) in enumerate(zip(whole, parts)):
        assert equal(locals_of(cut(tensors, mesh)), held), step


@pytest.mark.parametrize("how", RUNS, ids=lambda how: " ".join(map(str, how)))
def test_shards_have_the_bits_of_the_whole(meshes, wholes, how):
    """Two shards with two replicas each beside two ranks with all of it."""
    whole = wholes[how]
    assert not equal(whole[0][-4], whole[1][-4]), "ranks have made the same steps"
    for number in range(2):
        mesh = meshes[number, 2]
        parts = thread_ranks(2, lambda comm, mesh=mesh: trained(mesh, comm, *how))
        for replica in range(2):
            assert_cut(whole[replica], parts[replica], mesh)


@pytest.mark.parametrize("codec", ["onebit", "int8", "bf16"])
def test_codecs_work_on_the_shard(meshes, codec):
    """Their scales are those of the shard: as the outer optimizer on its buffers."""
    keys = {"preset": "co2", "period": 3, "codec": codec, **BY_ELEMENT}

    def body(comm, mesh):
        params, plain = parameters(mesh), locals_of(parameters(mesh))
        outer = made(params, comm, "sgd", **keys)
        theirs = INNER["sgd"](plain)
        other = PlainOuter(plain, keys, comm=comm)
        for step in range(STEPS):
            step_of(params, outer, mesh, comm.rank, step)
            for p, grad in zip(plain, locals_of(cut(gradients(comm.rank, step), mesh))):
                p.grad = grad
            theirs.step()
            other.step().wait()
            assert equal(locals_of(params), plain), step
        assert outer.info().round == 3
        outer.close()
        other.close()

    for number in range(2):
        thread_ranks(2, lambda comm, number=number: body(comm, meshes[number, 2]))


def test_four_shards_some_of_them_empty(meshes):
    """One parameter of 3 elements: the fourth rank holds nothing at all."""
    keys = SETTINGS["co2 by element"]

    def body(comm, mesh):
        whole = torch.arange(3.0)
        p = (
            whole
            if mesh is None
            else distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        )
        p = torch.nn.Parameter(p)
        outer = made([p], comm, "adamw", **keys)
        for step in range(10):
            grad = torch.full((3,), 1.0 + step + comm.rank)
            p.grad = (
                grad
                if mesh is None
                else DTensor.from_local(
                    grad[: p._local_tensor.numel()],
                    mesh,
                    [Shard(0)],
                    run_check=False,
                    shape=(3,),
                    stride=(1,),
                )
            )
            outer.step()
        state = saved_and_loaded(outer.state_dict())
        outer.load_state_dict(state)
        out = locals_of([p])[0]
        rounds = outer.info().round
        outer.close()
        return out, rounds

    whole = thread_ranks(2, lambda comm: body(comm, None))
    for number in range(4):
        found = thread_ranks(2, lambda comm, number=number: body(comm, meshes[number, 4]))
        for (p, rounds), (q, others) in zip(whole, found):
            assert rounds == others == 1
            assert torch.equal(p[number : number + 1], q)


def test_frozen_and_replaced_shards(meshes):
    keys = SETTINGS["co2 without penalty"]

    class Module(torch.nn.Module):
        def __init__(self, mesh):
            super().__init__()
            for i, p in enumerate(parameters(mesh)):
                setattr(self, f"p{i}", p)

        def shown(self):
            return list(self.parameters())

    def body(comm, mesh, replaces):
        net = Module(mesh)
        net.p1.requires_grad_(False)  # never trained
        outer = made(net.shown(), comm, "adamw", **keys)
        for step in range(14):
            if step == 6:
                net.p3.requires_grad_(False)  # in the middle of a round
                net.p3.grad = None
            if replaces and step == 3:
                state = {name: p.detach().clone() for name, p in net.named_parameters()}
                net.load_state_dict(state, assign=True)
                net.p1.requires_grad_(False)
            step_of(net.shown(), outer, mesh, comm.rank, step)
        assert len(outer._tensors) == 3
        out = locals_of(net.shown())
        if mesh is not None and replaces:
            # Another shard of the same shape.
            moved = net.p3.detach()._local_tensor.T.contiguous().T.contiguous()
            other = meshes[1 - mesh.get_coordinate()[0], 2]
            net.p3 = torch.nn.Parameter(
                DTensor.from_local(
                    moved, other, [Shard(1)], run_check=False, shape=(4, 5), stride=(5, 1)
                )
            )
            with pytest.raises(
                sotto.InvalidStateError,
                match=r'shard of parameter "param3" has changed from shard . of 2, .* to shard',
            ):
                outer.step()
        outer.close()
        return out

    whole = thread_ranks(2, lambda comm: body(comm, None, False))
    for number in range(2):
        mesh = meshes[number, 2]
        for replaces in (False, True):
            parts = thread_ranks(2, lambda comm, m=mesh, r=replaces: body(comm, m, r))
            for these, those in zip(whole, parts):
                assert equal(locals_of(cut(these, mesh)), those)


def test_states_continue_on_the_same_shard_alone(meshes):
    keys = {**SETTINGS["co2 by element"], "codec": "onebit"}
    mesh = meshes[1, 2]

    def body(comm):
        params = parameters(mesh)
        outer = made(params, comm, "adamw", **keys)
        for step in range(8):
            step_of(params, outer, mesh, comm.rank, step)
        other = parameters(mesh)
        resumed = made(other, comm, "adamw", **keys)
        for step in range(8):
            state = resumed.gather_state() if step % 4 == 2 else resumed.state_dict()
            state = saved_and_loaded(state)
            resumed.close()
            other = parameters(mesh)
            resumed = made(other, comm, "adamw", **keys)
            resumed.load_state_dict(state)
            step_of(other, resumed, mesh, comm.rank, step)
        assert equal(locals_of(params), locals_of(other))
        moments = resumed.state[other[0]]["exp_avg"]
        assert moments.device_mesh == mesh
        assert torch.equal(moments._local_tensor, outer.state[params[0]]["exp_avg"]._local_tensor)
        state = resumed.state_dict()
        before = locals_of(other)
        moved = parameters(meshes["elsewhere"])
        again = made(moved, comm, "adamw", **keys)
        again.load_state_dict(state)
        assert again.state[moved[0]]["exp_avg"].device_mesh == meshes["elsewhere"] != mesh
        step_of(moved, again, meshes["elsewhere"], comm.rank, 8)
        again.close()
        for elsewhere, text in (
            (
                meshes[0, 2],
                r"it has shard 1 of 2, \[10, 30\] at \[10, 0\] of \[20, 30\] by "
                r"Shard\(dim=0\), here is shard 0 of 2",
            ),
            (meshes[1, 4], r"it has shard 1 of 2, .* here is shard 1 of 4, \[5, 30\] at \[5, 0\]"),
            (None, "it has shard 1 of 2, .* here is all of it"),
        ):
            refused = made(parameters(elsewhere), comm, "adamw", **keys)
            with pytest.raises(
                sotto.InvalidArgumentError, match='cannot be re-cut: of .*"param0" ' + text
            ):
                refused.load_state_dict(state)
            whole = made(parameters(None), comm, "adamw", **keys).state_dict()
            with pytest.raises(sotto.InvalidArgumentError, match="it has all of it, here is shard"):
                resumed.load_state_dict(whole)
            refused.close()
        assert equal(locals_of(other), before)
        outer.close()
        resumed.close()

    thread_ranks(2, body)


def test_what_needs_whole_parameters_is_refused(meshes):
    mesh = meshes[0, 2]
    cases = (
        ({"preset": "co2"}, 'penalty "gap_ema" with granularity "global" .*; clip "rms" .allowed'),
        (
            {**BY_ELEMENT, "granularity": "tensor"},
            '"gap_rel" with granularity "tensor" .allowed: "global" with shards=; '
            'penalty "none", "const", or "gap_rel" with granularity "element"',
        ),
        ({"penalty": "gap_inner", **COORD}, 'penalty "gap_inner"'),
        (
            {"penalty": "none", "clip": "norm", "phi": 1},
            'clip "norm" .allowed: the same with shards=, .*; "none", "coord"',
        ),
        (
            {"preset": "delta_corrected", "clip": "norm", "phi": 1},
            "freshness .* with such a penalty or clip .allowed: 0",
        ),
        ({"penalty": "none", "clip": "rms"}, 'clip "rms"'),
        ({"penalty": "none", "clip": "none", "period": "auto"}, 'period "auto" .allowed: a number'),
        (
            {"penalty": "none", "clip": "none", "period": 4, "fragments": 2},
            "fragments 2 .allowed: 1, or lists",
        ),
        (
            {"penalty": "none", "clip": "none", "nonfinite": "error"},
            'nonfinite "error" .allowed: "skip_rank", "pass"',
        ),
    )

    def body(comm):
        for keys, text in cases:
            with pytest.raises(
                sotto.UnsupportedError,
                match=r'"param0" is cut, here is shard 0 of 2, \[10, 30\] at \[0, 0\].* ' + text,
            ):
                made(parameters(mesh), comm, **keys)
            made(parameters(None), comm, **keys).close()
        with pytest.raises(sotto.UnsupportedError, match='"tensor" .allowed: "global"'):
            made(parameters(mesh), comm, shards=comm, **{**BY_ELEMENT, "granularity": "tensor"})
        outer = st.Outer(INNER["sgd"]([torch.nn.Parameter(torch.zeros(3))]), comm=comm)
        with pytest.raises(sotto.UnsupportedError, match='"param1" is cut, .*"gap_ema"'):
            outer.add_param_group({"params": parameters(mesh)})
        assert len(outer.param_groups) == 1
        for keys in ({"penalty": "const", "lambda_const": 2, "clip": "none"}, BY_ELEMENT):
            made(parameters(mesh), comm, **keys).close()
        sums = DTensor.from_local(torch.zeros(3), mesh, [Partial()], run_check=False)
        with pytest.raises(sotto.UnsupportedError, match="placements .Partial.*; allowed: Shard"):
            made([torch.nn.Parameter(sums)], comm)
        far = DeviceMesh("cpu", [2, 3], _init_backend=False)
        away = DTensor.from_local(
            torch.zeros(0), far, [Shard(0)], run_check=False, shape=(4,), stride=(1,)
        )
        with pytest.raises(sotto.UnsupportedError, match="on a mesh without this rank"):
            made([torch.nn.Parameter(away)], comm)

    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        body(comm)


def test_ranks_that_hold_other_shards_are_told(meshes):
    """As with a comm of all ranks in place of one of replicas."""

    def body(comm, mesh_of):
        params = parameters(mesh_of(comm.rank))
        outer = made(params, comm, **SETTINGS["co2 by element"])
        before = locals_of(params)
        with pytest.raises(sotto.ProtocolError) as told:
            step_of(params, outer, mesh_of(comm.rank), comm.rank, 0)
        assert equal(locals_of(params), before)
        if mesh_of(comm.rank) is not None:
            with pytest.raises(sotto.ProtocolError, match="hold different parts of"):
                st.broadcast_parameters(params, comm=comm)
        else:
            st.broadcast_parameters(params, comm=comm.split(comm.rank))
        outer.close()
        return str(told.value)

    first, *others = thread_ranks(3, lambda comm: body(comm, lambda rank: meshes[rank % 2, 2]))
    assert others == [first] * 2
    assert first.startswith(
        'ranks hold different parts of parameter "param0": ranks 0, 2: shard 0 of 2, [10, 30] at '
        "[0, 0] of [20, 30] by Shard(dim=0); rank 1: shard 1 of 2, [10, 30] at [10, 0] of "
        "[20, 30] by Shard(dim=0). comm= has to be"
    )
    first, second = thread_ranks(2, lambda comm: body(comm, lambda rank: meshes[0, 2 + 2 * rank]))
    assert first == second
    assert "rank 1: shard 0 of 4, [5, 30] at [0, 0]" in first


def test_whole_on_one_rank_and_cut_on_another(meshes):
    def body(comm):
        params = parameters(meshes[0, 2] if comm.rank else None)
        outer = made(params, comm, **SETTINGS["cocod"])
        with pytest.raises(
            sotto.ProtocolError, match='"param0": rank 0: all of it; rank 1: shard 0 of 2'
        ):
            step_of(params, outer, meshes[0, 2] if comm.rank else None, comm.rank, 0)
        outer.close()

    thread_ranks(2, body)


def test_replicated_parameters_are_averaged_already(meshes):
    mesh = meshes[0, 2]

    def body(comm):
        def whole():
            made_here = distribute_tensor(torch.ones(6), mesh, [Replicate()], src_data_rank=None)
            return [torch.nn.Parameter(made_here)]

        def step(params, outer):
            grad = torch.full((6,), float(comm.rank))
            params[0].grad = distribute_tensor(grad, mesh, [Replicate()], src_data_rank=None)
            outer.step()

        params = whole()
        outer = made(params, comm, preset="co2", period=2, delay=0)  # nothing is cut
        with pytest.raises(
            sotto.InvalidStateError,
            match=r'"param0" is replicated over the ranks \[0, 1\] of its'
            " mesh, which may be those of the comm: their gradients are averaged",
        ):
            step(params, outer)
        outer.close()
        for ranks, text in (((0, 1), "which the comm has too"), ((0, 2), None)):
            comm._framework_ranks = ranks
            outer = made(params := whole(), comm, preset="co2", period=2, delay=0)
            if text:
                with pytest.raises(sotto.InvalidStateError, match=text):
                    step(params, outer)
            else:
                step(params, outer)
            outer.close()
        comm._framework_ranks = None
        outer = made(params := whole(), comm, preset="co2", period=2, delay=0, ddp=True)
        for _ in range(4):
            step(params, outer)
        out = locals_of(params)
        outer.close()
        return out

    a, b = thread_ranks(2, body)
    assert equal(a, b)
    assert not torch.equal(a[0], torch.ones(6))


def test_start_values_of_shards(meshes):
    def body(comm):
        mesh = meshes[1, 2]
        params = parameters(mesh)
        with torch.no_grad():
            for p in params:
                p._local_tensor.add_(comm.rank)
        with pytest.raises(sotto.InvalidStateError, match="3 of 4 tensors differ"):  # one is empty
            st.check_parameters(params, comm=comm)
        st.broadcast_parameters(params, root=1, comm=comm)
        st.check_parameters(params, comm=comm)
        return locals_of(params)

    a, b = thread_ranks(2, body)
    assert equal(a, b)
    assert torch.equal(b[0], cut(start(), meshes[1, 2])[0]._local_tensor + 1)


def test_other_optimizers_go_on_refusing_them(meshes):
    with (
        sotto.create_comm(world_size=1, cpu_threads=1) as comm,
        pytest.raises(sotto.UnsupportedError, match="is a DTensor: every rank has a shard"),
    ):
        st.AdamW(parameters(meshes[0, 2]), comm=comm)


def test_norms_take_every_element_once(meshes):
    """A comm of as many ranks as there are parts, and no parameter that all of them have."""

    def body(comm):
        replicated = DTensor.from_local(
            torch.zeros(3), meshes[0, 2], [Replicate()], run_check=False
        )
        for params, text in (
            (parameters(meshes[0, 4]), r"is cut, here is shard 0 of 4, .*shards= has 2 ranks"),
            (parameters(None), "is whole on this rank, and shards= has 2 ranks; allowed where"),
            ([torch.nn.Parameter(replicated)], "is whole on this rank"),
        ):
            with pytest.raises(sotto.InvalidArgumentError, match='"param0" ' + text):
                made(params, comm, shards=comm, preset="co2")
            # Without norms nothing is counted.
            made(params, comm, shards=comm, **SETTINGS["cocod"]).close()
        made(parameters(meshes[comm.rank, 2]), comm, shards=comm, preset="co2").close()
        alone = comm.split(comm.rank)
        with pytest.raises(sotto.InvalidArgumentError, match="is cut, .*, and shards= has 1 rank;"):
            made(parameters(meshes[0, 2]), comm, shards=alone, preset="co2")
        made(parameters(None), comm, shards=alone, preset="co2").close()
        alone.close()

    thread_ranks(2, body)
