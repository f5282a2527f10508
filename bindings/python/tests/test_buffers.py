"""What arrays are taken, without a copy, and what is refused."""

import array
import ctypes

import numpy as np
import pytest

import sotto
from sotto import _abi
from sotto._buffers import DTYPES, Buffers, view_of


@pytest.mark.parametrize("name", [n for n in DTYPES if n != "bfloat16"])
def test_numpy_arrays(name):
    x = np.zeros((3, 5), name)
    view = view_of(x, "x")
    assert (view.data, view.elements, view.dtype, view.writable) == (
        x.ctypes.data,
        15,
        DTYPES[name],
        True,
    )


@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        ("b", "int8"),
        ("B", "uint8"),
        ("i", "int32"),
        ("I", "uint32"),
        ("l", "int64"),
        ("q", "int64"),
        ("Q", "uint64"),
        ("f", "float32"),
        ("d", "float64"),
    ],
)
def test_array_array(code, dtype):
    x = array.array(code, [1, 2, 3])
    view = view_of(x, "x")
    assert (view.data, view.elements, view.dtype) == (x.buffer_info()[0], 3, DTYPES[dtype])
    with pytest.raises(BufferError):
        x.append(4)  # the view holds the memory in place


def test_bytes_like():
    assert view_of(b"abc", "x")[1:4] == (3, _abi.SOTTO_UINT8, False)
    assert view_of(bytearray(4), "x")[1:4] == (4, _abi.SOTTO_UINT8, True)
    assert view_of(memoryview(bytearray(8)).cast("f"), "x")[1:4] == (2, _abi.SOTTO_FLOAT32, True)
    assert view_of((ctypes.c_int32 * 7)(), "x")[1:4] == (7, _abi.SOTTO_INT32, True)


class Producer:
    """An array of another library: only DLPack."""

    def __init__(self, values, device=(1, 0)):
        self.values = values
        self.device = device

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device


def test_dlpack():
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    view = view_of(Producer(values), "x")
    assert (view.data, view.elements, view.dtype) == (values.ctypes.data, 12, _abi.SOTTO_FLOAT32)
    assert view_of(Producer(values[1:]), "x").data == values[1:].ctypes.data
    assert view_of(Producer(values[:1, :].T), "x").elements == 4


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (np.zeros((4, 4), np.float32).T[:, 1:], sotto.InvalidArgumentError, "x is not contiguous"),
        (np.zeros(8, np.float32)[::2], sotto.InvalidArgumentError, "x is not contiguous"),
        (memoryview(bytearray(8))[::2], sotto.InvalidArgumentError, "x is not contiguous"),
        (
            Producer(np.zeros((4, 4), np.float32)[:, 1:]),
            sotto.InvalidArgumentError,
            "x is not contiguous",
        ),
        (Producer(np.zeros(4, np.float32), (2, 0)), sotto.UnsupportedError, "DLPack device type 2"),
        (np.zeros(3, ">f4"), sotto.UnsupportedError, "byte order"),
        (np.zeros(3, bool), sotto.UnsupportedError, "dtype bool; allowed: int8"),
        (np.zeros(3, complex), sotto.UnsupportedError, "dtype complex128"),
        (np.array(["a"]), sotto.UnsupportedError, "dtype str"),
        (Producer(np.zeros(3, np.complex64)), sotto.UnsupportedError, "dtype code 5"),
        (1.5, sotto.InvalidArgumentError, "x is of type float; allowed"),
        (None, sotto.InvalidArgumentError, "x is of type NoneType"),
    ],
)
def test_refused(x, error, text):
    with pytest.raises(error, match=text):
        view_of(x, "x")


def test_read_only_arrays_are_inputs_alone():
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    assert Buffers(frozen, "x", writable=False).n == 1
    with pytest.raises(sotto.InvalidArgumentError, match=r"out\[1\] is read-only"):
        Buffers([np.zeros(3, np.float32), frozen], "out", writable=True)


def test_no_elements():
    assert view_of(np.zeros((0, 3), np.float32), "x").elements == 0
    assert Buffers(np.zeros(0, np.float32), "x", writable=True).array[0].data is None
    assert view_of(b"", "x").elements == 0
