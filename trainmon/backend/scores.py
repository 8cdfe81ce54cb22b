"""Attention logits of some rows with any mask, in NumPy: what ``attention_logits`` of trainmon.ops does not take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmon.ops import AttentionRows

__all__ = ["allowed_by", "as_float32", "rows_of_products", "rows_of_scores"]

Flags = NDArray[np.bool_]
Floats = NDArray[np.float32]

#: Scores that are in memory at a time: 4 MiB, and what becomes of them.
_SCORES = 1 << 20


def as_float32(tensor: Any) -> NDArray[np.float32]:
    """A host tensor of any float dtype; bfloat16, which NumPy doesn't have, through the tensor's own conversion."""
    if hasattr(tensor, "float"):
        tensor = tensor.float()
    return np.asarray(np.from_dlpack(tensor) if hasattr(tensor, "__dlpack__") else tensor, np.float32)


def allowed_by(mask: Any, rows: NDArray[np.int64]) -> Flags:
    """Which keys a row may see, of a mask [..., queries, keys] that is bool (True: may) or added to the scores (so low
    that nothing is left: may not)."""
    if mask.shape[-2] != 1:
        mask = mask[..., rows, :]
    if "bool" in str(mask.dtype):
        return np.asarray(mask, np.bool_)
    return np.asarray(as_float32(mask) > _least(mask), np.bool_)


def rows_of_products(q: Any, k: Any, scale: float, rows: NDArray[np.int64], allowed: Flags) -> AttentionRows:
    """Rows of scale * q . k for q [..., Hq, Sq, D] and k [..., Hk, Sk, D]."""
    *lead, heads, _, depth = q.shape
    key_heads, keys = k.shape[-3:-1]
    seen = np.broadcast_to(allowed, (*lead, heads, len(rows), keys))

    def part(index: tuple[int, ...], some: slice) -> tuple[Floats, Flags]:
        # One product for all heads that share their keys, which are not repeated.
        queries = as_float32(q[index][:, rows[some], :]).reshape(key_heads, -1, depth)
        scores = queries @ as_float32(k[index]).swapaxes(-1, -2)
        return scores.reshape(heads, -1, keys) * np.float32(scale), seen[index][:, some]

    return _in_parts(tuple(lead), heads, len(rows), keys, part)


def rows_of_scores(scores: Any, rows: NDArray[np.int64]) -> AttentionRows:
    """Rows of scores [..., heads, queries, keys] as softmax takes them, masked ones very low."""
    *lead, heads, _, keys = scores.shape

    def part(index: tuple[int, ...], some: slice) -> tuple[Floats, Flags]:
        found = as_float32(scores[index][:, rows[some], :])
        return found, ~(found <= _least(scores))

    return _in_parts(tuple(lead), heads, len(rows), keys, part)


def _in_parts(
    lead: tuple[int, ...],
    heads: int,
    rows: int,
    keys: int,
    part: Callable[[tuple[int, ...], slice], tuple[Floats, Flags]],
) -> AttentionRows:
    """Rows [..., heads, rows], from parts of few enough scores.

    Args:
        part: scores [heads, some rows, keys] of one leading index, and which of them a row may see.
    """
    found = [np.zeros((math.prod(lead), heads, rows)) for _ in range(4)]
    at_once = max(1, _SCORES // max(1, heads * keys))
    for place, index in enumerate(np.ndindex(lead)):
        for start in range(0, rows, at_once):
            some = slice(start, start + at_once)
            one = _rows(*part(index, some))
            for whole, piece in zip(found, (one.max, one.sum, one.keys, one.z), strict=True):
                whole[place, :, some] = piece
    m, total, counts, z = (one.reshape(*lead, heads, rows) for one in found)
    return AttentionRows(max=m, sum=total, keys=counts.astype(np.int64), z=z)


def _least(tensor: Any) -> float:
    """Half the most negative number of the dtype: hosts mask with it, or with -inf."""
    return -32_752.0 if "float16" in str(tensor.dtype).replace("bfloat16", "") else -1.7e38


def _rows(scores: NDArray[np.float32], allowed: Flags) -> AttentionRows:
    keys = np.count_nonzero(allowed, axis=-1)
    with np.errstate(invalid="ignore", over="ignore"):
        m = scores.max(axis=-1, where=allowed, initial=-np.inf)
        shifted = np.where(allowed, np.exp(scores - m[..., None], dtype=np.float64), 0.0)
        denominator = shifted.sum(axis=-1)
        z = scores.sum(axis=-1, where=allowed, dtype=np.float64)
    denominator = np.where(m == -np.inf, 0.0, np.where(np.isfinite(m), denominator, np.nan))
    return AttentionRows(max=m.astype(np.float64), sum=denominator, keys=keys, z=z)
