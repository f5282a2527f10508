"""Trees of arrays as lists of leaves, and the memory of results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import numpy

from .._frameworks.jax import Fresh, check_values, device_of, name_of
from .._view import dtype_code
from ..errors import InvalidArgumentError

LOW_PRECISION = ("bfloat16", "float16")  # what has a float32 master where it is trained
TRAINED = ("float32", *LOW_PRECISION)
WIDE = ("float64", "int64", "uint64")  # what JAX makes half as wide unless it is told not to
ALIGNMENT = 64  # bytes; JAX takes over host memory that is aligned so, and copies other


class Tree(NamedTuple):
    """A tree in pieces. names: the path of every leaf, "dense.kernel", in the order of leaves."""

    leaves: list[Any]
    names: list[str]
    structure: Any

    def build(self, leaves: Sequence[Any]) -> Any:
        """The same tree of other leaves."""
        return jax.tree_util.tree_unflatten(self.structure, leaves)

    def check_structure(self, what: str, params: Tree) -> None:
        """Errors: InvalidArgumentError (this tree, named what, has other leaves than params)."""
        if self.structure != params.structure:
            raise InvalidArgumentError(
                f"{what} is a tree of {self.structure}, params of {params.structure}; they have to "
                "be alike"
            )


def tree_of(
    tree: Any, what: str, kinds: tuple[type, ...] = (jax.Array,), *, trained: bool = False
) -> Tree:
    """A tree in pieces. trained: it is one of parameters or gradients.

    Errors, which name the leaf: InvalidArgumentError (no array, traced, deleted), UnsupportedError
    (dtype, sharded).
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [".".join(map(_step, path)) for path, _ in found]
    for name, (_, leaf) in zip(names, found):
        _check_leaf(leaf, kinds, leaf_of(what, name), trained)
    return Tree([leaf for _, leaf in found], names, structure)


def _check_leaf(leaf: Any, kinds: tuple[type, ...], at: str, trained: bool) -> None:
    if not isinstance(leaf, kinds):
        raise InvalidArgumentError(
            f"{at} is of type {type(leaf).__qualname__}; allowed: arrays of JAX and trees of them "
            "(jax.numpy.asarray makes one)"
        )
    array: Any = leaf
    if isinstance(leaf, jax.Array):
        check_values(leaf, at)
        device_of(leaf, at)
    if not trained:
        dtype_code(name_of(array.dtype), at)
    elif name_of(array.dtype) not in TRAINED:
        raise InvalidArgumentError(f"{at} is of dtype {array.dtype}; allowed: {', '.join(TRAINED)}")


def _step(key: Any) -> str:
    """A step of a path, without the brackets and dots that JAX writes."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def leaf_of(what: str, name: str) -> str:
    """A leaf in error texts: what it is of, and its path."""
    return f'{what}, leaf "{name}",' if name else what


def has_master(leaf: Any) -> bool:
    """Whether a parameter has a float32 master beside it."""
    return name_of(leaf.dtype) in LOW_PRECISION


def keeping(dtype: Any) -> AbstractContextManager[Any]:
    """Inside, JAX makes arrays of this dtype as it is, whether or not 64 bits are enabled."""
    if name_of(dtype) not in WIDE:
        return nullcontext()
    module: Any = (
        jax if hasattr(jax, "enable_x64") else jax.experimental
    )  # as older versions have it
    context: AbstractContextManager[Any] = module.enable_x64(True)
    return context


def without_weak_type(leaf: Any) -> Any:
    """The same array; of one whose dtype gives way to others, as 0.1 has it, one of that dtype."""
    if not leaf.weak_type:
        return leaf
    with keeping(leaf.dtype):
        return jax.numpy.asarray(leaf, leaf.dtype)


class Room:
    """Memory for a result, which becomes an array of JAX when it has been written."""

    def __init__(self, like: Any, shape: tuple[int, ...] | None = None, dtype: Any = None) -> None:
        """like: an array or a room, whose device it has; shape, dtype: None: those too."""
        self.shape = tuple(like.shape if shape is None else shape)
        self.dtype = dtype or like.dtype
        self.sharding = getattr(like, "sharding", None)
        self.committed = getattr(like, "committed", True)
        # An array that JAX may move goes on being one: it is put where JAX puts new ones.
        self._target = self.sharding if self.committed else None
        self.memory: Any  # what the library writes
        if on_host(self.sharding):
            self.memory = aligned(self.shape, self.dtype)
        else:
            with keeping(self.dtype):
                self.memory = Fresh(self.shape, self.dtype, self.sharding)

    def array(self) -> Any:
        """The array; from now on nothing may write the memory."""
        if isinstance(self.memory, Fresh):
            return self.memory.array
        return self._put(self.memory)

    def _put(self, memory: Any) -> Any:
        """An array that takes over host memory."""
        with keeping(self.dtype):
            return jax.device_put(memory, self._target, may_alias=True)

    def copy(self) -> Any:
        """An array of what is in the memory now, which may be written again."""
        if isinstance(self.memory, Fresh):
            return jax.numpy.array(self.memory.array, copy=True).block_until_ready()
        values = aligned(self.shape, self.memory.dtype)
        values[...] = self.memory
        return self._put(values)

    def fill(self, values: Any) -> Room:
        """Copies the values of an array of JAX, of the memory's dtype or one that it holds."""
        if isinstance(self.memory, Fresh):
            self.memory.array = jax.numpy.array(values, self.memory.array.dtype, copy=True)
            self.memory.array.block_until_ready()
        else:
            self.memory[...] = numpy.asarray(values)
        return self

    def adopt(self, values: Any) -> None:
        """The memory of a master takes what others have written into its low-precision parameter.

        Elements that still have the master's value keep its precision.
        """
        if isinstance(self.memory, Fresh):
            held = self.memory.array
            new = jax.numpy.where(held.astype(values.dtype) == values, held, values)
            self.memory.array = new.block_until_ready()
            return
        given = numpy.asarray(values)
        with numpy.errstate(over="ignore"):  # beyond float16 lies infinity
            changed = self.memory.astype(given.dtype) != given
        numpy.copyto(self.memory, given, where=changed)


def on_host(sharding: Any) -> bool:
    """Whether arrays with this sharding lie in host memory; None: they do."""
    return sharding is None or all(d.platform == "cpu" for d in sharding.device_set)


def aligned(shape: tuple[int, ...], dtype: Any) -> Any:
    """Host memory that JAX can take over without a copy, as an array of numpy."""
    n = math.prod(shape) * numpy.dtype(dtype).itemsize
    raw = numpy.empty(n + ALIGNMENT, numpy.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin : begin + n].view(dtype).reshape(shape)
