"""How far gradients go the way of the momentum that they are about to join: the agreement of their signs.

Looked at before the optimizer's step, when the momentum has nothing of this gradient yet; neither clipping nor a loss
scale changes a sign. Formula: docs/formulas.md. Null before an optimizer has momentum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainmon.backend.base import Lazy
from trainmon.events import GradsReady, StepBegin, StepEnd
from trainmon.frame import Flags, Floats, Frame, Registry
from trainmon.probes.base import ProbeContext, Sample, Selected

__all__ = ["MomentumProbe"]

#: First moments by the names of :meth:`trainmon.events.OptimizerView.moments`.
_MOMENTUM = ("exp_avg", "momentum_buffer")


def _agreement(product: Floats, count: Floats) -> tuple[Floats, Flags]:
    return (product / count + 1) / 2, count != 0


class MomentumProbe:
    """Publishes ``grad/sign_agreement`` over the selected parameters that have momentum, each piece once.

    Args:
        selected: whether a parameter of this name is looked at.
    """

    name = "gradients"
    title = "gradients: signs"

    def __init__(self, selected: Selected) -> None:
        self.stale = False
        self._selected = selected
        self._known: dict[str, bool] = {}
        self._counts: Lazy | None = None
        self._seen = self._left_out_said = False

    def begin(self, context: ProbeContext) -> None:
        self._context = context

    def register(self, registry: Registry) -> None:
        self.stale = False
        self._product = registry.part("grad.sign_product", "sum")
        self._count = registry.part("grad.sign_count", "sum")
        registry.add("grad/sign_agreement", (self._product, self._count), _agreement, probe=self.name)

    def on_step_begin(self, event: StepBegin) -> None:
        self._counts, self._seen = None, False

    def on_grads_ready(self, event: GradsReady) -> None:
        optimizer = self._context.begin.optimizer
        if self._seen or optimizer is None:
            return
        self._seen = True
        gradients, momentum = self._pairs(event)
        if gradients:
            self._counts = self._context.backend.signs(gradients, momentum)

    def _pairs(self, event: GradsReady) -> tuple[list[Any], list[Any]]:
        """This rank's gradients and their momentum, of what it contributes."""
        optimizer = self._context.begin.optimizer
        views = {} if optimizer is None else optimizer.moments()
        there = dict(zip(event.gradients.names, event.gradients.tensors, strict=True))
        gradients, momentum = [], []
        for state in _MOMENTUM:
            for name, tensor, shard in views.get(state, ()):
                gradient = there.pop(name, None)
                if gradient is None or not shard.owner or not self._is_selected(name):
                    continue
                shape = getattr(gradient, "shape", tensor.shape)  # without one the backend says what it lacks
                if shard.apart or tuple(shape) != tuple(tensor.shape):
                    self._say_left_out(event.step, name, state)
                    continue
                gradients.append(gradient)
                momentum.append(tensor)
        return gradients, momentum

    def _is_selected(self, name: str) -> bool:
        """Patterns are searched once a name."""
        answer = self._known.get(name)
        if answer is None:
            answer = self._known[name] = name in self._selected
        return answer

    def _say_left_out(self, step: int, name: str, state: str) -> None:
        if not self._left_out_said:
            self._left_out_said = True
            text = (
                f"grad/sign_agreement leaves out {name} and others like it: {state} is kept in other pieces than the "
                "gradient, or in another shape (sparse gradients)"
            )
            self._context.say("info", "momentum_left_out", text, step=step)

    def close(self, event: StepEnd) -> Sample:
        counts, self._counts = self._counts, None

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            for same, opposite, total in read:
                frame.set(self._product, float(same - opposite))
                frame.set(self._count, float(total))

        return Sample(() if counts is None else (counts,), write)
