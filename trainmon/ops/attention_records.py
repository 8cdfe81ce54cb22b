"""What attention logits come down to: sums of each head that merge over batches, ranks and shards of heads, and
rows that merge over splits of the keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainmon.ops._doubles import doubles

Float = npt.NDArray[np.float64]
Count = npt.NDArray[np.int64]
Point = Literal["scaled", "masked"]

_COUNTS = ("rows", "norm_rows", "keys", "nonfinite_rows", "empty_rows", "all_rows")
# The fields that add, in the order of `AttentionLogits.sums`.
SUMS = (
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
    "all_rows",
)


def _ratio(numerator: Float, denominator: Float | Count) -> Float:
    """NaN where there is nothing to divide by."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator > 0, numerator / denominator, np.nan)


@dataclass(frozen=True, eq=False)
class AttentionLogits:
    """Logits of attention heads as numbers that merge; every array has the shape [heads].

    z are the scores of a row over the n keys that it may see, m = max z, l = sum of exp(z - m): the softmax
    denominator, from 1 to n. Rows that see no key, or whose scores are all -inf, are empty; rows with a NaN or
    +inf score are nonfinite; all others are counted.

    Attributes:
        max: the largest m, signed; -inf without a row; NaN if a score was NaN, else inf if one was +inf. Merges
            as the maximum (NaN wins); all other fields add.
        sum_l, sum_l2: sums of l and of l^2 over the counted rows.
        rows: number of counted rows.
        sum_m, sum_inv_l: sums of m and of 1 / l.
        sum_norm, norm_rows: sum of (l - 1) / (n - 1) over the counted rows with n >= 2, and their number.
        sum_z, keys: sum of z over the counted rows, and the number of those z.
        nonfinite_rows, empty_rows: rows that were left out.
        all_rows: rows that there are, read or not.
        point: `scaled`: z is the scaled product; `masked`: the input of softmax, with softcap and sink.
    """

    max: Float
    sum_l: Float
    sum_l2: Float
    rows: Count
    sum_m: Float
    sum_inv_l: Float
    sum_norm: Float
    norm_rows: Count
    sum_z: Float
    keys: Count
    nonfinite_rows: Count
    empty_rows: Count
    all_rows: Count
    point: Point

    @property
    def mean_sum(self) -> Float:
        """The mean of l over the counted rows, in [1, mean n]; NaN without one. Unbiased where rows are sampled."""
        return _ratio(self.sum_l, self.rows)

    @property
    def mean_sum_error(self) -> Float:
        """The standard error s / sqrt(rows) of `mean_sum` where rows are sampled, s the deviation of l among
        them; 0 where all rows were read; NaN below 2 rows."""
        with np.errstate(divide="ignore", invalid="ignore"):
            variance = (self.sum_l2 - self.sum_l**2 / self.rows) / (self.rows - 1)
            error = np.sqrt(np.maximum(variance, 0) / self.rows)
        return np.where(self.sampled == 1, 0.0, np.where(self.rows > 1, error, np.nan))

    @property
    def mean_sum_norm(self) -> Float:
        """The mean of (l - 1) / (n - 1) over the counted rows with n >= 2, in [0, 1]; NaN without one."""
        return _ratio(self.sum_norm, self.norm_rows)

    @property
    def row_max_mean(self) -> Float:
        """The mean of m; NaN without a counted row."""
        return _ratio(self.sum_m, self.rows)

    @property
    def attn_prob_max_mean(self) -> Float:
        """The mean of 1 / l, the largest probability of a row; NaN without a counted row."""
        return _ratio(self.sum_inv_l, self.rows)

    @property
    def logit_mean(self) -> Float:
        """The mean of z; NaN without a counted row."""
        return _ratio(self.sum_z, self.keys)

    @property
    def sampled(self) -> Float:
        """The share of the rows that were read, 1 if all were; NaN without rows. Below 1 `max` is a lower bound."""
        return _ratio((self.rows + self.nonfinite_rows + self.empty_rows).astype(np.float64), self.all_rows)

    @property
    def sums(self) -> Float:
        """What adds, as float64 of shape [12, heads], for one SUM all-reduce beside a MAX of `max`.

        Some collectives drop a NaN in MAX: `nonfinite_rows` keeps count of them.
        """
        return np.stack([getattr(self, name) for name in SUMS]).astype(np.float64)

    @classmethod
    def from_sums(cls, max: npt.ArrayLike, sums: npt.ArrayLike, point: Point = "scaled") -> AttentionLogits:
        """The record of reduced `max` and `sums`.

        Raises:
            ValueError: other shapes than [heads] and [12, heads], or another point.
        """
        largest, rest = np.array(max, np.float64), np.array(sums, np.float64)
        if largest.ndim != 1 or rest.shape != (len(SUMS), *largest.shape):
            raise ValueError(
                f"max must be [heads] and sums [{len(SUMS)}, heads], not {list(largest.shape)} and"
                f" {list(rest.shape)}"
            )
        _check_point(point)
        fields: dict[str, Any] = dict(zip(SUMS, rest, strict=True))
        for name in _COUNTS:
            fields[name] = fields[name].astype(np.int64)
        return cls(max=largest, **fields, point=point)

    def merge(self, *others: AttentionLogits) -> AttentionLogits:
        """The record of all of them: of the same heads over micro-batches, data-parallel ranks, pieces of the
        queries (context parallel), or calls with other sampled rows.

        Raises:
            ValueError: other numbers of heads, or another point.
        """
        result, largest = self.sums, self.max
        for other in others:
            if other.point != self.point:
                raise ValueError(f"logits at {other.point!r} don't merge with those at {self.point!r}")
            if other.max.shape != self.max.shape:
                raise ValueError(f"{other.max.size} heads don't merge with {self.max.size}")
            result = result + other.sums
            largest = np.maximum(largest, other.max)  # NaN wins
        return AttentionLogits.from_sums(largest, result, self.point)

    @staticmethod
    def cat(parts: Iterable[AttentionLogits]) -> AttentionLogits:
        """The heads of all parts one after the other: shards of the heads (tensor parallel), in their order.

        Raises:
            ValueError: no parts, or different points.
        """
        parts = tuple(parts)
        if len({part.point for part in parts}) != 1:
            raise ValueError("cat needs at least one part, and all parts at one point")
        return AttentionLogits.from_sums(
            np.concatenate([part.max for part in parts]),
            np.concatenate([part.sums for part in parts], axis=1),
            parts[0].point,
        )


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Single query rows; every array has the shape [..., heads, rows].

    Attributes:
        max: m, -inf for a row without keys, NaN if a score was NaN.
        sum: l, 0 for an empty row, NaN for a nonfinite one.
        keys: n, int64; None where a kernel gave only m and l.
        z: the sum of the row's scores, 0 without keys; None as `keys`.
    """

    max: Float
    sum: Float
    keys: Count | None = None
    z: Float | None = None

    def logits(self, point: Point = "scaled") -> AttentionLogits:
        """The rows as sums of each head: also for (row max, row sum) as fused kernels return them.

        Without `keys`, `mean_sum_norm` and `logit_mean` are NaN.

        Raises:
            ValueError: arrays of different shapes or of less than two axes, or another point.
        """
        m, denominator = np.asarray(self.max, np.float64), np.asarray(self.sum, np.float64)
        keys = np.zeros(m.shape, np.int64) if self.keys is None else np.asarray(self.keys)
        z = np.full(m.shape, np.nan) if self.z is None else np.asarray(self.z, np.float64)
        if m.ndim < 2 or not m.shape == denominator.shape == keys.shape == z.shape:
            raise ValueError(
                f"rows must have one shape [..., heads, rows], not {m.shape} and {denominator.shape}"
            )
        _check_point(point)
        axes = (*range(m.ndim - 2), m.ndim - 1)
        bad = np.isnan(m) | (m == np.inf) | np.isnan(denominator)
        empty = ~bad & (m == -np.inf)
        counted = ~bad & ~empty
        norm = counted & (keys > 1)

        def total(values: npt.NDArray[Any], where: npt.NDArray[np.bool_] = counted) -> npt.NDArray[Any]:
            return np.asarray(values.sum(axis=axes, where=where))

        with np.errstate(divide="ignore", invalid="ignore"):
            share, inverse = (denominator - 1) / (keys - 1), 1 / denominator
        return AttentionLogits(
            max=m.max(axis=axes, initial=-np.inf),
            sum_l=total(denominator),
            sum_l2=total(denominator * denominator),
            rows=np.count_nonzero(counted, axis=axes),
            sum_m=total(m),
            sum_inv_l=total(inverse),
            sum_norm=total(share, norm),
            norm_rows=np.count_nonzero(norm, axis=axes),
            sum_z=total(z),
            keys=total(keys),
            nonfinite_rows=np.count_nonzero(bad, axis=axes),
            empty_rows=np.count_nonzero(empty, axis=axes),
            all_rows=np.full(m.shape[-2], m.size // max(m.shape[-2], 1), np.int64),
            point=point,
        )


def merge_key_splits(parts: Iterable[AttentionRows]) -> AttentionRows:
    """The same rows over all keys, from their rows over disjoint pieces of the keys.

    m = max of the pieces' m, l = sum of l * exp(m_piece - m) with exp(-inf) = 0; n and z add. A piece without a
    key for a row changes nothing. A row that is not finite in one piece is not finite.

    Raises:
        TypeError: a part is something else.
        ValueError: no parts, or rows of different shapes.
    """
    parts = tuple(parts)
    for position, part in enumerate(parts):
        if not isinstance(part, AttentionRows):
            raise TypeError(f"parts[{position}] must be an AttentionRows, not {type(part).__name__}")
    shapes = {np.shape(part.max) for part in parts}
    if len(shapes) != 1:
        raise ValueError(f"the parts must be of the same rows, not of shapes {sorted(shapes)}")
    maxima, sums = np.empty((2, len(parts), *shapes.pop()))
    for part, m, denominator in zip(parts, maxima, sums, strict=True):
        m[...], denominator[...] = part.max, part.sum
    largest = maxima.max(axis=0)  # NaN wins
    with np.errstate(invalid="ignore"):
        weight = np.exp(maxima - largest)
    weight[maxima == -np.inf] = 0
    total = np.where(weight == 0, 0, sums * weight).sum(axis=0)
    bad = np.isnan(largest) | (largest == np.inf) | np.isnan(sums).any(axis=0)
    return AttentionRows(
        max=largest,
        sum=np.where(bad, np.nan, total),
        keys=_sum_of([part.keys for part in parts]),
        z=_sum_of([part.z for part in parts]),
    )


def _sum_of(arrays: Sequence[npt.NDArray[Any] | None]) -> Any:
    known = [array for array in arrays if array is not None]
    return sum(known[1:], known[0]) if len(known) == len(arrays) else None


@dataclass(frozen=True, eq=False)
class QKClip:
    """Factors of QK-clip.

    Attributes:
        gamma: min(1, tau / S) of each head, in (0, 1]; 1 for S <= 0 and for heads without a row; NaN where S is
            NaN or infinite.
        alarm: True where gamma is NaN: nothing to scale by, something to look at.
        share: the share of the heads with gamma < 1 among those that have one; NaN without heads.
    """

    gamma: Float
    alarm: npt.NDArray[np.bool_]
    share: float


def qk_clip(max: npt.ArrayLike | AttentionLogits, tau: float = 100.0) -> QKClip:
    """QK-clip factors min(1, tau / S_h) from the largest logits S_h of heads.

    Args:
        max: S_h, of any shape; or an `AttentionLogits` at point `scaled`, over the global batch.
        tau: the largest logit that is let be, positive.

    Raises:
        ValueError: `tau` is not positive and finite, or logits are at point `masked`.

    Source: Kimi K2 (arXiv 2507.20534); docs/kernels/attention.md says what a host does with the factors.
    """
    if not (tau > 0 and np.isfinite(tau)):
        raise ValueError(f"tau must be positive and finite, not {tau!r}")
    if isinstance(max, AttentionLogits):
        if max.point != "scaled":
            raise ValueError("QK-clip takes logits at point 'scaled', before softcap and sink")
        max = max.max
    largest = doubles(max, "max")
    alarm = np.isnan(largest) | (largest == np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        gamma = np.where(largest > tau, tau / largest, 1.0)
    gamma = np.where(alarm, np.nan, gamma)
    known = int(np.count_nonzero(~alarm))
    share = float(np.count_nonzero(gamma < 1) / known) if known else float("nan")
    return QKClip(gamma, alarm, share)


def _check_point(point: str) -> None:
    if point not in ("scaled", "masked"):
        raise ValueError(f"point must be 'scaled' or 'masked', not {point!r}")


assert {field.name for field in dataclasses.fields(AttentionLogits)} == {"max", "point", *SUMS}
