"""tensor_stats against its twin over every awkward array, and its records on their own."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.awkward import DTYPES, FLOATS, LAYOUTS, arrays, make
from tests.kernels.compare import assert_record, same
from trainmon.ops import STATS_DTYPE, tensor_stats


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_twin(dtype: str, layout: str) -> None:
    tensors = list(arrays(dtype, layout))
    for record, array in zip(tensor_stats(tensors), tensors, strict=True):
        assert_record(record, array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_twin_over_chunks(dtype: str) -> None:
    """Three chunks and a ragged end, in C order and strided."""
    for layout in ("contiguous", "every third", "misaligned"):
        for values in ("bits", "ordinary"):
            array = make(dtype, layout, values, n=3 * 65536 + 77)
            assert_record(tensor_stats(array)[0], array)


@pytest.mark.parametrize("n", [*range(70), 127, 128, 129, 255, 256, 257, 65535, 65536, 65537])
def test_every_length(n: int) -> None:
    for dtype in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int8"):
        array = make(dtype, "contiguous", "bits", n=n)
        assert_record(tensor_stats(array)[0], array)


@pytest.mark.parametrize("dtype", [name for name in FLOATS if name != "float8_e8m0fnu"])
def test_every_position_of_a_bad_element(dtype: str) -> None:
    for position in range(70):
        array = make(dtype, "contiguous", "ordinary", n=70)
        with np.errstate(all="ignore"):
            array[position] = np.float32(np.nan).astype(DTYPES[dtype])
        record = tensor_stats(array)[0]
        assert (record["n_nan"], record["first_bad"]) == (1, position)


@pytest.mark.parametrize("dtype", [name for name in FLOATS if DTYPES[name].itemsize <= 2])
def test_every_code_of_a_narrow_float(dtype: str) -> None:
    """All 256 or 65,536 codes at once: each is classified and widened as NumPy has it."""
    bits = 8 * DTYPES[dtype].itemsize
    codes = np.arange(2**bits, dtype=np.uint32).astype(f"u{bits // 8}").view(DTYPES[dtype])
    assert_record(tensor_stats(codes)[0], codes)
    for code in codes[:: max(1, codes.size // 256)]:
        one = np.array([code])
        assert_record(tensor_stats(one)[0], one)


def test_record_layout() -> None:
    records = tensor_stats([np.ones(3), np.ones(2)])
    assert records.dtype == STATS_DTYPE
    assert records.shape == (2,)
    assert records.dtype.names == (
        *(
            "n",
            "sum",
            "sumsq",
            "min",
            "max",
            "absmax",
            "n_nan",
            "n_posinf",
            "n_neginf",
            "n_zero",
            "first_bad",
        ),
        *("sumsq_scaled", "scale_exponent", "m2_scaled"),
    )


def test_no_finite_element_leaves_extremes_undefined() -> None:
    for array, n in ((np.empty(0, np.float32), 0), (np.array([np.nan, np.inf]), 2)):
        record = tensor_stats(array)[0]
        assert record["n"] == n
        assert (record["sum"], record["sumsq"]) == (0, 0)
        assert all(math.isnan(record[name]) for name in ("min", "max", "absmax"))


def test_squares_beyond_float64_are_kept_scaled() -> None:
    record = tensor_stats(np.full(4, 1e200))[0]
    assert record["sumsq"] == math.inf
    assert math.ldexp(math.sqrt(record["sumsq_scaled"]), int(record["scale_exponent"])) == pytest.approx(
        2e200, rel=1e-15
    )
    record = tensor_stats(np.full(4, 5e-324))[0]
    assert record["sumsq"] == 0
    assert math.ldexp(math.sqrt(record["sumsq_scaled"]), int(record["scale_exponent"])) == 1e-323


def test_fsum_bounds_the_sum() -> None:
    array = make("float64", "contiguous", "ordinary", n=1000)
    record = tensor_stats(array)[0]
    assert abs(record["sum"] - math.fsum(array)) <= 1000 * 2.0**-53 * np.abs(array).sum()
    squares = math.fsum(float(x) * float(x) for x in array)
    assert record["sumsq"] == pytest.approx(squares, rel=1000 * 2.0**-53)


def test_nan_payloads_and_signs_are_nan() -> None:
    bits = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF, 0x7F800000, 0xFF800000], np.uint32)
    record = tensor_stats(bits.view(np.float32))[0]
    assert (record["n_nan"], record["n_posinf"], record["n_neginf"]) == (4, 1, 1)


def test_nothing_to_read() -> None:
    assert tensor_stats([]).shape == (0,)
    assert tensor_stats([], names=[]).shape == (0,)


def test_both_zeros_are_counted() -> None:
    record = tensor_stats(np.array([0.0, -0.0, 1.0]))[0]
    assert record["n_zero"] == 2
    assert same(float(record["min"]), 0.0)
