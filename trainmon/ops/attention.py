"""Attention logits on the host: maxima and softmax denominators of QK^T, tile by tile, without S x S memory."""

from __future__ import annotations

import math
import random
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from trainmon.ops._extension import Array, _core
from trainmon.ops.attention_mask import Index, MaskKind, intervals
from trainmon.ops.attention_records import AttentionLogits, AttentionRows, Count, Float, Point

# Columns of the extension's sums: the fields of tm_attention_sums (csrc/core/tm_attention.h).
_COLUMNS = (
    "max",
    "sum_l",
    "sum_l2",
    "rows",
    "sum_m",
    "sum_inv_l",
    "sum_norm",
    "norm_rows",
    "sum_z",
    "keys",
    "nonfinite_rows",
    "empty_rows",
)
_INTEGERS = ("rows", "norm_rows", "keys", "nonfinite_rows", "empty_rows")


@overload
def attention_logits(
    q: Array,
    k: Array,
    scale: float | None = ...,
    mask: MaskKind = ...,
    *,
    window: int | None = ...,
    q_start: int | None = ...,
    k_start: int = ...,
    q_mask: npt.ArrayLike | None = ...,
    k_mask: npt.ArrayLike | None = ...,
    documents: Any = ...,
    point: Point = ...,
    softcap: float | None = ...,
    sinks: npt.ArrayLike | None = ...,
    sample_rows: int | None = ...,
    sample_heads: int | None = ...,
    seed: int = ...,
    per_row: Literal[False] = ...,
    threads: int = ...,
) -> AttentionLogits: ...
@overload
def attention_logits(
    q: Array,
    k: Array,
    scale: float | None = ...,
    mask: MaskKind = ...,
    *,
    window: int | None = ...,
    q_start: int | None = ...,
    k_start: int = ...,
    q_mask: npt.ArrayLike | None = ...,
    k_mask: npt.ArrayLike | None = ...,
    documents: Any = ...,
    point: Point = ...,
    softcap: float | None = ...,
    sinks: npt.ArrayLike | None = ...,
    sample_rows: int | None = ...,
    sample_heads: int | None = ...,
    seed: int = ...,
    per_row: Literal[True],
    threads: int = ...,
) -> tuple[AttentionLogits, AttentionRows]: ...


def attention_logits(
    q: Array,
    k: Array,
    scale: float | None = None,
    mask: MaskKind = "causal",
    *,
    window: int | None = None,
    q_start: int | None = None,
    k_start: int = 0,
    q_mask: npt.ArrayLike | None = None,
    k_mask: npt.ArrayLike | None = None,
    documents: Any = None,
    point: Point = "scaled",
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,
    sample_rows: int | None = None,
    sample_heads: int | None = None,
    seed: int = 0,
    per_row: bool = False,
    threads: int = 1,
) -> AttentionLogits | tuple[AttentionLogits, AttentionRows]:
    """Row maxima and softmax denominators of z = scale * q . k, summed up for each query head.

    Products go through OpenBLAS in float32, one tile of scores at a time; tiles that no row may see are skipped.
    Masks combine: a row sees the keys that all of them allow.

    Args:
        q: queries [..., Hq, Sq, D] of any float dtype and strides: with sequence before heads, pass
            `q.swapaxes(-2, -3)`. float64 is rounded to float32.
        k: keys [..., Hk, Sk, D], the axes before the heads as in q; Hq is a multiple of Hk, and query head h
            reads key head h // (Hq / Hk) (grouped and multi-query attention).
        scale: None is 1 / sqrt(D).
        mask: `causal`: key positions up to the row's own; `full`: all.
        window: the row's own position and `window` - 1 before it (with `full`, as many behind it) at most.
        q_start, k_start: positions of the first query and key, for pieces of a sequence (context parallel,
            key-value caches); by default the last query is at the last key's position.
        q_mask: which query rows are real: bool [..., Sq], or integer lengths [...]. Other rows count as empty.
        k_mask: which keys are real: bool [..., Sk], or integer lengths [...].
        documents: integer ids [S] or [..., S] of packed documents, or a pair of them for queries and keys; a row
            sees the keys with its id. The keys of one document stand side by side. Negative: padding.
        point: `scaled`; or `masked`, the input of softmax, which `softcap` and `sinks` need.
        softcap: z becomes softcap * tanh(z / softcap).
        sinks: learned sinks [Hq]: one more score of every row that sees a key; it counts as a key.
        sample_rows: how many rows of each head to read, evenly spaced from an offset that `seed` draws; all
            heads read the same. `max` is then a lower bound, `mean_sum` is unbiased over calls with different
            seeds (as far as all rows count), with the standard error `mean_sum_error`; `sampled` tells the share.
        sample_heads: how many heads to read, chosen alike; the others have no rows, so that calls with other
            seeds merge.
        seed: of the offsets; pass the step.
        per_row: also return m, l, n and the sum of z of each row read, for `merge_key_splits`.
        threads: worker threads at most; results don't depend on it.

    Returns:
        `AttentionLogits`, arrays of shape [Hq]; with `per_row` a pair with `AttentionRows`, arrays of shape
        [..., Hq, rows read].

    Raises:
        TypeError: q or k can't be read or aren't floats.
        ValueError: shapes that don't fit, or an argument out of its range; the message names it.

    Definitions, edge cases and accuracy: docs/kernels/attention.md.
    """
    if point not in ("scaled", "masked"):
        raise ValueError(f"point must be 'scaled' or 'masked', not {point!r}")
    if point == "scaled" and (softcap is not None or sinks is not None):
        raise ValueError("softcap and sinks belong to point='masked'; point='scaled' is before them")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap must be positive and finite, not {softcap!r}")
    batch, heads, queries, keys, depth = _shapes(q, k)
    rows = None if sample_rows is None else sampled_places(queries, sample_rows, seed, "sample_rows")
    read = None
    if sample_heads is not None:
        read = np.zeros(heads, np.bool_)
        read[sampled_places(heads, sample_heads, seed, "sample_heads")] = True
    where = intervals(mask, batch, queries, keys, window, q_start, k_start, q_mask, k_mask, documents, rows)
    if sinks is not None:
        sinks = np.ascontiguousarray(sinks, np.float64)
        if sinks.shape != (heads,):
            raise ValueError(f"sinks must have the shape {[heads]}, not {list(sinks.shape)}")
    sums, each = _core.attention_logits(
        q,
        k,
        where.bounds,
        where.kept,
        where.starts,
        rows,
        read,
        _scale(scale, depth),
        0.0 if softcap is None else softcap,
        sinks,
        True,
        per_row,
        threads,
    )
    fields: dict[str, Any] = dict(zip(_COLUMNS, sums.T.copy(), strict=True))
    for name in _INTEGERS:
        fields[name] = fields[name].astype(np.int64)
    all_rows = np.full(heads, math.prod(batch) * queries, np.int64)
    logits = AttentionLogits(**fields, all_rows=all_rows, point=point)
    if each is None:
        return logits
    m, denominator, z, n = each
    shape = (*batch, *m.shape[1:])
    return logits, AttentionRows(
        max=m.reshape(shape), sum=denominator.reshape(shape), keys=n.reshape(shape), z=z.reshape(shape)
    )


