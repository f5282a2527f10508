"""What the package asks a framework, and the answers of one that has nothing of the kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .._view import View

if TYPE_CHECKING:
    from ..comm import Comm

MakeComm = Callable[..., "Comm"]


class Framework:
    """A library with arrays. Its module in this folder is imported after the library itself."""

    has_streams = False  # whether it has a current stream for every CUDA device

    def view(self, x: Any, what: str) -> View | None:
        """Where its array `x` lies, named `what` in errors; None: x is not an array of its own.

        Errors: UnsupportedError (dtype, device, layout), InvalidArgumentError (not contiguous).
        """
        return None

    def bytes_of_bools(self, x: Any) -> Any:
        """Its array of booleans as one of uint8, not copied; None: x is no such array."""
        return None

    def current_stream(self, cuda: int) -> int:
        """The current stream (cudaStream_t) on a CUDA device, if it has streams."""
        raise NotImplementedError

    def await_current_stream(self, cuda: int) -> None:
        """The host waits for that stream, unless it is being captured into a graph."""
        raise NotImplementedError

    def has_process_group(self) -> bool:
        """Whether it has joined ranks of its own in this process."""
        return False

    def meeting(self, environ: Mapping[str, str]) -> MakeComm | None:
        """What makes a comm of ranks that it has joined, or can join; None: there are none.

        The function takes listen, transport, timeout, cpu_threads and max_ops.
        """
        return None
