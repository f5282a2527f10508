"""Optimizers on trees of parameters."""

from __future__ import annotations

from typing import Any, Callable

from .. import optim
from ..comm import Comm
from ..errors import InvalidArgumentError
from .trees import Room, Tree, has_master, tree_of


class Optimizer:
    """An optimizer over a tree of parameters. Collective: all ranks make the same.

    params: a tree of arrays, float32, bfloat16 or float16, on one device; they are copied. Those of
            low precision (all alike) have float32 masters here
    config, kind, hyper-parameters: as for :class:`sotto.optim.Optimizer`
    group:  the parameter group of the parameter with a path, such as "dense.kernel"; None: all are
            of group 0

    base is the :class:`sotto.optim.Optimizer` of the masters, for what has no trees: set(), info(),
    report(), export_state() and import_state(), set_frozen(). Parameters are named by their paths.
    Errors: InvalidArgumentError (names a leaf), UnsupportedError, those of the base. Threads: one
    at a time.
    """

    def __init__(
        self,
        params: Any,
        config: Any = None,
        *,
        comm: Comm | None = None,
        kind: str | None = None,
        group: Callable[[str], int] | None = None,
        **hyper: Any,
    ) -> None:
        self._tree: Tree = tree_of(params, "params", trained=True)
        self._masters, self._copies = [], []
        registered = []
        for leaf, name in zip(self._tree.leaves, self._tree.names):
            copy = Room(leaf).fill(leaf) if has_master(leaf) else None
            master = Room(leaf, dtype="float32").fill(leaf)
            self._masters.append(master)
            self._copies.append(copy)
            number = 0 if group is None else group(name)
            registered.append(
                optim.Param(
                    master.memory,
                    leaf,  # no gradient yet: it says the dtype and the place
                    name or None,
                    number,
                    None if copy is None else copy.memory,
                )
            )
        self.base = optim.Optimizer(registered, config, comm=comm, kind=kind, **hyper)
        self._tree = self._tree._replace(leaves=[])

    def __enter__(self) -> Optimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def params(self) -> Any:
        """The parameters as they are now: a tree of new arrays, copied at every call.

        Errors: BusyError (a step in flight, which writes them: an interrupt has left it).
        """
        if not self.base.closed:
            self.base.info()  # raises while a step is in flight
        rooms = [copy or master for master, copy in zip(self._masters, self._copies)]
        return self._tree.build([room.copy() for room in rooms])

    def step(self, grads: Any, *, timeout: float | None = None) -> Any:
        """One step: averages the gradients over ranks, clips, updates; the new parameters.

        grads: a tree like params; means over this rank's samples, times the loss scale if there is
        one; read where they lie. All parameters are copied once per step, into new memory of their
        size: the library updates in place what it keeps, so an array that showed that memory would
        change with the next step, and what a jitted function has been given must not.

        Collective. Errors: InvalidArgumentError (another tree, other shapes or dtypes), from
        the operation NonfiniteError (nothing was updated) and the comm's own.
        """
        self._take(grads)
        self.base.step(timeout=timeout).wait()
        return self.params

    def accumulate(self, grads: Any, *, timeout: float | None = None) -> None:
        """Adds the gradients of one micro-batch to those that the next step takes the mean of."""
        self._take(grads)
        self.base.accumulate(timeout=timeout).wait()

    def synchronize(self, *, timeout: float | None = None) -> Any:
        """0/1 Adam between synchronisations: brings all ranks together; the parameters."""
        self.base.synchronize(timeout=timeout).wait()
        return self.params

    def _take(self, grads: Any) -> None:
        tree = tree_of(grads, "grads", trained=True)
        tree.check_structure("grads", self._tree)
        for leaf, name, room in zip(tree.leaves, tree.names, self._masters):
            if leaf.shape != room.shape:
                raise InvalidArgumentError(
                    f'grads, leaf "{name}", has shape {leaf.shape}, its parameter {room.shape}'
                )
        self.base.set_grads(tree.leaves)

    def close(self) -> None:
        """Leaves the library; parameters of before stay. A second call does nothing."""
        self.base.close()
