"""What flows through modules in training: norms and largest values of activations and of their gradients.

A row is a module's output (``blocks.0.mlp``), or with a suffix its inputs (``/input``), the gradients of its outputs
(``/grad_output``) or of its inputs (``/grad_input``). Over all calls and micro-batches of the step and all tensors of a
call: norm = sqrt(sum of squares), absmax = the largest absolute value, nonfinite = how many values are NaN or infinite.
Gradients are what the backward pass gives, a loss scale included; that of an input is the whole gradient of that tensor,
with what reaches it past the module (a residual stream).

Scope is local: each rank measures its own tensors (its tokens, its shard of the features); over the ranks the largest is
shown, so that no rank's NaN or outlier is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainmon.backend.base import Lazy
from trainmon.events import Flow, ModuleSeen, StepBegin, StepEnd
from trainmon.findings import Finding, Role, kinds_of
from trainmon.frame import Floats, Frame, Registry, identity, root
from trainmon.probes.base import ProbeContext, Sample

__all__ = ["ActivationsProbe"]

_SUFFIX: dict[Flow, str] = {
    "output": "",
    "input": "/input",
    "grad_output": "/grad_output",
    "grad_input": "/grad_input",
}
_WORDS: dict[Flow, str] = {
    "output": "output",
    "input": "input",
    "grad_output": "output gradient",
    "grad_input": "input gradient",
}
#: What a flow is made from, seen before it in the same call.
_SOURCE: dict[Flow, Flow] = {"output": "input", "grad_input": "grad_output"}
#: Steps that are looked at in vain before it is said that no hook was called.
_PATIENCE = 3


@dataclass(frozen=True, slots=True)
class _Call:
    row: int
    module: str
    flow: Flow
    micro: int
    order: int
    table: Lazy


class ActivationsProbe:
    """Publishes ``activation/norm/<module>``, ``activation/absmax/<module>``, ``activation/nonfinite/<module>``.

    Args:
        flows: what of each module is looked at.
        norm, absmax, nonfinite: what is published.
    """

    name = "activations"

    def __init__(self, flows: Sequence[Flow], *, norm: bool, absmax: bool, nonfinite: bool) -> None:
        self.stale = False
        self._flows = tuple(flows)
        self._norm, self._absmax, self._nonfinite = norm, absmax, nonfinite
        self._calls: list[_Call] = []
        self._unseen = 0

    def begin(self, context: ProbeContext) -> None:
        self._context = context
        modules = context.begin.observed.modules
        self._rows = tuple(f"{module}{_SUFFIX[flow]}" for module in modules for flow in self._flows)
        self._index = {row: index for index, row in enumerate(self._rows)}

    def register(self, registry: Registry) -> None:
        self.stale = False
        self._square, self._peak, self._bad = (
            registry.part(f"activation.{name}", "max", subjects=self._rows)
            for name in ("sumsq", "absmax", "nonfinite")
        )
        for wanted, series, part, derive in (
            (self._norm, "activation/norm/<module>", self._square, root),
            (self._absmax, "activation/absmax/<module>", self._peak, identity),
            (self._nonfinite, "activation/nonfinite/<module>", self._bad, identity),
        ):
            if wanted:
                registry.add(series, (part,), derive, probe=self.name, subjects=self._rows)

    def on_step_begin(self, event: StepBegin) -> None:
        self._calls = []

    def on_module_seen(self, event: ModuleSeen) -> None:
        row = self._index.get(event.module + _SUFFIX[event.flow])
        if row is not None and event.tensors:
            table = self._context.backend.summaries(event.tensors)
            self._calls.append(
                _Call(row, event.module, event.flow, event.micro, self._context.order(), table)
            )

    def close(self, event: StepEnd) -> Sample:
        calls, self._calls = self._calls, []
        self._watch_hooks(event.step, bool(calls))

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            size = len(self._rows)
            known = np.zeros(size, np.bool_)
            square, peak, bad = np.zeros(size), np.full(size, -np.inf), np.zeros(size)
            for call, table in zip(calls, read, strict=True):
                known[call.row] = True
                square[call.row] += table[:, 0].sum()
                filled = ~((table[:, 1] != table[:, 1]) & (table[:, 2] == 0))  # NaN without one: no element
                peak[call.row] = np.maximum(peak[call.row], table[filled, 1].max(initial=-np.inf))
                bad[call.row] += table[:, 2:5].sum()
            frame.fill(self._square, square, known)
            frame.fill(self._peak, peak, known & (peak != -np.inf))
            frame.fill(self._bad, bad, known)
            if self._nonfinite:
                self._report(event.step, calls, read)

        return Sample([call.table for call in calls], write)

    def _watch_hooks(self, step: int, seen: bool) -> None:
        self._unseen = 0 if seen or self._unseen < 0 else self._unseen + 1
        if seen:
            self._unseen = -1
        elif self._unseen == _PATIENCE and self._rows:
            self._context.say(
                "warning",
                "modules_unseen",
                f"none of {len(self._rows)} activations was seen in {_PATIENCE} steps that were looked at: hooks are not "
                "called inside torch.compile, nor in evaluation mode; is this the model that is trained?",
                step=step,
            )

    def _report(self, step: int, calls: Sequence[_Call], tables: Sequence[Floats]) -> None:
        """The first of each flow, in the order of calls; those behind it got it passed on."""
        finite: dict[tuple[str, Flow], bool] = {}
        first: dict[Flow, tuple[_Call, Floats, Role]] = {}
        bad: Counter[Flow] = Counter()
        for call, table in zip(calls, tables, strict=True):
            counts = table[:, 2:5].sum(axis=0)
            finite[call.module, call.flow] = not counts.any()
            if counts.any():
                bad[call.flow] += 1
                source = _SOURCE.get(call.flow)
                known = None if source is None else finite.get((call.module, source))
                role: Role = "unknown" if known is None else "producer" if known else "propagator"
                first.setdefault(call.flow, (call, counts, role))
        for flow, (call, counts, role) in first.items():
            self._context.found(
                Finding(
                    step=step,
                    stage="backward" if flow.startswith("grad") else "forward",
                    quantity=_WORDS[flow],
                    name=call.module,
                    series=f"activation/nonfinite/{self._rows[call.row]}",
                    micro=call.micro,
                    call=call.order,
                    role=role,
                    counts=kinds_of(counts.tolist()),
                    more=bad[flow] - 1,
                )
            )
