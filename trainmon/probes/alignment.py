"""How well the ranks' gradients agree: the reduced gradient's square over the mean of the squares before reduction.

1 where all ranks have the same gradient, 1/R for R ranks whose gradients are orthogonal, 0 where they cancel. Formula:
docs/formulas.md; what it means on which layout: docs/parallelism.md.

Ranks that hold the same piece of a parameter are those over which its gradient is averaged, so each rank contributes its
square over their number, and one of them the reduced one: two sums, whatever the layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainmon.backend.base import Lazy
from trainmon.events import GradientAccumulated, GradsReady, MicroEnd, MicroGradient, StepBegin, StepEnd
from trainmon.frame import Flags, Floats, Frame, Registry
from trainmon.probes.base import ProbeContext, Sample, contributing, owned_flags

__all__ = ["AlignmentProbe"]

Column = tuple[Floats, Flags]

#: Why a rank can't tell its part.
_NOT_SHOWN = "call grads_ready() after backward: what the optimizer sees may be clipped"
_UNSEEN = (
    "was never seen before its reduction on this rank: FSDP reduces inside backward, where no hook of a parameter is "
    "called; of experts, the rank may not have used one yet"
)
_BETWEEN = (
    "gradients change between micro-batches, so that a rank's own sum is never there: leave all reductions but the last "
    "out (no_sync())"
)

#: By how much rounding of the average may lift it above 1 (bfloat16 has 8 bits).
_ROUNDING = 0.01


def _align(mean: Column, ranks: Column, unknown: Column) -> Column:
    """Null unless every rank knows its part."""
    value = mean[0] / ranks[0]
    value = np.where((value > 1) & (value <= 1 + _ROUNDING), 1.0, value)
    return value, mean[1] & ranks[1] & unknown[1] & (unknown[0] == 0) & (ranks[0] != 0)


@dataclass(frozen=True, slots=True)
class _Reduced:
    """What is kept of the reduced gradients: never a tensor."""

    names: Sequence[str]
    owned: Flags
    holders: Floats  # of each piece; 0: not told yet
    shared: bool  # whether the ranks have compared their pieces
    scale: float
    squares: Lazy


class AlignmentProbe:
    """Publishes ``grad/align`` over all parameters.

    Args:
        summed: gradients are added up over ranks, not averaged.
    """

    name = "gradients"
    title = "gradients: alignment"

    def __init__(self, *, summed: bool) -> None:
        self.stale = False
        self._summed = summed
        self._ever: set[str] = set()  # parameters whose own gradient this rank has seen
        self._said: set[str] = set()
        self._reset()

    def _reset(self) -> None:
        self._own: dict[str, tuple[int, Lazy]] = {}  # micro-batch, square of what is accumulated
        self._found: list[Lazy] = []  # squares of what was there before a micro-batch's gradient was added,
        self._left: list[Lazy | None] = []  # and of what the one before had left; None: there was none
        self._scales: dict[int, float] = {}
        self._reduced: _Reduced | None = None
        self._clipped = False

    def begin(self, context: ProbeContext) -> None:
        self._context = context

    def register(self, registry: Registry) -> None:
        self.stale = False
        self._mean = registry.part("grad.q_mean", "sum")
        self._ranks = registry.part("grad.q_ranks", "sum")
        self._unknown = registry.part("grad.q_unknown", "max")
        parts = (self._mean, self._ranks, self._unknown)
        registry.add("grad/align", parts, _align, probe=self.name, sees_null=True)

    # -- a step -----------------------------------------------------------------------------------------------------

    def on_step_begin(self, event: StepBegin) -> None:
        self._reset()

    def on_micro_gradient(self, event: MicroGradient) -> None:
        if event.before is not None:
            self._found.append(self._context.backend.square_sum([event.before]))
            before = self._own.get(event.name)
            self._left.append(None if before is None else before[1])

    def on_gradient_accumulated(self, event: GradientAccumulated) -> None:
        self._ever.add(event.name)
        self._own[event.name] = event.micro, self._context.backend.square_sum([event.gradient])

    def on_micro_end(self, event: MicroEnd) -> None:
        if event.loss_scale is not None:
            self._scales[event.micro] = float(event.loss_scale)

    def on_grads_ready(self, event: GradsReady) -> None:
        view = event.gradients
        if event.phase != "reduced":
            self._clipped = True
            return
        self._reduced = _Reduced(
            view.names,
            owned_flags(view),
            np.array([float(shard.replicas) for _, _, shard in view]),
            bool(view.shards),
            1.0 if event.loss_scale is None else float(event.loss_scale),
            self._context.backend.squares(view.tensors),
        )

    def close(self, event: StepEnd) -> Sample:
        own, found, before, scales = self._own, self._found, self._left, self._scales
        reduced, clipped = self._reduced, self._clipped
        self._reset()
        if reduced is None:
            return Sample(
                (), lambda frame, read: self._give_up(frame, event.step, _NOT_SHOWN if clipped else "")
            )
        problem = self._problem(reduced)
        left = [lazy for lazy in before if lazy is not None]

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            table, squares = read[0], [float(square[0]) for square in read[1:]]
            mine, rest = squares[: len(own)], squares[len(own) :]
            known = iter(rest[len(found) :])
            unchanged = all(
                _same(now, 0.0 if lazy is None else next(known))
                for now, lazy in zip(rest, before, strict=False)
            )
            if problem is not None or not unchanged:
                self._give_up(frame, event.step, problem or _BETWEEN)
                return
            divisors = [scales.get(micro, reduced.scale) ** 2 for micro, _ in own.values()]
            with np.errstate(all="ignore"):
                each = np.array(mine) / divisors
            self._write(frame, reduced, table[:, 0], dict(zip(own, each.tolist(), strict=True)))

        return Sample([reduced.squares, *(lazy for _, lazy in own.values()), *found, *left], write)

    def _write(self, frame: Frame, reduced: _Reduced, squares: Floats, own: dict[str, float]) -> None:
        told = reduced.holders > 0
        holders = np.where(told, reduced.holders, 1.0)
        each = np.array([own.get(name, 0.0) for name in reduced.names])  # 0: not used on this rank
        with np.errstate(all="ignore"):
            means = squares / np.float64(reduced.scale) ** 2 / (holders**2 if self._summed else 1.0)
        frame.set(self._mean, float(np.sum(means[contributing(reduced.owned, squares) & told])))
        frame.set(self._ranks, float(np.sum((each / holders)[told])))
        frame.set(self._unknown, 0.0)

    def _problem(self, reduced: _Reduced) -> str | None:
        """Why this rank can't tell its part; what is said elsewhere is empty."""
        if self._context.begin.layout.world > 1 and not reduced.shared:
            return ""
        missing = next((name for name in reduced.names if name not in self._ever), None)
        return None if missing is None else f"the gradient of {missing} {_UNSEEN}"

    def _give_up(self, frame: Frame, step: int, problem: str) -> None:
        """Null on all ranks, and why, each reason once."""
        frame.set(self._unknown, 1.0)
        kind = problem.rpartition(_UNSEEN)[1] or problem
        if kind and kind not in self._said:
            self._said.add(kind)
            self._context.say("warning", "alignment_unknown", f"grad/align is null: {problem}", step=step)


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
