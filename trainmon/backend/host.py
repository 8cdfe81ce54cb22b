"""The host backend: the C kernels on memory that the host can address. Results are there at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainmon.backend.base import Floats, Lazy
from trainmon.backend.scores import allowed_by, as_float32, rows_of_products, rows_of_scores
from trainmon.events import AdamStep
from trainmon.ops import (
    AttentionLogits,
    AttentionRows,
    LossAccumulator,
    assign_churn,
    attention_logits,
    diff_norm,
    expert_load,
    fingerprint,
    multi_norm,
    sign_agreement,
    stable_rank,
    tensor_stats,
    underflow_shares,
)
from trainmon.ops.attention import sampled_places
from trainmon.ops.attention_mask import MaskKind

__all__ = ["HostBackend"]

#: Elements of a block of NumPy arithmetic.
_BLOCK = 16_384


class HostBackend:
    """Reads each tensor once, in C."""

    name = "host"
    deferred = False

    def __init__(self) -> None:
        self.reads = 0

    def summaries(self, tensors: Sequence[Any]) -> Lazy:
        stats = tensor_stats(tensors)
        table = np.zeros((len(stats), 6))
        table[:, 0], table[:, 1], table[:, 5] = stats["sumsq"], stats["absmax"], np.nan
        bad = np.flatnonzero(stats["first_bad"] >= 0)
        if len(bad):
            those = stats[bad]
            table[bad, 0], table[bad, 1] = _propagating(those, "sumsq"), _propagating(those, "absmax")
            for column, field in enumerate(("n_nan", "n_posinf", "n_neginf", "first_bad"), start=2):
                table[bad, column] = those[field]
        return _known(table)

    def statistics(self, tensors: Sequence[Any]) -> Lazy:
        from trainmon.backend.statistics import propagating

        records = tensor_stats(tensors)
        return Lazy((), lambda: propagating(records))

    def squares(self, tensors: Sequence[Any], negatives: bool = False) -> Lazy:
        table = np.full((len(tensors), 2), np.nan)
        if negatives:
            stats = tensor_stats(tensors)
            table[:, 0] = _propagating(stats, "sumsq")
            lowest = zip(tensors, stats["min"].tolist(), strict=True)
            table[:, 1] = [float((tensor < 0).sum()) if low < 0 else 0.0 for tensor, low in lowest]
        else:
            table[:, 0] = np.square(multi_norm(tensors, per_tensor=True)[1])
        return _known(table)

    def square_sum(self, tensors: Sequence[Any]) -> Lazy:
        norm = float(multi_norm(tensors))
        return _known(np.array([norm * norm]))

    def bucket_sums(self, losses: Any, weights: Any, buckets: Any, count: int) -> Lazy:
        sums = LossAccumulator(buckets=count)
        sums.add(losses, weights, buckets)
        pairs = [(one.mean, one.tokens) for one in map(sums.bucket, range(count))]
        return _known(
            np.array([(0.0 if mean is None else mean * n, n) for mean, n in pairs]).reshape(count, 2)
        )

    def flushed(self, tensors: Sequence[Any], formats: Sequence[str]) -> Lazy:
        losses = underflow_shares(tensors, to=formats)
        table = [(losses[name].n_underflow, losses[name].nonzero) for name in formats]
        return _known(np.array(table, np.float64).reshape(-1, 2))

    def signs(self, tensors: Sequence[Any], others: Sequence[Any]) -> Lazy:
        found = sign_agreement(tensors, others)
        return _known(np.array([found.same, found.opposite, found.n], np.float64))

    def fingerprints(self, tensors: Sequence[Any]) -> Lazy:
        return _known(prints(tensors))

    def keep(self, tensors: Sequence[Any], into: Sequence[Any | None] = ()) -> list[Any]:
        copies = into if into else [None] * len(tensors)
        return [_copy(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True)]

    def differences(self, tensors: Sequence[Any], copies: Sequence[Any], update: bool = False) -> Lazy:
        each = diff_norm(tensors, copies, update=update, per_tensor=True).each
        if each is None:
            raise RuntimeError("diff_norm gave no numbers of single tensors")
        unchanged = np.where(each.n > 0, np.round(each.unchanged * each.n), 0.0)
        return _known(np.stack([each.norm**2, each.previous_norm**2, unchanged, each.n], axis=1))

    def adam_squares(self, steps: Sequence[AdamStep], weights: Sequence[Any]) -> Lazy:
        return _known(np.array([_adam_square(*one) for one in zip(steps, weights, strict=True)]))

    def spectra(
        self,
        matrices: Sequence[Any],
        states: Sequence[Any | None],
        seeds: Sequence[int],
        tolerance: float,
        epsilon: float,
    ) -> tuple[Lazy, list[Any]]:
        table = np.zeros((len(matrices), 3))
        after = []
        for row, matrix in enumerate(matrices):
            (found,), state = stable_rank([matrix], states[row], tolerance, epsilon, seeds[row])
            after.append(state)
            if found.stopped_by == "nonfinite":
                table[row] = np.nan
            elif found.stopped_by != "zero":
                table[row] = found.norm**2, found.sigma**2, found.norm**2 / found.low
        return _known(table), after

    def scalar(self, value: Any) -> Lazy:
        return _known(np.array([float(value)]))

    def bincount(self, indices: Any, count: int) -> Lazy:
        counts, invalid = expert_load(indices, count)
        return _known(np.append(counts, invalid).astype(np.float64))

    def common(self, before: Any, after: Any, count: int) -> Lazy:
        total = math.prod(after.shape)
        kept = 0 if total == 0 else round((1 - assign_churn(before, after, count)) * total)
        return _known(np.array([kept, total], np.float64))

    def vector(self, value: Any) -> Lazy:
        array = as_float32(value) if hasattr(value, "__dlpack__") else np.asarray(value)
        return _known(array.reshape(-1).astype(np.float64))

    def attention(
        self,
        q: Any,
        k: Any,
        *,
        scale: float,
        causal: bool,
        q_start: int,
        mask: Any,
        sample_rows: int | None,
        seed: int,
    ) -> Lazy:
        if mask is None:
            kind: MaskKind = "causal" if causal else "full"
            return _logits(
                attention_logits(q, k, scale, kind, q_start=q_start, sample_rows=sample_rows, seed=seed)
            )
        queries, keys = q.shape[-2], k.shape[-2]
        rows = sampled_places(queries, sample_rows or queries, seed)
        allowed = allowed_by(mask, rows)
        if causal:
            allowed = allowed & (np.arange(keys) <= rows[:, None] + q_start)
        return _logits(rows_of_products(q, k, scale, rows, allowed).logits(), q.shape)

    def attention_scores(self, scores: Any, *, sample_rows: int | None, seed: int) -> Lazy:
        rows = sampled_places(scores.shape[-2], sample_rows or scores.shape[-2], seed)
        return _logits(rows_of_scores(scores, rows).logits("masked"), scores.shape)

    def attention_rows(self, row_max: Any, row_sum: Any) -> Lazy:
        m, total = (as_float32(x).astype(np.float64) for x in (row_max, row_sum))
        rows = AttentionRows(max=m, sum=total)
        return _logits(rows.logits())

    def read(self, lazies: Sequence[Lazy]) -> HostRead:
        return HostRead([lazy.finish() for lazy in lazies])


class HostRead:
    """Values that never were anywhere else."""

    def __init__(self, values: list[Floats]) -> None:
        self._values = values

    def wait(self) -> list[Floats]:
        return self._values


def prints(tensors: Sequence[Any]) -> Floats:
    """The halves of the 64-bit fingerprints of host tensors, shape ``[len(tensors), 2]``."""
    values = [one.value for one in fingerprint(tensors, bits=64)]
    return np.array([(value >> 32, value & 0xFFFFFFFF) for value in values], np.float64).reshape(-1, 2)


def _copy(tensor: Any, into: Any | None) -> Any:
    """Of an array, or of a tensor that has torch's methods."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach()
    if into is None or into.shape != tensor.shape or into.dtype != tensor.dtype:
        return tensor.clone() if hasattr(tensor, "clone") else np.array(tensor)
    if hasattr(into, "copy_"):
        into.copy_(tensor)
    else:
        np.copyto(into, tensor)
    return into


