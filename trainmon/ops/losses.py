"""The token-weighted loss, summed exactly: no order, split or number of processes changes a bit of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from trainmon.ops._extension import Array, _core

State = npt.NDArray[np.int64]

_FIELDS = _core.loss_layout()
_WORDS = sum(digits for _, digits in _FIELDS.values())


class LossAccumulator:
    """Sums of losses and tokens, and the loss per token that follows from them.

    Each `add` is one pair (s, n): s = sum of weight * loss over the tokens with weight, n = sum of the weights
    (formulas: docs/kernels/losses.md). s is held without rounding, whatever the magnitudes.

    Args:
        buckets: also keep the sums of this many groups of tokens, by position or source: `add` then takes
            the group of each token.

    Raises:
        ValueError: `buckets` is negative.
    """

    __slots__ = ("_state",)

    def __init__(self, buckets: int = 0) -> None:
        if not 0 <= buckets <= 2**24:
            raise ValueError(f"buckets must be from 0 to {2**24}, not {buckets}")
        self._state: State = np.zeros((1 + buckets, _WORDS), np.int64)

    def add(self, losses: Array, weights: Array | None = None, buckets: Array | None = None) -> None:
        """Adds one pair: the losses of one micro-batch.

        Args:
            losses: floats of any shape and dtype, in nats per token or any other unit; may be negative.
            weights: integers or bool of the same shape, 0 or more; None: 1 each. A loss of weight 0 is not
                looked at (0 * nan is nan) and counts as masked.
            buckets: for an accumulator with buckets, and only there: the bucket of each token, integers of the
                shape of `losses` or one that broadcasts to it. A token whose id is no bucket counts in the
                whole, in no bucket, and in `invalid`.

        Raises:
            ValueError: a negative weight, or one beyond 2^63 - 1 (the message says which); other shapes than
                that of `losses`. Nothing was added then.
            TypeError: an array that can't be read or has the wrong kind of dtype.
        """
        shape = getattr(losses, "shape", None)
        if weights is not None:
            _check_shape("weights", shape, weights)
        if buckets is not None and shape is not None and getattr(buckets, "shape", shape) != shape:
            buckets = np.broadcast_to(buckets, tuple(shape))
        _core.loss_add(self._state, losses, weights, buckets)

    def add_mean(self, mean: float, n: int) -> None:
        """Adds the pair (mean * n, n), without rounding the product; n = 0 leaves the pair out.

        Raises:
            ValueError: `n` is negative or beyond 2^63 - 1, or the accumulator has buckets.
            TypeError: `mean` is not a number or `n` not an integer.
        """
        _core.loss_add_value(self._state, mean, True, n)

    def add_sum(self, total: float, n: int) -> None:
        """Adds the pair (total, n): a sum of losses that was taken elsewhere; n = 0 leaves the pair out.

        Raises:
            ValueError, TypeError: as `add_mean`.
        """
        _core.loss_add_value(self._state, total, False, n)

    def merge(self, other: LossAccumulator) -> None:
        """Adds the pairs of `other` to these; `other` stays as it is.

        Raises:
            ValueError: another number of buckets.
            TypeError: `other` is not a LossAccumulator.
        """
        if not isinstance(other, LossAccumulator):
            raise TypeError(f"merge takes a LossAccumulator, not {type(other).__name__}")
        _core.loss_add_state(self._state, other._state)

    @property
    def mean(self) -> float | None:
        """Loss per token: s / n of all pairs, correctly rounded; None without a token.

        NaN, or an infinity, as soon as a loss with weight is; infinities of both signs make NaN.
        """
        means = _core.loss_means(self._state, 0)
        return None if means is None else means[0]

    @property
    def mean_of_means(self) -> float | None:
        """The mean of the pairs' means, each rounded to float64; what unweighted averaging would report."""
        means = _core.loss_means(self._state, 0)
        return None if means is None else means[1]

    @property
    def gap(self) -> float | None:
        """`mean_of_means` - `mean`: how far averaging without tokens is off. None without a token."""
        means = _core.loss_means(self._state, 0)
        return None if means is None else means[1] - means[0]

    @property
    def bucket_means(self) -> tuple[float | None, ...]:
        """Loss per token of each bucket, as `mean`."""
        rows = range(1, len(self._state))
        return tuple(
            None if means is None else means[0] for means in (_core.loss_means(self._state, r) for r in rows)
        )

    def bucket(self, index: int) -> LossAccumulator:
        """A copy of one bucket's sums, as an accumulator without buckets.

        Raises:
            IndexError: there is no such bucket.
        """
        if not 0 <= index < self.buckets:
            raise IndexError(f"bucket {index} of {self.buckets}")
        part = LossAccumulator()
        part._state[0] = self._state[1 + index]
        return part

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return len(self._state) - 1

    @property
    def tokens(self) -> int:
        """n: the sum of all weights."""
        return self._integer("TOKENS")

    @property
    def pairs(self) -> int:
        """Number of pairs with a token."""
        return self._integer("PAIRS")

    @property
    def masked(self) -> int:
        """Number of losses of weight 0."""
        return self._integer("MASKED")

    @property
    def nonfinite(self) -> int:
        """Number of losses with weight that are NaN or infinite."""
        return self._integer("NAN") + self._integer("POSINF") + self._integer("NEGINF")

    @property
    def invalid(self) -> int:
        """Number of losses with weight whose bucket doesn't exist."""
        return self._integer("INVALID")

    @property
    def state(self) -> State:
        """A copy of all sums: int64 of shape [1 + buckets, words].

        States of several ranks add element by element, as int64 or float64: each word is an integer below
        2^32, so that float64 sums of up to 2^21 ranks are exact. `from_state` takes the sum. The layout is in
        docs/kernels/losses.md.
        """
        return self._state.copy()

    @classmethod
    def from_state(cls, state: npt.ArrayLike) -> LossAccumulator:
        """The accumulator of a `state`, or of a sum of states.

        Args:
            state: int64 or float64 of shape [1 + buckets, words].

        Raises:
            ValueError: another shape, or words that no sum of states has: not whole, too large, negative sums
                of counts.
        """
        array = np.asarray(state)
        if array.ndim != 2 or len(array) < 1 or array.shape[1] != _WORDS:
            raise ValueError(f"a state has the shape [1 + buckets, {_WORDS}], not {list(array.shape)}")
        if array.dtype.kind == "f":
            # The comparison is false for NaN.
            if not bool((np.abs(array) <= 2.0**53).all()) or not bool((array == np.trunc(array)).all()):
                raise ValueError("a state consists of integers up to 2^53 in magnitude")
        elif array.dtype.kind != "i" or not bool(((array < 2**61) & (array > -(2**61))).all()):
            raise ValueError("a state consists of integers below 2^61 in magnitude")
        result = cls(len(array) - 1)
        _core.loss_add_state(result._state, np.ascontiguousarray(array, np.int64))
        tops = [offset + digits - 1 for offset, digits in _FIELDS.values()]
        if not bool((np.abs(result._state[:, tops]) < 2**31).all()) or bool(
            (result._state[:, tops[2:]] < 0).any()
        ):
            raise ValueError("a state whose sums are out of range")
        return result

    def _integer(self, field: str) -> int:
        offset, digits = _FIELDS[field]
        words = self._state[0, offset : offset + digits].tolist()
        return sum(word << 32 * place for place, word in enumerate(words))

    def __repr__(self) -> str:
        return f"<LossAccumulator mean={self.mean} tokens={self.tokens} pairs={self.pairs}>"


