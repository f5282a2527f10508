"""Stand-ins for PyTorch on CUDA where there is no GPU.

Tensors of torch's CPU build say that they are on a device, with memory of the fake CUDA runtime
that the library built for the emulator works on. What torch computes happens in host memory;
upload() and download() copy between the two on the "current stream".
"""

import contextlib
import ctypes as c
from types import SimpleNamespace
from typing import Any

import torch

HOST_TO_DEVICE, DEVICE_TO_HOST, NON_BLOCKING = 1, 2, 1


class Runtime:
    """Calls of the fake runtime; `current` is the stream that torch.cuda.current_stream() names."""

    def __init__(self, path):
        self._calls = c.CDLL(path)
        self.twins = {}  # address of a storage: (device memory, bytes)
        self.current = self.new_stream()
        self.capturing = False

    def call(self, name, *arguments):
        error = getattr(self._calls, name)(*arguments)
        assert error == 0, f"{name} returned {error}"

    def new_stream(self):
        stream = c.c_void_p()
        self.call("cudaStreamCreateWithFlags", c.byref(stream), NON_BLOCKING)
        return SimpleNamespace(
            cuda_stream=stream.value,
            synchronize=lambda: self.call("cudaStreamSynchronize", stream),
        )

    def twin(self, storage):
        """Device memory of as many bytes as the storage."""
        host, size = storage.data_ptr(), storage.nbytes()
        if host not in self.twins:
            memory = c.c_void_p()
            self.call("cudaMalloc", c.byref(memory), c.c_size_t(max(size, 1)))
            # The storage stays, so that its address is its own.
            self.twins[host] = memory.value, storage
        return self.twins[host][0]

    def copy(self, tensor, kind):
        device, host = c.c_void_p(tensor.data_ptr()), c.c_void_p(host_address(tensor))
        to, source = (device, host) if kind == HOST_TO_DEVICE else (host, device)
        self.call(
            "cudaMemcpyAsync",
            to,
            source,
            c.c_size_t(tensor.nbytes),
            kind,
            c.c_void_p(self.current.cuda_stream),
        )

    def upload(self, *tensors):
        for tensor in tensors:
            self.copy(tensor, HOST_TO_DEVICE)

    def download(self, *tensors):
        for tensor in tensors:
            self.copy(tensor, DEVICE_TO_HOST)
        self.synchronize()

    def synchronize(self):
        self.current.synchronize()

    def graph(self):
        return Graph(self)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Graph:
    """As torch.cuda.CUDAGraph; capture() as torch.cuda.graph()."""

    def __init__(self, runtime):
        self._runtime = runtime
        self._exec = c.c_void_p()

    @contextlib.contextmanager
    def capture(self):
        runtime, graph = self._runtime, c.c_void_p()
        with runtime.stream(runtime.new_stream()):
            stream = c.c_void_p(runtime.current.cuda_stream)
            runtime.call("cudaStreamBeginCapture", stream, 0)
            runtime.capturing = True
            try:
                yield
            finally:
                runtime.capturing = False
                runtime.call("cudaStreamEndCapture", stream, c.byref(graph))
        runtime.call("cudaGraphInstantiate", c.byref(self._exec), graph, c.c_ulonglong(0))

    def replay(self):
        stream = c.c_void_p(self._runtime.current.cuda_stream)
        self._runtime.call("cudaGraphLaunch", self._exec, stream)


def host_address(tensor):
    storage = tensor.untyped_storage()
    return storage.data_ptr() + tensor.storage_offset() * tensor.element_size()


class OnCuda(torch.Tensor):
    """A tensor that says that it is on cuda:0."""

    runtime = None

    @property
    def device(self):
        return torch.device("cuda", 0)

    @property
    def is_cuda(self):
        return True

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        # Also for torch.Tensor.data_ptr(x), which a method of this class would not answer.
        if function is torch.Tensor.data_ptr:
            return cls.address(*args)
        return super().__torch_function__(function, types, args, kwargs)

    @staticmethod
    def address(tensor):
        storage = tensor.untyped_storage()
        return OnCuda.runtime.twin(storage) + host_address(tensor) - storage.data_ptr()

    def record_stream(self, stream):
        pass


def on_cuda(values):
    """A copy of the values "on the device"."""
    tensor = values.clone().as_subclass(OnCuda)
    OnCuda.runtime.upload(tensor)
    return tensor


def install(path):
    """Makes torch.cuda the stand-in's, on the runtime at the path."""
    runtime = OnCuda.runtime = Runtime(path)
    cuda: Any = torch.cuda
    cuda.current_stream = lambda device=None: runtime.current
    cuda.Stream = lambda device=None: runtime.new_stream()
    cuda.stream = runtime.stream
    cuda.is_current_stream_capturing = lambda: runtime.capturing
    return runtime
