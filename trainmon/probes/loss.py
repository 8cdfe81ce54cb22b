"""Loss: token-weighted over all micro-batches, and each micro-batch's own (formulas: docs/formulas.md, Loss).

``loss/global`` is the sum of all token losses over the sum of all counted tokens; the mean of micro-batch means, which
many hosts print, is published beside it with the difference as ``loss/gap``. A micro-batch without a counted token is
left out, whatever its loss says. Without token counts every micro-batch weighs the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trainmon.backend.base import Lazy
from trainmon.events import MicroEnd, StepBegin, StepEnd
from trainmon.frame import Flags, Floats, Frame, Registry, identity, ratio
from trainmon.probes.base import ProbeContext, Sample

__all__ = ["LossProbe"]


def _gap(s: Floats, n: Floats, q: Floats, k: Floats) -> tuple[Floats, Flags]:
    return q / k - s / n, (n != 0) & (k != 0)


class LossProbe:
    """Publishes ``loss/global``, ``loss/mean_of_means``, ``loss/gap``, ``loss/empty_steps`` and ``loss/micro``."""

    name = "loss"

    def __init__(self, *, whole: bool, micro: bool) -> None:
        self.stale = False
        self._whole, self._micro = whole, micro
        self._capacity = 8
        self._losses: list[Lazy] = []
        self._tokens: list[Lazy | None] = []
        self._sums: list[bool] = []
        self._empty_steps = 0
        self._bad_since: int | None = None

    def begin(self, context: ProbeContext) -> None:
        self._context = context

    def register(self, registry: Registry) -> None:
        self.stale = False
        s, n = registry.part("loss.s", "sum"), registry.part("loss.n", "sum")
        q, k = registry.part("loss.q", "sum"), registry.part("loss.k", "sum")
        empty = registry.part("loss.empty_steps", "max")
        self._parts = s, n, q, k, empty
        if self._whole:
            registry.add("loss/global", (s, n), ratio, probe=self.name)
            registry.add("loss/mean_of_means", (q, k), ratio, probe=self.name)
            registry.add("loss/gap", (s, n, q, k), _gap, probe=self.name)
            registry.add("loss/empty_steps", (empty,), identity, probe=self.name)
        if self._micro:
            self._micro_parts = (
                registry.part("loss.micro.s", "local", self._capacity),
                registry.part("loss.micro.n", "local", self._capacity),
            )
            indices = [str(index) for index in range(self._capacity)]
            registry.add("loss/micro", self._micro_parts, ratio, probe=self.name, subjects=indices)

    def on_step_begin(self, event: StepBegin) -> None:
        # What an interrupted step left behind is not this step's.
        self._losses, self._tokens, self._sums = [], [], []

    def on_micro_end(self, event: MicroEnd) -> None:
        if event.loss is None:
            return
        scalar = self._context.backend.scalar
        self._losses.append(scalar(event.loss))
        self._tokens.append(None if event.tokens is None else scalar(event.tokens))
        self._sums.append(event.reduction == "sum")

    def close(self, event: StepEnd) -> Sample:
        losses, tokens, sums = self._losses, self._tokens, self._sums
        if not losses and event.loss is not None:
            losses, tokens, sums = [self._context.backend.scalar(event.loss)], [None], [False]
        self._losses, self._tokens, self._sums = [], [], []
        if self._micro and len(losses) > self._capacity:
            self._capacity = 1 << (len(losses) - 1).bit_length()
            self.stale = True
        counted = [lazy for lazy in tokens if lazy is not None]

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            values = np.array([float(array[0]) for array in read[: len(losses)]])
            counts = iter(read[len(losses) :])
            weights = np.array([1.0 if lazy is None else float(next(counts)[0]) for lazy in tokens])
            self._write(frame, event.step, values, weights, np.array(sums, np.bool_))

        return Sample((*losses, *counted), write)

    def _write(self, frame: Frame, step: int, values: Floats, weights: Floats, sums: Flags) -> None:
        if np.any(weights < 0):
            raise ValueError(f"step {step}: a micro-batch with a negative token count ({weights.min():g})")
        counted = weights > 0
        with np.errstate(all="ignore"):
            totals = np.where(sums, values, values * weights)[counted]
            means = np.where(sums, values / weights, values)
        s, n, q, k, empty = self._parts
        if len(values):
            frame.set(s, _exact_sum(totals))
            frame.set(n, float(weights.sum()))
            frame.set(q, _exact_sum(means[counted]))
            frame.set(k, float(counted.sum()))
            self._empty_steps += not counted.any()
        frame.set(empty, float(self._empty_steps))
        if self._micro:
            for index, (mean, weight) in enumerate(zip(means, weights, strict=True)):
                frame.set(self._micro_parts[0], mean * weight if weight else 0.0, index)
                frame.set(self._micro_parts[1], weight, index)
        self._report(step, means, counted)

    def _report(self, step: int, means: Floats, counted: Flags) -> None:
        bad = np.flatnonzero(counted & ~np.isfinite(means))
        if len(bad) and self._bad_since is None:
            self._bad_since = step
            micro, value = int(bad[0]), float(means[bad[0]])
            text = f"loss is {value:g} in micro-batch {micro} of step {step}"
            self._context.say(
                "warning", "nonfinite_loss", text, step=step, data={"micro": micro, "value": value}
            )
        elif counted.any() and not len(bad) and self._bad_since is not None:
            steps = step - self._bad_since
            self._context.say("info", "finite_loss", f"loss is finite again after {steps} steps", step=step)
            self._bad_since = None


def _exact_sum(values: Floats) -> float:
    """Correctly rounded where finite: the order of micro-batches changes no bit."""
    return math.fsum(values) if np.isfinite(values).all() else float(np.sum(values))
