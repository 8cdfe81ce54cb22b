"""multi_norm against its twin: three orders, every awkward array, any list."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.awkward import DTYPES, LAYOUTS, arrays, make
from tests.kernels.compare import close, same
from tests.twins.stats import norm_twin
from trainmon.ops import multi_norm

ORDERS = (2, 1, math.inf)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_twin(dtype: str, layout: str) -> None:
    tensors = list(arrays(dtype, layout))
    for ord in ORDERS:
        _, each = multi_norm(tensors, ord, per_tensor=True)
        for value, array in zip(each, tensors, strict=True):
            assert close(float(value), norm_twin([array], ord), array.size), ord
            assert same(float(multi_norm(array, ord)), float(value))


@pytest.mark.parametrize("ord", ORDERS)
def test_total_is_the_norm_of_one_vector(ord: float) -> None:
    tensors = [make(dtype, layout, "ordinary") for dtype in DTYPES for layout in LAYOUTS]
    total, each = multi_norm(tensors, ord, per_tensor=True)
    assert close(float(total), norm_twin(tensors, ord), sum(tensor.size for tensor in tensors))
    assert each.shape == (len(tensors),)
    assert multi_norm(tensors, ord) == total


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64"])
def test_twin_over_chunks(dtype: str) -> None:
    array = make(dtype, "contiguous", "ordinary", n=3 * 65536 + 77)
    for ord in ORDERS:
        assert close(float(multi_norm(array, ord)), norm_twin([array], ord), array.size)


def test_nan_wins_over_infinity() -> None:
    for ord in ORDERS:
        assert math.isnan(multi_norm([np.array([np.inf, 1]), np.array([np.nan])], ord))
        assert multi_norm([np.array([-np.inf, 1]), np.array([2.0])], ord) == math.inf


def test_range_of_float64() -> None:
    assert multi_norm([np.full(2, 3e300), np.full(2, 4e-300)]) == pytest.approx(
        3e300 * math.sqrt(2), rel=1e-15
    )
    total, each = multi_norm([np.array([3e-300]), np.array([4e-300])], per_tensor=True)
    assert total == pytest.approx(5e-300, rel=1e-15)
    assert each.tolist() == [3e-300, 4e-300]
    assert multi_norm(np.full(4, 5e-324)) == 1e-323


def test_result_types() -> None:
    total, each = multi_norm(np.ones(4, np.float16), per_tensor=True)
    assert isinstance(total, np.float64)
    assert each.dtype == np.float64
    assert isinstance(multi_norm(np.ones(4)), np.float64)


def test_one_tensor_twice_counts_twice() -> None:
    array = np.array([3.0, 4.0])
    assert multi_norm([array, array]) == pytest.approx(5 * math.sqrt(2), rel=1e-15)


@pytest.mark.parametrize("ord", [0, 3, -1, -math.inf, math.nan, "fro", None, [2]])
def test_other_orders_are_refused(ord: object) -> None:
    with pytest.raises(ValueError, match=r"ord must be 2, 1 or math\.inf"):
        multi_norm(np.ones(2), ord)  # type: ignore[call-overload]


def test_numpy_spelling_of_orders() -> None:
    assert multi_norm(np.array([3.0, -4.0]), np.inf) == 4
    assert multi_norm(np.array([3.0, -4.0]), np.int64(1)) == 7


@pytest.mark.parametrize("threads", [0, -1, 10**6])
def test_threads_out_of_range(threads: int) -> None:
    with pytest.raises(ValueError, match="threads must be from 1 to"):
        multi_norm(np.ones(2), threads=threads)
