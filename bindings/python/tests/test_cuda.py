"""Tensors on CUDA devices: streams are passed and waited for, results are those of the CPU.

Where torch sees no GPU, stand-ins take the place of torch.cuda, and the library of the emulator
that of libsotto.so.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm

import sotto
from sotto import _abi as abi
from sotto._buffers import Buffers, buffer_of, cuda_of, view_of
from sotto.comm import call_on, call_options
from sotto.group import default_comm

torch = pytest.importorskip("torch", reason="torch is not installed")

from cuda_stand_ins import OnCuda, host_address, install, on_cuda  # noqa: E402  # needs torch

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"


class Placed(OnCuda):
    """Without a runtime: the address is the host's."""

    def __new__(cls, values):
        return values.as_subclass(cls)

    @staticmethod
    def address(tensor):
        return host_address(tensor)


# ---- Without a device --------------------------------------------------------------------------


def test_a_tensor_says_which_device_it_is_on():
    x = Placed(torch.arange(6, dtype=torch.float32))
    view = view_of(x, "x")
    assert view.data == host_address(x)
    assert (view.elements, view.dtype, view.cuda) == (6, abi.SOTTO_FLOAT32, 0)
    buffer = buffer_of(view)
    assert (buffer.device_type, buffer.device_id) == (abi.SOTTO_DEVICE_CUDA, 0)
    host = view_of(torch.zeros(2), "y")
    assert (buffer_of(host).device_type, host.cuda) == (abi.SOTTO_DEVICE_CPU, cuda_of(()))
    assert Buffers([torch.zeros(2), x], "x", writable=False).cuda == 0


def test_other_devices_are_refused():
    with pytest.raises(
        sotto.UnsupportedError, match=r"x is on meta; allowed: host memory, .* CUDA"
    ):
        view_of(torch.zeros(2, device="meta"), "x")


def test_the_current_stream_goes_with_every_call(monkeypatch):
    asked = []

    def current_stream(device):
        asked.append(device)
        return SimpleNamespace(cuda_stream=0x1230)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    assert call_on(cuda_of(()), None) is None
    assert call_on(3, None)._obj.stream == 0x1230
    passed = call_on(3, call_options(tag=7))._obj
    assert (passed.stream, passed.tag, asked) == (0x1230, 7, [3, 3])


# ---- On the emulator ---------------------------------------------------------------------------


def emulated():
    """The library of the emulator and its runtime, beside the one under test."""
    build = Path(os.environ["SOTTO_LIBRARY"]).resolve().parent.parent
    library = build / "lib" / "libsotto_emulated.so"
    runtimes = sorted((build / "fakes").glob("libcudart.so.*"))
    if not library.exists() or not runtimes:
        pytest.skip(f"{library} is not built: it needs CUDA's headers")
    return library, runtimes[0]


@pytest.mark.parametrize(
    "scene",
    [
        "optimizers",
        "outer_steps",
        "a_step_that_fails",
        "writes_that_are_queued",
        "graphs",
        "collectives",
        "hook_without_codec",
        "hook_with_codec",
    ],
)
def test_on_the_emulator(scene):
    library, runtime = emulated()
    run = subprocess.run(
        [warm.python("torch"), "-B", __file__, scene, str(runtime)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "SOTTO_LIBRARY": str(library), "FAKE_CUDA_MAX_DELAY_US": "500"},
    )
    assert run.returncode == 0, run.stdout + run.stderr


