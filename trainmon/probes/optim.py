"""Learning rate of the step, per parameter group, and the loss scale where a host has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainmon.events import GradsReady, StepBegin, StepEnd
from trainmon.frame import Floats, Frame, Registry, identity
from trainmon.probes.base import ProbeContext, Sample

__all__ = ["OptimProbe"]


def _of_several(rates: Floats) -> tuple[Floats, bool]:
    """The rate of a single group is the rate."""
    return rates, len(rates) > 1


class OptimProbe:
    """Publishes ``optim/lr`` (the largest of the groups), ``optim/lr/<group>`` with several groups, and, where
    a loss scaler is at work, ``optim/loss_scale`` and ``optim/overflow``.

    The rate is the one that the update of this step used: it is read when gradients are ready or when the optimizer
    steps, before a scheduler moves on.
    """

    name = "optim"

    def __init__(self) -> None:
        self.stale = False
        self._groups: tuple[str, ...] = ()
        self._rates: Mapping[str, Any] | None = None
        self._scale: Any = None

    def begin(self, context: ProbeContext) -> None:
        self._context = context
        if context.begin.optimizer is not None:
            self._groups = tuple(context.begin.optimizer.learning_rates())

    def register(self, registry: Registry) -> None:
        self.stale = False
        self._lr = registry.part("optim.lr", "max")
        registry.add("optim/lr", (self._lr,), identity, probe=self.name)
        self._lr_groups = registry.part("optim.lr.groups", "max", subjects=self._groups)
        registry.add(
            "optim/lr/<group>",
            (self._lr_groups,),
            _of_several,
            probe=self.name,
            subjects=self._groups,
            optional=True,
        )
        self._loss_scale = registry.part("optim.loss_scale", "max")
        self._overflow = registry.part("optim.overflow", "max")
        registry.add("optim/loss_scale", (self._loss_scale,), identity, probe=self.name, optional=True)
        registry.add("optim/overflow", (self._overflow,), identity, probe=self.name, optional=True)
        self._index = {name: index for index, name in enumerate(self._groups)}

    def on_step_begin(self, event: StepBegin) -> None:
        self._rates, self._scale = None, None

    def on_grads_ready(self, event: GradsReady) -> None:
        if event.learning_rates is not None:
            self._rates = event.learning_rates
        if event.loss_scale is not None:
            self._scale = event.loss_scale

    def close(self, event: StepEnd) -> Sample:
        rates = event.learning_rates if event.learning_rates is not None else self._rates
        if rates is not None and tuple(rates) != self._groups:
            self._groups = tuple(rates)
            self.stale = True
        scalar = self._context.backend.scalar
        scale = event.loss_scale if event.loss_scale is not None else self._scale
        values = [scalar(rate) for rate in (rates or {}).values()]
        extra = [None if value is None else scalar(value) for value in (scale, event.overflow)]

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            numbers = [float(array[0]) for array in read]
            for name, rate in zip(rates or (), numbers, strict=False):
                frame.add(self._lr, rate)
                if name in self._index:
                    frame.set(self._lr_groups, rate, self._index[name])
            rest = iter(numbers[len(values) :])
            for part, lazy in zip((self._loss_scale, self._overflow), extra, strict=True):
                if lazy is not None:
                    frame.set(part, next(rest))

        return Sample([*values, *(lazy for lazy in extra if lazy is not None)], write)
