"""The parameters of a module whose gradients an Overlap averages, as the module changes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from .._text import counted
from ..comm import Comm
from ..errors import InvalidStateError, ProtocolError, UnsupportedError
from .averagers import check_whole, ddp_modules
from .gradients import check_param
from .passes import in_functional_call
from .state import bytes_of, gather, tensor_of

Named = list[tuple[str, torch.Tensor]]

# How often any module has been given a parameter or a module: nobody else has to look again.
_registrations = 0
_counted = False
_lock = threading.Lock()


def _registered(*_: Any) -> None:
    global _registrations
    _registrations += 1


def _count_registrations() -> None:
    global _counted
    with _lock:
        if not _counted:
            _counted = True
            register_module_parameter_registration_hook(_registered)
            register_module_module_registration_hook(_registered)


def check_model(named: Named) -> None:
    """Errors: UnsupportedError (names a parameter whose gradient an Overlap cannot average)."""
    if not named:
        raise UnsupportedError("the model has no parameter that requires a gradient")
    if ddp_modules(p for _, p in named):
        raise UnsupportedError(
            "the model is wrapped in DistributedDataParallel, which averages gradients itself: "
            "give the module inside, or take sotto.torch.ddp_hook"
        )
    check_whole(named)
    for name, p in named:
        check_param(name, p)
        if p.device != named[0][1].device:
            raise UnsupportedError(
                f'parameter "{name}" is on {p.device}, "{named[0][0]}" on '
                f"{named[0][1].device}; a model is on one device"
            )
    if not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
        raise UnsupportedError(f"torch {torch.__version__} is too old; 2.1 or later is needed")


def agree(comm: Comm, parameters: Iterable[tuple[str, torch.Tensor, bool]]) -> None:
    """Compares the parameters whose gradients the ranks average. Collective.

    parameters: name, tensor, and whether its gradient is averaged.
    Errors: ProtocolError on every rank (names the first parameter that differs, and the ranks).
    """
    if comm.size == 1:
        return
    mine = [
        (name, f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)}" if taken else None)
        for name, p, taken in parameters
    ]
    # Frozen ones are for the text alone.
    text = json.dumps([entry for entry in mine if entry[1] is not None]).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    digests = torch.empty(comm.size, dtype=torch.int64)
    own = torch.tensor([int.from_bytes(digest, "little", signed=True)])
    comm.all_gather(own, digests).wait()
    # Without a computation of torch's, with the first of which a thread gets its number of threads.
    all_of_them = digests.tolist()
    rank = next((r for r, d in enumerate(all_of_them) if d != all_of_them[0]), None)
    if rank is None:
        return
    blobs = gather(comm, tensor_of(bytearray(json.dumps(mine).encode())))
    first, other = (json.loads(bytes_of(blobs[r]).tobytes()) for r in (0, rank))
    raise ProtocolError(
        f"ranks average gradients of other parameters: {_difference(first, other, rank)}; give all "
        "ranks the same model, of which the same parameters require a gradient"
    )


def _difference(first: Sequence[Any], other: Sequence[Any], rank: int) -> str:
    """What rank 0 and another one have of the first parameter that is not the same."""
    here, there = dict(first), dict(other)
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            texts = [
                (side[name] or "frozen") if name in side else "not there" for side in (here, there)
            ]
            return f'parameter "{name}" is {texts[0]} on rank 0, {texts[1]} on rank {rank}'
    names = [[name for name, taken in side if taken] for side in (first, other)]
    at = next(i for i, pair in enumerate(zip(*names)) if pair[0] != pair[1])
    return f'parameter {at} is "{names[0][at]}" on rank 0, "{names[1][at]}" on rank {rank}'


def _check_dense(name: str, gradient: torch.Tensor) -> None:
    """Errors: UnsupportedError (a gradient that is not written in place: names the parameter)."""
    if gradient.layout != torch.strided:
        raise UnsupportedError(
            f'parameter "{name}" has a gradient with layout {gradient.layout}; gradients have to '
            "be dense: torch.nn.Embedding(sparse=False)"
        )
    if not gradient.is_contiguous():
        raise UnsupportedError(
            f'parameter "{name}" has a gradient with strides {list(gradient.stride())} for shape '
            f"{list(gradient.shape)}; it has to be contiguous, as its parameter is"
        )


class Hooked:
    """Parameters with a hook behind their gradients, numbered.

    Modules may be given other Parameters in their place, as load_state_dict(assign=True) does: the
    hooks move to those. Those that would not be averaged are an error.

    named:    parameters by the names that source gives them
    source:   all parameters that there are now
    computed: is called with number and parameter when a gradient is there
    """

    def __init__(
        self,
        named: Named,
        source: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        computed: Callable[[int, torch.Tensor], None],
    ) -> None:
        self.named = named
        self.numbers = {id(p): i for i, (_, p) in enumerate(named)}
        self._like = [(p.dtype, p.numel()) for _, p in named]
        self._source = source
        self._computed = computed
        self._handles = [self._hook(p) for _, p in named]
        self._stand_ins: dict[int, torch.Tensor] = {}  # of the open round
        _count_registrations()
        self._seen = _registrations
        self._take_frozen(source())

    def _hook(self, p: torch.Tensor) -> Any:
        register: Any = p.register_post_accumulate_grad_hook
        return register(lambda q: self._computed(self.numbers[id(q)], q))

    def _take_frozen(self, now: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._frozen = [
            (name, p) for name, p in now if not p.requires_grad and id(p) not in self.numbers
        ]

    def follow(self) -> None:
        """Errors: InvalidStateError (names a parameter that would not be averaged)."""
        for name, p in self._frozen:
            if p.requires_grad:
                raise _left_out(name, "requires a gradient now, and did not")
        seen = _registrations
        if seen == self._seen or in_functional_call():
            return
        now = list(self._source())
        there, by_name = {id(p) for _, p in now}, dict(now)
        for i, (name, p) in enumerate(self.named):
            new = by_name.get(name)
            if id(p) not in there and new is not None and id(new) not in self.numbers:
                self._replace(i, new)
        for name, p in now:
            if p.requires_grad and id(p) not in self.numbers:
                raise _left_out(name, "was not in the model")
        self._take_frozen(now)
        self._seen = seen

    def _replace(self, i: int, new: torch.Tensor) -> None:
        name, old = self.named[i]
        for what in ("dtype", "device", "shape"):
            before, after = getattr(old, what), getattr(new, what)
            if before != after:
                raise _left_out(name, f"has {what} {after}, and had {before},")
        check_param(name, new)
        if not new.requires_grad:
            return
        self._handles[i].remove()
        self.named[i] = name, new
        self.numbers[id(new)] = self.numbers.pop(id(old))
        self._handles[i] = self._hook(new)

    def gradient(self, i: int) -> torch.Tensor:
        """What a round averages in place.

        Errors: UnsupportedError, InvalidStateError (another dtype or size than when the overlap was
        made): name the parameter.
        """
        name, p = self.named[i]
        if p.grad is None:  # it was frozen
            self._stand_ins[i] = torch.zeros_like(p)
            return self._stand_ins[i]
        _check_dense(name, p.grad)
        if (p.grad.dtype, p.grad.numel()) != self._like[i]:
            dtype, count = self._like[i]
            raise InvalidStateError(
                f'parameter "{name}" has a gradient of '
                f"{counted(p.grad.numel(), 'element')} of {p.grad.dtype}, and had {count} of "
                f"{dtype} when the Overlap was made: close() that, and make a new one"
            )
        return p.grad

    def check_frozen(self) -> None:
        """Errors: InvalidStateError (names a parameter that only other ranks train)."""
        stand_ins, self._stand_ins = self._stand_ins, {}
        for i, mean in stand_ins.items():
            if bool(mean.any()):
                raise InvalidStateError(
                    f'parameter "{self.named[i][0]}" is frozen on this rank and has a gradient on '
                    "others, which would move it there alone: freeze it on all ranks, or on none"
                )

    def release(self) -> None:
        """Takes the hooks off. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _left_out(name: str, what: str) -> InvalidStateError:
    return InvalidStateError(
        f'parameter "{name}" {what} when the Overlap was made, and would not be averaged: close() '
        "that, and make a new one"
    )
