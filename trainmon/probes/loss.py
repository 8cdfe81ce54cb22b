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
from trainmon.findings import LAST_CALL, Finding
from trainmon.frame import Flags, Floats, Frame, Part, Registry, identity, ratio
from trainmon.probes.base import ProbeContext, Sample

__all__ = ["LossProbe"]


def _gap(s: Floats, n: Floats, q: Floats, k: Floats) -> tuple[Floats, Flags]:
    return q / k - s / n, (n != 0) & (k != 0)


def _perplexity(s: Floats, n: Floats) -> tuple[Floats, Flags]:
    return np.exp(s / n), n != 0


class LossProbe:
    """Publishes ``loss/global``, ``loss/mean_of_means``, ``loss/gap``, ``loss/empty_steps``, ``loss/ppl``, ``loss/micro``
    and ``loss/device``: this rank's own.

    Args:
        whole, micro, perplexity: what is published.
        device: whether ``loss/device`` is; None: with several ranks.
        own: only what is this rank's own, beside a probe that has the rest; left out, not null, in steps without.
    """

    name = "loss"

    def __init__(
        self, *, whole: bool, micro: bool, perplexity: bool, device: bool | None = None, own: bool = False
    ) -> None:
        self.stale = False
        self._whole, self._micro, self._perplexity = whole, micro, perplexity
        self._device, self._merged = device, not own
        if own:
            self.title = "losses of this rank"
        self._capacity = 8
        self._losses: list[Lazy] = []
        self._tokens: list[Lazy | None] = []
        self._sums: list[bool] = []
        self._empty_steps = 0
        self._step = 0

    def begin(self, context: ProbeContext) -> None:
        self._context = context

    def register(self, registry: Registry) -> None:
        self.stale = False
        if self._merged:
            self._register_merged(registry)
        self._own: tuple[Part, Part] | None = None
        several = self._context.begin.layout.world > 1
        if several if self._device is None else self._device:
            self._own = registry.part("loss.own.s", "local"), registry.part("loss.own.n", "local")
            registry.add("loss/device", self._own, ratio, probe=self.name, optional=not self._merged)
        if self._micro:
            self._micro_parts = (
                registry.part("loss.micro.s", "local", self._capacity),
                registry.part("loss.micro.n", "local", self._capacity),
            )
            indices = [str(index) for index in range(self._capacity)]
            registry.add(
                "loss/micro",
                self._micro_parts,
                ratio,
                probe=self.name,
                subjects=indices,
                optional=not self._merged,
            )

    def _register_merged(self, registry: Registry) -> None:
        s, n = registry.part("loss.s", "sum", early=True), registry.part("loss.n", "sum", early=True)
        q, k = registry.part("loss.q", "sum", early=True), registry.part("loss.k", "sum", early=True)
        empty = registry.part("loss.empty_steps", "max")
        self._parts = s, n, q, k, empty
        if self._whole:
            registry.add("loss/global", (s, n), ratio, probe=self.name)
            registry.add("loss/mean_of_means", (q, k), ratio, probe=self.name)
            registry.add("loss/gap", (s, n, q, k), _gap, probe=self.name)
            registry.add("loss/empty_steps", (empty,), identity, probe=self.name)
        if self._perplexity:
            registry.add("loss/ppl", (s, n), _perplexity, probe=self.name)

    def on_step_begin(self, event: StepBegin) -> None:
        # What an interrupted step left behind is not this step's.
        self._losses, self._tokens, self._sums = [], [], []
        self._step = event.step

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
        return self._sample(event.step, losses, tokens, sums)

    def before_update(self) -> Sample:
        """What the micro-batches gave so far."""
        if not self._merged:
            return Sample((), lambda frame, read: None)
        return self._sample(self._step, list(self._losses), list(self._tokens), list(self._sums))

    def _sample(self, step: int, losses: list[Lazy], tokens: list[Lazy | None], sums: list[bool]) -> Sample:
        counted = [lazy for lazy in tokens if lazy is not None]

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            values = [float(array[0]) for array in read]
            counts = iter(values[len(losses) :])
            weights = [1.0 if lazy is None else next(counts) for lazy in tokens]
            self._write(frame, step, list(zip(values, weights, sums, strict=False)))

        return Sample((*losses, *counted), write)

    def _write(self, frame: Frame, step: int, micros: list[tuple[float, float, bool]]) -> None:
        """Each micro-batch is (loss, counted tokens, whether the loss is their sum)."""
        totals: list[float] = []
        means: list[float] = []
        bad: tuple[int, float] | None = None
        for index, (value, weight, is_sum) in enumerate(micros):
            if not weight >= 0:
                raise ValueError(f"step {step}: micro-batch {index} counts {weight:g} tokens")
            if weight > 0:
                totals.append(value if is_sum else value * weight)
                means.append(value / weight if is_sum else value)
                if bad is None and not math.isfinite(means[-1]):
                    bad = index, means[-1]
            if self._micro and index < self._micro_parts[0].size:
                frame.set(self._micro_parts[0], totals[-1] if weight > 0 else 0.0, index)
                frame.set(self._micro_parts[1], weight, index)
        total, weights = _exact_sum(totals), math.fsum(weight for _, weight, _ in micros)
        if micros and self._own is not None:
            frame.set(self._own[0], total)
            frame.set(self._own[1], weights)
        if not self._merged:
            return
        s, n, q, k, _ = self._parts
        if micros and self._context.begin.layout.counts_tokens:
            frame.set(s, total)
            frame.set(n, weights)
            frame.set(q, _exact_sum(means))
            frame.set(k, float(len(means)))
        if bad is not None:
            micro, loss = bad
            counts = {"nan" if math.isnan(loss) else "+inf" if loss > 0 else "-inf": 1}
            # The loss is what all calls of the forward end in.
            bad_loss = Finding(step, "forward", "loss", "", "loss/global", micro, LAST_CALL, counts=counts)
            self._context.found(bad_loss)

    def merged(self, frame: Frame) -> None:
        """Counts the steps in which no rank had a token that counts."""
        if not self._merged:
            return
        _, n, _, _, empty = self._parts
        values, valid = frame.get(n)
        self._empty_steps += bool(valid[0] and values[0] == 0)
        frame.set(empty, float(self._empty_steps))


def _exact_sum(values: Sequence[float]) -> float:
    """Correctly rounded where finite: the order of micro-batches changes no bit. Otherwise as IEEE 754 adds."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)
