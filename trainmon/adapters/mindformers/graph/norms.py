"""Norms of gradients that the host itself has summed up: squares that a step returns, and files that the graph leaves.

What a step returns are squares of float32, in the optimizer's order, after the loss scale is taken off and before
gradients are reduced over ranks. Those of the pipeline's cell are of placeholders, and are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainmon.backend.mindspore import CompiledSums

__all__ = ["returned_sums", "sums_of_norms"]


def returned_sums(outputs: Any, order: Sequence[int]) -> list[CompiledSums | None] | None:
    """Of each parameter, in the model's order; None where a step returns no squares.

    Args:
        order: for each parameter of the model, its place in the optimizer.
    """
    if not isinstance(outputs, tuple | list) or len(outputs) != 7:
        return None
    values = outputs[5]
    try:
        squares = np.asarray(values.asnumpy() if hasattr(values, "asnumpy") else values, np.float64).reshape(
            -1
        )
    except (TypeError, ValueError):
        return None
    if len(squares) != len(order):
        return None
    return [_sums(float(squares[place])) for place in order]


def sums_of_norms(norms: dict[str, float], names: Sequence[str]) -> list[CompiledSums | None]:
    """Of norms by name."""
    return [_sums(norms[name] ** 2) if name in norms else None for name in names]


def _sums(square: float) -> CompiledSums:
    return CompiledSums(square, int(not math.isfinite(square)))
