"""Attention masks as intervals: which keys each query row may see, of those keys that any row may see."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]
MaskKind = Literal["causal", "full"]


@dataclass(frozen=True)
class Intervals:
    """A mask as the kernels take it.

    Attributes:
        bounds: first key and end of each row, [masks, rows, 2], counted among the kept keys.
        kept: the keys that may be seen, one mask after the other; None: all of them.
        starts: where each mask's keys begin in `kept`, [masks + 1].
    """

    bounds: Index
    kept: Index | None
    starts: Index | None


def intervals(
    mask: MaskKind,
    batch: tuple[int, ...],
    queries: int,
    keys: int,
    window: int | None,
    q_start: int | None,
    k_start: int,
    q_mask: npt.ArrayLike | None,
    k_mask: npt.ArrayLike | None,
    documents: Any,
    rows: Index | None,
) -> Intervals:
    """The intervals of all masks together; arguments as in `attention_logits`, `batch` the axes before heads."""
    if mask not in ("causal", "full"):
        raise ValueError(f"mask must be 'causal' or 'full', not {mask!r}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 key, not {window}")
    query = np.arange(queries, dtype=np.int64) if rows is None else rows
    # the row's own position, counted in keys of this call
    own = query + ((k_start + keys - queries if q_start is None else q_start) - k_start)
    low, high = np.zeros_like(own), np.full_like(own, keys)
    if mask == "causal":
        high = own + 1
    if window is not None:
        low = own - window + 1
        high = np.minimum(high, own + window)
    bounds = np.stack([low, high], axis=-1).clip(0, keys)[None]

    if documents is not None:
        of_queries, of_keys = _documents(documents, batch, queries, keys)
        bounds = _within(bounds, _runs(of_queries[:, query], of_keys))
    if q_mask is not None:
        real = _real(q_mask, "q_mask", batch, queries)[:, query, None]
        bounds = np.where(real, bounds, 0)
    kept = starts = None
    if k_mask is not None:
        real = _real(k_mask, "k_mask", batch, keys)
        bounds = np.broadcast_to(bounds, (len(real), *bounds.shape[1:]))
        before = np.zeros((len(real), keys + 1), np.int64)  # kept keys before each key
        np.cumsum(real, axis=1, out=before[:, 1:])
        bounds = np.take_along_axis(before, bounds.reshape(len(real), 2 * query.size), axis=1).reshape(
            bounds.shape
        )
        kept = np.ascontiguousarray(np.nonzero(real)[1])
        starts = np.concatenate([[0], np.cumsum(before[:, -1])])
    bounds = np.stack([bounds[..., 0], bounds.max(axis=-1)], axis=-1)  # an end before the start: no key
    return Intervals(np.ascontiguousarray(bounds), kept, starts)


def _real(mask: npt.ArrayLike, name: str, batch: tuple[int, ...], length: int) -> npt.NDArray[np.bool_]:
    """[batches, length] from bools of that shape, or from lengths."""
    array = np.asarray(mask)
    if array.dtype.kind in "iu" and array.shape in ((), batch):
        if bool((array < 0).any()) or bool((array > length).any()):
            raise ValueError(f"{name}: lengths must be from 0 to {length}")
        return np.arange(length) < np.broadcast_to(array, batch).reshape(math.prod(batch), 1)
    if array.dtype.kind == "b" and array.shape == (*batch, length):
        return array.reshape(math.prod(batch), length)
    raise ValueError(
        f"{name} must be bool of shape {[*batch, length]} or integer lengths of shape {list(batch)}, not"
        f" {array.dtype} of shape {list(array.shape)}"
    )


def _documents(documents: Any, batch: tuple[int, ...], queries: int, keys: int) -> tuple[Index, Index]:
    """Ids of queries [batches, queries] and of keys [batches, keys]."""
    both = documents if isinstance(documents, tuple) else (documents, documents)
    if len(both) != 2:
        raise ValueError("documents must be one array of ids, or a pair for queries and keys")
    found = []
    for ids, what, length in zip(both, ("queries", "keys"), (queries, keys), strict=True):
        array = np.asarray(ids)
        if array.dtype.kind not in "iu" or array.shape not in ((length,), (*batch, length)):
            raise ValueError(
                f"documents of {what} must be integers of shape {[length]} or {[*batch, length]}, not"
                f" {array.dtype} of shape {list(array.shape)}"
            )
        masks = 1 if array.ndim == 1 else math.prod(batch)
        found.append(array.reshape(masks, length).astype(np.int64))
    return found[0], found[1]


def _runs(queries: Index, keys: Index) -> Index:
    """For each query the run of keys with its document, [masks, rows, 2]; an empty one for negative ids."""
    masks = len(queries) if len(keys) == 1 else len(keys)
    queries = np.broadcast_to(queries, (masks, queries.shape[1]))
    bounds = np.zeros((*queries.shape, 2), np.int64)
    for number in range(masks):
        ids = keys[number if len(keys) > 1 else 0]
        starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1)) if ids.size else np.zeros(0, np.int64)
        ends = np.append(starts[1:], ids.size)
        real = ids[starts] >= 0
        names, starts, ends = ids[starts][real], starts[real], ends[real]
        order = np.argsort(names)
        names, starts, ends = names[order], starts[order], ends[order]
        if bool((names[1:] == names[:-1]).any()):
            raise ValueError("documents: the keys of one document must stand side by side")
        if names.size == 0:
            continue
        place = np.searchsorted(names, queries[number]).clip(0, names.size - 1)
        found = names[place] == queries[number]
        bounds[number, :, 0] = np.where(found, starts[place], 0)
        bounds[number, :, 1] = np.where(found, ends[place], 0)
    return bounds


def _within(bounds: Index, runs: Index) -> Index:
    """The common part of two lists of intervals."""
    return np.stack(
        [np.maximum(bounds[..., 0], runs[..., 0]), np.minimum(bounds[..., 1], runs[..., 1])], axis=-1
    )
