"""Gradients: global norm before and after clipping, per-parameter norms, search for non-finite values.

Formulas: docs/formulas.md, Norms. All norms are divided by the loss scale that is still on the gradients. A parameter
without a gradient is not counted and its own norm is null. Norms propagate NaN and infinities as torch does.

Phases: ``reduced`` gradients (final, before clipping) give ``grad/norm``; what the optimizer sees is ``clipped``. A host
that shows only clipped gradients but reports its own norm gives both, and the clip coefficient by their ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainmon.backend.base import Lazy
from trainmon.events import GradsReady, Phase, StepBegin, StepEnd
from trainmon.frame import Flags, Floats, Frame, Registry, root
from trainmon.probes.base import NonFiniteCount, ProbeContext, Rows, Sample, contributing, owned_flags

__all__ = ["GradientsProbe"]

Column = tuple[Floats, Flags]


def _norm(square: Column, scale: Column, reported: Column) -> Column:
    """The measured norm of reduced gradients, else what the host reports."""
    measured = square[1] & scale[1] & (scale[0] > 0)
    return np.where(measured, np.sqrt(square[0]) / scale[0], reported[0]), measured | reported[1]


def _norms(squares: Column, square: Column, scale: Column, after: Column, reported: Column) -> Column:
    """Of each parameter. Clipping scaled every gradient alike, so each one's own norm grows back alike."""
    measured = square[1] & scale[1] & (scale[0] > 0)
    regrown = after[1] & reported[1] & (reported[0] > 0) & (after[0] > 0) & np.isfinite(after[0])
    factor = np.where(measured, 1 / scale[0], reported[0] / np.sqrt(after[0]))
    return np.sqrt(squares[0]) * factor, squares[1] & (measured | regrown)


