"""Matrices with planted spectra, and trajectories of drifting ones, for the tests of stable_rank.

Sizes stay small, so that the exact path is switched off and the iteration runs where it would not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests.twins.spectral import covers, spectral_twin
from trainmon.ops import Spectral
from trainmon.ops._extension import _core
from trainmon.ops.spectral import _STOPS

Array = np.ndarray[Any, Any]
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}
SCALES = {"float32": (1.0, 1e28, 1e-28), "bfloat16": (1.0, 1e28, 1e-28), "float64": (1.0, 1e160, 1e-160)}


def iterate(
    matrix: Any,
    carried: Any = None,
    epsilon: float = 1e-6,
    seed: int = 0,
    step: int = 0,
    tolerance: float = 0.01,
) -> tuple[Spectral, Any]:
    """stable_rank of one matrix by iteration, however small it is."""
    found, after = _core.stable_rank([matrix], carried, tolerance, epsilon, seed, step, 0, 1)
    *numbers, passes, stop = found[0]
    return Spectral(*numbers, passes, _STOPS[stop]), after


def _ramp(k: int) -> Array:
    return np.arange(k) / max(k - 1, 1)


def _bulk(k: int) -> Array:
    """From 1 to .1, as dense at its upper edge as the singular values of a random matrix."""
    return 1 - 0.9 * _ramp(k) ** (2 / 3)


# Singular values by their number; some need random places.
SPECTRA: dict[str, Callable[[int, np.random.Generator], Array]] = {
    "flat": lambda k, rng: np.ones(k),
    "near flat": lambda k, rng: 1 + 1e-2 * rng.random(k),
    "bulk": lambda k, rng: _bulk(k),
    "gap .5": lambda k, rng: np.concatenate([[1.0], 0.5 * _bulk(k - 1)]),
    "gap .9": lambda k, rng: np.concatenate([[1.0], 0.9 * _bulk(k - 1)]),
    "gap .999": lambda k, rng: np.concatenate([[1.0], 0.999 * _bulk(k - 1)]),
    "tie": lambda k, rng: np.concatenate([[1.0, 1.0], 0.9 * _bulk(max(k - 2, 0))])[:k],
    "power law": lambda k, rng: 1 / np.arange(1.0, k + 1),
    "decay": lambda k, rng: 0.5 ** np.arange(k),
    "rank 3": lambda k, rng: np.where(np.arange(k) < 3, 1 - 0.2 * np.arange(k), 0.0),
}

# Spectra of the tests of reads only: the campaigns draw from SPECTRA. A trained weight is taken as a leader, values
# that fall from `gap` like a power of their number, and the bulk of a random matrix below them.
READS: dict[str, Callable[[int, np.random.Generator], Array]] = {
    "gap .99": lambda k, rng: np.concatenate([[1.0], 0.99 * _bulk(k - 1)]),
    "trained embedding": lambda k, rng: _trained(k, 0.3, 0.5),
    "trained ffn": lambda k, rng: _trained(k, 0.6, 0.5),
    "trained attention": lambda k, rng: _trained(k, 0.9, 0.3),
}


def _trained(k: int, gap: float, power: float) -> Array:
    return np.concatenate([[1.0], np.maximum(gap * np.arange(1.0, k) ** -power, 0.15 * _bulk(k - 1))])


def orthonormal(m: int, k: int, rng: np.random.Generator) -> Array:
    return np.linalg.qr(rng.standard_normal((m, k)))[0]


def planted(m: int, n: int, spectrum: str, rng: np.random.Generator) -> Array:
    """An m x n float64 matrix with these singular values and random singular vectors."""
    k = min(m, n)
    return (orthonormal(m, k, rng) * (SPECTRA | READS)[spectrum](k, rng)) @ orthonormal(n, k, rng).T


def _warm(kind: str, matrix: Array, rng: np.random.Generator) -> Any:
    """Warm vectors that mislead: exact lower singular vectors, random ones, nothing."""
    m, n = matrix.shape
    if kind == "cold":
        return None
    right = np.linalg.svd(matrix.astype(np.float64))[2]
    if kind == "second":
        pair = right[[min(1, n - 1), min(2, n - 1)]]
    elif kind == "last":
        pair = right[[n - 1, max(n - 2, 0)]]
    elif kind == "random":
        pair = rng.standard_normal((2, n))
    else:
        pair = np.zeros((2, n))
    # A contiguous matrix is read as it lies: vectors are as long as its rows.
    return ((m, np.ascontiguousarray(pair[None], np.float32)),)


WARM = ("cold", "second", "last", "random", "zero")


@dataclass
class Count:
    """What a campaign saw."""

    trajectories: int = 0
    intervals: int = 0
    low_missed: int = 0
    high_missed: int = 0
    passes: int = 0

    def add(self, other: Count) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def trajectory(seed: int, epsilon: float, spectra: tuple[str, ...] = tuple(SPECTRA)) -> Count:
    """A random matrix of random dtype, scale and start, drifting for a few steps; each interval is checked."""
    rng = np.random.default_rng([seed, 7])
    m, n = (int(rng.integers(2, rng.choice([24, 60, 160]))) for _ in range(2))
    dtype = str(rng.choice(list(DTYPES), p=[0.45, 0.45, 0.1]))
    scale = float(rng.choice(SCALES[dtype], p=[0.8, 0.1, 0.1]))
    base = planted(m, n, str(rng.choice(spectra)), rng)
    carried, count = None, Count(trajectories=1)
    for step in range(int(rng.integers(1, 7))):
        matrix = (base * scale).astype(DTYPES[dtype])
        if step == 0:
            carried = _warm(str(rng.choice(WARM)), matrix, rng) if scale == 1.0 else None
        result, carried = iterate(matrix, carried, epsilon, seed, step)
        twin = spectral_twin(matrix)
        assert twin is not None
        count.intervals += 1
        count.passes += result.passes
        if not covers(result, twin):
            count.low_missed += result.low > twin.stable_rank
            count.high_missed += result.high < twin.stable_rank
        base = _drift(base, rng)
    return count


def _drift(base: Array, rng: np.random.Generator) -> Array:
    """A small change, a large one, or a new largest singular value."""
    kind = rng.choice(3, p=[0.6, 0.25, 0.15])
    if kind < 2:
        noise = rng.standard_normal(base.shape)
        return base + (0.002, 0.02)[kind] * np.linalg.norm(base) / np.linalg.norm(noise) * noise
    spike = np.outer(orthonormal(base.shape[0], 1, rng)[:, 0], orthonormal(base.shape[1], 1, rng)[:, 0])
    return base + float(rng.uniform(0.5, 2.0)) * np.linalg.norm(base, 2) * spike


def campaign(seeds: range, epsilon: float, spectra: tuple[str, ...] = tuple(SPECTRA)) -> Count:
    total = Count()
    for seed in seeds:
        total.add(trajectory(seed, epsilon, spectra))
    return total
