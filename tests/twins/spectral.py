"""The oracle of stable_rank: NumPy's singular values in float64, scaled so that no square leaves the range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainmon.ops import Spectral


@dataclass(frozen=True)
class SpectralTwin:
    stable_rank: float
    sigma: float


def spectral_twin(matrix: Any) -> SpectralTwin | None:
    """None for zero and non-finite matrices. First axis times the rest; a vector is one row."""
    w = np.asarray(matrix).astype(np.float64)
    largest = float(np.abs(w).max(initial=0.0))
    if largest == 0.0 or not math.isfinite(largest):
        return None
    w = w.reshape(1, -1) if w.ndim < 2 else w.reshape(w.shape[0], -1)
    exponent = math.frexp(largest)[1]
    sigma = np.linalg.svd(np.ldexp(w, -exponent), compute_uv=False)
    return SpectralTwin(
        float(np.sum(np.square(sigma)) / sigma[0] ** 2), math.ldexp(float(sigma[0]), exponent)
    )


def covers(result: Spectral, twin: SpectralTwin, slack: float = 1e-12) -> bool:
    """The interval holds the twin's value; `slack` is the twin's own rounding."""
    return result.low <= twin.stable_rank * (1 + slack) and twin.stable_rank <= result.high * (1 + slack)