def numbers(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def train(kind, place, options, in_graphs=None):
    """Parameters after a few steps, made of tensors that `place` puts somewhere.

    in_graphs: makes a step of the optimizer, whose gradients then stay where they are.
    """
    params = [place(numbers(n, n)).requires_grad_() for n in (1000, 17, 1)]
    optimizer = getattr(sotto.torch, kind)(params, lr=0.01, **options)
    for step in range(6):
        for i, p in enumerate(params):
            values = numbers(p.numel(), 100 * step + i)
            if in_graphs is None or step == 0:
                p.grad = place(values)
                continue
            with torch.no_grad():
                p.grad.copy_(values)
                if isinstance(p.grad, OnCuda):
                    OnCuda.runtime.upload(p.grad)
        if in_graphs is None:
            optimizer.step()
        else:
            in_graphs(optimizer)
    return params, optimizer


def scene_optimizers(runtime):
    for kind, options in (
        ("AdamW", {}),
        ("AdamW", {"gradient_clipping": 1.0, "loss_scale": 4.0}),
        ("OnebitLamb", {"freeze_step": 3}),
    ):
        expected, reference = train(kind, torch.clone, options)
        params, optimizer = train(kind, on_cuda, options)
        assert optimizer._flying is not None  # the last step was not waited for
        with torch.no_grad():
            runtime.download(*(p.detach() for p in params))
        for here, there in zip(params, expected):
            assert torch.equal(here.detach().as_subclass(torch.Tensor), there.detach()), kind
        assert optimizer.info().step == reference.info().step == 6
        assert optimizer._flying is None
        for each in (optimizer, reference):
            each.close()


class Descent(torch.optim.Optimizer):
    """Gradient descent on tensors of the stand-in, or of the host."""

    def __init__(self, params, runtime=None):
        super().__init__(params, {"lr": 0.5})
        self.runtime = runtime

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            with torch.no_grad():
                if self.runtime:
                    self.runtime.download(p.detach())
                p.sub_(p.grad, alpha=0.5)
                if self.runtime:
                    self.runtime.upload(p.detach())


def scene_outer_steps(runtime):
    """Steps are not waited for; states, evaluations and parameters that move come after them."""
    found = []
    for on in (None, runtime):
        place = torch.clone if on is None else on_cuda
        params = [place(numbers(n, n)).requires_grad_() for n in (1000, 17)]
        outer = sotto.torch.Outer(Descent(params, on), preset="co2", period=3)
        for step in range(10):
            for i, p in enumerate(params):
                p.grad = place(numbers(p.numel(), 100 * step + i))
            outer.step()
            assert (outer._flying is not None) == (on is not None)
            if step == 4:
                state = outer.state_dict()
                assert outer._flying is None
            if step == 6:
                with torch.no_grad():
                    if on:
                        on.download(params[0].detach())
                    params[0].data = place(params[0].detach())
        assert outer.info().step == 10
        with outer.evaluation():
            with torch.no_grad():
                if on:
                    on.download(*(p.detach() for p in params))
            found.append([p.detach().as_subclass(torch.Tensor).clone() for p in params])
        if on:
            with on.graph().capture(), pytest.raises(sotto.InvalidStateError, match="CUDA graph"):
                outer.step()
        outer.load_state_dict(state)
        assert outer.info().step == 5
        outer.flush()
        if on:
            outer.synchronize()
            with torch.no_grad():
                on.download(*(p.detach() for p in params))
        found.append([p.detach().as_subclass(torch.Tensor).clone() for p in params])
        outer.close()
    (anchor, flushed), (anchor_there, flushed_there) = found[:2], found[2:]
    assert all(map(torch.equal, anchor, anchor_there))
    assert all(map(torch.equal, flushed, flushed_there))


def scene_a_step_that_fails(runtime):
    p = on_cuda(torch.ones(10)).requires_grad_()
    optimizer = sotto.torch.AdamW([p], lr=0.1)
    p.grad = on_cuda(torch.full((10,), float("nan")))
    optimizer.step()  # its end is not known yet
    for tell in (optimizer.synchronize, optimizer.step):
        with pytest.raises(sotto.NonfiniteError):
            tell()
        if tell == optimizer.synchronize:
            optimizer.synchronize()  # said once
            optimizer.step()
    p.grad = on_cuda(torch.ones(10))
    optimizer.step()
    optimizer.accumulate()
    optimizer.close()
    with torch.no_grad():
        runtime.download(p.detach())
    assert 0.85 < float(p.detach().as_subclass(torch.Tensor)[0]) < 0.95


def scene_writes_that_are_queued(runtime):
    """Calls that no stream orders wait for the current one."""
    p = on_cuda(torch.zeros(5000)).requires_grad_()
    optimizer = sotto.optim.Optimizer([(p, on_cuda(torch.zeros(5000)))], kind="AdamW", lr=0.1)

    def write(value):
        with torch.no_grad():
            p.fill_(value)
            runtime.upload(p.detach())

    for i in range(1, 30):
        write(i)
        state = optimizer.export_state("exact")
        runtime.synchronize()
        assert state == optimizer.export_state("exact"), i
        write(-i)
        optimizer.import_state(state, "exact")
        with torch.no_grad():
            runtime.download(p.detach())
            assert p.as_subclass(torch.Tensor).eq(i).all(), i
        optimizer.set_frozen([True])
    optimizer.close()


class InGraphs:
    """Steps with graphs: those there are, or another one, or none for the switch.

    make_graph: something with capture() and replay().
    """

    def __init__(self, make_graph):
        self.make_graph, self.graphs, self.replays, self.misfits = make_graph, [], 0, 0

    def __call__(self, optimizer):
        if not self.graphs:
            with pytest.raises(sotto.InvalidStateError, match="no step was recorded"):
                optimizer.replay(None)
        for graph, recorded in self.graphs:
            try:
                optimizer.replay(graph, recorded)
            except sotto.InvalidStateError:
                self.misfits += 1
            else:
                self.replays += 1
                return
        graph = self.make_graph()
        try:
            with graph.capture():
                optimizer.step()
        except sotto.InvalidStateError:
            optimizer.step()
            return
        self.graphs.append((graph, optimizer.recorded))
        first = optimizer.param_groups[0]["params"][0]
        version = first._version
        optimizer.replay(graph)
        assert first._version > version  # autograd knows
        self.replays += 1


IN_GRAPHS = (  # and how many graphs and replays six steps make
    ("AdamW", {"gradient_clipping": 1.0}, 1, 6),
    ("Lamb", {"loss_scale": "dynamic"}, 1, 6),
    ("OnebitLamb", {"freeze_step": 3}, 2, 5),
)


def scene_graphs(runtime):
    for kind, options, graphs, replays in IN_GRAPHS:
        expected, reference = train(kind, torch.clone, options)
        steps = InGraphs(runtime.graph)
        params, optimizer = train(kind, on_cuda, options, steps)
        with torch.no_grad():
            runtime.download(*(p.detach() for p in params))
        for here, there in zip(params, expected):
            assert torch.equal(here.detach().as_subclass(torch.Tensor), there.detach()), kind
        assert optimizer.info().step == reference.info().step == 6
        assert (len(steps.graphs), steps.replays) == (graphs, replays), kind
        assert bool(steps.misfits) == (graphs > 1)
        for each in (optimizer, reference):
            each.close()


def scene_collectives(runtime):
    comm = default_comm()
    x = on_cuda(numbers(5000, 1))
    codec = comm.codec("onebit", x)
    other = runtime.new_stream()
    for work in (comm.all_reduce(x, op="mean"), comm.all_reduce(x, codec=codec)):
        assert work.on_cuda
        work.wait_stream()
        work.wait_stream(other)
        work.wait_stream(other.cuda_stream)
        work.wait()
    y = on_cuda(numbers(300, 2))
    with comm.group() as work:
        comm.all_reduce(x)
        comm.broadcast(y)
    assert work.on_cuda
    work.wait_stream()
    runtime.download(x, y)
    host = comm.all_reduce(torch.zeros(3))
    with pytest.raises(sotto.UnsupportedError, match="host memory"):
        host.wait_stream()
    host.wait()
    with pytest.raises(sotto.InvalidArgumentError, match=r"cuda:0.*cpu"):
        comm.all_gather(x, torch.zeros(5000))
    codec.close()


class Bucket(SimpleNamespace):
    """As DDP hands one over."""

    def index(self):
        return 0

    def is_last(self):
        return True

    def buffer(self):
        return self.values

    def parameters(self):
        return []


class Future:
    """Says on which stream it was completed."""

    def __init__(self, devices=None):
        self.devices, self.stream, self.result, self.error = devices, None, None, None

    def set_result(self, result):
        self.result, self.stream = result, OnCuda.runtime.current.cuda_stream

    def set_exception(self, error):
        self.error = error


class Backward(torch.autograd.Function):
    """Does something in backward(), as DDP's reducer does."""

    @staticmethod
    def forward(ctx, x, work):
        ctx.work = work
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.work()
        return grad, None


def hook(runtime, codec, steps):
    torch.futures.Future = Future
    state = sotto.torch.DDPState(codec)
    values, made = on_cuda(numbers(4000, 3)), []
    for _ in range(steps):
        x = torch.ones(1, requires_grad=True)
        Backward.apply(
            x, lambda: made.append(sotto.torch.ddp_hook(state, Bucket(values=values)))
        ).backward()
    state.close()
    assert len(made) == steps
    assert all(f.error is None and f.result is values for f in made)
    assert all(f.devices == [values.device] for f in made)
    runtime.download(values)
    return [f.stream != runtime.current.cuda_stream for f in made]


def scene_hook_without_codec(runtime):
    assert hook(runtime, None, 3) == [True] * 3  # a stream of its own


def scene_hook_with_codec(runtime):
    # The first step has none; the others end when the host knows the verdict.
    assert hook(runtime, "onebit", 3) == [True, False, False]


# ---- On a GPU ----------------------------------------------------------------------------------


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    if "cuda" not in sotto.build_info()["devices"]:
        pytest.skip("this library was built without CUDA")
    with sotto.init_process_group(rank=0, world_size=1):
        yield torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Lamb", "OnebitAdam", "OnebitLamb"])
def test_optimizers_on_a_gpu_have_the_bits_of_the_cpu(gpu, kind):
    options = {"freeze_step": 3} if kind.startswith("Onebit") else {}
    expected, _ = train(kind, torch.clone, options)
    params, _ = train(kind, lambda values: values.to(gpu), options)
    for here, there in zip(params, expected):
        assert torch.equal(here.detach().cpu(), there.detach())


class GpuGraph:
    def __init__(self):
        self._graph = torch.cuda.CUDAGraph()
        self.replay = self._graph.replay

    def capture(self):
        return torch.cuda.graph(self._graph)


@pytest.mark.parametrize(("kind", "options", "graphs", "replays"), IN_GRAPHS)
def test_steps_in_graphs_on_a_gpu(gpu, kind, options, graphs, replays):
    expected, _ = train(kind, torch.clone, options)
    steps = InGraphs(GpuGraph)
    params, _ = train(kind, lambda values: values.to(gpu), options, steps)
    for here, there in zip(params, expected):
        assert torch.equal(here.detach().cpu(), there.detach())
    assert (len(steps.graphs), steps.replays) == (graphs, replays)


def test_ddp_on_a_gpu(gpu, tmp_path):
    dist = torch.distributed
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        for codec in (None, "onebit"):
            torch.manual_seed(0)
            model = torch.nn.Linear(64, 8).to(gpu)
            ddp = torch.nn.parallel.DistributedDataParallel(model)
            state = sotto.torch.DDPState(codec)
            ddp.register_comm_hook(state, sotto.torch.ddp_hook)
            for _ in range(3):
                ddp.zero_grad()
                ddp(torch.ones(4, 64, device=gpu)).sum().backward()
            assert all(p.grad.isfinite().all() for p in model.parameters())
            state.close()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.path[:0] = [str(SOURCE)]
    import sotto.torch

    on = install(sys.argv[2])
    with sotto.init_process_group(rank=0, world_size=1):
        globals()[f"scene_{sys.argv[1]}"](on)
