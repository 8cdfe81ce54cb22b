"""Updates: how far a step moves the weights, against their size, and which share of them did not move.

The difference between the weights when the step is over and a copy from before the optimizer's step, learning rate and
decay included. The copy is taken when a step that is looked at begins, again at the optimizer's step if somebody else has
written to weights in between (``load_state_dict``, averaged weights put in and out); where every step is looked at, it is
brought up to date in the read that takes the difference. A step without an update (a loss scaler skipped it) gives 0.

Memory: one copy of the selected weights that this rank contributes, kept between the steps that are looked at.
Formulas: docs/formulas.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainmon.backend.base import Lazy
from trainmon.events import OptimizerBegin, OptimizerEnd, StepBegin, StepEnd
from trainmon.frame import Flags, Floats, Frame, Registry, ratio, root
from trainmon.probes.base import ProbeContext, Rows, Sample, Selected, Source, owned_flags, weights_of

__all__ = ["UpdatesProbe"]

_SMALL = ("bfloat16", "float16", "float8")


def _relative(square: Floats, before: Floats) -> tuple[Floats, Flags]:
    """Root of a quotient; inf for what came from 0, null for 0/0."""
    return np.sqrt(square / before), (square != 0) | (before != 0)


class UpdatesProbe:
    """Publishes ``update/norm``, ``update/ratio``, ``update/ratio/<p>``, ``update/zero_share``, ``update/norm_adam``.

    Args:
        selected: whether a parameter of this name is looked at, in all of these numbers: only those are copied.
        norm, ratio, zero_share, per_parameter: what is published.
        adam: also the estimate from Adam's state.
        source: which copy of the weights.
    """

    name = "updates"

    def __init__(
        self,
        selected: Selected,
        *,
        norm: bool,
        ratio: bool,
        zero_share: bool,
        per_parameter: bool,
        adam: bool,
        source: Source,
    ) -> None:
        self.stale = False
        self._norm, self._ratio, self._zero_share = norm, ratio, zero_share
        self._per_parameter, self._adam, self._source = per_parameter, adam, source
        self._selected = selected
        self._rows = Rows(selected)
        self._known: dict[str, bool] = {}
        self._copies: dict[str, Any] = {}
        self._good_after: int | None = None  # the copies are the weights as this step left them
        self._version = self._masters = 0
        self._last: int | None = None  # the last step that was looked at
        self._stepped = False
        self._estimate: Lazy | None = None
        self._small_said = False

    def begin(self, context: ProbeContext) -> None:
        self._context = context
        if context.begin.model is not None:
            self._rows.extend(context.begin.model.parameter_names())

    def register(self, registry: Registry) -> None:
        self.stale = False
        if self._context.begin.model is None:
            return  # a host that shows none
        self._square, self._before = registry.part("update.sumsq", "sum"), registry.part("update.w", "sum")
        self._same, self._size = registry.part("update.z", "sum"), registry.part("update.n", "sum")
        self._adam_square = registry.part("update.adam", "sum")
        if self._norm:
            registry.add("update/norm", (self._square,), root, probe=self.name)
        if self._ratio:
            registry.add("update/ratio", (self._square, self._before), _relative, probe=self.name)
        if self._zero_share:
            registry.add("update/zero_share", (self._same, self._size), ratio, probe=self.name)
        if self._adam:
            registry.add("update/norm_adam", (self._adam_square,), root, probe=self.name)
        self._tables = None
        if self._per_parameter:
            subjects = self._rows.names
            self._tables = (
                registry.part("update.sumsq_tensor", "sum", subjects=subjects),
                registry.part("update.w_tensor", "sum", subjects=subjects),
            )
            registry.add("update/ratio/<p>", self._tables, _relative, probe=self.name, subjects=subjects)

    # -- a step -----------------------------------------------------------------------------------------------------

    def on_step_begin(self, event: StepBegin) -> None:
        self._stepped, self._estimate = False, None
        if self._good_after != event.step - 1:
            self._copy()

    def on_optimizer_begin(self, event: OptimizerBegin) -> None:
        model = self._context.begin.model
        if not self._stepped and model is not None:
            # Master copies in the optimizer's state are replaced by its load_state_dict, and nobody counts that.
            if self._masters or model.version() != self._version:
                self._copy()
        self._stepped = True

    def on_optimizer_end(self, event: OptimizerEnd) -> None:
        optimizer = self._context.begin.optimizer
        if self._adam and optimizer is not None:
            steps = [one for one in optimizer.adam_steps() if one.owner and self._is_selected(one.name)]
            before = self._copies
            if any(
                one.name not in before for one in steps
            ):  # state may lie elsewhere than what this rank contributes
                view, _ = weights_of(self._context.begin, self._source)
                before = dict(zip(view.names, view.tensors, strict=True)) | before
            weights = [before[one.name] for one in steps]
            self._estimate = self._context.backend.adam_squares(steps, weights) if steps else None

    def close(self, event: StepEnd) -> Sample:
        begin, backend, estimate = self._context.begin, self._context.backend, self._estimate
        self._estimate = None
        if begin.model is None:
            return Sample((), lambda frame, read: None)
        often, self._last = self._last == event.step - 1, event.step
        names, tensors = self._weights()
        if not self._there:
            return Sample((), lambda frame, read: None)
        version = begin.model.version()
        fits = [_fit(self._copies.get(name), tensor) for name, tensor in zip(names, tensors, strict=True)]
        made_anew = any(name in self._copies and not fit for name, fit in zip(names, fits, strict=True))
        if made_anew or (not self._stepped and version != self._version):
            # Written to by nobody knows whom: no update that could be told.
            self._good_after = None
            return Sample((), lambda frame, read: None)
        names = [name for name, fit in zip(names, fits, strict=True) if fit]
        tensors = [tensor for tensor, fit in zip(tensors, fits, strict=True) if fit]
        before = [self._copies[name] for name in names]
        if self._per_parameter and self._rows.extend(names):
            self.stale = True
        table = backend.differences(tensors, before, update=often)
        self._good_after = event.step if often and all(fits) else None
        self._version = version
        self._say_small(event.step, tensors)

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            numbers = read[0]
            for column, part in enumerate((self._square, self._before, self._same, self._size)):
                frame.set(part, float(np.sum(numbers[:, column])))
            if self._tables is not None:
                for column, part in enumerate(self._tables):
                    self._rows.write(frame, part, names, numbers[:, column])
            if estimate is not None:
                frame.set(self._adam_square, float(np.sum(read[1])))

        return Sample((table,) if estimate is None else (table, estimate), write)

    def _weights(self) -> tuple[list[str], list[Any]]:
        """Those that this rank contributes, live."""
        begin = self._context.begin
        view, self._masters = weights_of(begin, self._source)
        # They may be where the host can't look.
        self._there = bool(view.names or begin.model is None or not begin.model.parameter_names())
        mine = [
            index
            for index, owned in enumerate(owned_flags(view).tolist())
            if owned and self._is_selected(view.names[index])
        ]
        return [view.names[index] for index in mine], [view.tensors[index] for index in mine]

    def _is_selected(self, name: str) -> bool:
        """Patterns are searched once a name."""
        answer = self._known.get(name)
        if answer is None:
            answer = self._known[name] = name in self._selected
        return answer

    def _copy(self) -> None:
        """Takes the weights as they are, into the copies of before where they fit."""
        model = self._context.begin.model
        if model is None:
            return
        names, tensors = self._weights()
        into = [self._copies.get(name) for name in names]
        self._copies = {}  # what no longer fits is gone before it is made anew
        self._copies = dict(zip(names, self._context.backend.keep(tensors, into), strict=True))
        self._version = model.version()

    def _say_small(self, step: int, tensors: Sequence[Any]) -> None:
        if self._small_said or not tensors:
            return
        self._small_said = True
        kind = str(getattr(tensors[0], "dtype", ""))
        if any(small in kind for small in _SMALL):
            self._context.say(
                "info",
                "updates_of_rounded_weights",
                f"updates are those of {kind} weights: what rounding loses of an update is not in them ("
                "update/zero_share says which share did not move)",
                step=step,
                data={"dtype": kind},
            )


def _fit(copy: Any, tensor: Any) -> bool:
    return copy is not None and copy.shape == tensor.shape and copy.dtype == tensor.dtype
