"""Buffers by their format, and memory with a dtype name beside it."""

from __future__ import annotations

import array
import ctypes
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.awkward import DTYPES, make
from tests.kernels.compare import assert_record
from trainmon.ops import multi_norm, tensor_stats


@pytest.mark.parametrize("code", "bBhHiIlLqQfd")
def test_array_module(code: str) -> None:
    values = array.array(code, [3, 4, 0])
    assert multi_norm(values) == 5
    assert multi_norm([values, values], 1) == 14


def test_bytes_and_views() -> None:
    assert multi_norm(b"\x03\x04") == 5
    assert multi_norm(bytearray([3, 4])) == 5
    assert multi_norm(b"") == 0
    assert multi_norm(memoryview(bytes([3, 9, 4, 9]))[::2]) == 5
    assert multi_norm(memoryview(bytes([9, 4, 9, 3]))[::-2]) == 5
    assert multi_norm(memoryview(b"\x03\x04").cast("c")) == 5
    assert multi_norm(memoryview(np.arange(12.0).reshape(3, 4)[:, ::-1])) == 22.494443758403985
    assert multi_norm(memoryview(np.array(-2.5))) == 2.5
    assert multi_norm((ctypes.c_float * 2)(3, 4)) == 5
    assert multi_norm(memoryview(np.array([True, False]))) == 1
    assert multi_norm(memoryview(np.array([3, 4], np.float16))) == 5


def test_swapped_and_foreign_formats() -> None:
    swapped = ">f" if sys.byteorder == "little" else "<f"
    with pytest.raises(TypeError, match=f"'{swapped}' has the byte order of another machine"):
        multi_norm(memoryview(np.ones(2, swapped + "4")))
    with pytest.raises(TypeError, match=r"buffer format 'Zd' can't be read"):
        multi_norm(memoryview(np.ones(2, complex)))
    with pytest.raises(TypeError, match=r"buffer format 'T\{"):
        multi_norm(memoryview(np.zeros(2, [("a", "f4"), ("b", "u1")])))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tag_names_what_the_memory_holds(dtype: str) -> None:
    values = make(dtype, "contiguous", "bits")
    for memory in (values.tobytes(), bytearray(values.tobytes()), values.view(f"u{values.itemsize}")):
        assert_record(tensor_stats((memory, dtype))[0], values)
        assert_record(tensor_stats([np.ones(1), (memory, dtype)])[1], values)


def test_a_tag_keeps_shape_and_strides_of_equal_sizes() -> None:
    values = make("bfloat16", "fortran", "ordinary")
    codes = values.view(np.uint16)
    assert_record(tensor_stats((codes, "bf16"))[0], values)
    assert_record(tensor_stats((memoryview(codes), "bf16"))[0], values)
    assert multi_norm((np.array([3, 4], ml_dtypes.bfloat16).view(np.int16)[::-1], "bf16")) == 5


@pytest.mark.parametrize("tag", ["bf16", "bfloat16", "f16", "e4m3fn", "float8_e4m3fn", "f32"])
def test_tags_have_short_names(tag: str) -> None:
    assert multi_norm((b"", tag)) == 0


@pytest.mark.parametrize(
    ("pair", "error", "words"),
    [
        ((b"123", "bf16"), ValueError, "3 elements of 1 bytes can't be read as 'bf16'"),
        ((np.ones(2), "bf16"), ValueError, "2 elements of 8 bytes can't be read as 'bf16'"),
        ((memoryview(b"12345678")[::2], "bf16"), ValueError, "contiguous bytes"),
        ((b"12", "bf17"), TypeError, "unknown dtype name 'bf17'"),
        ((b"12", ""), TypeError, "unknown dtype name ''"),
        ((3, "bf16"), TypeError, "int is not an array"),
    ],
)
def test_wrong_tags(pair: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        multi_norm(pair)
    with pytest.raises(error, match=rf"tensors\[1\]: .*{words}"):
        multi_norm([b"", pair])


def test_buffers_are_released() -> None:
    memory = bytearray(b"1234")
    multi_norm(memory)
    multi_norm((memory, "bf16"))
    with pytest.raises(ValueError, match="as 'f64'"):
        multi_norm((memory, "f64"))
    memory += b"5"  # a bytearray with an open view can't grow
    assert len(memory) == 5


def test_a_closed_view_is_a_type_error() -> None:
    view = memoryview(b"12")
    view.release()
    with pytest.raises(TypeError, match=r"tensors\[0\]: memoryview gives no view of its memory") as caught:
        multi_norm(view)
    assert isinstance(caught.value.__cause__, ValueError)
