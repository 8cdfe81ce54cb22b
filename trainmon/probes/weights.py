"""Weights: their norm, norms of single parameters, search for non-finite values.

Looked at when the step is over, after the update. Formulas: docs/formulas.md. Tied weights count once, frozen ones not at
all. Norms propagate NaN and infinities as torch does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainmon.events import StepEnd, TensorView
from trainmon.frame import Floats, Frame, Registry, root
from trainmon.probes.base import (
    NonFiniteCount,
    ProbeContext,
    Rows,
    Sample,
    Selected,
    Source,
    contributing,
    owned_flags,
    weights_of,
)

__all__ = ["WeightsProbe"]


class WeightsProbe:
    """Publishes ``weight/norm``, ``weight/norm/<p>``, ``weight/nonfinite``.

    Args:
        selected: whether a parameter of this name has a row; norm and count are of all parameters.
        norm, per_parameter, nonfinite: what is published.
        source: which copy of the weights.
    """

    name = "weights"

    def __init__(
        self, selected: Selected, *, norm: bool, per_parameter: bool, nonfinite: bool, source: Source
    ) -> None:
        self.stale = False
        self._norm, self._per_parameter, self._nonfinite = norm, per_parameter, nonfinite
        self._source = source
        self._rows = Rows(selected)
        self._count = NonFiniteCount("weight", "optimizer", "weight")
        self._masters = 0

    def begin(self, context: ProbeContext) -> None:
        self._context = context
        if context.begin.model is not None:
            self._rows.extend(context.begin.model.parameter_names())

    def register(self, registry: Registry) -> None:
        self.stale = False
        if self._context.begin.model is None:
            return  # a host that shows none
        self._square = registry.part("weight.sumsq", "sum")
        if self._norm:
            registry.add("weight/norm", (self._square,), root, probe=self.name)
        self._count.register(registry, probe=self.name, published=self._nonfinite)
        self._table = None
        if self._per_parameter:
            self._table = registry.part("weight.sumsq_tensor", "sum", subjects=self._rows.names)
            registry.add("weight/norm/<p>", (self._table,), root, probe=self.name, subjects=self._rows.names)

    def close(self, event: StepEnd) -> Sample:
        begin, backend = self._context.begin, self._context.backend
        if begin.model is None:
            return Sample((), lambda frame, read: None)
        view, masters = weights_of(begin, self._source)
        if not view.names and begin.model.parameter_names():
            return Sample((), lambda frame, read: None)  # they are where the host can't look
        self._say_source(event.step, view, masters)
        if self._per_parameter and self._rows.extend(view.names):
            self.stale = True
        names, owned = view.names, owned_flags(view)

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            (table,) = read
            mine = contributing(owned, table[:, 0])
            frame.set(self._square, float(np.sum(table[mine, 0])))
            if self._table is not None:
                self._rows.write(frame, self._table, names, table[:, 0], mine)
            finding = self._count.write(frame, event.step, names, owned, table)
            if finding is not None:
                self._context.found(finding)

        return Sample((backend.summaries(view.tensors),), write)

    def _say_source(self, step: int, view: TensorView, masters: int) -> None:
        """Master copies may come with the first update."""
        if masters == self._masters:
            return
        self._masters = masters
        text = f"weights are the optimizer's master copies of {masters} of {len(view)} parameters"
        if not masters:
            text = "weights are the model's own: the optimizer keeps no master copies any more"
        self._context.say("info", "weights_source", text, step=step, data={"masters": masters})
