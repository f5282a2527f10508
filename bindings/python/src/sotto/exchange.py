"""The collectives that move parts of arrays, which may be unequal."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from typing import Any

from . import _abi as abi
from ._buffers import Buffers
from ._call import call_options, whole_number
from .errors import InvalidArgumentError
from .work import Work


class Exchanges:
    """What :class:`sotto.Comm` has of them."""

    _rank: int
    _size: int

    def _submit(self, name: str, *arguments: Any, call: abi.Call | None, keep: Any) -> Work:
        raise NotImplementedError

    def _inputs(self, x: Any, what: str = "x") -> Buffers:
        raise NotImplementedError

    def _outputs(self, out: Any, what: str = "out") -> Buffers:
        raise NotImplementedError

    def _pair(self, x: Any, out: Any) -> tuple[Buffers, Buffers]:
        raise NotImplementedError

    def _number(self, rank: Any, what: str) -> int:
        """A root or peer. Errors: InvalidArgumentError (no rank)."""
        return whole_number(rank, what, 0, self._size - 1)

    def all_to_all(
        self,
        x: Any,
        out: Any,
        *,
        in_counts: Sequence[Any] | None = None,
        out_counts: Sequence[Any] | None = None,
        tag: int = 0,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Work:
        """Part r of x goes to rank r; part r of out comes from rank r.

        Without counts all parts are equal. in_counts and out_counts: elements per rank, one number
        for every rank, parts one behind the other; for a list of arrays a list of such lists. What
        one rank sends to another has to be what that one expects: ProtocolError otherwise.
        """
        ins, outs = self._pair(x, out)
        if (in_counts is None) != (out_counts is None):
            raise InvalidArgumentError(
                "one of in_counts and out_counts is None; give both or neither"
            )
        parts, numbers = None, None
        if in_counts is not None and out_counts is not None:
            several = isinstance(x, (list, tuple))
            parts, numbers = self._parts(
                in_counts if several else [in_counts],
                out_counts if several else [out_counts],
                ins.n,
            )
        call = call_options(tag, timeout, priority)
        return self._submit(
            "sotto_all_to_all",
            ins.array,
            outs.array,
            ins.n,
            parts,
            call=call,
            keep=(ins, outs, numbers),
        )

    def all_gather_v(
        self,
        x: Any,
        out: Any,
        counts: Sequence[Any],
        *,
        tag: int = 0,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Work:
        """out = concatenation of x over ranks, of which each may have another number of elements.

        counts: elements of every rank, the same on all ranks; for a list of arrays a list of such
        lists. x has counts[rank] elements and may be this rank's part of out.
        """
        ins, outs = self._pair(x, out)
        of_arrays = counts if isinstance(x, (list, tuple)) else [counts]
        parts, numbers = self._parts(None, of_arrays, ins.n)
        call = call_options(tag, timeout, priority)
        return self._submit(
            "sotto_all_gather_v",
            ins.array,
            outs.array,
            ins.n,
            parts,
            call=call,
            keep=(ins, outs, numbers),
        )

    def reduce_scatter_v(
        self,
        x: Any,
        out: Any,
        counts: Sequence[Any],
        *,
        op: str | None = None,
        tag: int = 0,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Work:
        """out = this rank's part of the reduction of x; parts may have different sizes.

        counts: elements that every rank gets, the same on all ranks; for a list of arrays a list of
        such lists. out has counts[rank] elements and may be this rank's part of x. op: as in
        all_reduce.
        """
        ins, outs = self._pair(x, out)
        of_arrays = counts if isinstance(x, (list, tuple)) else [counts]
        parts, numbers = self._parts(of_arrays, None, ins.n)
        call = call_options(tag, timeout, priority, op)
        return self._submit(
            "sotto_reduce_scatter_v",
            ins.array,
            outs.array,
            ins.n,
            parts,
            call=call,
            keep=(ins, outs, numbers),
        )

    def _parts(
        self, in_counts: Sequence[Any] | None, out_counts: Sequence[Any] | None, n: int
    ) -> tuple[Any, Any]:
        """The structs, and what keeps their arrays alive. None: a side that has no parts."""
        sides = [
            (name, counts)
            for name, counts in (("in_counts", in_counts), ("out_counts", out_counts))
            if counts is not None
        ]
        if any(len(counts) != n for _, counts in sides):
            found = " and ".join(f"{len(counts)} {name}" for name, counts in sides)
            raise InvalidArgumentError(
                f"{found} for {n} arrays; each array needs a list of "
                f"{'both' if len(sides) == 2 else 'them'}"
            )
        parts = (abi.Parts * n)()
        numbers = []
        for i, part in enumerate(parts):
            for name, counts in sides:
                of_rank = counts[i]
                if len(of_rank) != self._size or any(k < 0 for k in of_rank):
                    raise InvalidArgumentError(
                        f"{name} is {list(of_rank)}; allowed: {self._size} numbers from 0, one "
                        "for every rank"
                    )
                array = (c.c_uint64 * self._size)(*of_rank)
                numbers.append(array)
                setattr(part, name, c.cast(array, c.POINTER(c.c_uint64)))
            part.struct_size = c.sizeof(abi.Parts)
        return parts, numbers

    def gather(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        *,
        tag: int = 0,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Work:
        """out on the root = concatenation of x over ranks.

        out: size times as many elements as x; None on all ranks but the root.
        """
        root = self._number(root, "root")
        ins = self._inputs(x)
        outs = None
        if self._rank == root:
            if out is None:
                raise InvalidArgumentError(
                    "out is None; the root of a gather needs an array for the result"
                )
            ins, outs = self._pair(x, out)
        call = call_options(tag, timeout, priority)
        return self._submit(
            "sotto_gather",
            ins.array,
            None if outs is None else outs.array,
            ins.n,
            root,
            call=call,
            keep=(ins, outs),
        )

    def scatter(
        self,
        x: Any,
        out: Any,
        root: int = 0,
        *,
        tag: int = 0,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Work:
        """out = this rank's part of x on the root.

        x: size times as many elements as out; None on all ranks but the root.
        """
        root = self._number(root, "root")
        ins, outs = None, self._outputs(out)
        if self._rank == root:
            if x is None:
                raise InvalidArgumentError(
                    "x is None; the root of a scatter needs the array to be sent"
                )
            ins, outs = self._pair(x, out)
        call = call_options(tag, timeout, priority)
        return self._submit(
            "sotto_scatter",
            None if ins is None else ins.array,
            outs.array,
            outs.n,
            root,
            call=call,
            keep=(ins, outs),
        )
