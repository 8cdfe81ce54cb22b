"""The backend for MindSpore: the C kernels on what the host can address, and sums that a compiled graph has made.

On a CPU a tensor's ``asnumpy()`` is a view of its memory, bfloat16 too, which the kernels read as it is. A gradient of a
compiled step never comes out of the graph: :class:`CompiledSums` stands for it, and only what it holds can be asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainmon.backend.base import Lazy
from trainmon.backend.host import HostBackend

__all__ = ["CompiledSums", "MindSporeBackend"]


@dataclass(frozen=True, slots=True)
class CompiledSums:
    """What a compiled hook keeps of one tensor.

    Attributes:
        square: sum of squares, propagating NaN and infinities.
        nonfinite: how many elements are NaN or infinite.
    """

    square: float
    nonfinite: int


class MindSporeBackend(HostBackend):
    """Arrays as :class:`HostBackend`; of :class:`CompiledSums` norms and counts. A sum can't tell how many of the
    elements that are not finite are NaN: all are called so where it is NaN, and infinite where it is infinite."""

    name = "mindspore"

    def summaries(self, tensors: Sequence[Any]) -> Lazy:
        if not _compiled(tensors):
            return super().summaries(tensors)
        table = np.zeros((len(tensors), 6))
        table[:, 1] = table[:, 5] = np.nan
        for row, one in enumerate(tensors):
            table[row, 0] = one.square
            table[row, 2 if math.isnan(one.square) else 3] = one.nonfinite
        return Lazy((), lambda: table)

    def squares(self, tensors: Sequence[Any], negatives: bool = False) -> Lazy:
        if not _compiled(tensors):
            return super().squares(tensors, negatives)
        table = np.array([(one.square, math.nan) for one in tensors]).reshape(-1, 2)
        return Lazy((), lambda: table)

    def square_sum(self, tensors: Sequence[Any]) -> Lazy:
        if not _compiled(tensors):
            return super().square_sum(tensors)
        total = np.array([sum(one.square for one in tensors)])
        return Lazy((), lambda: total)

    def flushed(self, tensors: Sequence[Any], formats: Sequence[str]) -> Lazy:
        if _compiled(tensors):
            raise NotImplementedError(
                "a compiled step (GRAPH mode) shows sums of its gradients, not their elements: what a smaller format "
                "would round to zero can't be counted; set gradients.underflow: false"
            )
        return super().flushed(tensors, formats)

    def signs(self, tensors: Sequence[Any], others: Sequence[Any]) -> Lazy:
        if _compiled(tensors):
            raise NotImplementedError(
                "a compiled step (GRAPH mode) shows sums of its gradients, not their elements: their signs can't be "
                "compared with the momentum's; set gradients.signs: false"
            )
        return super().signs(tensors, others)


def _compiled(tensors: Sequence[Any]) -> bool:
    return len(tensors) > 0 and isinstance(tensors[0], CompiledSums)
