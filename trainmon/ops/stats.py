"""Statistics of tensors in one read, their merging over pieces, and the numbers derived from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from trainmon.ops._extension import Tensors, _core, names_tuple

Records: TypeAlias = npt.NDArray[Any]
Reading: TypeAlias = Literal["propagate", "finite"]

STATS_DTYPE: np.dtype[np.void] = _core.STATS_DTYPE

_FLOATS = ("sum", "mean", "norm", "rms", "std", "min", "max", "absmax")
SUMMARY_DTYPE: np.dtype[np.void] = np.dtype(
    [("n", np.int64), ("nonfinite", np.int64), *((name, np.float64) for name in _FLOATS)]
)


def tensor_stats(tensors: Tensors, names: Iterable[str] | str | None = None, threads: int = 1) -> Records:
    """One record of statistics a tensor, from one read.

    Args:
        tensors: one array or an iterable of arrays, any shapes, any mix of dtypes.
        names: one name a tensor, for error messages.
        threads: workers for large inputs; they don't change a bit of the result.

    Returns:
        A structured array of dtype `STATS_DTYPE`, shape [number of tensors]. `n` counts all elements; `sum`,
        `sumsq`, `min`, `max`, `absmax` run over the finite ones, in the unit of the elements (`sumsq`:
        squared); `n_nan n_posinf n_neginf n_zero` count (both zeros are zero); `first_bad` is the C-order
        index of the first non-finite element, -1 if there is none. Without a finite element `sum` and `sumsq`
        are 0 and `min`, `max`, `absmax` are NaN, which stands for "undefined". `sumsq` equals `sumsq_scaled *
        4**scale_exponent`; only that product holds the value when squares of float64 elements leave the range
        of float64. `m2_scaled * 4**scale_exponent` is the sum of squared deviations from the mean.

    Raises:
        ValueError: another number of names than tensors; `threads` below 1.
        TypeError: an element that can't be read; the message names its position and name.

    Formula: docs/numerics.md, "Records".
    """
    return _core.tensor_stats(tensors, names_tuple(names), threads)


def merge_stats(records: Records, offsets: npt.ArrayLike | None = None) -> Records:
    """The record of pieces taken together: of one tensor that was read in parts, or of several tensors.

    Args:
        records: array of dtype `STATS_DTYPE`, any shape; its elements in C order are the pieces.
        offsets: where each piece starts in the whole, in elements, shape [number of records], in any order.
            None: one piece after the other. Only `first_bad` and the order of the additions depend on it.

    Returns:
        One record: an array of dtype `STATS_DTYPE` and shape (). Counts and extremes are exact. Sums have the
        bits that the whole would have given when each piece is 2^k chunks of 65,536 elements that start at a
        multiple of 2^k chunks (single chunks always are; what stands last may be short), and differ by
        rounding otherwise. No records: the record of an empty tensor.

    Raises:
        ValueError: another number of offsets than records; offsets below 0; pieces that overlap.
        TypeError: records of another dtype.

    Formula: docs/numerics.md, "Merging".
    """
    pieces = np.ascontiguousarray(_as_records(records).reshape(-1))
    if pieces.ctypes.data % 8:
        pieces = pieces.copy()
    if offsets is None:
        return _core.merge_stats(pieces, None)
    starts = np.asarray(offsets).reshape(-1)
    if starts.dtype.kind not in "iu" and starts.size:
        raise TypeError(f"offsets must be integers, not {starts.dtype}")
    starts = starts.astype(np.int64)
    if starts.shape != pieces.shape:
        raise ValueError(f"offsets has {starts.size} entries for {pieces.size} records")
    order = np.lexsort((pieces["n"], starts))  # an empty piece comes before the one that starts where it does
    return _core.merge_stats(pieces[order], starts[order])


def finish_stats(records: Records, reading: Reading = "propagate") -> npt.NDArray[Any]:
    """The numbers that people read, derived from records.

    Args:
        records: array of dtype `STATS_DTYPE`, any shape.
        reading: "propagate" treats non-finite elements as torch does: any NaN makes everything NaN; otherwise
            an infinity makes `norm`, `rms` and `absmax` inf, `std` NaN, and `sum`, `mean`, `min`, `max` what
            IEEE 754 arithmetic gives. "finite" leaves them out and counts only the N finite elements.

    Returns:
        A structured array of dtype `SUMMARY_DTYPE` and the shape of `records`: `n` (elements in this reading,
        N), `nonfinite`, `sum`, `mean` = sum/N, `norm` = sqrt(sumsq), `rms` = norm/sqrt(N), `std` =
        sqrt(m2/N) (population, m2 the sum of squared deviations from the mean), `min`, `max`, `absmax`. With
        N = 0 `sum` and `norm` are 0 and the others NaN, which stands for "undefined". N = 1: `std` is 0.

        Where the spread is below 1e-4 of the mean `std` rests on a second read of the chunk (in
        `tensor_stats`), so that at least 7 digits are right down to 1e-11 of the mean.

    Raises:
        ValueError: another reading.
        TypeError: records of another dtype.

    Formula: docs/numerics.md, "Derived numbers".
    """
    if reading not in ("propagate", "finite"):
        raise ValueError(f'reading must be "propagate" or "finite", not {reading!r}')
    records = _as_records(records)
    nan, posinf, neginf = records["n_nan"], records["n_posinf"], records["n_neginf"]
    nonfinite = nan + posinf + neginf
    out = np.empty(records.shape, SUMMARY_DTYPE)
    out["nonfinite"] = nonfinite
    out["n"] = records["n"] - nonfinite
    _derive_finite(records, out)
    if reading == "propagate":
        out["n"] = records["n"]
        _propagate(out, nan, posinf, neginf)
    return out


def _derive_finite(records: Records, out: npt.NDArray[Any]) -> None:
    """Fills `out` from the finite elements; its `n` is set. Scaled sums keep the range of float64."""
    with np.errstate(all="ignore"):
        n = out["n"].astype(np.float64)
        exponent = records["scale_exponent"].astype(np.int32)
        mean_square = records["sumsq_scaled"] / n  # times 4**exponent; NaN for no elements
        mean = records["sum"] / n
        out["sum"] = records["sum"]
        out["mean"] = mean
        out["norm"] = np.ldexp(np.sqrt(records["sumsq_scaled"]), exponent)
        out["rms"] = np.ldexp(np.sqrt(mean_square), exponent)
        out["std"] = np.ldexp(np.sqrt(records["m2_scaled"] / n), exponent)
    for name in ("min", "max", "absmax"):
        out[name] = records[name]


def _propagate(
    out: npt.NDArray[Any],
    nan: npt.NDArray[np.int64],
    posinf: npt.NDArray[np.int64],
    neginf: npt.NDArray[np.int64],
) -> None:
    """Lets the non-finite elements have their way in numbers derived from the finite ones."""
    above, below = posinf > 0, neginf > 0
    infinite = above | below
    signed = np.where(above & below, np.nan, np.where(above, np.inf, -np.inf))
    for name in ("sum", "mean"):
        out[name] = np.where(infinite, signed, out[name])
    for name in ("norm", "rms", "absmax"):
        out[name] = np.where(infinite, np.inf, out[name])
    out["std"] = np.where(infinite, np.nan, out["std"])
    # fmin and fmax: an extreme of no finite elements is NaN and must not win over the infinity.
    out["min"] = np.where(below, -np.inf, np.where(above, np.fmin(out["min"], np.inf), out["min"]))
    out["max"] = np.where(above, np.inf, np.where(below, np.fmax(out["max"], -np.inf), out["max"]))
    for name in _FLOATS:
        out[name] = np.where(nan > 0, np.nan, out[name])


def _as_records(records: Records) -> Records:
    array = np.asarray(records)
    if array.dtype != STATS_DTYPE:
        raise TypeError(f"records must be what tensor_stats returns, not an array of {array.dtype}")
    return array
