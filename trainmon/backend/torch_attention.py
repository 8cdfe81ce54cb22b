"""Attention logits of sampled rows on the tensors' own device, with any mask: no S x S memory, no read."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

__all__ = ["product_sums", "rows_given", "score_sums"]

#: Scores that are in memory at a time: 16 MiB, and what becomes of them.
_SCORES = 1 << 22


def _mask_allows(mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Which keys a row may see: bool masks say so (True: may), added ones by anything that is not hopelessly low."""
    if mask.shape[-2] != 1:
        mask = mask.index_select(-2, rows)
    return mask if mask.dtype == torch.bool else mask > _least(mask)


def product_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    rows: torch.Tensor,
    causal: bool,
    q_start: int,
    mask: torch.Tensor | None,
    wide: torch.dtype,
) -> torch.Tensor:
    """The columns of an attention record, ``[13, Hq]``, of scale * q . k for q [..., Hq, Sq, D], k [..., Hk, Sk, D]."""
    heads, queries = q.shape[-3], q.shape[-2]
    key_heads, keys = k.shape[-3], k.shape[-2]
    allowed = torch.ones((1, 1, len(rows), keys), dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed & (torch.arange(keys, device=q.device) <= rows[:, None] + q_start)
    if mask is not None:
        allowed = allowed & _mask_allows(mask.to(q.device), rows)
    lead = math.prod(q.shape[:-3])
    allowed = allowed.expand(*q.shape[:-3], heads, len(rows), keys) if mask is not None else allowed
    queries_read = q.index_select(-2, rows).reshape(
        lead, key_heads, heads // key_heads, len(rows), q.shape[-1]
    )
    keys_read = k.reshape(lead, key_heads, 1, keys, k.shape[-1])
    allowed = allowed.reshape(-1, allowed.shape[-3], len(rows), keys)
    total: torch.Tensor | None = None
    for some, places in _portions(lead, len(rows), heads * keys):
        scores = queries_read[some][..., places, :].float() @ keys_read[some].float().mT
        scores = scores.mul_(scale).reshape(-1, heads, scores.shape[-2], keys)
        seen = (allowed[some] if allowed.shape[0] > 1 else allowed)[..., places, :]
        sums = _row_sums(scores, seen, wide)
        total = sums if total is None else _merge(total, sums)
    if total is None:
        total = torch.zeros((13, heads), dtype=wide, device=q.device)
        total[0] = -math.inf
    total[-1] = lead * queries
    return total


def score_sums(scores: torch.Tensor, rows: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """As :func:`product_sums`, of scores [..., heads, queries, keys] as softmax takes them."""
    total: torch.Tensor | None = None
    flat = scores.reshape(-1, *scores.shape[-3:])
    for some, places in _portions(len(flat), len(rows), scores.shape[-3] * scores.shape[-1]):
        part = flat[some].index_select(-2, rows[places])
        sums = _row_sums(part.float(), part > _least(part), wide, unless_nan=part.isnan())
        total = sums if total is None else _merge(total, sums)
    if total is None:
        total = torch.zeros((13, scores.shape[-3]), dtype=wide, device=scores.device)
        total[0] = -math.inf
    total[-1] = math.prod(scores.shape[:-3]) * scores.shape[-2]
    return total


def _portions(lead: int, rows: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Some of the leading places at a time, or of one some rows, so that scores of ``width`` a row fit."""
    fit = max(1, _SCORES // max(1, width))
    together, at_once = max(1, fit // max(1, rows)), min(max(1, rows), fit)
    for start in range(0, lead, together):
        for row in range(0, rows, at_once):
            yield slice(start, start + together), slice(row, row + at_once)


def _row_sums(
    scores: torch.Tensor, allowed: torch.Tensor, wide: torch.dtype, unless_nan: torch.Tensor | None = None
) -> torch.Tensor:
    """``[13, heads]`` of float32 scores [n, heads, rows, keys], which are overwritten; all rows are read."""
    if unless_nan is not None:
        allowed = allowed | unless_nan  # a NaN compares as masked, and must be seen
    n = allowed.expand_as(scores).sum(-1)
    hidden = ~allowed
    z = scores.masked_fill(hidden, 0.0).sum(-1, dtype=wide)
    masked = scores.masked_fill_(hidden, -math.inf)
    m = masked.amax(-1)
    exponentials = masked.sub_(m.masked_fill(m == -math.inf, 0.0)[..., None]).exp_()
    return _columns(m.to(wide), exponentials.sum(-1, dtype=wide), n, z)


def rows_given(row_max: torch.Tensor, row_sum: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """``[13, heads]`` of (row max, row sum) [..., heads, rows] as fused kernels return them; keys are unknown."""
    m, denominator = (x.reshape(-1, *x.shape[-2:]).to(wide) for x in (row_max, row_sum))
    nothing = torch.zeros_like(m)
    return _columns(m, denominator, nothing, torch.full_like(m, math.nan))


def _columns(m: torch.Tensor, l: torch.Tensor, n: torch.Tensor, z: torch.Tensor) -> torch.Tensor:  # noqa: E741
    """From rows [n, heads, rows]: their maximum, largest-shifted sum, number of keys and sum of scores."""
    bad = m.isnan() | (m == math.inf) | l.isnan()
    empty = ~bad & (m == -math.inf)
    counted = ~bad & ~empty
    norm = counted & (n > 1)

    def total(values: torch.Tensor, where: torch.Tensor = counted) -> torch.Tensor:
        return torch.where(where, values.to(m.dtype), 0.0).sum((0, 2))

    def count(where: torch.Tensor) -> torch.Tensor:
        return where.sum((0, 2)).to(m.dtype)

    everything = torch.full((m.shape[1],), m.shape[0] * m.shape[2], dtype=m.dtype, device=m.device)
    largest = m.amax((0, 2)) if m.numel() else torch.full_like(everything, -math.inf)
    return torch.stack(
        [
            largest,
            total(l),
            total(l * l),
            count(counted),
            total(m),
            total(1 / l),
            total((l - 1) / (n - 1), norm),
            count(norm),
            total(z),
            total(n),
            count(bad),
            count(empty),
            everything,
        ]
    )


def _merge(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.maximum(one[:1], other[:1]), one[1:] + other[1:]])


def _least(tensor: torch.Tensor) -> float:
    """Half the most negative number of the dtype: hosts mask with it, or with -inf."""
    return torch.finfo(tensor.dtype).min / 2
