"""What a smaller format would do to the gradients: the share of their elements that would become zero.

Counted on the gradients as they stand, with the loss scale on them: that is what a cast would see
(docs/formulas.md, Gradients; the formats' limits: docs/kernels/histograms.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainmon.backend.base import Lazy
from trainmon.events import GradsReady, StepBegin, StepEnd
from trainmon.frame import Floats, Frame, Registry, ratio
from trainmon.probes.base import ProbeContext, Sample, owned_flags

__all__ = ["UnderflowProbe"]


class UnderflowProbe:
    """Publishes ``grad/underflow_share/<format>``: elements that round to zero over nonzero finite elements, of all
    selected parameters, each piece once.

    Args:
        selected: whether a parameter of this name is looked at.
        formats: as :func:`trainmon.underflow_shares` names them.
    """

    name = "gradients"
    title = "gradients: underflow"

    def __init__(self, selected: Any, formats: Sequence[str]) -> None:
        self.stale = False
        self._selected, self._formats = selected, tuple(formats)
        self._counts: Lazy | None = None

    def begin(self, context: ProbeContext) -> None:
        self._context = context

    def register(self, registry: Registry) -> None:
        self.stale = False
        self._flushed = registry.part("grad.flushed", "sum", subjects=self._formats)
        self._nonzero = registry.part("grad.nonzero", "sum", subjects=self._formats)
        registry.add(
            "grad/underflow_share/<format>",
            (self._flushed, self._nonzero),
            ratio,
            probe=self.name,
            subjects=self._formats,
        )

    def on_step_begin(self, event: StepBegin) -> None:
        self._counts = None

    def on_grads_ready(self, event: GradsReady) -> None:
        if self._counts is not None and event.phase == "clipped":
            return  # as they were before clipping
        view = event.gradients
        mine = [
            tensor
            for name, tensor, own in zip(view.names, view.tensors, owned_flags(view).tolist(), strict=True)
            if own and name in self._selected
        ]
        self._counts = self._context.backend.flushed(mine, self._formats)

    def close(self, event: StepEnd) -> Sample:
        counts, self._counts = self._counts, None

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            for table in read:
                frame.fill(self._flushed, table[:, 0])
                frame.fill(self._nonzero, table[:, 1])

        return Sample(() if counts is None else (counts,), write)
