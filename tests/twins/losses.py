"""The twin of LossAccumulator: the same sums as fractions, rounded once at the end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any


def nearest(value: Fraction) -> float:
    """The float64 nearest to a fraction, ties to even: Python's integer division rounds so."""
    return value.numerator / value.denominator


class LossTwin:
    def __init__(self) -> None:
        self.sum = Fraction(0)
        self.tokens = 0
        self.means: list[Fraction] = []
        self.pairs = 0
        self.masked = 0
        self.bad: list[float] = []

    def add(self, losses: Iterable[Any], weights: Iterable[Any] | None = None) -> None:
        values = [float(loss) for loss in losses]
        counts = [1] * len(values) if weights is None else [int(weight) for weight in weights]
        total, n, bad = Fraction(0), 0, []
        for loss, weight in zip(values, counts, strict=True):
            if weight == 0:
                self.masked += 1
                continue
            n += weight
            if math.isfinite(loss):
                total += Fraction(loss) * weight
            else:
                bad.append(loss)
        self._close(total, n, bad)

    def add_mean(self, mean: float, n: int) -> None:
        if n > 0:
            finite = math.isfinite(mean)
            self._close(Fraction(mean) * n if finite else Fraction(0), n, [] if finite else [mean])

    def _close(self, total: Fraction, n: int, bad: list[float]) -> None:
        if n == 0:
            return
        self.sum += total
        self.tokens += n
        self.pairs += 1
        self.bad += bad
        if not bad:
            self.means.append(Fraction(nearest(total / n)))

    @property
    def mean(self) -> float | None:
        if self.tokens == 0:
            return None
        return sum(self.bad) if self.bad else nearest(self.sum / self.tokens)

    @property
    def mean_of_means(self) -> float | None:
        if self.tokens == 0:
            return None
        return sum(self.bad) if self.bad else nearest(sum(self.means, Fraction(0)) / self.pairs)
