"""How often two lists of tensors have the same sign: a gradient and the momentum that it joins."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainmon.ops._extension import Tensors, _core

__all__ = ["SignAgreement", "sign_agreement"]


@dataclass(frozen=True, slots=True)
class SignAgreement:
    """Pairs of elements counted by their signs, in counts that add.

    Attributes:
        same: pairs of which both are above zero, or both below.
        opposite: pairs of which one is above zero and one below.
        n: all pairs; in those that are left, one is a zero or a NaN, which have no sign.
    """

    same: int
    opposite: int
    n: int

    @property
    def share(self) -> float:
        """(mean(sign a * sign b) + 1) / 2: 1 for equal signs, 0 for opposite ones, 1/2 where they have nothing to do with
        each other; a pair without signs counts 1/2. NaN, which stands for "undefined", for no elements."""
        return ((self.same - self.opposite) / self.n + 1) / 2 if self.n else math.nan

    def __add__(self, other: SignAgreement) -> SignAgreement:
        """The counts of both inputs taken together."""
        if not isinstance(other, SignAgreement):
            return NotImplemented
        return SignAgreement(self.same + other.same, self.opposite + other.opposite, self.n + other.n)


def sign_agreement(a: Tensors, b: Tensors, threads: int = 1) -> SignAgreement:
    """Counts the pairs of elements that have the same sign, and opposite signs, in one read of both lists.

    Args:
        a: one array or an iterable of arrays, any shapes, any mix of dtypes.
        b: as many arrays, each with the shape of its partner in `a`; dtypes and strides may differ.
        threads: workers for large inputs; they don't change the result.

    Returns:
        A `SignAgreement`: exact counts, which add over tensors, pieces, steps and ranks. Zeros and NaN have no sign,
        infinities have one.

    Raises:
        ValueError: another number of arrays or another shape in `b`; `threads` below 1.
        TypeError: an element that can't be read; messages name the position.

    Formula: docs/kernels/signs.md.
    """
    return SignAgreement(*_core.sign_agreement(a, b, threads))
