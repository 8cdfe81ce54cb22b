"""Step time, waiting for data, time left (formulas: docs/formulas.md, Throughput).

A step lasts from its begin to the next one's, data wait included. All clocks are monotonic.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from trainmon.events import DataBegin, DataEnd, EvalBegin, Save, StepBegin, StepEnd
from trainmon.frame import Floats, Frame, Registry, identity, ratio
from trainmon.probes.base import ProbeContext, Sample

__all__ = ["TimingProbe"]

#: Step times behind the estimate of the time left, and how many it needs at least.
_ETA_WINDOW, _ETA_MINIMUM = 100, 5


class TimingProbe:
    """Publishes ``time/step``, ``time/data_wait``, ``time/data_wait_share`` and ``time/eta``.

    The first step of a life (compilation, first batch) and steps with an evaluation or a save in them don't count for
    the time left.
    """

    name = "timing"

    def __init__(self) -> None:
        self.stale = False
        self._began: float | None = None
        self._data_began: float | None = None
        self._waited: float | None = None
        self._clean = True
        self._steps: deque[float] = deque(maxlen=_ETA_WINDOW)
        self._seen = 0

    def begin(self, context: ProbeContext) -> None:
        self._total = context.begin.total_steps

    def register(self, registry: Registry) -> None:
        self.stale = False
        self._step = registry.part("time.step", "max")
        self._wait = registry.part("time.wait", "max")
        self._wait_sum = registry.part("time.wait_sum", "sum")
        self._step_sum = registry.part("time.step_sum", "sum")
        self._left = registry.part("time.eta", "max")
        registry.add("time/step", (self._step,), identity, probe=self.name)
        registry.add("time/data_wait", (self._wait,), identity, probe=self.name)
        registry.add("time/data_wait_share", (self._wait_sum, self._step_sum), ratio, probe=self.name)
        registry.add("time/eta", (self._left,), identity, probe=self.name)

    def on_step_begin(self, event: StepBegin) -> None:
        self._began, self._waited, self._clean = event.time, None, True

    def on_data_begin(self, event: DataBegin) -> None:
        self._data_began = event.time

    def on_data_end(self, event: DataEnd) -> None:
        if self._data_began is not None:
            self._waited = (self._waited or 0.0) + event.time - self._data_began
            self._data_began = None

    def on_eval_begin(self, event: EvalBegin) -> None:
        self._clean = False

    def on_save(self, event: Save) -> None:
        self._clean = False

    def close(self, event: StepEnd) -> Sample:
        seconds = None if self._began is None else event.time - self._began
        waited, eta = self._waited, None
        if seconds is not None and seconds > 0 and self._clean:
            self._seen += 1
            if self._seen > 1:
                self._steps.append(seconds)
        if self._total is not None and len(self._steps) >= _ETA_MINIMUM:
            eta = max(0, self._total - event.step) * median(self._steps)

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            if seconds is not None:
                frame.set(self._step, seconds)
            if waited is not None and seconds is not None:
                frame.set(self._wait, waited)
                frame.set(self._wait_sum, waited)
                frame.set(self._step_sum, seconds)
            if eta is not None and math.isfinite(eta):
                frame.set(self._left, eta)

        return Sample((), write)
