"""What msProbe's older monitor shows of a torch model beside rows of tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as distributed

from trainmon.adapters.rows_parts.kinds import Failed
from trainmon.adapters.rows_parts.names import Named
from trainmon.adapters.torch_parts.modules import hookable
from trainmon.adapters.torch_parts.shards import is_dtensor, local
from trainmon.adapters.torch_rows.collectives import is_distributed
from trainmon.adapters.torch_rows.features import FeatureHooks, fitting
from trainmon.adapters.torch_rows.gradients import gradient_of
from trainmon.adapters.torch_rows.meter import Meter
from trainmon.adapters.torch_rows.names import chunks_of, named_modules
from trainmon.adapters.torch_rows.state import state_of, states_of
from trainmon.adapters.torch_rows.structure import StackHooks, StructureHooks
from trainmon.backend.base import Lazy

__all__ = ["More"]


class More:
    """Of the same model, optimizer and meter as the rows.

    Attributes:
        lacks: keys of the configuration that have no meaning here.
    """

    lacks: frozenset[str] = frozenset()

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        parameters: Sequence[Named],
        meter: Meter,
        failed: Failed,
    ) -> None:
        self._model, self._optimizer, self._parameters = model, optimizer, parameters
        self._meter, self._failed = meter, failed

    def names(self) -> tuple[list[str], list[str]]:
        """Of all modules, and of all parameters."""
        return [one.name for one in named_modules(self._model)], [one.name for one in self._parameters]

    def describe(self, distances: frozenset[float]) -> None:
        """Readings say from now on what the tensor is, and which share of it is nearer to zero than each distance."""
        self._meter.distances = distances

    def structure(self) -> StructureHooks:
        return StructureHooks(self._modules(), self._failed)

    def stacks(self, chosen: Callable[[str], bool]) -> StackHooks:
        return StackHooks([one for one in self._modules() if chosen(one.name)], self._failed)

    def features(
        self, kind: str, names: Sequence[str] | None, sequence_first: bool
    ) -> tuple[FeatureHooks, list[str]]:
        """Hooks of one kind, and the names that no module has."""
        modules = self._modules()
        there = {one.name for one in modules}
        missing = [name for name in names or () if name not in there]
        found = fitting(kind, modules, names)
        return FeatureHooks(kind, found, sequence_first, self._meter.backend_of, self._failed), missing

    def directions(self) -> list[tuple[str, int, Lazy]]:
        """Of each parameter with gradient and momentum: elements of one sign in both, of opposite signs, and all."""
        found = []
        states = list(states_of(self._optimizer))
        for one in self._parameters:
            gradient, momentum = gradient_of(one.thing), state_of(one.thing, states).get("exp_avg")
            if gradient is None or not isinstance(momentum, torch.Tensor):
                continue
            mine, theirs = local(gradient.detach()), local(momentum.detach())
            if mine.shape != theirs.shape or mine.layout is not torch.strided:
                continue
            found.append((one.name, one.stage, self._meter.backend_of(mine).signs([mine], [theirs])))
        return found

    def redundant(self, data_group: Any, tensor_group: Any) -> frozenset[str]:
        """Parameters that an earlier rank has alike: of a data parallel group all, of a tensor parallel group those that
        are not split."""
        names: set[str] = set()
        if data_group is not None and distributed.get_rank(data_group) > 0:
            names.update(one.name for one in self._parameters)
        if tensor_group is not None and distributed.get_rank(tensor_group) > 0:
            whole = [one for one in self._parameters if not is_dtensor(one.thing)]
            names.update(one.name for one in whole if not getattr(one.thing, "tensor_model_parallel", False))
        return frozenset(names)

    def together(self) -> None:
        """Waits for the other ranks."""
        if is_distributed():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                distributed.barrier()

    def _modules(self) -> list[Named]:
        inside = {id(one) for _, _, chunk in chunks_of(self._model) for one in hookable(chunk)[1].values()}
        return [one for one in named_modules(self._model) if id(one.thing) not in inside]
