"""The backend for MindSpore: the C kernels on what the host can address, and sums that a compiled graph has made.

On a CPU a tensor's ``asnumpy()`` is a view of its memory, bfloat16 too, which the kernels read as it is. A gradient of a
compiled step never comes out of the graph: :class:`CompiledSums` stands for it, and only what it holds can be asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mindspore
import numpy as np
from mindspore import ops

from trainmon.backend.base import STATISTICS, Floats, Lazy
from trainmon.backend.host import HostBackend, HostRead
from trainmon.backend.mindspore_spectral import block_power
from trainmon.backend.ritz import largest_ritz_value

__all__ = ["CompiledSums", "MindSporeBackend", "MindSporeDevice"]

#: Elements of one partial sum.
_CHUNK = 65536


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


class MindSporeDevice(MindSporeBackend):
    """Statistics of tensors in a device's memory: MindSpore's operators in float32, one packed read. Norms are scaled by
    the largest magnitude, so that squares neither overflow nor vanish; partial sums are added up in float64.

    Args:
        deferred: whether a step's numbers are waited for in the next one.
    """

    name = "mindspore-device"
    deferred = True

    def __init__(self, deferred: bool = True) -> None:
        super().__init__()
        self.deferred = deferred

    def summaries(self, tensors: Sequence[Any]) -> Lazy:
        if not tensors or _compiled(tensors):
            return super().summaries(tensors)

        def finish(*values: Floats) -> Floats:
            table = np.full((len(tensors), 6), np.nan)
            for row, one in enumerate(values):
                table[row, :5] = _square(one), one[0], *one[1:4]
            return table

        return Lazy(tuple(device_sums(one) for one in tensors), finish)

    def squares(self, tensors: Sequence[Any], negatives: bool = False) -> Lazy:
        if not tensors or _compiled(tensors):
            return super().squares(tensors, negatives)

        def finish(*values: Floats) -> Floats:
            return np.array([(_square(one), one[4] if negatives else np.nan) for one in values])

        return Lazy(tuple(device_sums(one) for one in tensors), finish)

    def square_sum(self, tensors: Sequence[Any]) -> Lazy:
        if not tensors or _compiled(tensors):
            return super().square_sum(tensors)
        handles = tuple(device_sums(one) for one in tensors)
        return Lazy(handles, lambda *values: np.array([sum(map(_square, values))]))

    def spectra(
        self,
        matrices: Sequence[Any],
        states: Sequence[Any | None],
        seeds: Sequence[int],
        tolerance: float,
        epsilon: float,
    ) -> tuple[Lazy, list[Any]]:
        found = [block_power(*one) for one in zip(matrices, states, seeds, strict=True)]
        squares = [device_sums(one) for one in matrices]

        def finish(*values: Floats) -> Floats:
            table = np.full((len(squares), 3), np.nan)
            table[:, 0] = [_square(one) for one in values[: len(squares)]]
            grams = values[len(squares) :]
            table[:, 1] = [largest_ritz_value(*grams[row : row + 2]) for row in range(0, len(grams), 2)]
            table[table[:, 0] == 0] = 0.0
            return table

        handles = (*squares, *(gram for grams, _ in found for gram in grams))
        return Lazy(handles, finish), [state for _, state in found]

    def keep(self, tensors: Sequence[Any], into: Sequence[Any | None] = ()) -> list[Any]:
        raise NotImplementedError("updates are not measured in a device's memory: set updates: false")

    def statistics(self, tensors: Sequence[Any]) -> Lazy:
        sizes = [int(one.size) for one in tensors]
        rows = [_on_device(one) for one in tensors if one.size]
        handles = (ops.concat(rows),) if rows else ()

        def finish(*values: Floats) -> Floats:
            table = np.full((len(sizes), len(STATISTICS)), np.nan)
            table[:, 0] = sizes
            table[:, 4:] = 0.0  # norm and count of what is empty
            if values:
                table[table[:, 0] > 0, 1:] = values[0].reshape(-1, len(STATISTICS) - 1)
            table[table[:, 5] > 0, 1:5] = np.nan  # operators differ in what their extremes make of NaN
            return table

        return Lazy(handles, finish)

    def read(self, lazies: Sequence[Lazy]) -> Any:
        handles = [handle for lazy in lazies for handle in lazy.handles]
        flat = ops.concat(handles).asnumpy().astype(np.float64) if handles else np.zeros(0)
        self.reads += bool(handles)
        results, at = [], 0
        for lazy in lazies:
            values = []
            for handle in lazy.handles:
                values.append(flat[at : at + int(handle.size)])
                at += int(handle.size)
            results.append(lazy.finish(*values))
        return HostRead(results)


def device_sums(tensor: Any) -> Any:
    """Largest magnitude, counts of NaN, positive and negative infinities and of elements below zero, and sums of squares
    over the largest magnitude's square, of as many elements each as float32 adds well."""
    wide = tensor.astype(mindspore.float32).reshape(-1)
    if not wide.size:
        return ops.zeros(6, mindspore.float32)
    nan, infinite = ops.isnan(wide), ops.isinf(wide)
    below = wide < 0
    counts = [nan, ops.logical_and(infinite, wide > 0), ops.logical_and(infinite, below), below]
    largest = ops.abs(wide).max()
    usable = ops.logical_and(largest > 0, ops.isfinite(largest))
    squares = ops.square(wide / ops.select(usable, largest, ops.ones_like(largest)))
    whole = int(wide.size) // _CHUNK * _CHUNK
    parts = [] if not whole else [squares[:whole].reshape(-1, _CHUNK).sum(1)]
    if whole < int(wide.size):
        parts.append(squares[whole:].sum().reshape(1))
    numbers = [largest.reshape(1), *(one.astype(mindspore.float32).sum().reshape(1) for one in counts)]
    return ops.concat([*numbers, *parts])


def _square(sums: Floats) -> float:
    """The sum of squares that :func:`device_sums` has left; NaN and infinities propagate."""
    largest = float(sums[0])
    if sums[1] > 0 or np.isnan(largest):
        return math.nan
    scale = largest if math.isfinite(largest) and largest > 0 else 1.0
    return float(sums[5:].sum()) * scale * scale


def _on_device(tensor: Any) -> Any:
    """Least, largest, mean, norm and NaN count, as :data:`STATISTICS` has them behind the size."""
    wide = tensor.astype(mindspore.float32).reshape(-1)
    least, most, nans = wide.min(), wide.max(), ops.isnan(wide).astype(mindspore.float32).sum()
    magnitude = ops.maximum(most, -least)
    scale = ops.select(
        ops.logical_and(magnitude > 0, ops.isfinite(magnitude)), magnitude, ops.ones_like(magnitude)
    )
    norm = scale * ops.sqrt(ops.square(wide / scale).sum())
    return ops.stack([least, most, wide.mean(), norm, nans])
