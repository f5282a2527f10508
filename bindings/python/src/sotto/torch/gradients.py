"""Parameters as the library has them registered, and where it reads their gradients."""

from __future__ import annotations

import ctypes as c

import torch

from .. import _abi as abi
from .. import optim as plain
from .._buffers import buffer_of, view_of
from ..errors import UnsupportedError

WORDS = c.sizeof(abi.Buffer) // 8  # a buffer starts with its address
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_param(name: str, p: torch.Tensor) -> None:
    """Errors: UnsupportedError (device, layout or dtype of a parameter)."""
    if p.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f'parameter "{name}" is on {p.device}; allowed: cpu, cuda')
    if p.layout != torch.strided or not p.is_contiguous():
        raise UnsupportedError(f'parameter "{name}" is not dense and contiguous (C order)')
    if p.dtype not in DTYPES:
        raise UnsupportedError(
            f'parameter "{name}" is {p.dtype}; allowed: float32, float16, bfloat16'
        )


class Tensor:
    """A registered parameter with its float32 master."""

    def __init__(
        self, name: str, group: int, p: torch.Tensor, mask: torch.Tensor | None = None
    ) -> None:
        self.name = name
        self.group = group
        self.p = p
        self.mask = mask
        values = p.detach()
        self.copy = None if p.dtype == torch.float32 else values
        self.master = values if self.copy is None else values.float()


class Gradients:
    """Points the library to the gradients of a step: in place, wherever autograd has put them.

    A gradient that is not contiguous or of another dtype than the others is copied; one that is
    absent is zero.
    """

    def __init__(self, tensors: list[Tensor], dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self._own: dict[int, torch.Tensor] = {}  # by position: what had to be copied
        self._zeros: torch.Tensor | None = None  # what all absent ones read
        first = [t.p.grad if self._usable(t.p.grad) else self._absent(t) for t in tensors]
        buffers = [buffer_of(view_of(grad, "gradient")) for grad in first]
        self._first = first
        self._buffers = (abi.Buffer * len(buffers))(*buffers)
        # The same memory as numbers: a step writes one address per parameter.
        self._words = memoryview(self._buffers).cast("B").cast("Q")
        self._addresses = [buffer.data or 0 for buffer in buffers]

    def registered(self) -> list[plain.Param]:
        """For the library's optimizer, with the gradients that are there now."""
        return [
            plain.Param(t.master, grad, t.name, t.group, t.copy, t.mask)
            for t, grad in zip(self._tensors, self._first)
        ]

    def _usable(self, grad: torch.Tensor | None) -> bool:
        return (
            grad is not None
            and grad.dtype is self._dtype
            and grad.layout is torch.strided
            and grad.is_contiguous()
        )

    def _absent(self, tensor: Tensor) -> torch.Tensor:
        if self._zeros is None:
            longest = max(t.p.numel() for t in self._tensors)
            self._zeros = torch.zeros(longest, dtype=self._dtype, device=tensor.p.device)
        return self._zeros[: tensor.p.numel()]

    def _place(self, i: int, tensor: Tensor, grad: torch.Tensor | None) -> int:
        if grad is None:
            return self._absent(tensor).data_ptr()
        if grad.is_sparse:
            raise UnsupportedError(
                f'parameter "{tensor.name}" has a sparse gradient; gradients have to be dense'
            )
        if i not in self._own:
            self._own[i] = torch.empty_like(tensor.master, dtype=self._dtype)
        self._own[i].copy_(grad)
        return self._own[i].data_ptr()

    def locate(self, optim: plain.Optimizer) -> None:
        """Tells the library where this step's gradients are."""
        dtype, strided = self._dtype, torch.strided
        addresses, words, moved = self._addresses, self._words, False
        for i, tensor in enumerate(self._tensors):
            grad = tensor.p.grad
            if (  # as _usable: a call per parameter costs more than the rest of the loop
                grad is not None
                and grad.dtype is dtype
                and grad.layout is strided
                and grad.is_contiguous()
            ):
                address = grad.data_ptr()
            else:
                address = self._place(i, tensor, grad)
            if address != addresses[i]:
                addresses[i] = words[i * WORDS] = address
                moved = True
        if moved:
            optim._set_grad_buffers(self._buffers)
            self._first = []  # they were kept alive until here
