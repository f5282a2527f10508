"""Arrays and trees of JAX: what is taken, what is returned, what ranks get, what is refused."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import warm
from ranks import HERE, ROOT, assert_no_leak, run_ranks, sotto_run, thread_ranks

import sotto
from sotto import _abi as abi
from sotto import _dlpack
from sotto._buffers import Buffers, view_of

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

import sotto.jax  # noqa: E402
from sotto._frameworks.jax import Fresh  # noqa: E402
from sotto.jax.trees import Room  # noqa: E402

CPU = jax.local_devices(backend="cpu")[0]


def alone():
    return sotto.create_comm(world_size=1, timeout=30)


def tree(rank=0):
    return {
        "dense": {"w": jnp.arange(6.0).reshape(2, 3) + rank, "b": jnp.full(3, rank, jnp.bfloat16)},
        "list": [jnp.int32(rank), jnp.zeros((0, 2))],
    }


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# ---- arrays ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint32", "int32"])
def test_arrays_are_read_where_they_lie(dtype):
    x = jnp.ones((3, 4), dtype)
    view = view_of(x, "x")
    assert view.data == x.unsafe_buffer_pointer()
    assert (view.elements, view.writable) == (12, False)
    assert view.dtype == getattr(abi, f"SOTTO_{dtype.upper()}")


def test_nothing_writes_an_array_of_jax():
    x = jnp.ones(4, jnp.bfloat16)
    with pytest.raises(sotto.InvalidArgumentError, match="out is read-only"):
        Buffers(x, "out", writable=True)
    with alone() as comm:
        with pytest.raises(sotto.InvalidArgumentError, match="x is read-only"):
            comm.all_reduce(x)
        with pytest.raises(sotto.InvalidArgumentError, match=r"params\[0\].param is read-only"):
            sotto.optim.Optimizer([(jnp.ones(4), jnp.ones(4))], kind="Adam", comm=comm)


def test_what_cannot_be_read_is_refused():
    donated = jnp.ones(3)
    donated.delete()
    for x, error, text in (
        (donated, sotto.InvalidArgumentError, "x is deleted"),
        (jnp.zeros(3, bool), sotto.UnsupportedError, "dtype bool"),
        (jnp.zeros(3, jnp.complex64), sotto.UnsupportedError, "dtype complex64"),
        (jax.random.key(0), sotto.UnsupportedError, "dtype key"),
    ):
        with pytest.raises(error, match=text):
            view_of(x, "x")


def test_calls_inside_jitted_functions_are_refused():
    with alone() as comm:

        def step(x):
            return sotto.jax.all_reduce({"w": x}, comm=comm)["w"]

        for function in (jax.jit(step), jax.vmap(step), jax.grad(lambda x: step(x).sum())):
            with pytest.raises(sotto.InvalidArgumentError, match=r'x, leaf "w", is traced'):
                function(jnp.ones(3))
        assert jax.jit(lambda x: 2 * x)(step(jnp.ones(3)))[0] == 2


def test_sharded_arrays_are_refused():
    program = (
        "import jax, numpy as np, sotto\n"
        "from sotto._buffers import view_of\n"
        "from jax.sharding import Mesh, NamedSharding, PartitionSpec\n"
        "mesh = Mesh(np.array(jax.devices()), ('x',))\n"
        "x = jax.device_put(np.zeros(4, np.float32), NamedSharding(mesh, PartitionSpec('x')))\n"
        "try:\n    view_of(x, 'x')\nexcept sotto.UnsupportedError as error:\n    print(error)\n"
    )
    run = subprocess.run(
        [warm.python("jax"), "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    )
    assert "x is sharded over 2 devices" in run.stdout, run.stdout + run.stderr


# ---- a CUDA device, by DLPack's rule -----------------------------------------------------------


class OnCuda:
    """A producer that says that its memory is on CUDA device 1."""

    def __init__(self, old=False):
        self.values, self.asked, self.old = np.arange(6, dtype=np.float32), [], old

    def __dlpack_device__(self):
        return (abi.SOTTO_DEVICE_CUDA, 1)

    def __dlpack__(self, *, stream=None, **options):
        if self.old and options:
            raise TypeError("unexpected keyword")
        self.asked.append(stream)
        return self.values.__dlpack__(**options)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("current", "passed"), [(0, 1), (0x1230, 0x1230)])
def test_producers_get_the_stream_of_the_call(old, current, passed):
    x = OnCuda(old)
    view = _dlpack.view_of_dlpack(x, "x", stream_on={1: current}.__getitem__)
    assert (view.cuda, view.data, view.elements) == (1, x.values.ctypes.data, 6)
    assert x.asked == [passed]


def test_producers_of_no_framework_stay_in_host_memory():
    with pytest.raises(sotto.UnsupportedError, match="DLPack device type 2"):
        view_of(OnCuda(), "x")


def test_arrays_on_a_gpu_go_by_dlpack(monkeypatch):
    from sotto._frameworks import jax as adapter

    class Array(OnCuda):
        dtype = np.dtype("float32")
        is_deleted = staticmethod(lambda: False)
        devices = staticmethod(lambda: [SimpleNamespace(platform="gpu")])

        def block_until_ready(self):
            raise AssertionError("the host waits for the device")

    monkeypatch.setattr(adapter.jax, "Array", Array)
    monkeypatch.setattr(adapter, "current_stream", {1: 0x77}.__getitem__)
    x = Array()
    view = view_of(x, "x")
    assert (view.cuda, view.writable, x.asked) == (1, False, [0x77])
    tpu = Array()
    tpu.devices = lambda: [SimpleNamespace(platform="tpu")]
    with pytest.raises(sotto.UnsupportedError, match="allowed: host memory"):
        view_of(tpu, "x")
    fresh = Fresh.__new__(Fresh)
    fresh.array = Array()
    assert view_of(fresh, "out").writable


# ---- results -----------------------------------------------------------------------------------


def test_results_are_taken_over_without_a_copy():
    room = Room(jnp.ones((5, 3), jnp.bfloat16))
    room.memory[...] = 2
    x = room.array()
    assert x.unsafe_buffer_pointer() == room.memory.ctypes.data
    assert (x.shape, x.dtype, float(x[4, 2])) == ((5, 3), jnp.bfloat16, 2.0)
    kept = room.copy()
    room.memory[...] = 3
    assert float(kept[0, 0]) == 2.0


@pytest.mark.parametrize("committed", [False, True])
def test_results_are_where_the_argument_was(committed):
    x = jax.device_put(jnp.ones(3), CPU if committed else None)
    assert x.committed == committed
    with alone() as comm:
        y = sotto.jax.all_reduce(x, comm=comm)
    assert (y.committed, y.devices()) == (committed, x.devices())


def test_leaves_have_to_be_arrays():
    with alone() as comm:
        for leaf, text in ((jnp.zeros(2, bool), "dtype bool"), (jax.random.key(0), "dtype key")):
            with pytest.raises(sotto.UnsupportedError, match=f'x, leaf "a.0", is of {text}'):
                sotto.jax.all_reduce({"a": [leaf]}, comm=comm)
        for leaf in (1.0, np.zeros(3), "text"):
            with pytest.raises(sotto.InvalidArgumentError, match='x, leaf "a.0", is of type'):
                sotto.jax.all_reduce({"a": [leaf]}, comm=comm)
        with pytest.raises(sotto.InvalidArgumentError, match=r"like is of type float"):
            sotto.jax.recv(1.0, 0, comm=comm)


def test_64_bits_stay_64_bits():
    """Also where they are not enabled when a result is made."""
    with jax.enable_x64(True):
        x = {"f": jnp.full(3, 1 / 3), "i": jnp.full(2, 2**40), "u": jnp.full(2, 2**40, jnp.uint64)}
        double = jax.tree.map(lambda leaf: 2 * leaf, x)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)

    def body(comm):
        same(sotto.jax.all_reduce(x, comm=comm), double)
        same(sotto.jax.broadcast(x, comm=comm), x)
        if comm.rank == 0:
            sotto.jax.send(x, 1, comm=comm)
        else:
            same(sotto.jax.recv(like, 0, comm=comm), x)

    thread_ranks(2, body)


def test_results_have_no_weak_types():
    """On the root of a broadcast too, else ranks would promote to other dtypes."""
    for x in (jnp.asarray(0.1), jax.device_put(jnp.asarray(0.1), CPU)):
        assert x.weak_type
        for y in thread_ranks(2, lambda comm, x=x: sotto.jax.broadcast({"a": x}, comm=comm)["a"]):
            assert (y.weak_type, y.committed, float(y)) == (False, x.committed, float(x))


def collectives(comm):
    rank, n = comm.rank, comm.size
    mine, options = tree(rank), {"comm": comm}
    before = jax.tree.map(np.array, mine)
    same(sotto.jax.broadcast(mine, 1, **options), tree(1))
    total = sotto.jax.all_reduce(mine, **options)
    assert total["dense"]["w"].tolist() == (n * np.arange(6).reshape(2, 3) + 3).tolist()
    assert (int(total["list"][0]), total["list"][1].shape) == (3, (0, 2))
    pending = [sotto.jax.all_reduce_async(x, op="mean", **options) for x in (mine, mine["dense"])]
    mean = pending[0].wait()
    assert pending[0].wait() is mean
    assert float(mean["dense"]["b"][0]) == 1.0
    same(pending[1].wait(), mean["dense"])
    parts = sotto.jax.all_gather(mine, **options)
    for r in range(n):
        same(jax.tree.map(lambda x, r=r: x[r], parts), tree(r))
    part = sotto.jax.reduce_scatter(parts, op="max", **options)
    same(jax.tree.map(lambda x: x[0], part), tree(rank))
    at_root = sotto.jax.reduce(mine, 2, **options)
    same(at_root, total) if rank == 2 else same(at_root, None)
    if rank == 0:
        sotto.jax.send(mine, 1, **options)
    elif rank == 1:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), mine)
        same(sotto.jax.recv(like, 0, **options), tree(0))
    with pytest.raises(sotto.InvalidArgumentError, match='leaf "dense.w", has shape'):
        sotto.jax.reduce_scatter(mine, **options)
    with sotto.jax.codec("onebit", [jnp.ones(512)], **options) as codec:
        x = [jnp.full(512, 1.0 + rank)]
        assert float(sotto.jax.all_reduce(x, codec=codec, **options)[0][0]) == 2.0
    same(mine, before)
    return np.asarray(jax.tree.leaves(mean)[1]).tobytes()


def test_collectives_of_threads():
    assert len(set(thread_ranks(3, collectives))) == 1


def test_collectives_of_processes():
    run_ranks(3, __file__, "collectives", imports=("jax",))


# ---- optimizers --------------------------------------------------------------------------------


def gradients(params, step, rank, scale=1.0):
    rng = np.random.default_rng(100 * step + rank)
    return jax.tree.map(
        lambda p: jnp.asarray(scale * rng.standard_normal(p.shape), p.dtype), params
    )


def train(comm, kind, dtype, steps=8):
    start = {
        "w": jnp.linspace(-1, 1, 300).astype(dtype).reshape(3, 100),
        "b": jnp.ones(7, dtype),
    }
    hyper = {"freeze_step": 4} if kind.startswith("OneBit") else {}
    groups = {"optimizer": {"type": kind, "params": {"lr": 0.01, **hyper}}}
    seen = []
    with sotto.jax.Optimizer(start, groups, comm=comm) as optimizer:
        params = start
        for step in range(steps):
            params = optimizer.step(gradients(params, step, comm.rank))
            seen.append(params)
        names = [t["name"] for t in optimizer.base.report("tensors")["tensors"]]
        state = optimizer.base.export_state("exact")
        optimizer.step(gradients(params, 99, comm.rank))
        optimizer.base.import_state(state, "exact")
        same(optimizer.params, params)
    assert names == ["b", "w"]
    # What a step has returned stays as it is when later ones write the masters.
    assert len({np.asarray(each["w"]).tobytes() for each in seen}) == steps
    return np.asarray(params["w"], np.float32), np.asarray(params["b"], np.float32)


def on_buffers(comm, kind, steps=8):
    """The same on plain buffers of numpy."""
    w, b = np.asarray(jnp.linspace(-1, 1, 300)).copy(), np.ones(7, np.float32)
    grads = {"b": np.zeros(7, np.float32), "w": np.zeros((3, 100), np.float32)}
    hyper = {"freeze_step": 4} if kind.startswith("OneBit") else {}
    pairs = [(b, grads["b"], "b"), (w, grads["w"].reshape(-1), "w")]
    with sotto.optim.Optimizer(pairs, kind=kind, comm=comm, lr=0.01, **hyper) as optimizer:
        for step in range(steps):
            for name, values in gradients(
                {"b": b, "w": w.reshape(3, 100)}, step, comm.rank
            ).items():
                grads[name][...] = values
            optimizer.step().wait()
    return w.reshape(3, 100), b


@pytest.mark.parametrize("kind", ["AdamW", "OneBitAdam"])
def test_steps_have_the_bits_of_plain_buffers(kind):
    def body(comm):
        return train(comm, kind, "float32"), on_buffers(comm, kind)

    for ours, theirs in thread_ranks(2, body):
        for a, b in zip(ours, theirs):
            assert a.tobytes() == b.tobytes()


def test_parameters_of_low_precision_have_masters():
    first, second = thread_ranks(2, lambda comm: train(comm, "AdamW", "bfloat16"))
    assert first[0].tobytes() == second[0].tobytes()
    assert np.all(np.abs(first[1] - 1) < 0.2)


def test_accumulated_gradients():
    config = {
        "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    with alone() as comm, sotto.jax.Optimizer([jnp.zeros(3)], config, comm=comm) as optimizer:
        optimizer.accumulate([jnp.ones(3)])
        (p,) = optimizer.step([jnp.full(3, 3.0)])
        assert p.tolist() == [-2, -2, -2]


def test_gradients_that_do_not_fit_are_refused():
    params = {"a": jnp.ones(3), "b": {"c": jnp.ones((2, 2))}}
    with alone() as comm:
        for leaf in (jnp.arange(3), jnp.zeros(3, bool), jnp.zeros(3, jnp.complex64)):
            text = f'leaf "a", is of dtype {leaf.dtype}; allowed: float32, bfloat16, float16$'
            with pytest.raises(sotto.InvalidArgumentError, match=text):
                sotto.jax.Optimizer({"a": leaf}, kind="Adam", comm=comm)
        with sotto.jax.Optimizer(params, kind="Adam", comm=comm) as optimizer:
            for grads, text in (
                (
                    {"a": jnp.ones(3, jnp.complex64), "b": {"c": jnp.ones((2, 2))}},
                    'grads, leaf "a", is of dtype complex64; allowed: float32, bfloat16, float16$',
                ),
                ({"a": params["a"]}, "to be alike"),
                ({"a": jnp.ones(3), "b": {"c": jnp.ones(4)}}, r'"b.c", has shape \(4,\)'),
                ({"a": jnp.ones(3, jnp.int32), "b": {"c": jnp.ones((2, 2))}}, "grads"),
            ):
                with pytest.raises(sotto.SottoError, match=text):
                    optimizer.step(grads)
            same(optimizer.params, params)
            bad = jax.tree.map(lambda p: p * jnp.nan, params)
            with pytest.raises(sotto.NonfiniteError):
                optimizer.step(bad)
            same(optimizer.params, params)


def test_parameters_that_a_step_is_writing_are_not_given():
    stepped = threading.Event()

    def body(comm):
        with sotto.jax.Optimizer({"a": jnp.ones(3)}, kind="SGD", lr=1.0, comm=comm) as optimizer:
            if comm.rank == 1:
                assert stepped.wait(50)
            else:  # as when Ctrl-C has ended the wait for it
                work = optimizer.base.step()
                with pytest.raises(sotto.BusyError, match="step"):
                    _ = optimizer.params
                stepped.set()
                work.wait()
                return optimizer.params["a"].tolist()
            return optimizer.step({"a": jnp.ones(3)})["a"].tolist()

    assert thread_ranks(2, body) == [[0] * 3] * 2


def test_cycles_keep_no_memory():
    params = {"a": jnp.ones(500), "b": (jnp.ones((3, 5)),)}

    def cycle(times, comm):
        for _ in range(times):
            with sotto.jax.Optimizer(params, kind="Adam", lr=0.1, comm=comm) as optimizer:
                optimizer.step(params)
            sotto.jax.all_reduce(params, comm=comm)
            with sotto.create_comm(world_size=1, cpu_threads=1) as another:
                sotto.jax.broadcast(params, 0, comm=another)

    with alone() as comm:
        cycle(100, comm)
        assert_no_leak(lambda: cycle(1000, comm), allowed_kb=2048)


INTERRUPTED = """
import signal, threading, time
import jax.numpy as jnp
import sotto, sotto.jax
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
unique_id, box = sotto.UniqueId(), []
def rank(number):
    mine = unique_id if number == 0 else bytes(unique_id)
    comm = sotto.create_comm(rank=number, world_size=2, unique_id=mine, timeout=60)
    return sotto.jax.Optimizer({"a": jnp.ones(3)}, kind="SGD", lr=1.0, comm=comm)
