"""Numbers that a compiled step leaves for the host: parameters that nobody trains, written to in every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mindspore import Parameter, ops

from trainmon.backend.mindspore import CompiledSums

__all__ = ["EMPTY", "Slots"]

#: In a slot that no step has written to; no sum of squares is below zero.
EMPTY = -1.0


class Slots:
    """Sums of squares of tensors, and how many of their elements are not finite.

    Args:
        halves, finite: one number a tensor, in as many parameters as there may be: half the sum of squares, and a count.
            ``finite`` may stay empty: then one element stands for any that are not finite.
        sizes: elements of the tensors.
        addressable: whether slots lie in memory of the host.
    """

    def __init__(
        self,
        halves: Sequence[Parameter],
        finite: Sequence[Parameter],
        sizes: Sequence[int],
        addressable: bool,
    ) -> None:
        self._slots, self._sizes, self._addressable = [*halves, *finite], list(sizes), addressable
        self._views: list[Any] = []

    def arm(self) -> None:
        """A step begins: what an earlier one left is not this one's."""
        if self._addressable:
            for view in self._views or [slot.asnumpy() for slot in self._slots]:
                view[...] = EMPTY

    def read(self) -> list[CompiledSums | None]:
        """A tensor's sums; None: the step has none of it."""
        flat = self._values()
        halves, finite = flat[: len(self._sizes)], flat[len(self._sizes) :]
        return [
            None if half == EMPTY else CompiledSums(2 * half, _nonfinite(half, there, size))
            for half, there, size in zip(halves, finite, self._sizes, strict=True)
        ]

    def _values(self) -> list[float]:
        if not self._addressable:
            flat: list[float] = (
                ops.concat([slot.reshape(-1) for slot in self._slots]).asnumpy().tolist()
            )  # one read
            return flat
        flat = _flat(self._views)
        if all(value == EMPTY for value in flat[: len(self._sizes)]):
            # Once a graph has run, slots stay where they are.
            self._views = [slot.asnumpy() for slot in self._slots]
            flat = _flat(self._views)
        return flat


def _flat(views: Sequence[Any]) -> list[float]:
    return [value for view in views for value in view.reshape(-1).tolist()]


def _nonfinite(half: float, finite: float, size: int) -> int:
    """Where nobody counts, a sum that is not finite says that there is one."""
    return int(not math.isfinite(half)) if finite == EMPTY else round(size - finite)
