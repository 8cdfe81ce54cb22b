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
from trainmon.frame import Flags, Floats, Frame, Registry, identity, root
from trainmon.probes.base import ProbeContext, Sample

__all__ = ["GradientsProbe"]

_KINDS = ("nan", "+inf", "-inf")


def _total(*counts: Floats) -> tuple[Floats, bool]:
    return np.sum(counts, axis=0), True


def _root_of_scaled(square: Floats, scale: Floats) -> tuple[Floats, Flags]:
    return np.sqrt(square) / scale, scale > 0


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is kept of the gradients after the event: never a tensor, whose memory the host wants back."""

    names: Sequence[str]
    phase: Phase
    clip_norm: float | None
    scale: float
    table: Lazy


class GradientsProbe:
    """Publishes ``grad/norm``, ``grad/norm_clipped``, ``grad/clip_coef``, ``grad/nonfinite``, ``grad/norm/<p>``.

    Args:
        selected: whether a parameter of this name is looked at; the global norm counts all parameters.
        norm, per_parameter, nonfinite: what is published.
        clipped: measure after clipping too (a second read of the gradients).
    """

    name = "gradients"

    def __init__(
        self, selected: Any, *, norm: bool, per_parameter: bool, nonfinite: bool, clipped: bool
    ) -> None:
        self.stale = False
        self._selected = selected
        self._norm, self._per_parameter = norm, per_parameter
        self._nonfinite, self._clipped = nonfinite, clipped
        self._names: tuple[str, ...] = ()
        self._index: dict[str, int] = {}
        self._bad_since: int | None = None
        self._unseen_said = False
        self._reset()

    def _reset(self) -> None:
        self._seen: _Seen | None = None
        self._after_square: Lazy | None = None

    def begin(self, context: ProbeContext) -> None:
        self._context = context
        if context.begin.model is not None:
            self._take_names(context.begin.model.parameter_names())

    def _take_names(self, names: Sequence[str]) -> None:
        self._names = tuple(name for name in names if name in self._selected)
        self._index = {name: index for index, name in enumerate(self._names)}

    def register(self, registry: Registry) -> None:
        self.stale = False
        square, scale = registry.part("grad.sumsq", "sum"), registry.part("grad.scale", "max")
        after, coefficient = (
            registry.part("grad.sumsq_clipped", "sum"),
            registry.part("grad.clip_coef", "max"),
        )
        self._parts = square, scale, after, coefficient
        if self._norm:
            registry.add("grad/norm", (square, scale), _root_of_scaled, probe=self.name)
            registry.add("grad/norm_clipped", (after,), root, probe=self.name)
            registry.add("grad/clip_coef", (coefficient,), identity, probe=self.name)
        self._counts = tuple(
            registry.part(f"grad.{kind}", "sum") for kind in ("n_nan", "n_posinf", "n_neginf")
        )
        self._any = registry.part("grad.any", "max")
        if self._nonfinite:
            registry.add("grad/nonfinite", self._counts, _total, probe=self.name)
        self._table = None
        if self._per_parameter and self._names:
            self._table = registry.part("grad.sumsq_tensor", "sum", len(self._names))
            registry.add("grad/norm/<p>", (self._table,), root, probe=self.name, subjects=self._names)

    def on_step_begin(self, event: StepBegin) -> None:
        self._reset()

    def on_grads_ready(self, event: GradsReady) -> None:
        backend, view = self._context.backend, event.gradients
        if event.phase == "reduced" or (event.phase == "clipped" and self._seen is None):
            scale = 1.0 if event.loss_scale is None else float(event.loss_scale)
            table = backend.summaries(view.tensors)
            self._seen = _Seen(view.names, event.phase, event.clip_norm, scale, table)
        elif event.phase == "clipped" and self._clipped:
            self._after_square = backend.square_sum(view.tensors)

    def close(self, event: StepEnd) -> Sample:
        seen, after_square = self._seen, self._after_square
        self._reset()
        host_norm = None if event.grad_norm is None else self._context.backend.scalar(event.grad_norm)
        if seen is not None:
            self._follow_parameters(event.step, seen)
        table_read = None if seen is None else seen.table
        lazies = [lazy for lazy in (table_read, after_square, host_norm) if lazy is not None]

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            values = iter(read)
            table = next(values) if seen is not None else None
            square_after = float(next(values)[0]) if after_square is not None else None
            reported = float(next(values)[0]) if host_norm is not None else None
            if seen is not None and table is not None:
                self._write(frame, event.step, seen, table, square_after, reported)
            elif reported is not None:
                self._set_norm(frame, reported * reported, 1.0)

        return Sample(lazies, write)

    def _write(
        self,
        frame: Frame,
        step: int,
        seen: _Seen,
        table: Floats,
        square_after: float | None,
        reported: float | None,
    ) -> None:
        square = float(np.sum(table[:, 0]))
        if seen.phase == "reduced":
            self._set_norm(frame, square, seen.scale)
            self._write_table(frame, seen.names, table[:, 0] / seen.scale**2)
        else:
            square_after = square
            if reported is not None:
                self._set_norm(frame, reported * reported, 1.0)
                if reported > 0 and 0 < square < math.inf:
                    # Clipping scaled every gradient alike, so each one's own norm grows back alike.
                    self._write_table(frame, seen.names, table[:, 0] * (reported * reported / square))
        self._write_clipping(frame, square_after, seen.clip_norm)
        self._write_nonfinite(frame, step, seen, table)

    def _set_norm(self, frame: Frame, square: float, scale: float) -> None:
        frame.set(self._parts[0], square)
        frame.set(self._parts[1], scale)

    def _write_table(self, frame: Frame, names: Sequence[str], squares: Floats) -> None:
        if self._table is None:
            return
        for name, square in zip(names, squares, strict=True):
            index = self._index.get(name)
            if index is not None:
                frame.set(self._table, float(square), index)

    def _write_clipping(self, frame: Frame, square_after: float | None, limit: float | None) -> None:
        square, scale, after, coefficient = self._parts
        if square_after is not None:
            frame.set(after, square_after)
        values, valid = frame.get(square)
        if not valid[0]:
            return
        norm = math.sqrt(values[0]) / float(frame.get(scale)[0][0])
        if math.isnan(norm):
            return
        if limit is not None:
            frame.set(coefficient, min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0)
        elif square_after is not None and norm > 0 and math.isfinite(square_after):
            frame.set(coefficient, math.sqrt(square_after) / norm)

    def _write_nonfinite(self, frame: Frame, step: int, seen: _Seen, table: Floats) -> None:
        totals = table[:, 2:5].sum(axis=0)
        for part, total in zip(self._counts, totals, strict=True):
            frame.set(part, float(total))
        frame.set(self._any, float(totals.sum()))
        bad = np.flatnonzero(table[:, 2:5].any(axis=1))
        if len(bad) and self._bad_since is None:
            self._bad_since = step
            self._report(step, seen, table, bad)
        elif not len(bad) and self._bad_since is not None:
            steps = step - self._bad_since
            text = f"gradients are finite again after {steps} step{'s' if steps > 1 else ''}"
            self._context.say("info", "finite_gradient", text, step=step)
            self._bad_since = None

    def _report(self, step: int, seen: _Seen, table: Floats, bad: Any) -> None:
        first = int(bad[0])
        name, counts = seen.names[first], table[first, 2:5]
        kinds = {kind: int(count) for kind, count in zip(_KINDS, counts, strict=True) if count}
        index = None if math.isnan(table[first, 5]) else int(table[first, 5])
        where = "" if index is None else f", first at element {index}"
        what = " and ".join(f"{count} {kind}" for kind, count in kinds.items())
        others = f"; {len(bad) - 1} more tensors are not finite" if len(bad) > 1 else ""
        self._context.say(
            "warning",
            "nonfinite_gradient",
            f"gradient of {name} is not finite at step {step} ({seen.phase}): {what}{where}{others}",
            step=step,
            data={"name": name, "index": index, "counts": kinds, "tensors": len(bad), "phase": seen.phase},
        )

    def _follow_parameters(self, step: int, seen: _Seen) -> None:
        """Parameters may come under way; they get their place from the next step on."""
        if self._per_parameter and not self._unseen_said and seen.phase == "clipped":
            self._unseen_said = True
            self._context.say(
                "info",
                "gradients_clipped_only",
                "gradients were first seen at optimizer.step(), after any clipping: call grads_ready() after "
                "backward, or give grad_norm= to step_end(), for norms before clipping",
                step=step,
            )
        new = [name for name in seen.names if name not in self._index and name in self._selected]
        if new and self._per_parameter:
            known = (*self._names, *new)
            self._take_names(known)
            self.stale = True
