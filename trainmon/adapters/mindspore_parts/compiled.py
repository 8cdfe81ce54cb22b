"""Gradients of a compiled step: hooks that are compiled with it and leave two sums of each gradient.

A hook is there before the graph is built or never: MindSpore compiles it in, and one on the optimizer, which writes to
parameters itself, would be a cycle. It runs in every step, whether anybody looks or not. Where a step cell hands all
gradients to a reducer, one hook behind that sees those of all ranks, before any clipping; in any other step hooks on
parameters see what the backward pass makes: with the loss scale on it, before any reduction over ranks and before
clipping, and of a step that differentiates several times the last. These cost twice as much to compile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from trainmon.adapters.mindspore_parts.slots import EMPTY, Slots
from trainmon.backend.mindspore import CompiledSums

__all__ = ["CompiledGradients", "ReducedGradients", "reducer_of", "sparse_parameters"]

#: Where a parameter or Cell keeps its slots: a graph that was compiled in an earlier run goes on writing to them.
_PLACE = "_trainmon_slots"


def reducer_of(cell: nn.Cell, plain: bool) -> nn.Cell | None:
    """What a step cell hands all its gradients to, so that behind it they are those of all ranks; None: nothing, or it
    can't be told in what state they are.

    Args:
        plain: the cell steps as MindSpore's own do; any other has to name its reducer, may not clip ahead of it, and may
            have no loss scale, which may be on or off by then.
    """
    reducer = getattr(cell, "grad_reducer", None)
    if not isinstance(reducer, nn.Cell):
        return None
    if plain:
        return reducer
    if getattr(cell, "scale_sense", None) is not None or getattr(cell, "sens", None) not in (None, 1, 1.0):
        return None
    try:
        text = inspect.getsource(type(cell).construct)
    except (OSError, TypeError):
        return None
    before, called, after = text.partition("self.grad_reducer(")
    ahead = before + after.partition("\n")[0]
    return reducer if called and "clip" not in ahead.lower() else None


def sparse_parameters(network: nn.Cell) -> set[int]:
    """Ids of parameters whose gradients a compiled step makes as rows, of which nothing can be summed up."""
    cells = [cell for _, cell in network.cells_and_names() if getattr(cell, "sparse", False) is True]
    return {id(one) for cell in cells for one in cell.get_parameters(expand=False)}


class CompiledGradients:
    """Hooks on parameters.

    Args:
        parameters: the trainable ones.
        addressable: whether slots lie in memory of the host.
        count: whether elements that are not finite are counted; else one stands for any. Half of a hook's cost.
        left_out: ids of parameters without a hook.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        addressable: bool,
        count: bool,
        left_out: Collection[int] = (),
    ) -> None:
        kind = _kind(addressable)
        self._handles: list[Any] = []
        found = []
        for parameter in parameters:
            slots = getattr(parameter, _PLACE, None)
            if slots is None:
                slots = _slot(f"{parameter.name}.square", kind), _slot(f"{parameter.name}.finite", kind)
                setattr(parameter, _PLACE, slots)
            found.append(slots)
            if id(parameter) not in left_out:
                hook = _counting(slots[0], slots[1], kind) if count else _summing(slots[0], kind)
                self._handles.append(parameter.register_hook(hook))
        sizes = [int(parameter.size) for parameter in parameters]
        self._slots = Slots([one for one, _ in found], [one for _, one in found], sizes, addressable)
        self.arm = self._slots.arm

    def read(self) -> list[CompiledSums | None]:
        """A parameter's sums; None: the step has no gradient of it."""
        return self._slots.read()

    def remove(self) -> None:
        """Graphs that are compiled from now on have no hooks. Idempotent."""
        while self._handles:
            self._handles.pop().remove()


