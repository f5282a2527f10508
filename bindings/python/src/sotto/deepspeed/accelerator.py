"""deepspeed.accelerator: the device that programs ask for by get_accelerator().

CUDA where PyTorch has it, else the CPU; DS_ACCELERATOR=cpu or cuda decides.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..errors import InvalidArgumentError, UnsupportedError

__path__: list[str] = []  # deepspeed.accelerator.real_accelerator is found below: see modules.py
KINDS = ("cpu", "cuda")


def resident_bytes() -> int:
    """Memory of this process that is resident, from /proc."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Accelerator:
    """What the accelerators of all devices share. Methods are named as in DeepSpeed."""

    _name = ""
    _backend = ""

    BFloat16Tensor = property(lambda self: self._tensor_type("BFloat16Tensor"))
    ByteTensor = property(lambda self: self._tensor_type("ByteTensor"))
    DoubleTensor = property(lambda self: self._tensor_type("DoubleTensor"))
    FloatTensor = property(lambda self: self._tensor_type("FloatTensor"))
    HalfTensor = property(lambda self: self._tensor_type("HalfTensor"))
    IntTensor = property(lambda self: self._tensor_type("IntTensor"))
    LongTensor = property(lambda self: self._tensor_type("LongTensor"))

    def __init__(self) -> None:
        self._compile_backend = "inductor"

    def _tensor_type(self, name: str) -> Any:
        return getattr(torch, name)

    def communication_backend_name(self) -> str:
        """Backend of torch's process group: "gloo" or "nccl"."""
        return self._backend

    def random(self) -> Any:
        """The module torch.random."""
        return torch.random

    def initial_seed(self) -> int:
        """Seed of PyTorch's generator."""
        return torch.initial_seed()

    def is_triton_supported(self) -> bool:
        """Whether kernels in Triton run."""
        return False

    def supported_dtypes(self) -> list[torch.dtype]:
        """Types that parameters may have."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_fp16_supported(self) -> bool:
        """Whether parameters may be float16."""
        return True

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Calls at once."""
        return callback()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this kind of device."""
        return tensor.device.type == self._name

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in page-locked memory."""
        return tensor.is_pinned()

    def get_compile_backend(self) -> str:
        """Backend that engine.compile() uses."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Sets get_compile_backend()."""
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise InvalidArgumentError(
                f"compile backend is {backend!r}; allowed: {', '.join(known)}"
            )
        self._compile_backend = backend

    def is_synchronized_device(self) -> bool:
        """Whether work is done when a call returns."""
        return self._name == "cpu"

    use_host_timers = is_synchronized_device
    resolves_data_dependency = is_synchronized_device
    handles_memory_backpressure = is_synchronized_device

    def export_envs(self) -> list[str]:
        """Beginnings of the names of variables that a launcher hands on."""
        return ["SOTTO", "NCCL"] if self._name == "cuda" else ["SOTTO"]

    def op_builder_dir(self) -> str:
        """Where the builders of DeepSpeed's operators are; none of them is here."""
        return "sotto.deepspeed.ops.op_builder"

    def create_op_builder(self, op_name: str) -> Any:
        """Refused: nothing is compiled at run time here."""
        raise UnsupportedError(
            f"op builder {op_name}: DeepSpeed's own operators are not here; the optimizers are in "
            "libsotto.so, and kernels of the model have to be PyTorch's"
        )

    get_op_builder = create_op_builder
    build_extension = create_op_builder


