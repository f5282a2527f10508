"""Collectives on arrays and trees of JAX: new arrays are returned.

A tree is one operation. Arguments and errors are those of the method of :class:`sotto.Comm` of the
same name; comm=None is the default comm. All functions wait until the operation has completed, but
those whose names end with "_async".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

import jax

from ..codec import Codec
from ..comm import Comm
from ..errors import InvalidArgumentError
from ..group import default_comm
from ..work import Work
from .trees import Room, Tree, tree_of, without_weak_type


class Pending:
    """An operation in flight, and the tree that it will give. It keeps its arrays alive."""

    def __init__(self, work: Work, result: Callable[[], Any]) -> None:
        self.work = work  # for is_completed(), error(), stats(), sotto.wait_any()
        self._result: Callable[[], Any] | None = result
        self._tree: Any = None

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the operation; the tree of new arrays, the same every time.

        Errors: as Work.wait().
        """
        self.work.wait(timeout)
        if self._result is not None:
            self._tree, self._result = self._result(), None
        return self._tree


def _comm(comm: Comm | None) -> Comm:
    return default_comm() if comm is None else comm


def _memory(rooms: list[Room]) -> list[Any]:
    return [room.memory for room in rooms]


def _result(tree: Tree, rooms: list[Room]) -> Callable[[], Any]:
    return lambda: tree.build([room.array() for room in rooms])


def all_reduce_async(
    x: Any,
    *,
    op: str | None = None,
    codec: Codec | None = None,
    comm: Comm | None = None,
    **options: Any,
) -> Pending:
    """Starts all_reduce(); wait() gives the tree. x must not be donated or deleted meanwhile."""
    tree = tree_of(x, "x")
    rooms = [Room(leaf) for leaf in tree.leaves]
    work = _comm(comm).all_reduce(tree.leaves, _memory(rooms), op=op, codec=codec, **options)
    return Pending(work, _result(tree, rooms))


def all_reduce(
    x: Any,
    *,
    op: str | None = None,
    codec: Codec | None = None,
    comm: Comm | None = None,
    **options: Any,
) -> Any:
    """The reduction of x over ranks, with the same bits on all of them.

    op: "sum" (default), "mean", "min", "max", "prod", "bit_or". codec: what codec() has made for a
    tree like x; the result is then the error-compensated mean.
    """
    return all_reduce_async(x, op=op, codec=codec, comm=comm, **options).wait()


def broadcast(x: Any, root: int = 0, *, comm: Comm | None = None, **options: Any) -> Any:
    """The root's x. On all other ranks x says shapes, dtypes and devices alone."""
    comm, tree = _comm(comm), tree_of(x, "x")
    if comm.rank == root:
        comm.broadcast(tree.leaves, root, **options).wait()
        return tree.build([without_weak_type(leaf) for leaf in tree.leaves])
    rooms = [Room(leaf) for leaf in tree.leaves]
    return Pending(comm.broadcast(_memory(rooms), root, **options), _result(tree, rooms)).wait()


def all_gather(x: Any, *, comm: Comm | None = None, **options: Any) -> Any:
    """x of all ranks in rank order: every array with a new first axis of as many as ranks."""
    comm, tree = _comm(comm), tree_of(x, "x")
    rooms = [Room(leaf, (comm.size, *leaf.shape)) for leaf in tree.leaves]
    work = comm.all_gather(tree.leaves, _memory(rooms), **options)
    return Pending(work, _result(tree, rooms)).wait()


def reduce_scatter(
    x: Any, *, op: str | None = None, comm: Comm | None = None, **options: Any
) -> Any:
    """This rank's part of the reduction of x: of every array an equal part of the first axis.

    Errors: InvalidArgumentError (names an array whose first axis the ranks cannot share).
    """
    comm, tree = _comm(comm), tree_of(x, "x")
    rooms = []
    for leaf, name in zip(tree.leaves, tree.names):
        if leaf.ndim == 0 or leaf.shape[0] % comm.size:
            raise InvalidArgumentError(
                f'x, leaf "{name}", has shape {leaf.shape}; the first axis has to be a multiple of '
                f"{comm.size}, the number of ranks"
            )
        rooms.append(Room(leaf, (leaf.shape[0] // comm.size, *leaf.shape[1:])))
    work = comm.reduce_scatter(tree.leaves, _memory(rooms), op=op, **options)
    return Pending(work, _result(tree, rooms)).wait()


def reduce(
    x: Any, root: int = 0, *, op: str | None = None, comm: Comm | None = None, **options: Any
) -> Any:
    """On the root the reduction of x, elsewhere None."""
    comm, tree = _comm(comm), tree_of(x, "x")
    if comm.rank != root:
        comm.reduce(tree.leaves, None, root, op=op, **options).wait()
        return None
    rooms = [Room(leaf) for leaf in tree.leaves]
    work = comm.reduce(tree.leaves, _memory(rooms), root, op=op, **options)
    return Pending(work, _result(tree, rooms)).wait()


def send(x: Any, peer: int, *, comm: Comm | None = None, **options: Any) -> None:
    """Sends x to a rank, which calls recv() with a tree of the same counts and dtypes."""
    _comm(comm).send(tree_of(x, "x").leaves, peer, **options).wait()


def recv(like: Any, peer: int, *, comm: Comm | None = None, **options: Any) -> Any:
    """What a rank sends with send(). like: a tree of arrays or of jax.ShapeDtypeStruct."""
    tree = tree_of(like, "like", (jax.Array, jax.ShapeDtypeStruct))
    rooms = [Room(leaf) for leaf in tree.leaves]
    work = _comm(comm).recv(_memory(rooms), peer, **options)
    return Pending(work, _result(tree, rooms)).wait()


def codec(
    kind: str | Mapping[str, Any], like: Any, *, comm: Comm | None = None, **options: Any
) -> Codec:
    """A codec for all_reduce() of trees like this: see :class:`sotto.Codec`."""
    return _comm(comm).codec(kind, tree_of(like, "like").leaves, **options)
