"""What the ranks' own values of one number say: who has the least and the most, how far apart, who stands out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["RankSpread", "compare_ranks"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RankSpread:
    """One number on all ranks.

    Attributes:
        low, high: the least and the largest finite value; NaN if there is none.
        low_rank, high_rank: the lowest rank that has it; -1 if there is none.
        median: of the finite values.
        spread: high - low.
        known: how many ranks know the number at all.
        outliers: ranks whose robust z = 0.6745 (x - median) / max(MAD, 1e-6 |median|, 1e-12) is beyond the bound, the
            farthest first; none among fewer than three values, of which nobody can say who is right.
        nonfinite: ranks whose value is NaN or infinite.
    """

    low: float
    low_rank: int
    high: float
    high_rank: int
    median: float
    spread: float
    known: int
    outliers: tuple[int, ...]
    nonfinite: tuple[int, ...]


def compare_ranks(values: Floats, valid: NDArray[np.bool_], bound: float = 6.0) -> list[RankSpread | None]:
    """Compares the ranks number by number.

    Args:
        values, valid: shape ``[ranks, numbers]``.
        bound: robust z beyond which a rank is an outlier (Iglewicz and Hoaglin's score).

    Returns:
        One a number; None where no rank knows it.
    """
    return [
        _spread(np.flatnonzero(known), column[known], bound) if known.any() else None
        for column, known in zip(values.T, valid.T, strict=True)
    ]


def _spread(ranks: NDArray[np.int64], values: Floats, bound: float) -> RankSpread:
    finite = np.isfinite(values)
    nonfinite = tuple(ranks[~finite].tolist())
    ranks, values, known = ranks[finite], values[finite], len(values)
    if not len(values):
        return RankSpread(np.nan, -1, np.nan, -1, np.nan, np.nan, known, (), nonfinite)
    low, high = int(values.argmin()), int(values.argmax())
    median = float(np.median(values))
    outliers: tuple[int, ...] = ()
    if len(values) >= 3:
        away = np.abs(values - median)
        z = 0.6745 * away / max(float(np.median(away)), 1e-6 * abs(median), 1e-12)
        order = np.argsort(-z, kind="stable")
        outliers = tuple(ranks[order[z[order] > bound]].tolist())
    least, most = float(values[low]), float(values[high])
    return RankSpread(
        least, int(ranks[low]), most, int(ranks[high]), median, most - least, known, outliers, nonfinite
    )
