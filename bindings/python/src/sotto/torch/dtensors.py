"""DTensors of torch: the shard of a parameter that this rank holds, and which one that is."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedError
from .averagers import objects_of


def is_dtensor(p: Any) -> bool:
    """Whether a tensor is distributed over a mesh of ranks."""
    return hasattr(p, "device_mesh")


def local(p: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: the tensor itself, or its part of a DTensor.

    The memory is the same: what is written there is the tensor's.
    """
    return getattr(p, "_local_tensor", p)


class Shard(NamedTuple):
    """Which part of a cut tensor a rank holds. Plain values, as states and messages have them."""

    held: list[int]  # shape of the part
    at: list[int]  # where it begins in the whole
    whole: list[int]  # shape of the whole
    number: list[int]  # of the part, for every dimension of the mesh that cuts
    parts: list[int]  # how many there are
    placements: str

    def __str__(self) -> str:
        number, parts = (n[0] if len(n) == 1 else tuple(n) for n in (self.number, self.parts))
        return (
            f"shard {number} of {parts}, {self.held} at {self.at} of {self.whole} by "
            f"{self.placements}"
        )


def _dimensions(p: Any, *, replicated: bool) -> list[int]:
    """The dimensions of a DTensor's mesh over which it is replicated, or else cut."""
    return [
        dim
        for dim, placement in enumerate(p.placements)
        if p.device_mesh.size(dim) > 1 and placement.is_replicate() == replicated
    ]


def shard_of(name: str, p: Any) -> Shard | None:
    """The shard that this rank holds; None: the tensor is whole here.

    Errors: UnsupportedError (a DTensor that is a sum to be, or one without a part on this rank).
    """
    if not is_dtensor(p):
        return None
    mesh = p.device_mesh
    where = mesh.get_coordinate()
    if where is None:
        raise UnsupportedError(
            f'parameter "{name}" is a DTensor on a mesh without this rank; allowed: one of which '
            "this rank holds a shard, which may be empty"
        )
    if any(placement.is_partial() for placement in p.placements):
        raise UnsupportedError(
            f'parameter "{name}" is a DTensor with placements {p.placements}; allowed: Shard and '
            "Replicate"
        )
    cut = _dimensions(p, replicated=False)
    if not cut:
        return None
    return Shard(
        held=list(local(p).shape),
        at=list(p.__create_chunk_list__()[0].offsets),
        whole=list(p.shape),
        number=[where[dim] for dim in cut],
        parts=[mesh.size(dim) for dim in cut],
        placements=", ".join(repr(p.placements[dim]) for dim in cut),
    )


def replicas_of(p: Any) -> Iterator[list[int]]:
    """The ranks of torch's world that hold the same of a DTensor as this one, by the dimensions of
    its mesh. Who distributes it so averages its gradients over them."""
    if is_dtensor(p):
        for dim in _dimensions(p, replicated=True):
            yield torch.distributed.get_process_group_ranks(p.device_mesh.get_group(dim))


def meshes_of(params: Iterable[Any]) -> list[Any]:
    """The meshes that cut any of these, in their order."""
    found: dict[Any, None] = {}
    for p in params:
        if is_dtensor(p) and _dimensions(p, replicated=False):
            found[p.device_mesh] = None
    return list(found)


def least(value: float, meshes: Iterable[Any]) -> float:
    """The smallest of the values that the ranks of meshes give. Collective among them, by torch."""
    for mesh in meshes:
        held = torch.tensor([value], dtype=torch.float32, device=mesh.device_type)
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                least_of_all = torch.distributed.ReduceOp.MIN
                torch.distributed.all_reduce(held, least_of_all, group=mesh.get_group(dim))
        value = float(held.item())
    return value


# ---- states of optimizers -----------------------------------------------------------------------

SHARD = "sotto.shard"  # the one key of what stands for a DTensor in a packed state

State = Mapping[Any, Mapping[str, Any]]


def packed(state: State, params: Sequence[Any]) -> dict[Any, dict[str, Any]]:
    """A state_dict()["state"] whose DTensors are this rank's parts, which know no mesh."""

    def pack(value: Any, p: Any) -> Any:
        alike = is_dtensor(value) and is_dtensor(p) and value.placements == p.placements
        return {SHARD: local(value)} if alike and value.shape == p.shape else value

    return _mapped(state, params, pack)


def at_home(state: State, params: Sequence[Any]) -> dict[Any, dict[str, Any]]:
    """A state_dict()["state"] whose DTensors, packed ones too, are on the parameters' meshes."""

    def unpack(value: Any, p: Any) -> Any:
        if isinstance(value, Mapping) and set(value) == {SHARD}:
            return _placed(value[SHARD], p, p)
        if is_dtensor(value) and is_dtensor(p) and value.device_mesh != p.device_mesh:
            return _placed(local(value), value, p)
        return value

    return _mapped(state, params, unpack)


def _placed(part: torch.Tensor, like: Any, p: Any) -> torch.Tensor:
    """A part as a DTensor on the mesh of p, cut and shaped like another one."""
    kind: Any = sys.modules["torch.distributed.tensor"]
    placed: torch.Tensor = kind.DTensor.from_local(
        part.to(local(p).device),
        p.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return placed


def _mapped(state: State, params: Sequence[Any], change: Any) -> dict[Any, dict[str, Any]]:
    """change(value, parameter) of all values. Keys of the state are parameters' numbers."""
    return {
        number: {key: change(value, params[number]) for key, value in values.items()}
        if isinstance(number, int) and number < len(params)
        else dict(values)
        for number, values in state.items()
    }


# ---- FSDP ---------------------------------------------------------------------------------------


class Gathered:
    """Modules of fully_shard that may keep whole parameters beside the shards: after a forward pass
    without a backward one they do."""

    def __init__(self, params: Iterable[Any]) -> None:
        """Finds the modules there are; those of other parameters do no harm."""
        kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
        # Modules are of subclasses, one for every class that fully_shard has seen.
        can_be = kind is not None and kind.__subclasses__() and any(map(is_dtensor, params))
        found = objects_of(kind) if can_be else ()
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet(found)

    def drop(self) -> None:
        """The shards have been written: whole parameters are gathered anew when they are needed."""
        for module in self._modules:
            module.reshard()
