"""Outer optimizers on plain buffers: local steps whose changes are averaged in the background."""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _abi as abi
from ._call import UINT32, real_number, whole_number
from ._frameworks import await_current_stream
from ._handle import HandleOwner
from ._json import config_text
from ._registered import Registered
from .codec import export_state, import_state, state_mode
from .comm import Comm
from .errors import OperationTimeoutError
from .work import Work

if TYPE_CHECKING:
    from .optim import Optimizer

STATE_MODES = ("exact", "common")
LAUNCHED = abi.SOTTO_OUTER_LAUNCHED
CONSUMED = abi.SOTTO_OUTER_CONSUMED
HELD = abi.SOTTO_OUTER_HELD
WAITED = abi.SOTTO_OUTER_WAITED
MEASURING = abi.SOTTO_OUTER_MEASURING


def what_is_lost(
    ranks: int, rank: int, comm: Comm, own: str = "its own state_dict()"
) -> str | None:
    """Where a rank of comm goes on from the state of a rank of so many: the warning; None: nothing.

    own: what it would have to save and load to lose nothing.
    """
    if ranks != comm.size:
        lost = (
            "parameters become its anchor, what ranks had changed since the last launch is not in "
            "it, and error feedback starts at zero. flush() before saving leaves nothing out"
        )
    elif rank != comm.rank:
        lost = (
            "what this rank had changed since the last launch is not in it, and error feedback "
            f"starts at zero. For all of it every rank has to save and load {own}"
        )
    else:
        return None
    return (
        f"the state was made by rank {rank} of {ranks}, and this is rank {comm.rank} of "
        f"{comm.size}: {lost}"
    )


def meet_for_load(comm: Comm) -> None:
    """Waits until every rank loads a state: one that does not would wait for this one in a step,
    at another count. Collective. Errors: OperationTimeoutError (says so), the comm's own."""
    try:
        comm.barrier().wait()
    except OperationTimeoutError as error:
        raise OperationTimeoutError(
            f"load_state_dict() is collective, and not every rank has called it: {error}"
        ) from None


class OuterParam(NamedTuple):
    """One tensor of an outer optimizer.

    param:      float32, the live values, which inner steps change
    name:       unique; None: "param<index>"
    model_copy: float16 or bfloat16 (all alike), or None: written after every change of the param
    """

    param: Any
    name: str | None = None
    model_copy: Any = None


def file_of(hierarchy: str, **keys: Any) -> dict[str, Any]:
    """A file with the keys of "sotto": {"outer": {...}} that are not None; some optimizer has to be
    in it."""
    section = {key: value for key, value in keys.items() if value is not None}
    return {
        "optimizer": {"type": "SGD"},
        "sotto": {"hierarchy": hierarchy, "outer": section},
    }


class OuterInfo(NamedTuple):
    """Hot figures of an outer optimizer. Those of an update are of the last one."""

    events: int  # of the last step: LAUNCHED, CONSUMED, HELD, WAITED, MEASURING
    step: int  # inner steps done
    round: int  # averages consumed
    next_boundary: int  # inner steps until something happens
    fragments: int
    in_flight: int  # averages launched and not consumed
    votes: int  # of all ranks
    not_finite: int  # ranks with NaN or Inf, which the last average has left out
    staleness: float  # penalty: what a late average was divided by
    gap: float
    unit: float
    clip_fraction: float
    delta_norm: float
    step_norm: float
    gain: float
    overlap_ratio: float  # share of the time of averages that was hidden
    contention: float  # NaN: not known
    network_ns: int  # of the last average that was consumed; -1: none
    exposed_ns: int
    payload_bytes_next_launch: int
    header_bytes_next_launch: int
    state_bytes: int
    period: int  # inner steps from one launch of a fragment to the next, now
    delay: int  # inner steps from a launch to its consumption, now
    loss: float  # mean of what ranks had set() at the last average; NaN: none had


