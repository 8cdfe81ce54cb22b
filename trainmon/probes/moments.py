"""The optimizer's moments: their norms by state key, of all parameters and of single ones, and second moments below zero.

Looked at when the step is over, after the update; the state is looked up then, so a ``load_state_dict`` shows at
once. Formulas: docs/formulas.md. Raw values, without bias correction. Before an optimizer has state its norms are null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trainmon.events import StepEnd, TensorView
from trainmon.frame import Floats, Frame, Part, Registry, identity, root
from trainmon.probes.base import ProbeContext, Rows, Sample, Selected, owned_flags

__all__ = ["MomentsProbe"]

#: States that are means of squares, whatever else is in their name.
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")


def _is_square(state: str) -> bool:
    return state.startswith(_SQUARES)


class MomentsProbe:
    """Publishes ``moment/norm/<state>``, ``moment/norm/<state>/<p>``, ``moment/v_negative``.

    Args:
        selected: whether a parameter of this name has a row; the norms by state are of all parameters.
        norm, per_parameter, negative: what is published.
    """

    name = "moments"

    def __init__(self, selected: Selected, *, norm: bool, per_parameter: bool, negative: bool) -> None:
        self.stale = False
        self._norm, self._per_parameter, self._negative = norm, per_parameter, negative
        self._rows = Rows(selected)
        self._states: tuple[str, ...] = ()
        self._negative_said = False

    def begin(self, context: ProbeContext) -> None:
        self._context = context
        if context.begin.model is not None:
            self._rows.extend(context.begin.model.parameter_names())
        if context.begin.optimizer is not None:
            self._add(context.begin.optimizer.moment_names())

    def _add(self, states: Sequence[str]) -> bool:
        new = [state for state in states if state not in self._states]
        self._states += tuple(new)
        return bool(new)

    def register(self, registry: Registry) -> None:
        self.stale = False
        self._square = registry.part("moment.sumsq", "sum", subjects=self._states)
        self._below = registry.part("moment.v_negative", "sum")
        self._tables: dict[str, Part] = {}
        if self._context.begin.optimizer is None:
            return  # a host that shows none
        if self._norm:
            registry.add("moment/norm/<state>", (self._square,), root, probe=self.name, subjects=self._states)
        if self._negative:
            registry.add("moment/v_negative", (self._below,), identity, probe=self.name)
        for state in self._states if self._per_parameter else ():
            self._tables[state] = registry.part(f"moment.{state}", "sum", subjects=self._rows.names)
            registry.add(
                "moment/norm/<state>/<p>",
                (self._tables[state],),
                root,
                probe=self.name,
                subjects=self._rows.names,
                given={"state": state},
            )
        self._row_of = {state: row for row, state in enumerate(self._states)}

    def close(self, event: StepEnd) -> Sample:
        begin, backend = self._context.begin, self._context.backend
        views: Mapping[str, TensorView] = {} if begin.optimizer is None else begin.optimizer.moments()
        names: dict[str, Sequence[str]] = {}
        lazies = []
        for state, view in views.items():
            owned, tensors = owned_flags(view), view.tensors
            names[state] = view.names
            if not owned.all():
                mine = np.flatnonzero(owned).tolist()
                names[state] = [view.names[index] for index in mine]
                tensors = [view.tensors[index] for index in mine]
            lazies.append(backend.squares(tensors, negatives=_is_square(state)))
        new = [self._rows.extend(column) for column in names.values()] if self._per_parameter else []
        if self._add(tuple(views)) or any(new):
            self.stale = True

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            for (state, column), table in zip(names.items(), read, strict=True):
                row = self._row_of.get(state)
                if row is None:
                    continue  # it gets its place with the next layout
                frame.set(self._square, float(np.sum(table[:, 0])), row)
                if state in self._tables:
                    self._rows.write(frame, self._tables[state], column, table[:, 0])
                if _is_square(state):
                    frame.add(self._below, float(np.sum(table[:, 1])))
                    self._alarm(event.step, state, column, table[:, 1])

        return Sample(lazies, write)

    def _alarm(self, step: int, state: str, names: Sequence[str], below: Floats) -> None:
        """Once: a mean of squares below zero is damaged memory or a wrong checkpoint, and its root is NaN."""
        bad = np.flatnonzero(below)
        if not len(bad) or self._negative_said or not self._negative:
            return
        self._negative_said = True
        name, count = names[int(bad[0])], int(below[bad[0]])
        self._context.say(
            "warning",
            "negative_second_moment",
            f"{state} of {name} has {count} element{'s' if count > 1 else ''} below zero at step {step}"
            + (f"; {len(bad) - 1} more parameters have some" if len(bad) > 1 else ""),
            step=step,
            data={"state": state, "name": name, "count": count, "tensors": len(bad)},
        )
