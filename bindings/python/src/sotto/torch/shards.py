"""Outer steps on shards: what has to be equal on the ranks that average, and what needs the whole.

Ranks of an outer optimizer hold the same shard of every parameter. Averages by element are then
those of whole parameters. Norms over whole parameters take a comm of the ranks with the other
shards; what every shard would decide for itself is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .._text import counted
from ..comm import Comm
from ..errors import InvalidArgumentError, InvalidStateError, ProtocolError, UnsupportedError
from .averagers import check_not_flat
from .dtensors import Shard, is_dtensor, replicas_of, shard_of
from .state import bytes_of, gather, tensor_of

Named = Iterable[tuple[str, torch.Tensor]]

COMM = (
    "comm= has to be of the ranks that hold the same shard, one of every replica: with a mesh of "
    '("replica", "shard") sotto.torch.comm_of_process_group(mesh["replica"].get_group())'
)


def takes_norms(settings: Mapping[str, Any]) -> bool:
    """Whether outer steps take norms of parameters. settings: as needs_whole()."""
    gap = settings["penalty"].startswith("gap_") and settings["granularity"] != "element"
    return gap or settings["clip"] in ("norm", "rms")


def needs_whole(settings: Mapping[str, Any], shards: Comm | None) -> list[str]:
    """What is not possible where a parameter is cut: found, and what is allowed in its place.

    settings: "outer" of a configuration's report. shards: of the ranks with the other shards.
    """
    found = []
    penalty, granularity = settings["penalty"], settings["granularity"]
    with_shards = "the same with shards=, a comm of the ranks of this replica"
    by_element = 'penalty "none", "const", or "gap_rel" with granularity "element"'
    if penalty.startswith("gap_") and granularity != "element":
        here = f'penalty "{penalty}" with granularity "{granularity}"'
        if granularity == "tensor":
            found.append(f'{here} (allowed: "global" with shards=; {by_element})')
        elif shards is None:
            found.append(f"{here} (allowed: {with_shards}; {by_element})")
    if shards is None and settings["clip"] in ("norm", "rms"):
        found.append(f'clip "{settings["clip"]}" (allowed: {with_shards}; "none", "coord")')
    if takes_norms(settings) and settings["freshness"] != 0:
        found.append(f"freshness {settings['freshness']} with such a penalty or clip (allowed: 0)")
    if settings["period"] == "auto":
        found.append('period "auto" (allowed: a number)')
    fragments = settings["fragments"]
    if isinstance(fragments, int) and fragments > 1:
        found.append(f"fragments {fragments} (allowed: 1, or lists of indices of parameters)")
    if settings["nonfinite"] == "error":
        found.append('nonfinite "error" (allowed: "skip_rank", "pass")')
    return found


def check_parts(named: Named, refused: Sequence[str], shards: int = 0) -> None:
    """Whether outer steps can be made on what this rank holds. refused: of needs_whole(). shards:
    ranks over which norms are taken; 0: there are none.

    Errors: UnsupportedError (names the parameter and the settings, or what it is),
    InvalidArgumentError (it is cut into another number of parts than there are ranks of shards=).
    """
    parts = list(named)
    check_not_flat(
        [(name, p) for name, p in parts if not is_dtensor(p)],
        "its flat parameters do not say what they are parts of; use fully_shard of "
        "torch.distributed.fsdp, or no wrapper at all",
    )
    for name, p in parts:
        shard = shard_of(name, p)
        if shard is not None and refused:
            raise UnsupportedError(
                f'parameter "{name}" is cut, here is {shard}; no rank has all of it, which is '
                f"needed for {'; '.join(refused)}"
            )
        parts_of = 1 if shard is None else math.prod(shard.parts)
        if shards and p.numel() and parts_of != shards:
            held = "whole on this rank" if shard is None else f"cut, here is {shard}"
            raise InvalidArgumentError(
                f'parameter "{name}" is {held}, and shards= has {counted(shards, "rank")}; '
                "allowed where norms are taken: every element on one of them"
            )


def _by_value(everybody: Sequence[Any]) -> str:
    """The ranks that have the same, with what they have: `ranks 0, 2: ...; rank 1: ...`."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(everybody):
        text = "all of it" if value is None else str(Shard(*value))
        ranks.setdefault(text, []).append(str(rank))
    named = [
        f"rank{'s' if len(those) > 1 else ''} {', '.join(those[:8])}"
        f"{', ...' if len(those) > 8 else ''}: {text}"
        for text, those in ranks.items()
    ]
    return "; ".join(named[:4]) + ("; ..." if len(named) > 4 else "")


def agree(comm: Comm, named: Named) -> None:
    """Compares which shard of every parameter the ranks hold. Collective.

    Errors: ProtocolError on every rank (names the first parameter that differs, and the ranks).
    """
    if comm.size == 1:
        return
    mine = [(name, shard_of(name, p)) for name, p in named]
    blobs = gather(comm, tensor_of(bytearray(json.dumps(mine).encode())))
    everybody = [json.loads(bytes_of(blob).tobytes()) for blob in blobs]
    for entries in zip(*everybody):  # names and their number are compared where they are registered
        shards = [shard for _, shard in entries]
        if any(shard != shards[0] for shard in shards):
            raise ProtocolError(
                f'ranks hold different parts of parameter "{entries[0][0]}": {_by_value(shards)}. '
                + COMM
            )


def check_unaveraged(comm: Comm, named: Named) -> None:
    """Whether inner steps are each rank's own.

    Errors: InvalidStateError (gradients are averaged over ranks of the comm: names a parameter).
    """
    if comm.size == 1:
        return
    known = comm._framework_ranks
    for name, p in named:
        for ranks in replicas_of(p):
            if known is not None and len(set(ranks) & set(known)) < 2:
                continue
            whose = "which the comm has too" if known else "which may be those of the comm"
            raise InvalidStateError(
                f'parameter "{name}" is replicated over the ranks {ranks} of its mesh, {whose}: '
                "their gradients are averaged in backward(), inner steps are the same and outer "
                "steps have nothing to average. Give fully_shard the mesh of one replica, "
                'mesh["shard"]; where that averaging is meant, give the outer optimizer ddp=True'
            )


# ---- states -------------------------------------------------------------------------------------


def described(named: Named) -> dict[str, list[Any]]:
    """The shards that a state is of, by the names of cut parameters."""
    found = {name: shard_of(name, p) for name, p in named}
    return {name: list(shard) for name, shard in found.items() if shard is not None}


def check_saved(named: Named, saved: Mapping[str, Sequence[Any]]) -> None:
    """saved: described() of a state's parameters.

    Errors: InvalidArgumentError (the state is of other shards: names a parameter and both).
    """
    for name, p in named:
        here = shard_of(name, p)
        there = Shard(*saved[name]) if name in saved else None
        if here != there:
            both = (str(shard) if shard else "all of it" for shard in (there, here))
            raise InvalidArgumentError(
                'the state is of other shards and cannot be re-cut: of parameter "{}" it has {}, '
                "here is {}; load on every rank the state of its own shard, on as many "
                "shards".format(name, *both)
            )
