"""What msProbe's older monitor shows of a MindSpore model beside rows of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trainmon.adapters.mindspore_parts.parameters import host_view
from trainmon.adapters.mindspore_rows.collectives import is_distributed
from trainmon.adapters.mindspore_rows.meter import Meter
from trainmon.adapters.mindspore_rows.names import named_cells
from trainmon.adapters.mindspore_rows.structure import StackHooks, StructureHooks
from trainmon.adapters.rows_parts.kinds import Failed
from trainmon.adapters.rows_parts.names import Named
from trainmon.backend.base import Lazy
from trainmon.backend.host import HostBackend

__all__ = ["More"]

Pairs = Iterable[tuple[Named, Any]]


class More:
    """Of the same model, optimizer and meter as the rows.

    Args:
        gradients: those that the running update was given, by parameter.
        momenta: first moments, by parameter.

    Attributes:
        lacks: keys of the configuration that have no meaning here.
    """

    def __init__(
        self,
        model: Any,
        parameters: Sequence[Named],
        meter: Meter,
        failed: Failed,
        *,
        compiled: bool,
        gradients: Callable[[], Pairs],
        momenta: Callable[[], Pairs],
    ) -> None:
        self._model, self._parameters, self._meter, self._failed = model, parameters, meter, failed
        self._gradients, self._momenta = gradients, momenta
        self._host = HostBackend()
        unseen = {"print_struct", "stack_info", "mg_direction"} if compiled else set()
        self.lacks = frozenset({"recording_l2_features", *unseen})

    def names(self) -> tuple[list[str], list[str]]:
        """Of all Cells, and of all parameters."""
        return [one.name for one in named_cells(self._model)], [one.name for one in self._parameters]

    def describe(self, distances: frozenset[float]) -> None:
        """Readings say from now on what the tensor is, and which share of it is nearer to zero than each distance."""
        self._meter.distances = distances

    def structure(self) -> StructureHooks:
        return StructureHooks(list(named_cells(self._model)), self._failed)

    def stacks(self, chosen: Callable[[str], bool]) -> StackHooks:
        return StackHooks([one for one in named_cells(self._model) if chosen(one.name)], self._failed)

    def features(self, kind: str, names: Sequence[str] | None, sequence_first: bool) -> Any:
        raise NotImplementedError("features of layers are not built for MindSpore")

    def directions(self) -> list[tuple[str, int, Lazy]]:
        """Of each parameter with gradient and momentum: elements of one sign in both, of opposite signs, and all."""
        momenta = {id(named): momentum for named, momentum in self._momenta()}
        found = []
        for named, gradient in self._gradients():
            momentum = momenta.get(id(named))
            if momentum is None or not hasattr(gradient, "asnumpy") or gradient.shape != momentum.shape:
                continue
            if self._meter.backend is None:
                lazy = self._host.signs([host_view(gradient)], [host_view(momentum)])
            else:
                lazy = self._meter.backend.signs([gradient], [momentum])
            found.append((named.name, named.stage, lazy))
        return found

    def redundant(self, data_group: Any, tensor_group: Any) -> frozenset[str]:
        """Parameters that another rank shows: groups are not looked at."""
        return frozenset()

    def together(self) -> None:
        """Waits for the other ranks."""
        if is_distributed():
            from mindspore.communication.comm_func import barrier

            barrier()
