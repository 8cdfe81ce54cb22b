"""Which exponents the elements of tensors have, and what a cast to a narrower format would lose."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
import numpy.typing as npt

from trainmon.ops._extension import Tensors, _core

Counts = npt.NDArray[np.int64]

_BINS = 256
_WIDTH = _BINS + 4


@dataclass(frozen=True, slots=True, eq=False)
class ExponentHistogram:
    """Elements counted by the exponent of their magnitude, on float32's axis for all dtypes.

    Attributes:
        counts: int64 of shape [256]. Bin b counts the finite elements other than zero with floor(log2 |x|) + 127
            = b: 2**(b - 127) <= |x| < 2**(b - 126). Smaller ones are in bin 0, larger ones in bin 255.
        zero: zeros of both signs.
        subnormal: elements that are subnormal in their own dtype; they are in `counts` too. Integers have none.
        inf: infinities of both signs.
        nan: NaNs.
    """

    counts: Counts
    zero: int
    subnormal: int
    inf: int
    nan: int

    @property
    def nonzero(self) -> int:
        """Number of finite elements other than zero."""
        return int(self.counts.sum())

    @property
    def finite(self) -> int:
        """Number of finite elements."""
        return self.nonzero + self.zero

    @property
    def n(self) -> int:
        """Number of elements."""
        return self.finite + self.inf + self.nan

    @property
    def state(self) -> Counts:
        """All counts in one new int64 array of shape [260]: `counts`, then zero, subnormal, inf, nan.

        States add, element by element: pieces, tensors, steps and ranks.
        """
        return np.append(self.counts, [self.zero, self.subnormal, self.inf, self.nan])

    @classmethod
    def from_state(cls, state: npt.ArrayLike) -> ExponentHistogram:
        """The histogram of a `state` or of a sum of states, as integers or as whole floats.

        Raises:
            ValueError: another shape, counts below 0, or numbers that are not whole.
        """
        array = np.asarray(state)
        if array.shape != (_WIDTH,):
            raise ValueError(f"a state has the shape [{_WIDTH}], not {list(array.shape)}")
        if array.dtype.kind not in "iuf" or not bool(((array >= 0) & (array <= 2.0**53)).all()):
            raise ValueError("a state consists of numbers from 0 to 2^53")
        whole = array.astype(np.int64)
        if not bool((whole == array).all()):
            raise ValueError("a state consists of whole numbers")
        return _histogram(whole)

    def __add__(self, other: ExponentHistogram) -> ExponentHistogram:
        """The histogram of both inputs taken together."""
        if not isinstance(other, ExponentHistogram):
            return NotImplemented
        return _histogram(self.state + other.state)


@dataclass(frozen=True, slots=True)
class CastLosses:
    """What a cast to one format would do to the elements of tensors, in counts that add.

    Attributes:
        finite: finite elements.
        nonzero: finite elements other than zero.
        n_underflow: nonzero elements that would become zero.
        n_subnormal: elements that would become subnormal, or round up from there to the least normal number.
        n_overflow: finite elements that would leave the format's range.
    """

    finite: int
    nonzero: int
    n_underflow: int
    n_subnormal: int
    n_overflow: int

    @property
    def underflow(self) -> float:
        """n_underflow / nonzero; NaN, which stands for "undefined", if all elements are zero."""
        return _share(self.n_underflow, self.nonzero)

    @property
    def subnormal(self) -> float:
        """n_subnormal / nonzero; NaN if all elements are zero."""
        return _share(self.n_subnormal, self.nonzero)

    @property
    def overflow(self) -> float:
        """n_overflow / finite; NaN without a finite element."""
        return _share(self.n_overflow, self.finite)

    def __add__(self, other: CastLosses) -> CastLosses:
        """The losses of both inputs taken together; both must be of the same format and scale."""
        if not isinstance(other, CastLosses):
            return NotImplemented
        return CastLosses(
            self.finite + other.finite,
            self.nonzero + other.nonzero,
            self.n_underflow + other.n_underflow,
            self.n_subnormal + other.n_subnormal,
            self.n_overflow + other.n_overflow,
        )


@overload
def exponent_histogram(
    tensors: Tensors, per_tensor: Literal[False] = ..., threads: int = ...
) -> ExponentHistogram: ...
@overload
def exponent_histogram(
    tensors: Tensors, per_tensor: Literal[True], threads: int = ...
) -> list[ExponentHistogram]: ...


def exponent_histogram(
    tensors: Tensors, per_tensor: bool = False, threads: int = 1
) -> ExponentHistogram | list[ExponentHistogram]:
    """Counts all elements by the exponent of their magnitude, in one read.

    Args:
        tensors: one array or an iterable of arrays, any shapes, any mix of dtypes. The exponent is that of the
            value, exactly: a float16 subnormal, an int64 and a float64 have their own place on float32's axis;
            float64 magnitudes below 2**-126 are in bin 0, from 2**128 on in bin 255.
        per_tensor: one histogram for each tensor instead of one over all.
        threads: workers for large inputs; counts are the same.

    Returns:
        `ExponentHistogram`, or a list of them. No tensors, or only empty ones: all counts 0.

    Raises:
        ValueError: `threads` below 1.
        TypeError: an element that can't be read; the message names its position.

    Formula: docs/kernels/histograms.md.
    """
    rows = _core.exponent_histogram(tensors, per_tensor, threads)
    return [_histogram(row) for row in rows] if per_tensor else _histogram(rows[0])


@overload
def underflow_shares(
    tensors: Tensors,
    to: Iterable[str] | str = ...,
    scale: float = ...,
    per_tensor: Literal[False] = ...,
    threads: int = ...,
) -> dict[str, CastLosses]: ...
@overload
def underflow_shares(
    tensors: Tensors,
    to: Iterable[str] | str = ...,
    scale: float = ...,
    *,
    per_tensor: Literal[True],
    threads: int = ...,
) -> list[dict[str, CastLosses]]: ...


def underflow_shares(
    tensors: Tensors,
    to: Iterable[str] | str = ("bf16", "fp16", "e4m3fn", "e5m2"),
    scale: float = 1.0,
    per_tensor: bool = False,
    threads: int = 1,
) -> dict[str, CastLosses] | list[dict[str, CastLosses]]:
    """How many elements would underflow, become subnormal or overflow in a cast of scale * x, in one read.

    Every element is compared with the format's own limits, under round to nearest, ties to even: half of the
    least subnormal number still becomes zero, and the largest number plus half of its last place overflows
    where the tie goes up (float8_e4m3fn: where it is passed).

    Args:
        tensors: one array or an iterable of arrays, any shapes, any mix of dtypes; compared by their values.
        to: names of formats, at most 16: "fp32", "fp16", "bf16", the float8 types of ml_dtypes with a sign
            ("e4m3fn", "e5m2", "e4m3", "e3m4", "e4m3fnuz", "e4m3b11fnuz", "e5m2fnuz") and those below 8 bits
            ("e2m3fn", "e3m2fn", "e2m1fn"), in short or as their dtype is called.
        scale: what elements are multiplied with before the cast; the product is not rounded.
        per_tensor: one dictionary for each tensor instead of one over all.
        threads: workers for large inputs; counts are the same.

    Returns:
        A dictionary from the names in `to` to `CastLosses`, or a list of dictionaries. NaN and infinities are
        left out.

    Raises:
        ValueError: an unknown format, more than 16 of them, a `scale` that is not finite and above 0,
            `threads` below 1.
        TypeError: an element that can't be read; the message names its position.

    Formula: docs/kernels/histograms.md.
    """
    names = (to,) if isinstance(to, str) else tuple(to)
    rows = _core.cast_losses(tensors, names, scale, per_tensor, threads).tolist()
    losses = [
        {name: CastLosses(*row[:2], *row[2 + 3 * i : 5 + 3 * i]) for i, name in enumerate(names)}
        for row in rows
    ]
    return losses if per_tensor else losses[0]


def _histogram(state: Counts) -> ExponentHistogram:
    zero, subnormal, inf, nan = state[_BINS:].tolist()
    return ExponentHistogram(state[:_BINS], zero, subnormal, inf, nan)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