def _adam_square(step: AdamStep, weight: Any) -> float:
    """Block by block in float64: NumPy's temporaries stay in the cache."""
    arrays = [_flat(tensor) for tensor in (step.mean, step.square, weight)]
    updates, (one, two) = float(step.step), step.betas
    correct_mean, correct_square = 1 - one**updates, 1 - two**updates
    total = 0.0
    with np.errstate(all="ignore"):
        for start in range(0, math.prod(arrays[0].shape), _BLOCK):
            m, v, w = (_wide(array[start : start + _BLOCK]) for array in arrays)
            move = (m / correct_mean) / (np.sqrt(v / correct_square) + step.eps) + step.decay * w
            total += float(np.dot(move, move))
    return total * float(step.lr) ** 2


def _flat(tensor: Any) -> Any:
    """In one dimension, in its own dtype."""
    return tensor.detach().reshape(-1) if hasattr(tensor, "detach") else np.ravel(tensor)


def _wide(block: Any) -> Floats:
    """Some elements as float64; bfloat16, which NumPy doesn't have, through the tensor's own conversion."""
    wide: Floats = block.double().numpy() if hasattr(block, "double") else block.astype(np.float64)
    return wide


def _propagating(stats: Any, field: str) -> Floats:
    """A column of records of finite elements, as torch would have it: NaN and infinities win."""
    infinite = stats["n_posinf"] + stats["n_neginf"] > 0
    values = np.where(infinite, np.inf, stats[field])
    return np.where(stats["n_nan"] > 0, np.nan, values)


def _known(values: Floats) -> Lazy:
    return Lazy((), lambda: values)


def _logits(logits: AttentionLogits, shape: Sequence[int] | None = None) -> Lazy:
    """``shape`` [..., heads, rows, x]: all rows, of which some were read."""
    columns = np.concatenate([logits.max[None], logits.sums])
    if shape is not None:
        columns[-1] = math.prod(shape[:-3]) * shape[-2]
    return _known(columns)
