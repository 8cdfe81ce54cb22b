"""The optimizer of the host as the engine asks for it: MindSpore's, with float32 copies of weights of 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspore import Parameter

from trainmon.adapters.mindformers.pynative.gradients import accumulated, is_low_precision
from trainmon.adapters.mindspore_parts.parameters import OptimizerView, ParameterList, host_view, own_piece
from trainmon.events import TensorView

__all__ = ["Chunks", "HostOptimizer", "with_gradients"]

_MASTERS = "fp32_params"


class Chunks:
    """The cells of a model on this rank as one network."""

    def __init__(self, cells: Sequence[Any]) -> None:
        self._cells = cells

    def trainable_params(self) -> list[Any]:
        return [parameter for cell in self._cells for parameter in cell.trainable_params()]


class HostOptimizer(OptimizerView):
    """See :class:`trainmon.events.OptimizerView`."""

    def __init__(self, optimizer: Any, parameters: ParameterList, addressable: bool) -> None:
        super().__init__(optimizer, parameters, addressable)
        self._optimizer, self._parameters, self._addressable = optimizer, parameters, addressable

    def masters(self) -> TensorView:
        """Of parameters of 16 bits; those of 32 are updated themselves."""
        copies = getattr(self._optimizer, _MASTERS, None)
        if copies is None:
            return TensorView((), ())
        names: list[str] = []
        tensors: list[Any] = []
        mine = self._parameters
        for name, parameter, index in zip(mine.names, mine.parameters, mine.order, strict=True):
            if is_low_precision(parameter):
                names.append(name)
                copy = copies[index]
                tensors.append(host_view(copy) if self._addressable else own_piece(copy))
        return TensorView(names, tensors, mine.shards(names))

    def _states(self) -> Iterator[tuple[str, Sequence[Parameter]]]:
        for key, state in super()._states():
            if key != _MASTERS:
                yield key, state


def with_gradients(optimizer: Any, values: Sequence[Any]) -> list[int] | None:
    """Numbers of the parameters whose gradients an optimizer was called with, in their order; None: it can't be told.

    The host leaves out parameters without a gradient, and its optimizers take what comes by position.
    """
    count = len(list(optimizer.parameters))
    if len(values) == count:
        return list(range(count))
    there = [index for index, one in enumerate(optimizer.parameters) if accumulated(one) is not None]
    return there if len(there) == len(values) else None
