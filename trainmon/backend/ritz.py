"""The largest eigenvalue that a block of vectors shows."""

from __future__ import annotations

import math

import numpy as np

from trainmon.backend.base import Floats

__all__ = ["largest_ritz_value"]

_ROUNDING = 1e-5


def largest_ritz_value(gram: Floats, power: Floats) -> float:
    """The largest x'(power)x / x'(gram)x; NaN if it can't be told."""
    width = math.isqrt(len(gram))
    below, above = gram.reshape(width, width), power.reshape(width, width)
    if not (np.isfinite(below).all() and np.isfinite(above).all()):
        return math.nan
    values, vectors = np.linalg.eigh((below + below.T) / 2)
    kept = values > 1e-4 * values[-1]
    if not kept.any():
        return math.nan
    basis = vectors[:, kept] / np.sqrt(values[kept])
    largest: float = np.linalg.eigvalsh(basis.T @ (above + above.T) @ basis / 2)[-1]
    return largest * (1 - _ROUNDING)
