"""Plain-NumPy twin of sign_agreement: the oracle, written for clarity alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.twins.stats import to_float64


def signs_twin(a: list[Any], b: list[Any]) -> tuple[int, int, int]:
    """Same, opposite, all."""
    same = opposite = n = 0
    for x, y in zip(a, b, strict=True):
        with np.errstate(all="ignore"):
            product = np.nan_to_num(np.sign(to_float64(x))) * np.nan_to_num(np.sign(to_float64(y)))
        same += int((product > 0).sum())
        opposite += int((product < 0).sum())
        n += product.size
    return same, opposite, n
