"""Plain-NumPy twin of diff_norm: the oracle, written for clarity alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.twins.stats import norm_twin, to_float64


@dataclass(frozen=True)
class DifferenceTwin:
    norm: float
    previous_norm: float
    ratio: float
    unchanged: float
    n: int
    n_nonfinite: int


def element_bits(array: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of each element in C order, shape [elements, bytes]."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).reshape(flat.size, flat.itemsize)


def difference_twin(tensors: list[Any], previous: list[Any]) -> DifferenceTwin:
    nothing = np.empty(0)
    with np.errstate(all="ignore"):
        differences = [to_float64(a) - to_float64(b) for a, b in zip(tensors, previous, strict=True)]
    difference = np.concatenate([nothing, *differences])
    same = sum(
        int((element_bits(a) == element_bits(b)).all(axis=1).sum())
        for a, b in zip(tensors, previous, strict=True)
    )
    norm, previous_norm = norm_twin([difference], 2), norm_twin(previous, 2)
    if previous_norm == 0:
        ratio = math.nan if norm == 0 or math.isnan(norm) else math.inf
    else:
        ratio = math.nan if math.isinf(norm) and math.isinf(previous_norm) else norm / previous_norm
    return DifferenceTwin(
        norm=norm,
        previous_norm=previous_norm,
        ratio=ratio,
        unchanged=same / difference.size if difference.size else math.nan,
        n=difference.size,
        n_nonfinite=int((~np.isfinite(difference)).sum()),
    )