def loss_gap(sums: Iterable[float], tokens: Iterable[int]) -> float | None:
    """`loss/gap` of pairs (s, n): the mean of the means s/n, minus sum of s / sum of n. None without a token.

    Args:
        sums: sums of losses, one a micro-batch.
        tokens: tokens of each; pairs without a token are left out.

    Raises:
        ValueError: different numbers of sums and tokens, or a negative number of tokens.
    """
    accumulator = LossAccumulator()
    for total, n in zip(sums, tokens, strict=True):
        accumulator.add_sum(total, n)
    return accumulator.gap


def position_buckets(length: int, buckets: int) -> npt.NDArray[np.int32]:
    """The bucket of each position of a sequence, for `LossAccumulator.add`: int32 of shape [length].

    Position t is in bucket t * buckets // length: consecutive groups as equal as can be.

    Raises:
        ValueError: `length` is negative, or `buckets` below 1 or beyond int32.
    """
    if length < 0 or not 1 <= buckets < 2**31:
        raise ValueError(f"length must be 0 or more and buckets 1 or more, not {length} and {buckets}")
    return (np.arange(length, dtype=np.int64) * buckets // max(length, 1)).astype(np.int32)


def _check_shape(name: str, shape: Any, array: Array) -> None:
    """Arrays that don't tell their shape are compared by their number of elements, in the core."""
    own = getattr(array, "shape", None)
    if shape is not None and own is not None and tuple(own) != tuple(shape):
        raise ValueError(f"{name} has the shape {list(own)}, losses {list(shape)}")