class CpuAccelerator(Accelerator):
    """The host. Memory is that of the process."""

    _name = "cpu"
    _backend = "gloo"
    Stream = None
    Event = None

    def __init__(self) -> None:
        super().__init__()
        self._most = 0

    def device_name(self, device_index: int | None = None) -> str:
        """The name "cpu", whatever the index."""
        return "cpu"

    def device(self, device_index: int | None = None) -> None:
        """None, as DeepSpeed's; a context manager of streams has no meaning here."""

    def set_device(self, device_index: int) -> None:
        """Nothing to choose."""

    def current_device(self) -> int:
        """LOCAL_RANK, as DeepSpeed's."""
        return int(os.environ.get("LOCAL_RANK", 0))

    def current_device_name(self) -> str:
        """The name "cpu"."""
        return "cpu"

    def device_count(self) -> int:
        """Processes of this machine, if the launcher says it; else 1."""
        from .ranks import LOCAL_SIZES

        found = [os.environ[name] for name in ("LOCAL_SIZE", *LOCAL_SIZES) if name in os.environ]
        return int(found[0]) if found else 1

    def is_available(self) -> bool:
        """Always."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing to wait for."""

    # ---- random numbers --------------------------------------------------------------------------

    def manual_seed(self, seed: int) -> Any:
        """As torch.manual_seed."""
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """State of the generator."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Sets it."""
        torch.set_rng_state(new_state)

    def default_generator(self, device_index: int = 0) -> Any:
        """The generator."""
        return torch.default_generator

    # ---- streams and graphs ----------------------------------------------------------------------

    def stream(self, stream: Any) -> Any:
        """A context that does nothing."""
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> None:
        """None."""

    def default_stream(self, device_index: int | None = None) -> None:
        """None."""

    def create_graph(self) -> None:
        """None: nothing is captured."""

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        """A context that does nothing."""
        return contextlib.nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Nothing."""

    def range_push(self, msg: str) -> None:
        """No profiler reads it."""

    def range_pop(self) -> None:
        """No profiler reads it."""

    # ---- memory ----------------------------------------------------------------------------------

    def get_rss(self) -> int:
        """Bytes of this process that are resident."""
        now = resident_bytes()
        self._most = max(self._most, now)
        return now

    def reset_rss(self) -> int:
        """Starts the maximum anew."""
        self._most = resident_bytes()
        return self._most

    def memory_allocated(self, device_index: int | None = None) -> int:
        """As get_rss()."""
        return self.get_rss()

    memory_cached = memory_allocated
    memory_reserved = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The largest that was seen."""
        self.get_rss()
        return self._most

    max_memory_cached = max_memory_allocated
    max_memory_reserved = max_memory_allocated

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Starts the maximum anew."""
        self.reset_rss()

    reset_max_memory_cached = reset_max_memory_allocated
    reset_peak_memory_stats = reset_max_memory_allocated

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """Two of the keys of torch.cuda.memory_stats."""
        now = self.get_rss()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": self._most}

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the machine."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of the machine that programs can have."""
        with open("/proc/meminfo", encoding="ascii") as file:
            rows = dict(line.split(":") for line in file)
        return int(rows["MemAvailable"].split()[0]) * 1024

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def is_bf16_supported(self) -> bool:
        """Always."""
        return True

    def visible_devices_envs(self) -> list[str]:
        """Variables that choose devices."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(
        self, current_env: dict[str, str], local_accelerator_ids: list[int]
    ) -> None:
        """Sets them in `current_env`."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))


class CudaAccelerator(Accelerator):
    """CUDA devices: what is not here is torch.cuda's function of the same name."""

    _name = "cuda"
    _backend = "nccl"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(torch.cuda, name):
            raise AttributeError(f"the accelerator has no member {name}")
        return getattr(torch.cuda, name)

    def _tensor_type(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def device_name(self, device_index: int | None = None) -> str:
        """The name "cuda", or "cuda:0" and so on."""
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        """Name of the current device."""
        return f"cuda:{torch.cuda.current_device()}"

    def default_generator(self, device_index: int) -> Any:
        """Generator of a device."""
        return torch.cuda.default_generators[device_index]

    def create_graph(self) -> Any:
        """A torch.cuda.CUDAGraph."""
        return torch.cuda.CUDAGraph()

    @contextlib.contextmanager
    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Iterator[None]:
        """As torch.cuda.graph."""
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            yield

    def replay_graph(self, graph: Any) -> None:
        """Launches it."""
        graph.replay()

    def range_push(self, msg: str) -> None:
        """As torch.cuda.nvtx.range_push."""
        torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self) -> None:
        """As torch.cuda.nvtx.range_pop."""
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device."""
        return int(torch.cuda.get_device_properties(device_index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that are free."""
        return int(torch.cuda.mem_get_info(device_index)[0])

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """A copy in page-locked memory."""
        return tensor.pin_memory()

    def visible_devices_envs(self) -> list[str]:
        """Variables that choose devices."""
        return ["CUDA_VISIBLE_DEVICES"]

    set_visible_devices_envs = CpuAccelerator.set_visible_devices_envs


_chosen: Any = None


def get_accelerator() -> Any:
    """The device's accelerator; the same object at every call.

    Errors: InvalidArgumentError (DS_ACCELERATOR is neither cpu nor cuda).
    """
    global _chosen
    if _chosen is None:
        name = os.environ.get("DS_ACCELERATOR")
        if name is None:
            usable = torch.cuda.is_available() and dist.is_nccl_available()
            name = "cuda" if usable else "cpu"
        if name not in KINDS:
            raise InvalidArgumentError(
                f"DS_ACCELERATOR is {name!r}; allowed: {', '.join(KINDS)}, or unset"
            )
        _chosen = CudaAccelerator() if name == "cuda" else CpuAccelerator()
    return _chosen


def is_current_accelerator_supported() -> bool:
    """Whether get_accelerator() is one of cpu and cuda: always."""
    return get_accelerator()._name in KINDS


def set_accelerator(accel_obj: Any) -> None:
    """Puts another object in the place of get_accelerator()'s."""
    global _chosen
    _chosen = accel_obj
