"""The update: gradients as the optimizer gets them, when it begins and ends, with which learning rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from trainmon.adapters.mindformers.pynative.optimizer import with_gradients
from trainmon.adapters.mindformers.pynative.rates import Rates
from trainmon.adapters.mindformers.pynative.sayings import Sayings
from trainmon.adapters.mindspore_parts.parameters import OptimizerView, ParameterList, own_piece
from trainmon.events import (
    AttentionSeen,
    Decision,
    GradsReady,
    OptimizerBegin,
    OptimizerEnd,
    Phase,
    TensorView,
)
from trainmon.monitor import TrainMonitor

__all__ = ["UpdateHooks"]


class UpdateHooks:
    """Hooks on an optimizer, which the host calls with the gradients after it has clipped them.

    Args:
        optimizer: of ``mindspore.nn``, or None.
        max_norm: what the host clips to; None: not told.
        before: is called when all micro-batches are through and weights have not changed.
        judge: is given what rules say of the gradients; may raise.

    Attributes:
        made: whether the running step has had its update.
        rates: learning rates.
    """

    def __init__(
        self,
        optimizer: Any,
        parameters: ParameterList,
        view: OptimizerView,
        monitor: TrainMonitor,
        sayings: Sayings,
        max_norm: float | None,
        before: Callable[[], None],
        judge: Callable[[Decision], None],
    ) -> None:
        self._optimizer, self._parameters, self._monitor = optimizer, parameters, monitor
        self._sayings, self._max_norm = sayings, max_norm
        self._before, self._judge = before, judge
        self.rates = Rates(optimizer, view)
        self.made = self._running = False
        self._handles: list[Any] = []

    @property
    def installed(self) -> bool:
        """Whether updates are seen."""
        return bool(self._handles)

    def install(self) -> None:
        """Hooks where somebody listens, none where nobody does."""
        wanted = (GradsReady, OptimizerBegin, OptimizerEnd, AttentionSeen)
        if self._optimizer is None or not any(self._monitor.listens(kind) for kind in wanted):
            self.remove()
        elif not self._handles:
            self._handles = [
                self._optimizer.register_forward_pre_hook(self._begins),
                self._optimizer.register_forward_hook(self._ends),
            ]
            self.rates.install()

    def remove(self) -> None:
        """Idempotent."""
        self._running = False
        self.rates.remove()
        while self._handles:
            self._handles.pop().remove()

    def arm(self) -> None:
        """A step begins."""
        self._running, self.made = True, False

    def step_ends(self) -> None:
        """It is over: what the optimizer is called for now is not the host's update."""
        self._running = False

    def _begins(self, _cell: Any, inputs: Any) -> None:
        if not self._running:
            return
        self.made, monitor = True, self._monitor
        monitor.guard(self.rates.begin)
        monitor.handle(OptimizerBegin(time.perf_counter()))
        self._before()
        if monitor.config.gradients is not None:
            values = inputs[0] if len(inputs) == 1 else inputs
            monitor.offer(GradsReady, lambda: self._ready(self._shown(values)))
        self._judge(monitor.before_update())

    def _ends(self, _cell: Any, _inputs: Any, _output: Any) -> None:
        self.rates.end()
        if self._running:
            self._monitor.handle(OptimizerEnd(time.perf_counter()))

    def _ready(self, view: TensorView) -> GradsReady:
        phase: Phase = "reduced" if self._max_norm == float("inf") else "clipped"
        return GradsReady(self._monitor.step, view, phase, self._max_norm or None)

    def _shown(self, values: Sequence[Any]) -> TensorView:
        """Gradients by the names of their parameters."""
        order = with_gradients(self._optimizer, values)
        updated = [one.name for one in self._optimizer.parameters]
        if order is None or len(order) < len(updated):
            there = set(order or ())
            self._sayings.misaligned([name for at, name in enumerate(updated) if at not in there])
        whole = {at: own_piece(value) for at, value in zip(order or (), values, strict=False)}
        return self._parameters.gradients([whole.get(at) for at in range(len(updated))])
