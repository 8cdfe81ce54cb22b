"""What a table of per-tensor values comes to in a few numbers."""

from __future__ import annotations

import math

import numpy as np

from trainmon.frame import Table

__all__ = ["QUANTILES", "ordered", "quantiles"]

#: Shares of the values by the label that shows them.
QUANTILES = {"p50": 0.5, "p95": 0.95, "max": 1.0}


def ordered(table: Table) -> list[int]:
    """Positions of the known values from the smallest to the largest; NaN counts as the largest."""
    known = np.flatnonzero(table.valid)
    # NumPy sorts NaN behind +inf.
    order: list[int] = known[np.argsort(table.values[known], kind="stable")].tolist()
    return order


def quantiles(order: list[int]) -> dict[str, int]:
    """The position of each quantile by nearest rank, so that one NaN does not hide the rest; nothing of nothing."""
    count = len(order)
    return {label: order[math.ceil(share * count) - 1] for label, share in QUANTILES.items()} if order else {}
