"""States of outer optimizers around inner ones, as sotto.torch.state has them for the others.

The inner optimizer's state_dict(), with an entry "sotto". Its "form" says what a load does:

rank   made by one rank alone. The same rank goes on bit for bit; on others parameters, anchor,
       momentum and counters become theirs, error feedback starts at zero
whole  the states of all ranks: "blobs" and "inners"

On another number of ranks parameters become the anchor, which all ranks have alike; an average
under way is left out. Of a whole state rank r takes the inner optimizer's of rank r modulo the
number of ranks that there were.

Where parameters are cut, "shards" says which part of them this state is of: ranks here are those
that hold the same.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidArgumentError
from ..outer import what_is_lost
from .dtensors import at_home, local, packed
from .shards import check_saved as check_shards
from .shards import described
from .state import bytes_of, check_saved, description, gather, tensor_of

if TYPE_CHECKING:
    from .outer import Outer


def own_state(optimizer: Outer) -> dict[str, Any]:
    """What this rank makes alone."""
    comm, inner = optimizer._comm, optimizer.inner.state_dict()
    mine = description(optimizer)
    parts = described(optimizer._parts())
    if parts:
        mine["shards"] = parts
    if "sotto" in inner:  # of an optimizer of sotto.torch
        mine["inner"] = inner["sotto"]
    if optimizer._outer is not None:
        blob = tensor_of(optimizer._outer.export_state())
        mine.update(form="rank", rank=comm.rank, world_size=comm.size, lr=optimizer._lr, blob=blob)
        mine["weight"] = optimizer._weight
    return {**inner, "sotto": mine}


def _numbered(optimizer: Outer) -> list[torch.Tensor]:
    """All parameters, in the order in which torch's states number them."""
    return [p for _, _, p in optimizer._named()]


def gathered(optimizer: Outer, mine: dict[str, Any]) -> dict[str, Any]:
    """The states of all ranks, from that of this one. Collective."""
    saved = mine["sotto"]
    if saved["blob"] is None:
        return mine
    file = io.BytesIO()
    state = packed(mine["state"], _numbered(optimizer))
    inner = {"state": state, "inner": saved.get("inner"), "weight": saved["weight"]}
    torch.save(inner, file)
    inners = gather(optimizer._comm, tensor_of(bytearray(file.getvalue())))
    blobs = gather(optimizer._comm, saved["blob"])
    whole = {**saved, "form": "whole", "rank": 0, "blob": blobs[0], "blobs": blobs}
    return _with_inner(optimizer, {**mine, "sotto": {**whole, "inners": inners}}, 0)


def _with_inner(optimizer: Outer, state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The state with the inner optimizer's of a rank."""
    saved = state["sotto"]
    inner = torch.load(io.BytesIO(bytes_of(saved["inners"][rank]).tobytes()), weights_only=True)
    more = {} if inner["inner"] is None else {"inner": inner["inner"]}
    more["weight"] = inner.get("weight", 1.0)
    own = at_home(inner["state"], _numbered(optimizer))
    return {**state, "state": own, "sotto": {**saved, **more}}


def load(optimizer: Outer, state: Mapping[str, Any]) -> None:
    """See Outer.load_state_dict()."""
    saved: Any = state.get("sotto")
    is_entry = isinstance(saved, Mapping)
    if not is_entry or saved.get("kind") != optimizer._kind:
        found = "no entry" if saved is None else repr(saved.get("kind") if is_entry else saved)
        raise InvalidArgumentError(
            f'the kind in the entry "sotto" of the state is {found}, it has to be '
            f"{optimizer._kind!r}: it was not made by a sotto.torch.Outer"
        )
    comm = optimizer._comm
    loaded, lr = optimizer._loaded, optimizer._lr
    optimizer._loaded = frozenset(saved["names"])
    try:
        check_saved(optimizer, saved)
        check_shards(optimizer._parts(), saved.get("shards", {}))
        blob, source, lost = saved["blob"], saved.get("rank"), None
        if saved["form"] == "whole":
            source = comm.rank % saved["world_size"]
            blob = saved["blobs"][source]
            state = _with_inner(optimizer, state, source)
        if blob is not None:
            own = "its own state_dict(), or what gather_state() gives"
            lost = what_is_lost(saved["world_size"], source, comm, own)
        mode = "exact" if lost is None else "common"
        before = optimizer.inner.state_dict()
        _load_inner(optimizer, state)
        try:
            _take(optimizer, blob, mode)
        except BaseException:
            optimizer.inner.load_state_dict(before)
            raise
    except BaseException:
        optimizer._loaded, optimizer._lr = loaded, lr
        raise
    optimizer._lr = saved.get("lr")
    optimizer._weight = state["sotto"].get("weight", 1.0) if lost is None else 1.0
    if optimizer._outer is not None:
        optimizer._outer.set(weight=optimizer._weight)
    if lost is not None:
        warnings.warn(lost, stacklevel=3)


def _load_inner(optimizer: Outer, state: Mapping[str, Any]) -> None:
    inner = {key: value for key, value in state.items() if key != "sotto"}
    inner["state"] = at_home(inner["state"], _numbered(optimizer))
    if "inner" in state["sotto"]:
        inner["sotto"] = state["sotto"]["inner"]
    optimizer.inner.load_state_dict(inner)


@torch.no_grad()
def _take(optimizer: Outer, blob: torch.Tensor | None, mode: str) -> None:
    """The library's part. None: of before the first step."""
    if blob is None or optimizer._outer is not None:
        if blob is None:
            optimizer._drop()
        else:
            optimizer._build().import_state(bytes_of(blob), mode)
        return
    # Ranks may have loaded the parameters of their checkpoints, which differ; all of them start
    # from the same here, and then have those of the state.
    params = [local(p).detach() for _, p in optimizer._parts()]
    before = [p.clone() for p in params]
    try:
        for p in params:
            p.zero_()
        optimizer._build().import_state(bytes_of(blob), mode)
    except BaseException:
        optimizer._drop()
        for p, values in zip(params, before):
            p.copy_(values)
        raise
