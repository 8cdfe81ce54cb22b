"""Gradients of a compiled step: hooks on parameters that are compiled with it and leave two sums in a slot each.

A hook is there before the graph is built or never: MindSpore compiles it in, and no hook on the optimizer can be. It
runs in every step, whether anybody looks or not. What it sees is the gradient as the backward pass makes it: with the
loss scale on it, before any reduction over ranks and before clipping. A step that differentiates several times leaves
its last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, ops

from trainmon.backend.mindspore import CompiledSums

__all__ = ["CompiledGradients"]

#: In a slot that no step has written to.
_EMPTY = -1.0
#: Where a parameter keeps its slot: a graph that was compiled in an earlier run goes on writing to it.
_PLACE = "_trainmon_slot"


class CompiledGradients:
    """Slots of parameters, and the hooks that fill them.

    Args:
        parameters: the trainable ones.
        addressable: whether slots lie in memory of the host.
    """

    def __init__(self, parameters: Sequence[Parameter], addressable: bool) -> None:
        self._addressable = addressable
        # Devices have no float64.
        kind = mindspore.float64 if addressable else mindspore.float32
        self._slots: list[Parameter] = []
        self._handles: list[Any] = []
        for parameter in parameters:
            slot = getattr(parameter, _PLACE, None)
            if slot is None:
                slot = Parameter(
                    Tensor(np.full(2, _EMPTY), kind), name=f"trainmon.{parameter.name}", requires_grad=False
                )
                setattr(parameter, _PLACE, slot)
            self._slots.append(slot)
            self._handles.append(parameter.register_hook(_hook(slot, kind)))

    def arm(self) -> None:
        """A step begins: what an earlier one left is not this one's."""
        if self._addressable:
            for slot in self._slots:
                slot.asnumpy()[:] = _EMPTY

    def read(self) -> list[CompiledSums | None]:
        """A parameter's sums; None: the step has no gradient of it."""
        return [_sums(row) for row in self._rows()]

    def _rows(self) -> Any:
        if self._addressable:
            return [slot.asnumpy().tolist() for slot in self._slots]
        return ops.stack(self._slots).asnumpy().tolist()  # one read

    def remove(self) -> None:
        """Graphs that are compiled from now on have no hooks. Idempotent."""
        while self._handles:
            self._handles.pop().remove()


def _sums(row: Sequence[float]) -> CompiledSums | None:
    square, nonfinite = row
    return None if nonfinite == _EMPTY else CompiledSums(square, round(nonfinite))


def _hook(slot: Parameter, kind: Any) -> Callable[[Any], Any]:
    def leave_sums(gradient: Any) -> Any:
        wide = gradient.astype(kind)
        bad = ops.logical_not(ops.isfinite(wide))
        ops.assign(slot, ops.stack((ops.reduce_sum(ops.square(wide)), ops.reduce_sum(bad.astype(kind)))))
        return gradient

    return leave_sums
