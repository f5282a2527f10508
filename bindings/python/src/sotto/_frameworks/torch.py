"""PyTorch's tensors, in host memory or on a CUDA device, its streams and its process groups."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .._view import HOST, View, device_error, dtype_code, not_contiguous
from ..errors import UnsupportedError
from ..launch import torchrun_serves_a_store
from .base import Framework, MakeComm

if TYPE_CHECKING:
    from ..comm import Comm


class Torch(Framework):
    """Tensors, the current stream of every device, torch.distributed."""

    has_streams = True

    def view(self, x: Any, what: str) -> View | None:
        """As the base class says."""
        if not isinstance(x, torch.Tensor):
            return None
        if x.device.type not in ("cpu", "cuda"):
            raise device_error(what, str(x.device))
        if str(x.layout) != "torch.strided":
            raise UnsupportedError(
                f"{what} has layout {x.layout}; a dense (strided) tensor is needed"
            )
        if x.is_conj() or x.is_neg():
            raise UnsupportedError(
                f"{what} is a lazy conjugate or negative view; call resolve_conj/resolve_neg"
            )
        dtype = dtype_code(str(x.dtype).removeprefix("torch."), what)
        if not x.is_contiguous():
            raise not_contiguous(what, "Tensor.contiguous() makes a copy that is")
        cuda = HOST if x.device.type == "cpu" else x.device.index
        return View(x.data_ptr(), x.numel(), dtype, True, x, cuda)

    def bytes_of_bools(self, x: Any) -> Any:
        """As the base class says."""
        if isinstance(x, torch.Tensor) and x.dtype == torch.bool:
            return x.view(torch.uint8)
        return None

    def current_stream(self, cuda: int) -> int:
        """As the base class says."""
        stream: int = torch.cuda.current_stream(cuda).cuda_stream
        return stream

    def await_current_stream(self, cuda: int) -> None:
        """As the base class says. PyTorch itself has waited for the device before a capture."""
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(cuda).synchronize()

    def has_process_group(self) -> bool:
        """As the base class says."""
        dist = sys.modules.get("torch.distributed")
        return dist is not None and dist.is_available() and dist.is_initialized()

    def meeting(self, environ: Mapping[str, str]) -> MakeComm | None:
        """The process group, else the store of torchrun's agent if sotto.torch is imported."""
        if self.has_process_group():
            return _comm_of_process_group
        if "sotto.torch" in sys.modules and torchrun_serves_a_store(environ):
            return _comm_of_torchrun
        return None


def _comm_of_process_group(**options: Any) -> Comm:
    from ..torch.groups import comm_of_process_group

    return comm_of_process_group(**options)


def _comm_of_torchrun(**options: Any) -> Comm:
    from ..torch.groups import comm_of_torchrun

    return comm_of_torchrun(**options)


FRAMEWORK = Torch()
