"""numpy's arrays, in host memory."""

from __future__ import annotations

from typing import Any

import numpy

from .._view import View, dtype_code, not_contiguous
from ..errors import UnsupportedError
from .base import Framework


class Numpy(Framework):
    """Arrays; no device, no process group."""

    def view(self, x: Any, what: str) -> View | None:
        """As the base class says."""
        if not isinstance(x, numpy.ndarray):
            return None
        if not x.dtype.isnative:
            raise UnsupportedError(
                f"{what} has the byte order of another machine; convert it first"
            )
        dtype = dtype_code(x.dtype.name, what)
        if not x.flags.c_contiguous:
            raise not_contiguous(what, "numpy.ascontiguousarray makes a copy that is")
        return View(x.ctypes.data, x.size, dtype, x.flags.writeable, x)


FRAMEWORK = Numpy()