class Outer(Registered):
    """An outer optimizer over registered buffers. Collective: all ranks make the same.

    params: OuterParam, tuples of the same order, or the arrays alone; borrowed until close()
    config: {"preset": "co2", "period": 48, ...}, or a file with "sotto": {"outer": {...}}: dict,
            JSON text or path
    comm:   None: the default comm
    shards: None: params are whole. A comm of the same context: they are shards. Ranks of `comm`
            hold the same shard, one of every replica; those of `shards` the shards of this rank's
            replica, every element on one of them. Norms are then of the whole params; what every
            shard would decide for itself is an UnsupportedError that names the key (see
            sotto_outer_create_sharded). Collective among both.

    Values have to be equal on all ranks. If one rank refuses, all of them raise its error. Errors:
    InvalidArgumentError (names the key or the parameter), UnsupportedError, ProtocolError (ranks
    differ), the comm's own. Threads: one at a time.
    """

    _noun = "outer optimizer"
    _create = "sotto_outer_create"
    _destroy = "sotto_outer_destroy"
    _places = "sotto_outer_set_params"
    _swapped = False  # evaluation() of this handle has put the anchor in the place of the params

    def __init__(
        self,
        params: Sequence[OuterParam | tuple[Any, ...] | Any],
        config: Any = None,
        *,
        comm: Comm | None = None,
        shards: Comm | None = None,
    ) -> None:
        registered = [
            OuterParam(*param) if isinstance(param, tuple) else OuterParam(param)
            for param in params
        ]
        others = () if shards is None else (shards,)
        if others:
            self._create = "sotto_outer_create_sharded"
        super().__init__(registered, config_text({} if config is None else config), comm, *others)

    @classmethod
    def of(cls, optimizer: Optimizer) -> Outer:
        """The outer steps of an optimizer whose configuration has "sotto": {"outer": {...}}.

        Its step() makes them, and its state has theirs: here are flush(), evaluation(), vote(),
        info() and set() of loss and weight. Errors: InvalidStateError (the configuration has none).
        """
        out = c.c_void_p()
        optimizer._lib.call("sotto_optim_outer", optimizer._handle, c.byref(out))
        outer = cls.__new__(cls)
        HandleOwner.__init__(outer, optimizer._lib, out)
        outer.cuda, outer._comm, outer._keep = optimizer.cuda, optimizer._comm, [optimizer]
        outer._others = ()
        return outer

    def step(self, *, timeout: float | None = None) -> Work:
        """Counts an inner step, which has changed the params; see sotto_outer_step.

        The params may be touched again when the Work has completed; an average that was launched
        goes on behind it. Collective where something happens. Errors: BusyError (previous step in
        flight), InvalidStateError (inside evaluation()), NonfiniteError (nothing was updated, the
        group is healthy), the comm's own.
        """
        return self._start("sotto_outer_step", timeout)

    def flush(self, *, timeout: float | None = None) -> Work:
        """Averages and consumes everything: the params become the anchor. Collective.

        Errors: as step().
        """
        return self._start("sotto_outer_flush", timeout)

    @contextmanager
    def evaluation(self, *, timeout: float | None = None) -> Iterator[None]:
        """The anchor is in the place of the params inside; then they are back, bit for bit.

        close() inside ends it. Errors: InvalidStateError (inside another), BusyError (step in
        flight), the comm's own.
        """
        self._whose()._check_live("evaluation()")
        self._start("sotto_outer_swap", timeout).wait()
        self._swapped = self._whose()._anchored = True
        try:
            yield
        finally:
            self._swap_back(timeout)

    def _averages_under_way(self) -> bool:
        return self._whose() is self and self.info().in_flight > 0

    def _whose(self) -> Registered:
        """Whose params the anchor takes the place of: those of the optimizer that has the steps."""
        return self._keep[0] if isinstance(self._keep[0], Registered) else self

    def _swap_back(self, timeout: float | None = None) -> None:
        if self._swapped:
            self._swapped = self._whose()._anchored = False
            self._start("sotto_outer_swap", timeout).wait()

    def close(self) -> None:
        """Destroys the handle; inside evaluation() the params are back before. A second call does
        nothing. Errors: as HandleOwner.close()."""
        try:
            self._swap_back()
        finally:
            super().close()

    def set(
        self,
        *,
        lr: float | None = None,
        loss: float | None = None,
        weight: float | None = None,
        retune: bool = False,
    ) -> None:
        """What belongs to the next steps: see sotto_outer_set.

        lr: the inner learning rate. loss: told to the others with the next averages (info().loss).
        weight: 1, or 0: the inner steps of this rank do not count. retune: all ranks measure a
        period "auto" anew.
        Errors: InvalidArgumentError, InvalidStateError (lr, retune), BusyError.
        """
        values = {"lr": lr, "loss": loss, "weight": weight, "retune": 1 if retune else None}
        numbers = {k: real_number(value, k) for k, value in values.items() if value is not None}
        for name, number in numbers.items():
            self._lib.call("sotto_outer_set", self._handle, name.encode(), number)

    def vote(self, bits: int) -> None:
        """Bits that travel with the next average; info().votes has those of all ranks, or-ed.

        Errors: InvalidArgumentError (not 0 to 2**32 - 1), BusyError (step in flight).
        """
        self._lib.call("sotto_outer_vote", self._handle, whole_number(bits, "bits", *UINT32))

    def info(self) -> OuterInfo:
        """Hot figures. Errors: BusyError (step in flight)."""
        info = abi.OuterInfo()
        self._lib.call("sotto_outer_get_info", self._handle, c.byref(info))
        names = (field[0] for field in info._fields_)
        return OuterInfo(*(getattr(info, name) for name in names if name != "struct_size"))

    def export_state(self, mode: str = "exact") -> bytearray:
        """This rank's state, params included, after any inner step; any rank can make it alone.

        mode: "exact" or "common", which are alike here. Waits for the average under way, which is
        not consumed; over NCCL it may have to be made again (docs/outer-configuration.md).
        Errors: BusyError (step in flight), InvalidStateError (inside evaluation()).
        """
        self._check_live("export_state()")
        number = state_mode(mode, STATE_MODES)
        await_current_stream(self.cuda)
        return export_state(self._comm, "sotto_outer_state_export", self._handle, number)

    def import_state(self, state: Any, mode: str = "exact") -> None:
        """Takes what export_state() gave, params included. Nothing changes on error.

        mode: "exact": of the same rank of as many, goes on from there bit for bit. "common": of
        any rank: the params become those of that rank, or, of another number of ranks, its anchor;
        error feedback starts at zero.
        Errors: InvalidArgumentError (damaged; of other settings, params or ranks),
        BusyError (step in flight), InvalidStateError (inside evaluation()).
        """
        self._check_live("import_state()")
        number = state_mode(mode, STATE_MODES)
        await_current_stream(self.cuda)
        import_state(self._lib, "sotto_outer_state_import", self._handle, number, state)
