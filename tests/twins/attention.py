"""The twin of attention_logits: all scores at once in float64, masks as comparisons of positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass
class Rows:
    """m, the denominator l, n and the sum of z, [batches, heads, rows]; `slack` bounds a float32 score's error."""

    m: Array
    d: Array
    n: Array
    z: Array
    slack: float


def allowed(
    batches: int,
    queries: int,
    keys: int,
    mask: str = "causal",
    window: int | None = None,
    q_start: int | None = None,
    k_start: int = 0,
    q_mask: Array | None = None,
    k_mask: Array | None = None,
    documents: tuple[Array, Array] | None = None,
) -> Array:
    """[batches, queries, keys]: may this row see this key?"""
    if q_start is None:
        q_start = k_start + keys - queries
    i = q_start + np.arange(queries)[:, None]
    j = k_start + np.arange(keys)[None, :]
    seen = np.ones((batches, queries, keys), bool)
    if mask == "causal":
        seen &= j <= i
    if window is not None:
        seen &= np.abs(i - j) < window
    if q_mask is not None:
        seen &= q_mask.reshape(batches, queries, 1)
    if k_mask is not None:
        seen &= k_mask.reshape(batches, 1, keys)
    if documents is not None:
        mine = np.broadcast_to(documents[0], (batches, queries))[:, :, None]
        its = np.broadcast_to(documents[1], (batches, keys))[:, None, :]
        seen &= (mine == its) & (mine >= 0)
    return seen


def rows_twin(
    q: Array, k: Array, scale: float, seen: Array, softcap: float | None = None, sinks: Array | None = None
) -> Rows:
    """q [batches, heads, rows, depth], k [batches, key heads, keys, depth] of any float dtype."""
    wide_q = q.astype(np.float64)
    wide_k = np.repeat(k.astype(np.float64), q.shape[1] // k.shape[1], axis=1)
    with np.errstate(all="ignore"):
        z = scale * (wide_q @ wide_k.swapaxes(-1, -2))
        sizes = np.nan_to_num(np.abs(wide_q), posinf=0) @ np.nan_to_num(np.abs(wide_k), posinf=0).swapaxes(
            -1, -2
        )
        if softcap is not None:
            z = softcap * np.tanh(z / softcap)
    seen = np.broadcast_to(seen[:, None], z.shape)
    slack = (q.shape[-1] + 4) * 2.0**-24 * abs(scale) * float(sizes.max(initial=0)) + 1e-37
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*z.shape[:3], 1))
        z = np.concatenate([z, column], axis=-1)
        seen = np.concatenate([seen, seen.any(axis=-1, keepdims=True)], axis=-1)
        slack += 2.0**-24 * float(np.abs(sinks[np.isfinite(sinks)]).max(initial=0))
    n = seen.sum(axis=-1)
    with np.errstate(all="ignore"):
        m = np.max(z, axis=-1, initial=-np.inf, where=seen)  # NaN wins
        d = np.where(seen, np.exp(z - m[..., None]), 0).sum(axis=-1)
        total = np.where(seen, z, 0).sum(axis=-1)
    bad = np.isnan(m) | (m == np.inf)
    empty = m == -np.inf
    d[bad], total[bad] = np.nan, np.nan
    d[empty], total[empty] = 0, np.where(n[empty] > 0, -np.inf, 0)
    return Rows(m, d, n, total, slack)


def sums_twin(rows: Rows) -> dict[str, Array]:
    """The record of each head."""
    bad = np.isnan(rows.m) | (rows.m == np.inf)
    empty = rows.m == -np.inf
    counted = ~bad & ~empty
    axes = (0, 2)
    norm = counted & (rows.n > 1)

    def total(values: Array, where: Array = counted) -> Array:
        return np.where(where, values, 0).sum(axis=axes)

    with np.errstate(all="ignore"):
        return {
            "max": rows.m.max(axis=axes, initial=-np.inf),
            "sum_l": total(rows.d),
            "sum_l2": total(rows.d**2),
            "rows": counted.sum(axis=axes),
            "sum_m": total(rows.m),
            "sum_inv_l": total(1 / rows.d),
            "sum_norm": total((rows.d - 1) / (rows.n - 1), norm),
            "norm_rows": norm.sum(axis=axes),
            "sum_z": total(rows.z),
            "keys": total(rows.n),
            "nonfinite_rows": bad.sum(axis=axes),
            "empty_rows": empty.sum(axis=axes),
            "all_rows": np.full(rows.m.shape[1], bad[:, :1].size),
        }
