"""Gradients of parameters as the backward pass of each micro-batch makes them, summed up over those of a step.

MindSpore keeps no gradient with its parameter: whoever accumulates does so elsewhere. So where a step has several
micro-batches the sum is made here, in the gradient's dtype, in the steps that are looked at: one more tensor a parameter
while such a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainmon.adapters.mindspore_rows.compiling import is_compiling
from trainmon.adapters.mindspore_rows.meter import Meter
from trainmon.adapters.rows_parts.kinds import AddRow, Failed, Say
from trainmon.adapters.rows_parts.names import Named

__all__ = ["GradientHooks", "gradient_of"]


def gradient_of(parameter: Any) -> Any:
    """What an optimizer takes that is not handed any: None with MindSpore's own."""
    main = getattr(parameter, "main_grad", None)
    return getattr(parameter, "grad", None) if main is None else main


class GradientHooks:
    """Hooks on parameters, which count micro-batches in every step and read in those that are looked at.

    Args:
        count: micro-batches of a step.
        each: a row for each of them, not for the last alone.
        say: is told once that a step has more micro-batches than that.
        own: what each micro-batch adds, not the sum.
    """

    def __init__(
        self,
        parameters: Sequence[Named],
        meter: Meter,
        add: AddRow,
        failed: Failed,
        *,
        count: int,
        each: bool,
        say: Say,
        own: bool = False,
    ) -> None:
        self._on = False
        self._parameters = [one for one in parameters if getattr(one.thing, "requires_grad", True)]
        self._frozen = len(parameters) - len(self._parameters)
        self._meter, self._add, self._failed = meter, add, failed
        self._count, self._each, self._own = count, each, own
        self._say: Say | None = say
        self._seen: dict[str, int] = {}
        self._sums: dict[str, Any] = {}
        self._first, self._rounds = "", 0  # how often this step has added to one of the parameters
        self._handles: list[Any] = []

    def install(self) -> None:
        for named in self._parameters:
            self._handles.append(named.thing.register_hook(self._hook(named)))

    def watched(self) -> str:
        """What is hooked, in words."""
        left = f" ({self._frozen} need no gradient)" if self._frozen else ""
        return f"{len(self._parameters)} parameters{left}"

    def arm(self, on: bool) -> None:
        """A step begins."""
        self._on = on
        self._sums.clear()
        if self._rounds > self._count and self._say is not None:
            self._say(
                f"a step has {self._rounds} micro-batches, but {self._count} of them are expected, so micro_step is "
                "wrong: set micro_batch_number, or pass it to start()"
            )
            self._say = None
        self._rounds = 0

    def remove(self) -> None:
        """Idempotent."""
        self._on = False
        self._sums.clear()
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, named: Named) -> Callable[[Any], Any]:
        take = self._take

        def hook(gradient: Any) -> Any:
            if is_compiling():  # @jit.cond: True
                return gradient
            return take(named, gradient)

        return hook

    def _take(self, named: Named, gradient: Any) -> None:
        try:
            self._added(named, gradient)
        except Exception as error:
            self._failed(error)

    def _added(self, named: Named, gradient: Any) -> None:
        self._first = self._first or named.name
        self._rounds += named.name == self._first
        micro = self._seen.get(named.name, 0) + 1
        self._seen[named.name] = 0 if micro >= self._count else micro
        if not self._on:
            return
        if self._count > 1 and not self._own:
            gradient = self._summed(named.name, micro, gradient)
        if self._each or micro >= self._count:
            reading = self._meter.read([gradient])[0]
            self._add(named.name, "unreduced", named.stage, micro if self._each else self._count, reading)

    def _summed(self, name: str, micro: int, gradient: Any) -> Any:
        before = self._sums.pop(name, None)
        total = gradient if before is None else before + gradient
        if micro < self._count:
            # A copy, since who accumulates may add to the first one in place.
            self._sums[name] = total.copy() if before is None else total
        return total
