"""Tokens and samples a second, and what was consumed in all (formulas: docs/formulas.md, Throughput).

A rate belongs to one step: its tokens over its own seconds, so that a resume, which brings a large total with it,
changes no rate. Ranks add their own tokens and samples; what earlier lives consumed is the run's and counts once:
as the host knows it, else as rank 0's ``scalars.jsonl`` has it at the step that the run goes on from. Without either the
totals are null.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainmon.backend.base import Lazy
from trainmon.events import MicroEnd, StepBegin, StepEnd
from trainmon.frame import Flags, Floats, Frame, Registry
from trainmon.probes.base import ProbeContext, Sample

__all__ = ["ThroughputProbe"]

_TOTALS = ("data/tokens", "data/consumed_samples")


def _rate(amount: Floats, seconds: Floats) -> tuple[Floats, Flags]:
    return amount / seconds, seconds > 0


def _together(before: Floats, own: Floats) -> tuple[Floats, bool]:
    return before + own, True


class ThroughputProbe:
    """Publishes ``perf/tokens_per_second``, ``perf/samples_per_second``, ``data/tokens`` and
    ``data/consumed_samples``. Tokens come from the micro-batches, or from the step's end if the host counts there."""

    name = "throughput"

    def __init__(self) -> None:
        self.stale = False
        self._began: float | None = None
        self._micro: list[Lazy] = []
        self._counted = True

    def begin(self, context: ProbeContext) -> None:
        self._context = context
        self._own_tokens = self._own_samples = 0.0

    def register(self, registry: Registry) -> None:
        self.stale = False
        tokens, samples = registry.part("perf.tokens", "sum"), registry.part("perf.samples", "sum")
        seconds = registry.part("perf.seconds", "max")
        own_tokens, own_samples = registry.part("data.tokens", "sum"), registry.part("data.samples", "sum")
        self._before = registry.part("data.tokens_before", "max"), registry.part("data.samples_before", "max")
        self._parts = tokens, samples, seconds, own_tokens, own_samples
        registry.add("perf/tokens_per_second", (tokens, seconds), _rate, probe=self.name)
        registry.add("perf/samples_per_second", (samples, seconds), _rate, probe=self.name)
        registry.add("data/tokens", (self._before[0], own_tokens), _together, probe=self.name)
        registry.add("data/consumed_samples", (self._before[1], own_samples), _together, probe=self.name)

    def on_step_begin(self, event: StepBegin) -> None:
        self._began, self._micro, self._counted = event.time, [], True

    def on_micro_end(self, event: MicroEnd) -> None:
        if event.tokens is None:
            self._counted = False
        else:
            self._micro.append(self._context.backend.scalar(event.tokens))

    def close(self, event: StepEnd) -> Sample:
        scalar = self._context.backend.scalar
        if event.tokens is not None:
            token_lazies = [scalar(event.tokens)]
        else:
            token_lazies = self._micro if self._counted else []
        sample_lazies = [] if event.samples is None else [scalar(event.samples)]
        seconds = None if self._began is None else event.time - self._began
        self._micro = []

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            tokens, samples, duration, own_tokens, own_samples = self._parts
            begin = self._context.begin
            told = (begin.consumed_tokens, begin.consumed_samples)
            for part, series, number in zip(self._before, _TOTALS, told, strict=True):
                before = self._consumed(series, number)
                if before is not None:
                    frame.set(part, before)
            if seconds is not None:
                frame.set(duration, seconds)
            if not begin.layout.counts_tokens:
                return
            amount = [float(array[0]) for array in read]
            if token_lazies:
                step_tokens = sum(amount[: len(token_lazies)])
                self._own_tokens += step_tokens * event.steps
                frame.set(tokens, step_tokens)
                frame.set(own_tokens, self._own_tokens)
            if sample_lazies:
                self._own_samples += amount[-1] * event.steps
                frame.set(samples, amount[-1])
                frame.set(own_samples, self._own_samples)

        return Sample((*token_lazies, *sample_lazies), write)

    def _consumed(self, series: str, told: int | None) -> float | None:
        """What earlier lives consumed, as the host knows it, or as the run's own file has it."""
        if told is not None:
            return float(told)
        if self._context.begin.resumed_step == 0:
            return 0.0
        before = self._context.before.get(series)
        return float(before) if isinstance(before, int | float) else None