class ReducedGradients:
    """A hook on what reduces all gradients of a step.

    Args:
        reducer: a Cell that is called with the gradients and returns them.
        parameters: in the order of the gradients.
        order: the place of each wanted gradient among them.
        addressable, count: as of :class:`CompiledGradients`.
    """

    def __init__(
        self,
        reducer: nn.Cell,
        parameters: Sequence[Parameter],
        order: Sequence[int],
        addressable: bool,
        count: bool,
    ) -> None:
        self._order = list(order)
        kind = _kind(addressable)
        kept = getattr(reducer, _PLACE, None)
        if kept is None or kept.kind is not kind:
            kept = _Kept(len(parameters), kind)
            object.__setattr__(reducer, _PLACE, kept)  # not a parameter of the Cell
        hook = _counting_all(kept.squares, kept.finite, kind) if count else _summing_all(kept.squares, kind)
        self._handle: Any = reducer.register_forward_hook(hook)
        self._slots = Slots(
            [kept.squares], [kept.finite], [int(parameter.size) for parameter in parameters], addressable
        )
        self.arm = self._slots.arm

    def read(self) -> list[CompiledSums | None]:
        """A parameter's sums; None: no step has left any."""
        found = self._slots.read()
        return [found[at] for at in self._order]

    def remove(self) -> None:
        """Graphs that are compiled from now on have no hook. Idempotent."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class _Kept:
    """Slots of all parameters of a step."""

    def __init__(self, count: int, kind: Any) -> None:
        self.kind = kind
        self.squares = _slot("squares", kind, count)
        self.finite = _slot("finite", kind, count)


def _kind(addressable: bool) -> Any:
    """Devices have no float64."""
    return mindspore.float64 if addressable else mindspore.float32


def _slot(name: str, kind: Any, count: int | None = None) -> Parameter:
    values = np.full(() if count is None else (count,), EMPTY)
    return Parameter(Tensor(values, kind), name=f"trainmon.{name}", requires_grad=False)


# Of as few operators as may be, for each costs time to compile, and of primitives alone: functions of mindspore.ops would
# be compiled anew for each parameter. L2Loss is half the sum of squares.


def _summing(square: Parameter, kind: Any) -> Callable[[Any], Any]:
    widen, half, leave = ops.Cast(), ops.L2Loss(), ops.Assign()

    def leave_square(gradient: Any) -> Any:
        leave(square, half(widen(gradient, kind)))
        return gradient

    return leave_square


def _counting(square: Parameter, finite: Parameter, kind: Any) -> Callable[[Any], Any]:
    widen, half, leave = ops.Cast(), ops.L2Loss(), ops.Assign()
    is_finite, total = ops.IsFinite(), ops.ReduceSum()

    def leave_sums(gradient: Any) -> Any:
        wide = widen(gradient, kind)
        leave(square, half(wide))
        leave(finite, total(widen(is_finite(wide), kind)))
        return gradient

    return leave_sums


def _summing_all(squares: Parameter, kind: Any) -> Callable[[Any, Any, Any], Any]:
    widen, half, leave = ops.Cast(), ops.L2Loss(), ops.Assign()
    each, together = ops.HyperMap(), ops.Stack()

    def half_square(gradient: Any) -> Any:
        return half(widen(gradient, kind))

    def leave_squares(_cell: Any, _inputs: Any, gradients: Any) -> Any:
        leave(squares, together(each(half_square, gradients)))
        return gradients

    return leave_squares


def _counting_all(squares: Parameter, finite: Parameter, kind: Any) -> Callable[[Any, Any, Any], Any]:
    widen, half, leave = ops.Cast(), ops.L2Loss(), ops.Assign()
    each, together = ops.HyperMap(), ops.Stack()
    is_finite, total = ops.IsFinite(), ops.ReduceSum()

    def half_square(gradient: Any) -> Any:
        return half(widen(gradient, kind))

    def finite_count(gradient: Any) -> Any:
        return total(widen(is_finite(gradient), kind))

    def leave_sums(_cell: Any, _inputs: Any, gradients: Any) -> Any:
        leave(squares, together(each(half_square, gradients)))
        leave(finite, together(each(finite_count, gradients)))
        return gradients

    return leave_sums
