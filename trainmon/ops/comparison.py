"""How far two lists of tensors are apart: errors, distances in units in the last place, agreement, in one read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainmon.ops._extension import Tensors, _core

Records = npt.NDArray[Any]

ULP_BINS = 65

_PLACE = np.dtype([("tensor", np.int64), ("index", np.int64), ("a", np.float64), ("b", np.float64)])
_SCALED = np.dtype([("value", np.float64), ("exponent", np.int64)])
_COUNTS = (
    "n",
    "n_identical",
    "n_finite",
    "n_zero_sign",
    "n_zero_reference",
    "n_nan_both",
    "n_nan_a",
    "n_nan_b",
    "n_inf_same",
    "n_inf_opposite",
    "n_inf_a",
    "n_inf_b",
)
_NUMBERS = (
    "max_abs",
    "max_rel",
    "mean_abs",
    "rms_error",
    "norm_error",
    "norm_a",
    "norm_b",
    "rms_a",
    "rms_b",
    "cosine",
)
_PLACES = ("first_difference", "max_abs_at", "max_rel_at")
COMPARISON_DTYPE: np.dtype[np.void] = np.dtype(
    [
        *((name, np.int64) for name in _COUNTS),
        ("max_ulp", np.uint64),
        *((name, np.float64) for name in _NUMBERS),
        *((name, _PLACE) for name in _PLACES),
        ("sum_abs", np.float64),
        *((name, _SCALED) for name in ("error_sq", "a_sq", "b_sq", "dot")),
        ("ulp", np.int64, (ULP_BINS,)),
    ]
)
_FIELDS = COMPARISON_DTYPE.fields
assert _FIELDS is not None
_WORDS = COMPARISON_DTYPE.itemsize // 8
_AT = {name: field[1] // 8 for name, field in _FIELDS.items()}  # the word at which a field begins


@dataclass(frozen=True, slots=True)
class Place:
    """An element: the position of its tensor in the list, its index there in C order, its two values."""

    tensor: int
    index: int
    a: float
    b: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far `a` is from `b`, the reference, all tensors taken as one vector.

    A pair is finite if both its elements are; errors, norms and distances run over the finite pairs, the others
    are counted by kind. What is undefined (the mean of nothing) is NaN.

    Attributes:
        n: number of pairs.
        n_identical: pairs whose bits are equal; of two dtypes: whose values and signs of zero are, NaN with NaN.
        n_finite: finite pairs.
        n_zero_sign: pairs of +0 and -0: equal (error and distance 0), but not identical.
        n_zero_reference: finite pairs with b = 0 and another a. They have no relative error.
        n_nan_both, n_nan_a, n_nan_b: pairs with NaN on both sides, in a only, in b only.
        n_inf_same, n_inf_opposite, n_inf_a, n_inf_b: pairs without NaN that hold infinities: the same one, one
            of each sign, one in a beside a finite b, one in b beside a finite a.
        max_abs: largest abs(a - b), in the unit of the elements; the subtraction is in float64.
        max_rel: largest abs(a - b) / abs(b), 0 where a = b = 0.
        max_ulp: largest distance in units in the last place (see `compare`).
        mean_abs, rms_error, norm_error: mean of abs(a - b), root of the mean and of the sum of (a - b)^2.
        norm_a, norm_b, rms_a, rms_b: the same roots of a^2 and b^2.
        cosine: sum(a b) / (norm_a norm_b), exactly 1 for identical lists; NaN if a norm is 0.
        ulp: int64 [65]: `ulp[0]` finite pairs at distance 0, `ulp[k]` at distances from 2^(k-1) to 2^k - 1.
        first_difference: the first pair that is not identical, in list order, then C order; None: there is none.
        max_abs_at, max_rel_at: the first pair that has that error; None: the error is 0 or undefined.
        records: the same numbers for each tensor: array of dtype `COMPARISON_DTYPE`, one record a tensor, with
            the sums that `merge` adds (value * 4^exponent); a place of index -1 stands for None.
    """

    n: int
    n_identical: int
    n_finite: int
    n_zero_sign: int
    n_zero_reference: int
    n_nan_both: int
    n_nan_a: int
    n_nan_b: int
    n_inf_same: int
    n_inf_opposite: int
    n_inf_a: int
    n_inf_b: int
    max_abs: float
    max_rel: float
    max_ulp: int
    mean_abs: float
    rms_error: float
    norm_error: float
    norm_a: float
    norm_b: float
    rms_a: float
    rms_b: float
    cosine: float
    ulp: npt.NDArray[np.int64]
    first_difference: Place | None
    max_abs_at: Place | None
    max_rel_at: Place | None
    records: Records

    @property
    def identical(self) -> bool:
        """Whether there is no difference at all."""
        return self.n_identical == self.n

    @property
    def nonfinite_agree(self) -> bool:
        """Whether NaN meets NaN and each infinity its like, everywhere."""
        return self.n_nan_both + self.n_inf_same == self.n - self.n_finite

    @staticmethod
    def merge(records: Records) -> Comparison:
        """The comparison of all tensors whose records these are, of several calls or ranks for example.

        Args:
            records: array of dtype `COMPARISON_DTYPE`, any shape; its elements in C order are the tensors, and
                `Place.tensor` counts them.

        Counts and maxima are exact. Sums have the bits that one call on the concatenated lists gives.

        Raises:
            TypeError: records of another dtype.
        """
        array = np.asarray(records)
        if array.dtype != COMPARISON_DTYPE:
            raise TypeError(f"records must be those of compare, not an array of {array.dtype}")
        array = np.ascontiguousarray(array.reshape(-1))
        words = array.view(np.int64).reshape(array.size, _WORDS)
        return _comparison(array, _core.merge_comparisons(words)[0])

    def __str__(self) -> str:
        if self.n == 0:
            return "nothing to compare"
        if self.identical:
            return f"identical: all {self.n} elements have equal bits"
        differ = self.n - self.n_identical
        lines = f"{differ} of {self.n} elements differ ({100 * differ / self.n:.3g} %)"
        if self.first_difference is not None:
            lines += f", first {_where(self.first_difference)}"
        if not self.nonfinite_agree:
            unlike = self.n - self.n_finite - self.n_nan_both - self.n_inf_same
            lines += f"; {unlike} with NaN or infinity on one side only"
        lines += f"\nmax error {self.max_abs:.3g}"
        if self.max_abs_at is not None:
            lines += f" {_where(self.max_abs_at)}"
        lines += f", relative {self.max_rel:.3g}, {self.max_ulp} ulp; rms {self.rms_error:.3g}"
        lines += f" of {self.rms_b:.3g}; cosine {self.cosine:.9g}"
        return lines