other = threading.Thread(target=lambda: box.append(rank(1)))
other.start()
optimizer = rank(0)
other.join()
wait = sotto.Work.wait
def announced(work, timeout=None):
    sotto.Work.wait = wait
    print("waiting", flush=True)
    return wait(work, timeout)
sotto.Work.wait = announced
try:
    optimizer.step({"a": jnp.ones(3)})
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(box[0].step({"a": jnp.ones(3)})["a"].tolist(), flush=True)
while True:  # the other rank may have ended its step before this one has
    try:
        print(optimizer.params["a"].tolist(), flush=True)
        break
    except sotto.BusyError:
        time.sleep(0.01)
"""


def test_ctrl_c_ends_the_wait_for_a_step_and_the_step_goes_on():
    process = subprocess.Popen(
        [warm.python("jax"), "-c", INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SOTTO_CPU_THREADS": "1", "PYTHONPATH": str(HERE.parent / "src")},
    )
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert out == "interrupted\n[0.0, 0.0, 0.0]\n[0.0, 0.0, 0.0]\n", err


def test_groups_by_path():
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    with alone() as comm:
        params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
        with sotto.jax.Optimizer(
            params, config, comm=comm, group=lambda path: int(path == "b")
        ) as optimizer:
            optimizer.base.set("lr", 0.5, 1)
            new = optimizer.step({"a": jnp.ones(2), "b": jnp.ones(2)})
        assert (new["a"].tolist(), new["b"].tolist()) == ([-1, -1], [-0.5, -0.5])


def test_the_example_trains():
    run = subprocess.run(
        [
            *(sotto_run(), "-n", "2", "--timeout", "100", "--", warm.python("jax")),
            str(ROOT / "integration/jax/train.py"),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SOTTO_CPU_THREADS": "1", "PYTHONPATH": str(HERE.parent / "src")},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line for line in run.stdout.splitlines() if "loss" in line]
    assert len(lines) == 2, run.stdout
    first, last = (float(word) for word in lines[0].rsplit("loss ", 1)[1].split(" to "))
    assert last < 0.5 * first, lines


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
