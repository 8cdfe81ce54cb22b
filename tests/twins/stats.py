"""Plain-NumPy twins of tensor_stats, multi_norm and scan_nonfinite: the oracle, written for clarity alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

EPSILON = 2.0**-53


def to_float64(array: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """All elements in C order, as float64 (int64 beyond 2^53 is rounded, as in the kernels)."""
    with np.errstate(all="ignore"):
        return np.asarray(array).ravel(order="C").astype(np.float64)


@dataclass(frozen=True)
class StatsTwin:
    n: int
    sum: float
    sum_bound: float  # how far the sum of another order of additions may lie from this one
    norm: float  # root of the sum of squares of the finite elements, in the range of float64
    min: float
    max: float
    absmax: float
    n_nan: int
    n_posinf: int
    n_neginf: int
    n_zero: int
    first_bad: int


def stats_twin(array: Any) -> StatsTwin:
    x = to_float64(array)
    finite = x[np.isfinite(x)]
    bad = np.flatnonzero(~np.isfinite(x))
    some = finite.size > 0
    with np.errstate(all="ignore"):
        total, magnitude = float(np.sum(finite)), float(np.sum(np.abs(finite)))
    return StatsTwin(
        n=x.size,
        sum=total,
        sum_bound=2 * x.size * EPSILON * magnitude,
        norm=norm2(finite),
        min=float(finite.min()) if some else math.nan,
        max=float(finite.max()) if some else math.nan,
        absmax=float(np.abs(finite).max()) if some else math.nan,
        n_nan=int(np.isnan(x).sum()),
        n_posinf=int((x == np.inf).sum()),
        n_neginf=int((x == -np.inf).sum()),
        n_zero=int((x == 0).sum()),
        first_bad=int(bad[0]) if bad.size else -1,
    )


def norm2(finite: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Scaled by the largest magnitude's power of two, so that no square leaves the range."""
    largest = float(np.abs(finite).max(initial=0.0))
    if largest == 0.0:
        return 0.0
    exponent = math.frexp(largest)[1]
    with np.errstate(under="ignore", over="ignore"):
        return float(np.ldexp(np.sqrt(np.sum(np.square(np.ldexp(finite, -exponent)))), exponent))


def norm_twin(arrays: list[Any], ord: float) -> float:
    """All arrays as one vector; NaN wins over infinity."""
    x = np.concatenate([np.empty(0), *(to_float64(array) for array in arrays)])
    if np.isnan(x).any():
        return math.nan
    if np.isinf(x).any():
        return math.inf
    if ord == 2:
        return norm2(x)
    if ord == 1:
        with np.errstate(over="ignore"):
            return float(np.sum(np.abs(x)))
    return float(np.abs(x).max(initial=0.0))


def scan_twin(arrays: list[Any]) -> tuple[int, int, str] | None:
    """(position, index, kind) of the first non-finite element."""
    for position, array in enumerate(arrays):
        x = to_float64(array)
        bad = np.flatnonzero(~np.isfinite(x))
        if bad.size:
            value = x[bad[0]]
            return position, int(bad[0]), "nan" if np.isnan(value) else "+inf" if value > 0 else "-inf"
    return None