def _clip_coefficient(
    square: Column, scale: Column, reported: Column, after: Column, limit: Column
) -> Column:
    """By the limit where it is known, else as measured."""
    norm, known = _norm(square, scale, reported)
    by_limit = np.where(limit[0] > 0, np.minimum(1.0, limit[0] / (norm + 1e-6)), 1.0)
    measurable = after[1] & (norm > 0) & np.isfinite(after[0])
    coefficient = np.where(limit[1], by_limit, np.sqrt(after[0]) / norm)
    return coefficient, known & ~np.isnan(norm) & (limit[1] | measurable)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is kept of the gradients after the event: never a tensor, whose memory the host wants back."""

    names: Sequence[str]
    owned: Flags  # whether this rank is the one that contributes the tensor
    phase: Phase
    clip_norm: float | None
    scale: float
    table: Lazy


class GradientsProbe:
    """Publishes ``grad/norm``, ``grad/norm_selected``, ``grad/norm_clipped``, ``grad/clip_coef``, ``grad/nonfinite``,
    ``grad/norm/<p>``.

    Args:
        selected: whether a parameter of this name is looked at; the global norm counts all parameters.
        norm, per_parameter, nonfinite: what is published.
        some: not all parameters are selected: the norm of those that are is published, too.
        clipped: measure after clipping too (a second read of the gradients).
    """

    name = "gradients"

    def __init__(
        self,
        selected: Any,
        *,
        norm: bool,
        per_parameter: bool,
        nonfinite: bool,
        clipped: bool,
        some: bool = False,
    ) -> None:
        self.stale = False
        self._norm, self._per_parameter = norm, per_parameter
        self._nonfinite, self._clipped = nonfinite, clipped
        self._rows = Rows(selected)
        self._selected, self._some = selected, norm and some
        self._asked: Sequence[str] = ()
        self._chosen: Flags = np.zeros(0, np.bool_)
        self._count = NonFiniteCount("gradient", "backward", "grad")
        self._unseen_said = False
        self._reset()

    def _reset(self) -> None:
        self._seen: _Seen | None = None
        self._after_square: Lazy | None = None
        self._host_norm: Any = None
        self._step = 0

    def begin(self, context: ProbeContext) -> None:
        self._context = context
        if context.begin.model is not None:
            self._rows.extend(context.begin.model.parameter_names())

    def register(self, registry: Registry) -> None:
        self.stale = False
        self._square = registry.part("grad.sumsq", "sum", early=True)
        self._scale = registry.part("grad.scale", "max", early=True)
        self._reported = registry.part("grad.host_norm", "max", early=True)
        self._after = registry.part("grad.sumsq_clipped", "sum")
        self._limit = registry.part("grad.clip_limit", "max")
        norm = self._square, self._scale, self._reported
        if self._norm:
            registry.add("grad/norm", norm, _norm, probe=self.name, sees_null=True)
            registry.add("grad/norm_clipped", (self._after,), root, probe=self.name)
            parts = (*norm, self._after, self._limit)
            registry.add("grad/clip_coef", parts, _clip_coefficient, probe=self.name, sees_null=True)
        if self._some:
            self._selected_square = registry.part("grad.sumsq_selected", "sum")
            parts = (self._selected_square, self._square, self._scale, self._after, self._reported)
            registry.add("grad/norm_selected", parts, _norms, probe=self.name, sees_null=True)
        self._count.register(registry, probe=self.name, published=self._nonfinite, early=True)
        self._table = None
        if self._per_parameter:
            self._table = registry.part("grad.sumsq_tensor", "sum", subjects=self._rows.names)
            registry.add(
                "grad/norm/<p>",
                (self._table, self._square, self._scale, self._after, self._reported),
                _norms,
                probe=self.name,
                subjects=self._rows.names,
                sees_null=True,
            )

    def on_step_begin(self, event: StepBegin) -> None:
        self._reset()

    def on_grads_ready(self, event: GradsReady) -> None:
        backend, view = self._context.backend, event.gradients
        self._step = event.step
        if event.grad_norm is not None:
            self._host_norm = event.grad_norm
        if event.phase == "reduced" or (event.phase == "clipped" and self._seen is None):
            scale = 1.0 if event.loss_scale is None else float(event.loss_scale)
            table = backend.summaries(view.tensors)
            self._seen = _Seen(view.names, owned_flags(view), event.phase, event.clip_norm, scale, table)
        elif event.phase == "clipped" and self._clipped:
            owned = zip(view.tensors, owned_flags(view), strict=True)
            self._after_square = backend.square_sum([tensor for tensor, mine in owned if mine])

    def before_update(self) -> Sample:
        """The norm and the search for what is not finite; where the host knows the norm already, that alone. Of gradients
        that are clipped already the search."""
        seen, step = self._seen, self._step
        if self._host_norm is not None:
            return Sample([self._context.backend.scalar(self._host_norm)], self._write_host_norm)
        if seen is None:
            return Sample((), lambda frame, read: None)

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            if seen.phase == "reduced":
                mine = contributing(seen.owned, read[0][:, 0])
                frame.set(self._square, float(np.sum(read[0][mine, 0])))
                frame.set(self._scale, seen.scale)
            self._find(frame, step, seen, read[0])

        return Sample([seen.table], write)

    def _write_host_norm(self, frame: Frame, read: Sequence[Floats]) -> None:
        norm = float(read[0][0])
        frame.set(self._reported, norm)
        self._count.write_seen(frame, not math.isfinite(norm))

    def close(self, event: StepEnd) -> Sample:
        seen, after_square = self._seen, self._after_square
        norm = self._host_norm if event.grad_norm is None else event.grad_norm
        self._reset()
        host_norm = None if norm is None else self._context.backend.scalar(norm)
        if seen is not None:
            self._follow_parameters(event.step, seen, norm is not None)
        table_read = None if seen is None else seen.table
        lazies = [lazy for lazy in (table_read, after_square, host_norm) if lazy is not None]

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            values = iter(read)
            table = next(values) if seen is not None else None
            if after_square is not None:
                frame.set(self._after, float(next(values)[0]))
            if host_norm is not None:
                frame.set(self._reported, float(next(values)[0]))
            if seen is not None and table is not None:
                self._write(frame, event.step, seen, table)

        return Sample(lazies, write)

    def _write(self, frame: Frame, step: int, seen: _Seen, table: Floats) -> None:
        mine = contributing(seen.owned, table[:, 0])
        square = float(np.sum(table[mine, 0]))
        if seen.phase == "reduced":
            frame.set(self._square, square)
            frame.set(self._scale, seen.scale)
        else:
            frame.set(self._after, square)
        if seen.clip_norm is not None:
            frame.set(self._limit, seen.clip_norm)
        if self._some:
            frame.set(self._selected_square, float(np.sum(table[mine & self._are_selected(seen.names), 0])))
        if self._table is not None:
            self._rows.write(frame, self._table, seen.names, table[:, 0], mine)
        self._find(frame, step, seen, table)

    def _are_selected(self, names: Sequence[str]) -> Flags:
        """Asked once a listing of the parameters."""
        if self._asked is not names:
            self._asked = names
            self._chosen = np.array([name in self._selected for name in names], np.bool_)
        return self._chosen

    def _find(self, frame: Frame, step: int, seen: _Seen, table: Floats) -> None:
        finding = self._count.write(frame, step, seen.names, seen.owned, table, seen.phase)
        if finding is not None:
            self._context.found(finding)

    def _follow_parameters(self, step: int, seen: _Seen, told: bool) -> None:
        """Parameters may come under way; they get a place in the next step. ``told``: the host gives the norm."""
        if self._per_parameter and not (self._unseen_said or told) and seen.phase == "clipped":
            self._unseen_said = True
            self._context.say(
                "info",
                "gradients_clipped_only",
                "gradients were first seen at optimizer.step(), after any clipping: call grads_ready() after "
                "backward, or give grad_norm= to step_end(), for norms before clipping",
                step=step,
            )
        if self._per_parameter and self._rows.extend(seen.names):
            self.stale = True