def compare(a: Tensors, b: Tensors, threads: int = 1) -> Comparison:
    """How far `a` is from `b`: errors, distances, agreement of NaN and infinities, in one read of both.

    Args:
        a: one array or an iterable of arrays, any shapes, any mix of dtypes.
        b: the reference: as many arrays, each of the shape of its partner; dtypes and strides may differ.
        threads: workers for large inputs; they don't change a bit of the result.

    Returns:
        A `Comparison`, with a record a tensor in its `records`. `str()` of it is two lines for people.

        Elements are widened to float64 (64-bit integers beyond 2^53 round), errors are differences there, sums
        run in float64; sums of squares and products keep any range. The distance in units in the last place of
        two elements of one dtype is the number of steps from one to the other through the dtype's values, +0
        and -0 being one; of integers it is their difference, exactly. Of two float dtypes it is taken in the
        coarser one (fewer mantissa bits, then the larger smallest normal number), to which both values are
        rounded, ties to even, as if its exponents went on without end; of an integer and a float, in the float;
        of two integer dtypes it is the difference in float64.

    Raises:
        ValueError: another number of arrays or another shape in `b`; `threads` below 1.
        TypeError: an element that can't be read; messages name the position.

    Formula: docs/kernels/compare.md.
    """
    words = _core.compare(a, b, threads)
    return _comparison(words[:-1].view(COMPARISON_DTYPE)[:, 0], words[-1])


def _comparison(records: Records, total: npt.NDArray[np.int64]) -> Comparison:
    """From the records of tensors and the words of their total."""
    integers: list[int] = total.tolist()
    floats: list[float] = total.view(np.float64).tolist()
    numbers: dict[str, Any] = {name: integers[_AT[name]] for name in _COUNTS}
    numbers |= {name: floats[_AT[name]] for name in _NUMBERS}
    numbers |= {name: _place(integers[_AT[name] :], floats[_AT[name] :]) for name in _PLACES}
    return Comparison(
        **numbers,
        max_ulp=integers[_AT["max_ulp"]] % 2**64,  # unsigned
        ulp=total[_AT["ulp"] :].copy(),
        records=records,
    )


def _place(integers: list[int], floats: list[float]) -> Place | None:
    """From the words of a place and those behind it."""
    return None if integers[1] < 0 else Place(integers[0], integers[1], floats[2], floats[3])


def _where(place: Place) -> str:
    values = " against ".join(
        f"{value:.9g}" if math.isfinite(value) else str(value) for value in (place.a, place.b)
    )
    return f"at [{place.tensor}][{place.index}]: {values}"
