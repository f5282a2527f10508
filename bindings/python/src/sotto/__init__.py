"""Sotto lets distributed training talk less: collectives in few bits, and the optimizers for them.

    import numpy as np, sotto
    with sotto.init_process_group() as comm:      # under sotto-run, torchrun, mpirun or srun
        x = np.full(4, comm.rank, np.float32)
        comm.all_reduce(x, op="mean").wait()

``sotto.optim`` has the optimizers on plain buffers, ``sotto.outer`` outer optimizers (CO2, DiLoCo
and the like), ``sotto.overlap`` gradients that are averaged as they become ready; ``sotto.torch``
(imported on request) those for PyTorch and a hook for DistributedDataParallel, ``sotto.jax`` trees
of JAX. The library is loaded on first use: the file that SOTTO_LIBRARY names, else the one in the
wheel, else the system's.
"""

from __future__ import annotations

import json
from typing import Any, cast

from . import optim, outer, overlap
from ._abi import SOTTO_PRIORITY_BACKGROUND as PRIORITY_BACKGROUND
from ._lib import library, text_of
from .codec import Codec
from .comm import Comm, Counters
from .create import UniqueId, create_comm
from .errors import (
    AbortedError,
    BusyError,
    CancelledError,
    DeviceError,
    InternalError,
    InvalidArgumentError,
    InvalidStateError,
    LibraryLoadError,
    NonfiniteError,
    OperationTimeoutError,
    OutOfMemoryError,
    PeerLostError,
    ProtocolError,
    SottoError,
    TransportError,
    UnsupportedError,
)
from .group import default_comm, init_process_group
from .log import capture_log
from .optim import config_report, config_resolve
from .work import OpStats, Work, wait_all, wait_any

__version__ = "0.2.0"

__all__ = [
    "PRIORITY_BACKGROUND",
    "AbortedError",
    "BusyError",
    "CancelledError",
    "Codec",
    "Comm",
    "Counters",
    "DeviceError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidStateError",
    "LibraryLoadError",
    "NonfiniteError",
    "OpStats",
    "OperationTimeoutError",
    "OutOfMemoryError",
    "PeerLostError",
    "ProtocolError",
    "SottoError",
    "TransportError",
    "UniqueId",
    "UnsupportedError",
    "Work",
    "build_info",
    "capture_log",
    "config_report",
    "config_resolve",
    "create_comm",
    "default_comm",
    "init_process_group",
    "library_path",
    "library_version",
    "optim",
    "outer",
    "overlap",
    "wait_all",
    "wait_any",
]


def library_version() -> str:
    """Version of the loaded library. Errors: LibraryLoadError."""
    return text_of(library().functions.sotto_version_string())


def library_path() -> str:
    """Which file was loaded. Errors: LibraryLoadError."""
    return library().path


def build_info() -> dict[str, Any]:
    """What was compiled in: transports, codecs, optimizers, SIMD targets, compiler."""
    return cast("dict[str, Any]", json.loads(text_of(library().functions.sotto_build_info())))
