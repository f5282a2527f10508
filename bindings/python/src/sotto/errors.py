"""One exception class per status code, all below :class:`SottoError`.

The text is the library's own: it names ranks, operations, addresses and what is allowed. Classes
also derive from the builtin exception that fits, where there is one.

What to do:

* ``InvalidArgumentError``, ``InvalidStateError``, ``UnsupportedError``: mend the program.
* ``OutOfMemoryError``, ``BusyError``: free something, try again.
* ``OperationTimeoutError``, ``PeerLostError``, ``AbortedError``, ``ProtocolError``,
  ``TransportError``, ``DeviceError``: the group has failed; close it, make a new one, resume.
* ``NonfiniteError``, ``CancelledError``: nothing was updated, the group is healthy.
"""

from __future__ import annotations

from . import _abi as abi


class SottoError(Exception):
    """Base of everything that this package raises on its own account.

    ``status`` is the C status code, or None where no call of the library was involved.
    """

    status: int | None = None


class LibraryLoadError(SottoError, ImportError):
    """The shared library was not found, or is not one that this package can work with."""


class InvalidArgumentError(SottoError, ValueError):
    """A caller's mistake: the text says what was found and what is allowed."""

    status = abi.SOTTO_E_INVALID_ARGUMENT


class InvalidStateError(SottoError, RuntimeError):
    """Calls in the wrong order, a closed object, or a handle of a parent process."""

    status = abi.SOTTO_E_INVALID_STATE


class UnsupportedError(SottoError, NotImplementedError):
    """Unknown or not built in; the text names it."""

    status = abi.SOTTO_E_UNSUPPORTED


class OutOfMemoryError(SottoError, MemoryError):
    """Memory ran out; nothing has changed."""

    status = abi.SOTTO_E_OUT_OF_MEMORY


class BusyError(SottoError, RuntimeError):
    """A local resource is in use: wait for the operation that uses it."""

    status = abi.SOTTO_E_BUSY


class OperationTimeoutError(SottoError):
    """An operation stood still for longer than its deadline; the group has failed.

    Not a builtin ``TimeoutError``: that one is raised by ``wait(timeout)``, and then the operation
    goes on.
    """

    status = abi.SOTTO_E_TIMEOUT


class PeerLostError(SottoError, ConnectionError):
    """Another rank is gone; the group has failed."""

    status = abi.SOTTO_E_PEER_LOST


class AbortedError(SottoError):
    """A rank aborted the group; the text is its reason."""

    status = abi.SOTTO_E_ABORTED


class ProtocolError(SottoError):
    """Ranks called different things, or a message is damaged; the text has both sides."""

    status = abi.SOTTO_E_PROTOCOL


class TransportError(SottoError, OSError):
    """The local network failed."""

    status = abi.SOTTO_E_TRANSPORT


class DeviceError(SottoError):
    """The local device failed."""

    status = abi.SOTTO_E_DEVICE


class InternalError(SottoError):
    """A fault of the library: please report it with its text."""

    status = abi.SOTTO_E_INTERNAL


class NonfiniteError(SottoError, ArithmeticError):
    """NaN or Inf in what was given: nothing was updated, the group is healthy."""

    status = abi.SOTTO_E_NONFINITE


class CancelledError(SottoError):
    """The operation was withdrawn before it started."""

    status = abi.SOTTO_E_CANCELLED


BY_STATUS: dict[int, type[SottoError]] = {
    cls.status: cls
    for cls in (
        InvalidArgumentError,
        InvalidStateError,
        UnsupportedError,
        OutOfMemoryError,
        BusyError,
        OperationTimeoutError,
        PeerLostError,
        AbortedError,
        ProtocolError,
        TransportError,
        DeviceError,
        InternalError,
        NonfiniteError,
        CancelledError,
    )
    if cls.status is not None
}


def error_of(status: int, text: str) -> SottoError:
    """The exception for a status code below zero; ``text`` is what the library says about it."""
    cls = BY_STATUS.get(status)
    if cls is None:
        return InternalError(f"status {status}, unknown to this package: {text}")
    return cls(text)
