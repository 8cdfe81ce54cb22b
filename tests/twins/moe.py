"""Plain-NumPy and plain-Python twins of the mixture-of-experts functions: the oracle, written for clarity alone."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


def load_twin(arrays: list[Any], experts: int) -> tuple[list[int], int]:
    """Counts per expert, and ids outside the range, by Python's integers."""
    seen = Counter(int(id) for array in arrays for id in np.asarray(array).ravel().tolist())
    counts = [seen[expert] for expert in range(experts)]
    return counts, sum(seen.values()) - sum(counts)


def assign_churn_twin(before: Any, after: Any, experts: int) -> float:
    """Rows are multisets; ids outside the range match nothing."""
    before, after = np.asarray(before), np.asarray(after)
    k = before.shape[-1]
    rows = list(zip(before.reshape(-1, k).tolist(), after.reshape(-1, k).tolist(), strict=True))
    if not rows:
        return math.nan
    common = 0
    for old, new in rows:
        both = Counter(old) & Counter(new)
        common += sum(count for expert, count in both.items() if 0 <= expert < experts)
    return 1 - common / (k * len(rows))


def max_vio(counts: Floats) -> float:
    return float(counts.max() / counts.mean() - 1)


def shape_twin(counts: Floats) -> dict[str, float]:
    """The metrics that depend on one step's counts of one layer alone."""
    n, total = counts.size, float(counts.sum())
    p = counts / total
    positive = p[p > 0]
    entropy = -float(np.sum(positive * np.log(positive)))
    ranks = np.arange(1, n + 1)
    return {
        "max_vio": max_vio(counts),
        "min_vio": float(1 - counts.min() / counts.mean()),
        "load_entropy": entropy,
        "load_entropy_norm": entropy / math.log(n) if n > 1 else 1.0,
        "experts_effective": math.exp(entropy),
        "load_cv": float(counts.std() / counts.mean()),
        "load_jain": total**2 / (n * float(np.sum(counts**2))),
        "load_gini": 2 * float(np.sum(ranks * np.sort(counts))) / (n * total) - (n + 1) / n,
    }


def drop_twin(counts: Floats, factor: float) -> dict[str, float]:
    n, total = counts.size, float(counts.sum())
    capacity = math.ceil(factor * total / n)
    return {
        "drop_forecast": float(np.sum(np.maximum(0, counts - capacity))) / total,
        "drop_forecast_mf": float(np.sum(np.maximum(0, counts / total - factor / n))),
    }


def group_drop_twin(groups: Floats, factor: float) -> float:
    """groups: [groups, E], a capacity each; NaN without assignments."""
    total = float(groups.sum())
    over = sum(
        drop_twin(counts, factor)["drop_forecast"] * counts.sum() for counts in groups if counts.sum() > 0
    )
    return float(over) / total if total > 0 else math.nan


def rank_loads(counts: Floats, holders: list[list[int]], ranks: int) -> Floats:
    """holders: the ranks that have expert i; they share its load."""
    loads = np.zeros(ranks)
    for count, ranks_of_expert in zip(counts, holders, strict=True):
        for rank in ranks_of_expert:
            loads[rank] += count / len(ranks_of_expert)
    return loads


class LayerTwin:
    """What one layer remembers, as lists."""

    def __init__(self, experts: int, window: int, hold: int) -> None:
        self.steps: deque[Floats] = deque(maxlen=window)
        self.total = np.zeros(experts)
        self.last: Floats | None = None
        self.window, self.hold = window, hold
        self.dead, self.hot, self.cold = [0] * experts, [0] * experts, [0] * experts

    def step(self, counts: Floats) -> dict[str, float] | None:
        """None: nothing was assigned, and the step leaves no trace."""
        if counts.sum() == 0:
            return None
        self.steps.append(counts)
        self.total = self.total + counts
        mean = counts.mean()
        for i, count in enumerate(counts):
            self.dead[i] = self.dead[i] + 1 if count <= 1e-3 * mean else 0
            self.hot[i] = self.hot[i] + 1 if count > 2 * mean else 0
            self.cold[i] = self.cold[i] + 1 if count < mean / 4 else 0
        share = counts / counts.sum()
        churn = math.nan if self.last is None else 0.5 * float(np.sum(np.abs(share - self.last)))
        self.last = share
        return {
            "max_vio_window": max_vio(np.sum(self.steps, axis=0)),
            "max_vio_global": max_vio(self.total),
            "dead": sum(age >= self.window for age in self.dead),
            "hot": sum(age >= self.hold for age in self.hot),
            "cold": sum(age >= self.hold for age in self.cold),
            "churn": churn,
        }
