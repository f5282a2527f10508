"""Parameters as the library has them registered: where they and their gradients lie in a step."""

from __future__ import annotations

import ctypes as c
import warnings
from array import array
from collections.abc import Collection, Mapping
from operator import attrgetter

import torch

from .. import _abi as abi
from .. import optim as plain
from .._buffers import buffer_of, view_of
from ..errors import InvalidStateError, UnsupportedError
from .dtensors import local, shard_of

WORDS = c.sizeof(abi.Buffer) // 8  # a buffer starts with its address
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# A step asks these of every parameter: a loop of the interpreter costs twice as much as map().
_grad, _dtype, _version = attrgetter("grad"), attrgetter("dtype"), attrgetter("_version")
_trains = attrgetter("requires_grad")
_address = torch.Tensor.data_ptr
_count = torch.Tensor.numel
_contiguous = torch.Tensor.is_contiguous

_CONTIGUOUS = "make it contiguous: p.data = p.data.contiguous()"


def check_param(name: str, p: torch.Tensor) -> None:
    """Errors: UnsupportedError (device, layout or dtype of a parameter: found, allowed, remedy)."""
    what = f'parameter "{name}"'
    if torch.nn.parameter.is_lazy(p):
        raise UnsupportedError(
            f"{what} has no shape yet (a lazy module); run the model once before making the "
            "optimizer"
        )
    if p.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"{what} is on {p.device}; allowed: cpu, cuda: move the model there first"
        )
    if p.layout != torch.strided:
        raise UnsupportedError(
            f"{what} has layout {p.layout} and is not dense and contiguous: use to_dense()"
        )
    if p.dtype not in DTYPES:
        raise UnsupportedError(
            f"{what} is {p.dtype}; allowed: float32, float16, bfloat16: convert the model first, "
            "as with model.float()"
        )
    if not p.is_contiguous():
        raise UnsupportedError(f"{what} is not dense and contiguous (C order){_layout_of(p)}")


def _layout_of(p: torch.Tensor) -> str:
    if p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last):
        return (
            ": its memory format is channels_last; convert the model back, "
            "model.to(memory_format=torch.contiguous_format); inputs may stay channels_last"
        )
    return f": shape {list(p.shape)}, strides {list(p.stride())}; {_CONTIGUOUS}"


def adopt(master: torch.Tensor, copy: torch.Tensor) -> None:
    """The master of a 16-bit parameter takes what others have written into that.

    Elements that still have the master's value keep its precision.
    """
    same = master.to(copy.dtype) == copy
    master.copy_(torch.where(same, master, copy.float()))


class Tensor:
    """A registered parameter with its float32 master: of a DTensor, what this rank holds of it."""

    def __init__(
        self, name: str, group: int, p: torch.Tensor, mask: torch.Tensor | None = None
    ) -> None:
        self.name = name
        self.group = group
        self.p = p
        self.mask = mask
        self.shard = shard_of(name, p)
        values = self.here
        self.copy = None if p.dtype == torch.float32 else values
        self.master = values if self.copy is None else values.float()

    @property
    def here(self) -> torch.Tensor:
        """The model's own memory now."""
        return local(self.p).detach()

    @property
    def registered(self) -> torch.Tensor:
        """The model's own memory when the library last heard of it. It keeps it from being reused,
        so that a parameter which has moved is somewhere else."""
        return self.master if self.copy is None else self.copy

    def check_still(self) -> None:
        """Errors: InvalidStateError (the parameter is not what was registered)."""
        was, now = self.registered, self.here
        remedy = "change it back, or make a new optimizer and load this one's state_dict()"
        for what, before, after in (
            ("dtype", was.dtype, now.dtype),
            ("device", was.device, now.device),
            ("shape", list(was.shape), list(now.shape)),
            ("shard", self.shard, shard_of(self.name, self.p)),
        ):
            if before != after:
                raise InvalidStateError(
                    f'the {what} of parameter "{self.name}" has changed from {before} to {after} '
                    f"since the optimizer first used it; {remedy}"
                )
        check_param(self.name, now)

    def place(self) -> None:
        """Takes the parameter's new memory."""
        if self.copy is None:
            self.master = self.here
        else:
            self.copy = self.here

    def move(self) -> None:
        """Takes the parameter's new memory, with the values there."""
        self.place()
        if self.copy is not None:
            self.adopt()

    def adopt(self) -> None:
        """The master takes what others have written into the parameter."""
        assert self.copy is not None
        adopt(self.master, self.copy)

    def differs(self) -> bool:
        """Whether the parameter has other values than the library's."""
        return not torch.equal(self.master.to(self.p.dtype), self.here)


