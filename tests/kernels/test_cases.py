"""The public cases of the kernels, with the outcomes that they name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from trainmon.ops import (
    exponent_histogram,
    finish_stats,
    merge_stats,
    multi_norm,
    scan_nonfinite,
    tensor_stats,
    underflow_shares,
)


def reversed_columns() -> np.ndarray[Any, Any]:
    return np.arange(12.0).reshape(3, 4)[:, ::-1]


def packed_field() -> np.ndarray[Any, Any]:
    records = np.zeros(4, np.dtype([("tag", "u1"), ("x", "<f4")]))
    records["x"] = [3, 4, 0, 0]
    assert records["x"].strides == (5,)
    return records["x"]


def read_only() -> np.ndarray[Any, Any]:
    array = np.zeros((3, 4))
    array[0, :2] = 3, 4
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("make", "norm"),
    [
        (reversed_columns, 22.494443758403985),
        (packed_field, 5),
        (lambda: np.broadcast_to(np.float32(2), (3, 5)), 7.745966692414834),
        (lambda: np.array(-2.5), 2.5),
        (read_only, 5),
    ],
)
def test_arrays_as_they_come(make: Callable[[], np.ndarray[Any, Any]], norm: float) -> None:
    """pytorch/pytorch#188023, numpy/numpy#20742"""
    array = make()
    assert multi_norm(array) == norm
    assert finish_stats(tensor_stats(array))["norm"] == norm
    assert scan_nonfinite(array) is None
    copied = exponent_histogram(np.array(array, copy=True))
    assert exponent_histogram(array).state.tolist() == copied.state.tolist()
    assert copied.n == array.size


def test_nan_is_found_at_its_place_in_the_view() -> None:
    base = np.arange(12.0).reshape(3, 4)
    base[0, 2] = np.nan
    found = scan_nonfinite(base[:, ::-1])
    assert found is not None
    assert (found.index, found.kind) == (1, "nan")
    assert tensor_stats(base[:, ::-1])[0]["first_bad"] == 1
    assert exponent_histogram(base[:, ::-1]).nan == 1


@pytest.mark.parametrize(
    "function", [multi_norm, tensor_stats, scan_nonfinite, exponent_histogram, underflow_shares]
)
def test_big_endian_is_refused_by_its_byte_order(function: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match="byte order"):
        function(np.ones(3, np.dtype(np.float32).newbyteorder()))


def as_list(tensors: list[Any]) -> Iterable[Any]:
    return tensors


def as_generator(tensors: list[Any]) -> Iterator[Any]:
    yield from tensors


@pytest.mark.parametrize("wrap", [as_list, as_generator])
def test_empty_tensors(wrap: Callable[[list[Any]], Iterable[Any]]) -> None:
    """pytorch/pytorch#140066, NVIDIA/Megatron-LM#5529, pytorch/torchtitan#1258"""
    tensors = [np.array([3.0]), np.array([]), np.array([4.0])]
    total, each = multi_norm(wrap(tensors), per_tensor=True)
    assert total == 5
    assert each.tolist() == [3, 0, 4]
    assert multi_norm(wrap(tensors), math.inf) == 4
    assert multi_norm(wrap(tensors), 1) == 7
    for nothing in ([np.array([]), np.array([])], []):
        for ord in (1, 2, math.inf):
            assert multi_norm(wrap(nothing), ord) == 0


def test_statistics_of_an_empty_tensor_make_nothing_up() -> None:
    for record in (tensor_stats(np.array([]))[0], merge_stats(tensor_stats([]))):
        assert record["n"] == 0
        assert record["sum"] == record["sumsq"] == record["n_zero"] == 0
        assert record["first_bad"] == -1
        assert all(math.isnan(record[name]) for name in ("min", "max", "absmax"))
        summary = finish_stats(record)
        assert summary["norm"] == 0
        assert all(math.isnan(summary[name]) for name in ("mean", "rms", "std", "min", "max", "absmax"))
    assert not exponent_histogram(np.array([])).state.any()
