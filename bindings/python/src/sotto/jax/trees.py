"""Trees of arrays as lists of leaves, and the memory of results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy

from .._frameworks.jax import Fresh, check_values
from ..errors import InvalidArgumentError

ALIGNMENT = 64  # bytes; JAX takes over host memory that is aligned so, and copies other


class Tree(NamedTuple):
    """A tree in pieces. names: the path of every leaf, "dense.kernel", in the order of leaves."""

    leaves: list[Any]
    names: list[str]
    structure: Any

    def build(self, leaves: Sequence[Any]) -> Any:
        """The same tree of other leaves."""
        return jax.tree_util.tree_unflatten(self.structure, leaves)


def tree_of(tree: Any, what: str, kinds: tuple[type, ...] = (jax.Array,)) -> Tree:
    """A tree in pieces. Errors: InvalidArgumentError (names a leaf: no array, traced, deleted)."""
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [".".join(map(_step, path)) for path, _ in found]
    for name, (_, leaf) in zip(names, found):
        at = f'{what}, leaf "{name}",' if name else what
        if not isinstance(leaf, kinds):
            raise InvalidArgumentError(
                f"{at} is of type {type(leaf).__qualname__}; allowed: arrays of JAX and trees of "
                "them (jax.numpy.asarray makes one)"
            )
        if isinstance(leaf, jax.Array):
            check_values(leaf, at)
    return Tree([leaf for _, leaf in found], names, structure)


def _step(key: Any) -> str:
    """A step of a path, without the brackets and dots that JAX writes."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


class Room:
    """Memory for a result, which becomes an array of JAX when it has been written."""

    def __init__(self, like: Any, shape: tuple[int, ...] | None = None, dtype: Any = None) -> None:
        """like: an array, whose device the result has; shape, dtype: None: those too."""
        self.shape = tuple(like.shape if shape is None else shape)
        sharding = getattr(like, "sharding", None)
        on_host = sharding is None or all(d.platform == "cpu" for d in sharding.device_set)
        # An array that JAX may move goes on being one: it is put where JAX puts new ones.
        self._sharding = sharding if getattr(like, "committed", True) else None
        self.memory: Any  # what the library writes
        if on_host:
            self.memory = aligned(self.shape, dtype or like.dtype)
        else:
            self.memory = Fresh(self.shape, dtype or like.dtype, sharding)

    def array(self) -> Any:
        """The array; from now on nothing may write the memory."""
        if isinstance(self.memory, Fresh):
            return self.memory.array
        return jax.device_put(self.memory, self._sharding, may_alias=True)

    def copy(self) -> Any:
        """An array of what is in the memory now, which may be written again."""
        if isinstance(self.memory, Fresh):
            return jax.numpy.array(self.memory.array, copy=True).block_until_ready()
        values = aligned(self.shape, self.memory.dtype)
        values[...] = self.memory
        return jax.device_put(values, self._sharding, may_alias=True)

    def fill(self, values: Any) -> Room:
        """Copies the values of an array of JAX, of the memory's dtype or one that it holds."""
        if isinstance(self.memory, Fresh):
            self.memory.array = jax.numpy.array(values, self.memory.array.dtype, copy=True)
            self.memory.array.block_until_ready()
        else:
            self.memory[...] = numpy.asarray(values)
        return self


def aligned(shape: tuple[int, ...], dtype: Any) -> Any:
    """Host memory that JAX can take over without a copy, as an array of numpy."""
    n = math.prod(shape) * numpy.dtype(dtype).itemsize
    raw = numpy.empty(n + ALIGNMENT, numpy.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin : begin + n].view(dtype).reshape(shape)