class Gradients:
    """Points the library to parameters and gradients of a step, wherever torch has put them.

    A gradient that is not contiguous or of another dtype than the others is copied. A parameter
    without a gradient stands still in the step.
    """

    def __init__(self, tensors: list[Tensor], dtype: torch.dtype, *, local: bool) -> None:
        """local: the library makes parameters anew from what it keeps: they cannot be edited."""
        self._tensors = tensors
        self._dtype = dtype
        self._local = local
        self._own: dict[int, torch.Tensor] = {}  # by position: what had to be copied
        self._zeros: torch.Tensor | None = None  # what all absent ones read
        first = [t.p.grad if self._usable(t.p.grad) else self._absent(t) for t in tensors]
        buffers = [buffer_of(view_of(grad, "gradient")) for grad in first]
        self._first = first
        self._buffers = (abi.Buffer * len(buffers))(*buffers)
        # The same memory as numbers: a step writes the addresses of all of them.
        self._words = memoryview(self._buffers).cast("B").cast("Q")
        self._addresses = [buffer.data or 0 for buffer in buffers]
        self._given: set[int] = set()  # had a gradient in a micro-batch of this step
        self._frozen: list[bool] = []  # as the library has been told; empty: none
        self._remember()

    def _remember(self) -> None:
        self._params = [t.p for t in self._tensors]
        self._at = list(map(_address, self._params))
        self._counts = list(map(_count, self._params))
        # Others' writes count where the library has values of its own beside the parameter.
        self._watched = [t for t in self._tensors if t.copy is not None or self._local]
        self._watched_params = [t.p for t in self._watched]
        self._versions = self._versions_now()

    def replace(self, new: Mapping[int, torch.Tensor]) -> None:
        """Other Parameter objects take the place of some, by their ids."""
        for tensor in self._tensors:
            tensor.p = new.get(id(tensor.p), tensor.p)
        self._params = [t.p for t in self._tensors]
        self._watched_params = [t.p for t in self._watched]

    def _versions_now(self) -> list[int]:
        return list(map(_version, self._watched_params))

    def registered(self) -> list[plain.Param]:
        """For the library's optimizer, with the gradients that are there now."""
        return [
            plain.Param(t.master, grad, t.name, t.group, t.copy, t.mask)
            for t, grad in zip(self._tensors, self._first)
        ]

    # ---- parameters ------------------------------------------------------------------------------

    def follow(self, optim: plain.Optimizer) -> None:
        """Tells the library where parameters lie, and gives masters what others have written.

        Errors: InvalidStateError (dtype, device or shape has changed; 0/1 Adam has a frozen
        variance and would undo what was written), UnsupportedError (layout).
        """
        if self._have_moved():
            moved = self._moved()
            self._check_local(optim, moved)
            for tensor in moved:
                tensor.move()
            self._tell_places(optim, moved, [])
            self._follow_written(optim)
        elif self._watched and self._versions_now() != self._versions:
            self._follow_written(optim)

    def follow_for_load(self, optim: plain.Optimizer) -> None:
        """Tells the library where parameters lie: a state is about to write them.

        What others have written is noticed by the next follow(), unless written() comes first.
        Errors: InvalidStateError, UnsupportedError (as follow()).
        """
        if self._have_moved():
            moved = self._moved()
            differ = [tensor for tensor in moved if tensor.differs()]
            for tensor in moved:
                tensor.place()
            self._tell_places(optim, moved, differ)

    def written(self) -> None:
        """The library has written the parameters, past autograd.

        It refuses backward passes through what was computed with other values, once it is told.
        """
        still = self._frozen or [False] * len(self._params)
        torch.autograd.graph.increment_version([p for p, no in zip(self._params, still) if not no])
        self._versions = self._versions_now()

    def _have_moved(self) -> bool:
        return list(map(_address, self._params)) != self._at

    def _moved(self) -> list[Tensor]:
        for tensor in self._tensors:
            tensor.check_still()
        return [t for t, at in zip(self._tensors, self._at) if t.p.data_ptr() != at]

    def _tell_places(
        self, optim: plain.Optimizer, moved: list[Tensor], written: list[Tensor]
    ) -> None:
        """written: of the moved ones, those that are to be taken for written by others."""
        copies = [t.copy for t in self._tensors]
        optim.set_params(
            [t.master for t in self._tensors],
            None if all(copy is None for copy in copies) else copies,
        )
        versions = dict(zip(map(id, self._watched), self._versions))
        self._remember()
        for tensor in moved:
            versions[id(tensor)] = tensor.p._version
        versions.update((id(tensor), -1) for tensor in written)
        self._versions = [versions[id(t)] for t in self._watched]

    def _follow_written(self, optim: plain.Optimizer) -> None:
        written = [t for t, seen in zip(self._watched, self._versions) if t.p._version != seen]
        self._check_local(optim, [t for t in written if t.copy is None], written=True)
        self._check_local(optim, [t for t in written if t.copy is not None])
        for tensor in written:
            if tensor.copy is not None:
                tensor.adopt()
        self._versions = self._versions_now()

    def _check_local(
        self, optim: plain.Optimizer, tensors: list[Tensor], *, written: bool = False
    ) -> None:
        """Errors: InvalidStateError (tensors have been given other values, which would be lost).

        written: in place, so that there is nothing to compare with.
        """
        if not (self._local and tensors) or optim.info().stage == 0:
            return
        for tensor in tensors:
            if written or tensor.differs():
                raise InvalidStateError(
                    f'parameter "{tensor.name}" was written by others: 0/1 Adam with a frozen '
                    "variance makes parameters anew from what the last synchronisation left, and "
                    "would undo it; load the optimizer's state with load_state_dict(), which has "
                    "the parameters, or make a new optimizer"
                )

    # ---- gradients -------------------------------------------------------------------------------

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

    def _place(self, i: int, grad: torch.Tensor) -> int:
        tensor = self._tensors[i]
        if self._usable(grad) and grad.numel() == self._counts[i]:
            return grad.data_ptr()
        if grad.is_sparse:
            raise UnsupportedError(
                f'parameter "{tensor.name}" has a sparse gradient; gradients have to be dense'
            )
        tensor.check_still()  # gradients have the strides of their parameter
        if i not in self._own:
            self._own[i] = torch.empty_like(tensor.master, dtype=self._dtype)
        self._own[i].copy_(grad)
        return self._own[i].data_ptr()

    def of(self, i: int) -> torch.Tensor:
        """The gradient of one parameter as the library reads it, for a step that has begun."""
        tensor = self._tensors[i]
        grad = tensor.p.grad
        assert grad is not None
        self._place(i, grad)
        own = not (self._usable(grad) and grad.numel() == self._counts[i])
        return self._own[i] if own else grad

    def _places(self) -> tuple[list[int], list[int]]:
        """Addresses of this step's gradients, and the positions of parameters without one."""
        params = self._params
        grads = list(map(_grad, params))
        try:
            addresses = list(map(_address, grads))
            plainly = (
                set(map(_dtype, grads)) == {self._dtype}
                and all(map(_contiguous, grads))
                and all(map(_trains, params))
            )
        except (AttributeError, TypeError, RuntimeError):  # None, or a sparse one
            plainly = False
        if plainly:
            # Of another size only where parameters are: a view of less of the same memory.
            if addresses != self._addresses and list(map(_count, grads)) != self._counts:
                for tensor in self._tensors:
                    tensor.check_still()
            return addresses, []
        addresses, absent = [], []
        for i, (p, grad) in enumerate(zip(params, grads)):
            if grad is None or not p.requires_grad:
                absent.append(i)
                addresses.append(self._absent(self._tensors[i]).data_ptr())
            else:
                addresses.append(self._place(i, grad))
        return addresses, absent

    def locate(self, optim: plain.Optimizer, *, micro_batch: bool) -> None:
        """Tells the library where parameters and gradients are, and who stands still in a step.

        micro_batch: one that is only accumulated.
        """
        self.follow(optim)
        addresses, absent = self._places()
        if addresses != self._addresses:
            self._words[::WORDS] = memoryview(array("Q", addresses))
            self._addresses = addresses
            optim._set_grad_buffers(self._buffers)
            self._first = []  # they were kept alive until here
        if micro_batch:
            self._given.update(set(range(len(addresses))) - set(absent))
        elif absent or self._frozen or self._given:
            still = set(absent) - self._given
            self._given = set()
            self.freeze(optim, {self._tensors[i].name for i in still})

    def freeze(self, optim: plain.Optimizer, names: Collection[str]) -> None:
        """These parameters stand still from now on, and no others."""
        frozen = [tensor.name in names for tensor in self._tensors] if names else []
        if frozen != self._frozen:
            optim.set_frozen(frozen or [False] * len(self._tensors))
            self._frozen = frozen

    def standing_still(self) -> list[str]:
        """Names of the parameters that the last step left as they are."""
        return [t.name for t, frozen in zip(self._tensors, self._frozen) if frozen]

    def check_moving(self) -> None:
        """Warns if the last step has changed nothing, on no rank: torch's do nothing then too."""
        if self._frozen and all(self._frozen):
            warnings.warn(
                "no parameter of the optimizer had a gradient, on no rank: the step has changed "
                "nothing. Either backward() was not called, or the model has other parameters by "
                "now: make a new optimizer of model.parameters() and load this one's state_dict()",
                stacklevel=4,
            )
