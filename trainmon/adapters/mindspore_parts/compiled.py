"""Gradients of a compiled step: hooks on parameters that are compiled with it and leave two sums in a slot each.

A hook is there before the graph is built or never: MindSpore compiles it in, and no hook on the optimizer can be. It
runs in every step, whether anybody looks or not. What it sees is the gradient as the backward pass makes it: with the
loss scale on it, before any reduction over ranks and before clipping. A step that differentiates several times leaves
its last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, ops

from trainmon.backend.mindspore import CompiledSums

__all__ = ["CompiledGradients"]

#: In a slot that no step has written to; no sum of squares is below zero.
_EMPTY = -1.0
#: Where a parameter keeps its slots: a graph that was compiled in an earlier run goes on writing to them.
_PLACE = "_trainmon_slots"


class CompiledGradients:
    """Slots of parameters, and the hooks that fill them.

    Args:
        parameters: the trainable ones.
        addressable: whether slots lie in memory of the host.
        count: whether elements that are not finite are counted; else one stands for any. Half of a hook's cost.
    """

    def __init__(self, parameters: Sequence[Parameter], addressable: bool, count: bool) -> None:
        self._addressable, self._count = addressable, count
        # Devices have no float64.
        kind = mindspore.float64 if addressable else mindspore.float32
        self._sizes = [int(parameter.size) for parameter in parameters]
        self._squares: list[Parameter] = []
        self._finite: list[Parameter] = []
        self._views: list[Any] = []
        self._handles: list[Any] = []
        for parameter in parameters:
            slots = getattr(parameter, _PLACE, None)
            if slots is None:
                slots = _slot(f"{parameter.name}.square", kind), _slot(f"{parameter.name}.finite", kind)
                setattr(parameter, _PLACE, slots)
            self._squares.append(slots[0])
            self._finite.append(slots[1])
            hook = _counting(slots[0], slots[1], kind) if count else _summing(slots[0], kind)
            self._handles.append(parameter.register_hook(hook))

    def arm(self) -> None:
        """A step begins: what an earlier one left is not this one's."""
        if self._addressable:
            for view in self._views[: len(self._squares)] or [slot.asnumpy() for slot in self._squares]:
                view[...] = _EMPTY

    def read(self) -> list[CompiledSums | None]:
        """A parameter's sums; None: the step has no gradient of it."""
        squares, finite = self._values()
        return [
            None
            if square == _EMPTY
            else CompiledSums(square, _nonfinite(square, there if self._count else _EMPTY, size))
            for square, there, size in zip(squares, finite, self._sizes, strict=True)
        ]

    def _values(self) -> tuple[list[float], list[float]]:
        if not self._addressable:
            flat = ops.stack([*self._squares, *self._finite]).asnumpy().tolist()  # one read
        else:
            flat = [float(view) for view in self._views]
            if all(value == _EMPTY for value in flat[: len(self._squares)]):
                # Once a graph has run, slots stay where they are.
                self._views = [slot.asnumpy() for slot in (*self._squares, *self._finite)]
                flat = [float(view) for view in self._views]
        return flat[: len(self._squares)], flat[len(self._squares) :]

    def remove(self) -> None:
        """Graphs that are compiled from now on have no hooks. Idempotent."""
        while self._handles:
            self._handles.pop().remove()


def _slot(name: str, kind: Any) -> Parameter:
    return Parameter(Tensor(_EMPTY, kind), name=f"trainmon.{name}", requires_grad=False)


def _nonfinite(square: float, finite: float, size: int) -> int:
    """Where nobody counts, a sum that is not finite says that there is one."""
    return int(not math.isfinite(square)) if finite == _EMPTY else round(size - finite)


# Of primitives alone: functions of mindspore.ops would be compiled anew for each parameter.


def _summing(square: Parameter, kind: Any) -> Callable[[Any], Any]:
    widen, power, total, leave = ops.Cast(), ops.Square(), ops.ReduceSum(), ops.Assign()

    def leave_square(gradient: Any) -> Any:
        leave(square, total(power(widen(gradient, kind))))
        return gradient

    return leave_square


def _counting(square: Parameter, finite: Parameter, kind: Any) -> Callable[[Any], Any]:
    widen, power, total, leave = ops.Cast(), ops.Square(), ops.ReduceSum(), ops.Assign()
    is_finite = ops.IsFinite()

    def leave_sums(gradient: Any) -> Any:
        wide = widen(gradient, kind)
        leave(square, total(power(wide)))
        leave(finite, total(widen(is_finite(wide), kind)))
        return gradient

    return leave_sums
