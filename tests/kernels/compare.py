"""A kernel's result held against its twin: counts and extremes exactly, sums within their error bound."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.twins.stats import EPSILON, stats_twin

EXACT = ("n", "n_nan", "n_posinf", "n_neginf", "n_zero", "first_bad")
EXTREMES = ("min", "max", "absmax")


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def close(value: float, expected: float, n: int) -> bool:
    """Equal up to the rounding of n additions of numbers of one sign, and of one root."""
    return same(value, expected) or abs(value - expected) <= 2 * (n + 4) * EPSILON * abs(expected) + 5e-324


def assert_record(record: Any, array: Any) -> None:
    twin = stats_twin(array)
    for name in EXACT:
        assert int(record[name]) == getattr(twin, name), name
    for name in EXTREMES:
        assert same(float(record[name]), getattr(twin, name)), name
    if math.isfinite(twin.sum_bound):  # else the magnitudes overflow, and any order may too
        assert abs(float(record["sum"]) - twin.sum) <= twin.sum_bound + 5e-324
    scaled, exponent = float(record["sumsq_scaled"]), int(record["scale_exponent"])
    with np.errstate(all="ignore"):
        assert close(float(np.ldexp(np.sqrt(scaled), exponent)), twin.norm, twin.n)
        plain = float(np.ldexp(np.ldexp(np.float64(scaled), exponent), exponent))
    assert same(float(record["sumsq"]), plain)