def attention_logit_mean(
    q: Array,
    k: Array,
    scale: float | None = None,
    mask: MaskKind = "causal",
    *,
    window: int | None = None,
    q_start: int | None = None,
    k_start: int = 0,
    q_mask: npt.ArrayLike | None = None,
    k_mask: npt.ArrayLike | None = None,
    documents: Any = None,
    threads: int = 1,
) -> tuple[Float, Count]:
    """Sum and number of all scaled scores of each query head, in O(S * D): scale * q . (sum of the keys it sees).

    No score is computed, so that a monitor can have the mean logit of all rows beside `attention_logits` of a
    few. Sums are float64.

    Args:
        q, k, scale, mask, window, q_start, k_start, q_mask, k_mask, documents, threads: as in
            `attention_logits`.

    Returns:
        (sum_z, keys), float64 and int64 of shape [Hq]: sum_z / keys is `logit_mean`, and both add over batches,
        ranks and splits of the keys. Rows that are not finite, or see a key that isn't, are left out.

    Raises:
        TypeError, ValueError: as `attention_logits`.
    """
    batch, _, queries, keys, depth = _shapes(q, k)
    where = intervals(mask, batch, queries, keys, window, q_start, k_start, q_mask, k_mask, documents, None)
    sums, _ = _core.attention_logits(
        q,
        k,
        where.bounds,
        where.kept,
        where.starts,
        None,
        None,
        _scale(scale, depth),
        0.0,
        None,
        False,
        False,
        threads,
    )
    sum_z: Float = sums[:, _COLUMNS.index("sum_z")].copy()
    return sum_z, np.asarray(sums[:, _COLUMNS.index("keys")], np.int64)


def _shapes(q: Array, k: Array) -> tuple[tuple[int, ...], int, int, int, int]:
    """Axes before the heads, query heads, queries, keys, depth."""
    found = []
    for array, name in ((q, "q"), (k, "k")):
        shape = getattr(array, "shape", None)
        if shape is None:
            raise TypeError(f"{name} must be one array with a shape, not {type(array).__name__}")
        if len(shape) < 3:
            raise ValueError(f"{name} must be [..., heads, sequence, depth], not of shape {list(shape)}")
        found.append(tuple(int(length) for length in shape))
    queries, keys = found
    if queries[:-3] != keys[:-3] or queries[-1] != keys[-1]:
        raise ValueError(
            f"q {list(queries)} and k {list(keys)} must agree in the axes before the heads and in the last one"
        )
    if keys[-3] == 0 or queries[-3] % keys[-3]:
        raise ValueError(f"{queries[-3]} heads of q can't share {keys[-3]} heads of k")
    if queries[-1] == 0:
        raise ValueError("q and k must have a last axis of length 1 or more")
    return queries[:-3], queries[-3], queries[-2], keys[-2], queries[-1]


def _scale(scale: float | None, depth: int) -> float:
    if scale is None:
        return 1 / math.sqrt(depth)
    if not (math.isfinite(scale) and float(np.float32(scale)) != 0):
        raise ValueError(f"scale must be finite and not 0, not {scale!r}")
    return float(scale)


def sampled_places(count: int, wanted: int, seed: int, name: str = "wanted") -> Index:
    """`wanted` of `count` numbers, evenly spaced from a random offset: each is as likely as any other."""
    if wanted < 1:
        raise ValueError(f"{name} must be at least 1, not {wanted}")
    if wanted >= count:
        return np.arange(count, dtype=np.int64)
    offset = random.Random(seed).random()
    places: Index = np.floor((np.arange(wanted) + offset) * (count / wanted)).astype(np.int64)
    places[-1] = min(places[-1], count - 1)  # rounding
    return places
