"""Plain-NumPy twin of compare: the oracle, written for clarity alone."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from tests.twins.differences import element_bits
from tests.twins.stats import to_float64

Array = np.ndarray[Any, Any]

FLOAT_KINDS = ("float", "bfloat")


def is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.name.startswith(FLOAT_KINDS)


def grid_of(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Mantissa bits and exponent of the smallest normal number."""
    info = ml_dtypes.finfo(dtype)
    return int(info.nmant), round(math.log2(float(info.smallest_normal)))


def coarser(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    if not is_float(a) or not is_float(b):
        return a if is_float(a) else b
    return min(a, b, key=lambda dtype: (grid_of(dtype)[0], -grid_of(dtype)[1]))


def grid_code(value: float, mantissa: int, exponent: int) -> int:
    """How many steps of the format lie between 0 and this value, rounded to it; exponents have no end."""
    if value == 0:
        return 0
    power = max(math.frexp(value)[1] - 1, exponent)
    steps = Fraction(abs(value)) * Fraction(2) ** (mantissa - power)
    code = round((power - exponent) * 2**mantissa + steps)  # ties to even
    return -code if value < 0 else code


def order(element: Any, dtype: np.dtype[Any]) -> int:
    """The place of a value among those of its own dtype."""
    if dtype.kind in "iub" and not is_float(dtype):
        return int(element)
    code = int.from_bytes(np.array(element, dtype).tobytes(), "little")
    if dtype.name == "float8_e8m0fnu":
        return code
    sign = 1 << (8 * dtype.itemsize - 1)
    return -(code - sign) if code & sign else code


def distances(a: Array, b: Array) -> list[int]:
    """Of finite elements, in units in the last place."""
    if a.dtype == b.dtype:
        return [abs(order(x, a.dtype) - order(y, b.dtype)) for x, y in zip(a, b, strict=True)]
    dtype = coarser(a.dtype, b.dtype)
    x, y = to_float64(a).tolist(), to_float64(b).tolist()
    if not is_float(dtype):
        return [min(int(abs(p - q)), 2**64 - 1) for p, q in zip(x, y, strict=True)]
    grid = grid_of(dtype)
    return [abs(grid_code(p, *grid) - grid_code(q, *grid)) for p, q in zip(x, y, strict=True)]


def _place(error: Array, finite: Array, a: Array, b: Array) -> tuple[int, float, float] | None:
    if not (error > 0).any():
        return None
    at = int(np.flatnonzero(finite)[int(np.argmax(error))])
    return at, float(to_float64(a)[at]), float(to_float64(b)[at])


def comparison_twin(a: Any, b: Any) -> dict[str, Any]:
    """The exact numbers of one pair of arrays under the names of the record, and its finite elements."""
    a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    x, y = to_float64(a), to_float64(b)
    finite = np.isfinite(x) & np.isfinite(y)
    if a.dtype == b.dtype:
        identical = (element_bits(a) == element_bits(b)).all(axis=1)
    else:
        identical = ((x == y) & (np.signbit(x) == np.signbit(y))) | (np.isnan(x) & np.isnan(y))
    nan_x, nan_y, inf_x, inf_y = np.isnan(x), np.isnan(y), np.isinf(x), np.isinf(y)
    p, q = x[finite], y[finite]
    with np.errstate(all="ignore"):
        error = np.abs(p - q)
        relative = np.where(q == 0, 0.0, error / np.abs(q))
    steps = distances(a[finite], b[finite])
    ulp = [0] * 65
    for step in steps:
        ulp[step.bit_length()] += 1
    no_reference = (q == 0) & (p != 0)
    n, count = x.size, int(finite.sum())
    different = np.flatnonzero(~identical)
    return {
        "n": n,
        "n_identical": int(identical.sum()),
        "n_finite": count,
        "n_zero_sign": int(((p == 0) & (q == 0) & (np.signbit(p) != np.signbit(q))).sum()),
        "n_zero_reference": int(no_reference.sum()),
        "n_nan_both": int((nan_x & nan_y).sum()),
        "n_nan_a": int((nan_x & ~nan_y).sum()),
        "n_nan_b": int((nan_y & ~nan_x).sum()),
        "n_inf_same": int((inf_x & inf_y & (x == y)).sum()),
        "n_inf_opposite": int((inf_x & inf_y & (x != y)).sum()),
        "n_inf_a": int((inf_x & np.isfinite(y)).sum()),
        "n_inf_b": int((inf_y & np.isfinite(x)).sum()),
        "max_abs": float(error.max()) if count else math.nan,
        "max_rel": float(relative[~no_reference].max()) if (~no_reference).any() else math.nan,
        "max_ulp": max(steps, default=0),
        "ulp": ulp,
        "first_difference": (int(different[0]), float(x[different[0]]), float(y[different[0]]))
        if different.size
        else None,
        "max_abs_at": _place(error, finite, a, b),
        "max_rel_at": _place(relative, finite, a, b),
        "finite_a": p,
        "finite_b": q,
    }
