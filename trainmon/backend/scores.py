"""Attention logits of some rows with any mask, in NumPy: what ``attention_logits`` of trainmon.ops does not take."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmon.ops import AttentionRows

__all__ = ["allowed_by", "as_float32", "rows_of_products", "rows_of_scores"]

Flags = NDArray[np.bool_]


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
    queries, keys = as_float32(q[..., rows, :]), as_float32(k)
    group = queries.shape[-3] // keys.shape[-3]
    scores = queries @ np.repeat(keys, group, axis=-3).swapaxes(-1, -2)
    return _rows(scores * np.float32(scale), np.broadcast_to(allowed, scores.shape))


def rows_of_scores(scores: Any, rows: NDArray[np.int64]) -> AttentionRows:
    """Rows of scores [..., heads, queries, keys] as softmax takes them, masked ones very low."""
    some = scores[..., rows, :]
    found = as_float32(some)
    return _rows(found, ~(found <= _least(some)))


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
