"""finish_stats: the numbers derived from records, in both readings."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

import numpy as np
import pytest

from tests.awkward import FLOATS, arrays
from tests.kernels.compare import same
from trainmon.ops import SUMMARY_DTYPE, finish_stats, merge_stats, tensor_stats

NAN, INF = math.nan, math.inf


def finish(values: list[float], reading: Literal["propagate", "finite"]) -> Any:
    return finish_stats(tensor_stats(np.array(values, np.float64)), reading)[0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_reading_is_numpy_on_the_finite_elements(dtype: str) -> None:
    for array in arrays(dtype, "contiguous"):
        x = np.asarray(array).astype(np.float64)
        x = x[np.isfinite(x)]
        row = finish_stats(tensor_stats(array), "finite")[0]
        assert row["n"] == x.size
        if x.size == 0 or np.abs(x).max() > 1e150:
            continue  # NumPy's own std overflows there; scaled sums have tests of their own
        assert row["mean"] == pytest.approx(x.mean(), rel=1e-12, abs=1e-12 * np.abs(x).max())
        assert row["rms"] == pytest.approx(math.sqrt(np.mean(x**2)), rel=1e-12)
        assert row["std"] == pytest.approx(x.std(), rel=1e-7)


@pytest.mark.parametrize("bad", [[NAN], [INF], [-INF], [INF, -INF], [INF, NAN], []])
def test_propagating_reading_is_ieee(bad: list[float]) -> None:
    x = np.array([1.0, -2.0, *bad])
    row = finish_stats(tensor_stats(x))[0]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        expected = {
            "sum": x.sum(), "mean": x.mean(), "norm": math.sqrt(float(np.sum(x * x))), "std": x.std(),
            "min": x.min(), "max": x.max(), "absmax": np.abs(x).max(),
        }  # fmt: skip
    assert row["n"] == x.size
    assert row["nonfinite"] == len(bad)
    for name, value in expected.items():
        assert same(float(row[name]), float(value)) or row[name] == pytest.approx(value, rel=1e-14), name


def test_only_infinities() -> None:
    row = finish([INF, INF], "propagate")
    assert (row["min"], row["max"], row["sum"], row["norm"]) == (INF, INF, INF, INF)
    row = finish([-INF], "propagate")
    assert (row["min"], row["max"], row["sum"], row["norm"]) == (-INF, -INF, -INF, INF)


@pytest.mark.parametrize("reading", ["propagate", "finite"])
def test_empty_has_norm_zero_and_nothing_else(reading: Literal["propagate", "finite"]) -> None:
    row = finish([], reading)
    assert (row["n"], row["norm"], row["sum"]) == (0, 0, 0)
    assert all(math.isnan(row[name]) for name in ("mean", "rms", "std", "min", "max", "absmax"))
    row = finish([NAN], "finite")
    assert (row["n"], row["nonfinite"], row["norm"]) == (0, 1, 0)
    assert math.isnan(row["rms"])


def test_one_element_has_no_spread() -> None:
    row = finish([0.1], "finite")
    assert (row["mean"], row["min"], row["max"], row["std"]) == (0.1, 0.1, 0.1, 0)


def test_scaled_sums_keep_their_range() -> None:
    row = finish([3e200, -4e200], "propagate")
    assert row["norm"] == pytest.approx(5e200, rel=1e-15)
    assert row["std"] == pytest.approx(3.5e200, rel=1e-15)
    row = finish([3e-200, -4e-200], "propagate")
    assert row["norm"] == pytest.approx(5e-200, rel=1e-15)
    assert row["std"] == pytest.approx(3.5e-200, rel=1e-15)


def test_shape_and_dtype_follow_the_records() -> None:
    records = tensor_stats([np.ones(2)] * 6).reshape(2, 3)
    assert finish_stats(records).shape == (2, 3)
    assert finish_stats(records).dtype == SUMMARY_DTYPE
    assert finish_stats(records[0, 0]).shape == ()


def test_no_floating_point_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for values in ([], [NAN, INF], [1e300, 1e300]):
            finish(values, "propagate")


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match='"propagate" or "finite", not \'both\''):
        finish_stats(tensor_stats(np.ones(1)), "both")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="what tensor_stats returns"):
        finish_stats(np.ones(1))


@pytest.mark.parametrize("mean", [1e3, 1e6, -1e9, 3e10])
def test_std_of_a_small_spread_around_a_large_mean(mean: float) -> None:
    spread = np.random.default_rng(0).integers(-8, 9, 3 * 65536 + 17) / 8  # exact beside every mean
    expected = float(np.std(spread))
    row = finish_stats(tensor_stats(mean + spread))[0]
    assert row["std"] == pytest.approx(expected, rel=1e-7)
    pieces = tensor_stats(np.array_split(mean + spread, 7))
    assert finish_stats(merge_stats(pieces))["std"] == pytest.approx(expected, rel=1e-7)


def test_std_of_a_constant_is_zero_and_of_two_constants_is_half_their_distance() -> None:
    row = finish_stats(tensor_stats(np.full(200_000, 0.1)))[0]
    assert row["std"] == 0
    assert finish_stats(tensor_stats(np.full(1000, 0.1, np.float32)))[0]["std"] == 0
    row = finish_stats(tensor_stats(np.repeat([5e8, 5e8 + 1], 65536)))[0]
    assert row["std"] == pytest.approx(0.5, rel=1e-12)


def test_std_leaves_out_what_is_not_finite() -> None:
    x = np.array([1e8, 1e8 + 1, np.nan, 1e8 + 2, np.inf, -np.inf])
    row = finish_stats(tensor_stats(x), "finite")[0]
    assert row["std"] == pytest.approx(math.sqrt(2 / 3), rel=1e-9)
