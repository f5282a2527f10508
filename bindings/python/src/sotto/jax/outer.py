"""Outer steps on trees of parameters: CO2, DiLoCo and their family around any inner steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy

from .. import outer as plain
from .._frameworks.jax import device_of
from ..comm import Comm
from ..errors import InvalidArgumentError, InvalidStateError
from ..optim import config_report
from .trees import Room, Tree, has_master, leaf_of, tree_of

FORMAT = 1
KIND = "sotto.jax.Outer"


def _checked_state(state: Mapping[str, Any]) -> Any:
    """The bytes of a state_dict(). Errors: InvalidArgumentError (it is none: names the entry)."""
    for key, allowed in (("kind", KIND), ("format", FORMAT)):
        if state.get(key) != allowed:
            raise InvalidArgumentError(
                f'the entry "{key}" of the state is {state.get(key)!r}; allowed: {allowed!r}, as '
                f"state_dict() of {KIND} gives it"
            )
    missing = sorted({"rank", "world_size", "lr", "blob"} - set(state))
    if missing:
        raise InvalidArgumentError(f"the state has no entries {', '.join(missing)}")
    blob = numpy.asarray(state["blob"])
    if blob.dtype != numpy.uint8:
        raise InvalidArgumentError(
            f'the entry "blob" of the state is of dtype {blob.dtype}; allowed: uint8'
        )
    return numpy.ascontiguousarray(blob)


class Outer:
    """Inner steps that send nothing, and outer ones that average what they have changed.

    The inner steps are the program's own, of this rank alone, with gradients of this rank's
    samples. Every ``period`` of them what they have changed is averaged over the ranks, in the
    background of the next ones, and moves an anchor from which all go on:

        outer = sotto.jax.Outer(params, preset="co2", period=12, codec="onebit")
        for batch in batches:
            params, state = update(params, state, batch)  # jitted: optax, or what you have
            params = outer.step(params)

    params: a tree of arrays, float32, bfloat16 or float16, on one device, equal on all ranks: see
            broadcast(). They are copied. Those of low precision (all alike) have float32 masters
            here
    preset: "co2", "diloco", "streaming_diloco", "slowmo", "local_sgd" and the others of
            docs/outer-configuration.md
    period: inner steps from one launch of an average to the next; "auto": ranks measure how many
            hide it; None: the preset's
    codec:  of what is averaged: a type, "onebit" for one, or a dict; None: the preset's
    comm:   None: the default comm
    hierarchy: of averages: "sharded", "leader" or "auto" have two levels (docs/hierarchy.md)
    keys:   delay, alpha, beta, merge and all other keys of the section "sotto": {"outer": {...}}

    Collective: all ranks make the same, and then as many steps; ranks wait for each other only in a
    step that launches or consumes something. Parameters are named by their paths, "dense.kernel".

    What is copied: a step that launches or consumes something copies all parameters once, into new
    memory. The arrays that it returns take that over, and nothing writes it again. So do flush(),
    state_dict(), and all steps with penalty "gap_inner", which measures inner steps. Any other step
    counts, and gives back the tree that it was given: it copies nothing and waits for no array, but
    those of low precision, which every step compares with their masters. Between steps one copy of
    the parameters is kept, beside anchor and momentum.

    Errors: InvalidArgumentError (names a leaf; a key: names it and what is allowed),
    UnsupportedError (a device; what is not built), ProtocolError (ranks differ), the comm's own.
    Threads: one at a time.
    """

    def __init__(
        self,
        params: Any,
        *,
        preset: str = "co2",
        period: int | str | None = None,
        codec: str | Mapping[str, Any] | None = None,
        comm: Comm | None = None,
        hierarchy: str = "flat",
        **keys: Any,
    ) -> None:
        tree = tree_of(params, "params", trained=True)
        self._like, self._masters, self._copies = [], [], []
        registered = []
        for leaf, name in zip(tree.leaves, tree.names):
            device = device_of(leaf, leaf_of("params", name))
            self._like.append((leaf.shape, leaf.dtype, {device}))
            copy = Room(leaf).fill(leaf) if has_master(leaf) else None
            master = Room(leaf, dtype="float32").fill(leaf)
            self._masters.append(master)
            self._copies.append(copy)
            memory_of_copy = None if copy is None else copy.memory
            registered.append(plain.OuterParam(master.memory, name or None, memory_of_copy))
        file = plain.file_of(hierarchy, preset=preset, period=period, codec=codec, **keys)
        self._outer = plain.Outer(registered, file, comm=comm)
        self._reads_all = config_report(file)["outer"]["penalty"] == "gap_inner"
        self._tree = tree._replace(leaves=[])
        self._evaluating = False
        self._lr = self._weight = 1.0  # which states of the library have not

    def __enter__(self) -> Outer:
        return self

    def __exit__(self, *error: Any) -> None:
        self._outer.__exit__(*error)

    # ---- where the library works ----------------------------------------------------------------

    def _checked(self, params: Any) -> Tree:
        """Errors: InvalidArgumentError (another tree, or a leaf unlike the one of before)."""
        tree = tree_of(params, "params", trained=True)
        tree.check_structure("params", self._tree)
        for leaf, name, like in zip(tree.leaves, tree.names, self._like):
            found = leaf.shape, leaf.dtype, leaf.devices()
            if found != like:
                texts = zip(("has shape", "is of dtype", "is on"), found, like)
                what, is_here, allowed = next(text for text in texts if text[1] != text[2])
                raise InvalidArgumentError(
                    f"{leaf_of('params', name)} {what} {is_here}; allowed: {allowed}, as when this "
                    "outer optimizer was made"
                )
        return tree

    def _adopt(self, tree: Tree) -> None:
        """Masters take what inner steps have written into parameters of low precision."""
        for leaf, master, copy in zip(tree.leaves, self._masters, self._copies):
            if copy is not None:
                master.adopt(leaf)

    def _take(self, tree: Tree) -> None:
        """Copies the parameters to where the library works next."""
        self._adopt(tree)
        self._work_on(
            [
                room if copy is not None else Room(leaf, dtype="float32").fill(leaf)
                for leaf, room, copy in zip(tree.leaves, self._masters, self._copies)
            ],
            [
                None if copy is None else Room(leaf).fill(leaf)
                for leaf, copy in zip(tree.leaves, self._copies)
            ],
        )

    def _renew(self) -> None:
        """The library works in memory that no array has; what it holds does not matter."""
        self._work_on(
            [
                room if copy is not None else Room(room)
                for room, copy in zip(self._masters, self._copies)
            ],
            [None if copy is None else Room(copy) for copy in self._copies],
        )

    def _work_on(self, masters: list[Room], copies: list[Room | None]) -> None:
        memory = [None if copy is None else copy.memory for copy in copies]
        given = None if all(m is None for m in memory) else memory
        self._outer.set_params([master.memory for master in masters], given)
        self._masters, self._copies = masters, copies

    def _rooms(self) -> list[Room]:
        return [copy or master for master, copy in zip(self._masters, self._copies)]

    def _given_away(self) -> Any:
        """The parameters: arrays that have the memory. The library writes it no more, since all
        that writes is behind _take() or _renew()."""
        return self._tree.build([room.array() for room in self._rooms()])

    def _check_at_work(self, what: str) -> plain.OuterInfo:
        """Hot figures. Errors: InvalidStateError (in evaluation(), closed), BusyError: a step that
        an interrupt has left goes on, on the memory of masters."""
        if self._evaluating:
            raise InvalidStateError(
                f"{what} inside evaluation(): the anchor is in the place of the parameters"
            )
        return self._outer.info()

    # ---- as sotto.torch.Outer has them ----------------------------------------------------------

    def step(self, params: Any, *, timeout: float | None = None) -> Any:
        """Counts an inner step, which has made these parameters; those to go on with.

        params: a tree like that of the constructor. In most steps nothing happens, and it is
        returned as it is. Where an average is launched or consumed the result is a tree of new
        arrays; that is collective. Anchor and momentum are those of before on all errors:
        InvalidArgumentError (another tree; shape, dtype or device of a leaf; traced, deleted),
        InvalidStateError (inside evaluation(), closed), BusyError (a step in flight, which an
        interrupt has left), the comm's own; the step is not counted then. NonfiniteError
        ("nonfinite": "error"; names the ranks): it is counted.
        """
        info = self._check_at_work("step()")
        tree = self._checked(params)
        acts = self._reads_all or info.next_boundary == 1
        if acts:
            self._take(tree)
        else:
            self._adopt(tree)
        self._outer.step(timeout=timeout).wait()
        return self._given_away() if acts else params

    def flush(self, params: Any, *, timeout: float | None = None) -> Any:
        """Averages and consumes everything; the anchor, equal on all ranks, as a tree of new
        arrays.

        params: what the last step has returned. For the end of a training. Collective; before the
        first step, and a second time, the parameters as they are. Errors: those of step().
        """
        self._check_at_work("flush()")
        self._take(self._checked(params))
        self._outer.flush(timeout=timeout).wait()
        return self._given_away()

    @contextmanager
    def evaluation(self, *, timeout: float | None = None) -> Iterator[Any]:
        """The anchor, as a tree of new arrays: ``with outer.evaluation() as anchor``.

        Local. Averages under way go on; the parameters stay as they are. Inside, what works on
        parameters is refused, and the time is no inner step's. The first call allocates as much as
        they have. Errors: InvalidStateError (inside another), the comm's own.
        """
        self._check_at_work("evaluation()")
        self._renew()
        with self._outer.evaluation(timeout=timeout):
            self._evaluating = True
            try:
                yield self._tree.build([room.copy() for room in self._rooms()])
            finally:
                self._evaluating = False

    def set(
        self,
        *,
        lr: float | None = None,
        loss: float | None = None,
        weight: float | None = None,
        retune: bool = False,
    ) -> None:
        """What belongs to the next steps; see sotto.outer.Outer.set().

        lr: the inner learning rate, which settings in its units need, as preset "slowmo" has.
        loss: told to the others (info().loss). weight: 1, or 0: this rank's inner steps do not
        count, as on a rank that has run out of samples. retune: all ranks measure a period "auto"
        anew. States have lr and weight. Errors: InvalidArgumentError, InvalidStateError (lr,
        retune).
        """
        self._outer.set(lr=lr, loss=loss, weight=weight, retune=retune)
        self._lr = self._lr if lr is None else float(lr)
        self._weight = self._weight if weight is None else float(weight)

    def vote(self, bits: int) -> None:
        """Bits that travel with the next average; info().votes has those of all ranks, or-ed, when
        it was consumed, at the same step on all."""
        self._outer.vote(bits)

    def info(self) -> plain.OuterInfo:
        """Steps, rounds, averages under way and the like.

        JAX computes asynchronously: what inner steps take is seen in those that wait for arrays.
        Their mean, which a period "auto" uses, is right; contention may not be.
        """
        return self._outer.info()

    def state_dict(self, params: Any) -> dict[str, Any]:
        """This rank's state: a dict of numbers, texts and one numpy array of bytes.

        params: what the last step has returned. They are in it, beside anchor, momentum, error
        feedback, counters and the average under way, which it waits for; the inner optimizer's
        state is not. Any rank can make it alone, after any step, also when the comm has failed.
        Errors: InvalidArgumentError (as step()), InvalidStateError (inside evaluation(), closed).
        """
        self._check_at_work("state_dict()")
        self._take(self._checked(params))
        comm = self._outer._comm
        return {
            "kind": KIND,
            "format": FORMAT,
            "rank": comm.rank,
            "world_size": comm.size,
            "lr": self._lr,
            "weight": self._weight,
            "blob": numpy.frombuffer(self._outer.export_state(), numpy.uint8),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Takes a state_dict(); its parameters, as a tree of new arrays. Collective.

        Every rank loads one, its own or that of any rank. If every rank loads its own, all go on
        bit for bit. Of another rank's the parameters are taken, and on another number of ranks the
        anchor in their place; a warning says what is lost. Keys alpha, beta, penalty and clip may
        be others than those of the state. Nothing changes on error.
        Errors: InvalidArgumentError (not of a sotto.jax.Outer; damaged; another tree, preset,
        period, delay, codec or fragments; another number of ranks with freshness: names what
        differs), InvalidStateError (inside evaluation(), closed), OperationTimeoutError (not every
        rank loads one).
        """
        self._check_at_work("load_state_dict()")
        plain.meet_for_load(self._outer._comm)
        blob = _checked_state(state)
        lost = plain.what_is_lost(int(state["world_size"]), int(state["rank"]), self._outer._comm)
        self._renew()
        lr, weight = self._lr, self._weight
        try:
            self.set(lr=float(state["lr"]))
            if lost is None:  # else it is of another rank's samples
                self.set(weight=float(state.get("weight", 1)))  # older states have none
            self._outer.import_state(blob, "exact" if lost is None else "common")
        except BaseException:
            self.set(lr=lr, weight=weight)
            raise
        if lost is not None:
            warnings.warn(lost, stacklevel=2)
        return self._given_away()

    def close(self) -> None:
        """Leaves the library; parameters of before stay. A second call does nothing."""
        self._outer.close()
