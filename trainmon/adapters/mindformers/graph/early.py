"""A look at what the host's own callbacks are about to take away.

The trainer's list puts them before ours: ``MFLossMonitor`` sets the separate losses back, ``TrainingStateMonitor``
empties the folder of dumped files, ``TopkBiasBalanceCallback`` the load of experts. Their own method is wrapped on the
object and put back when the run is over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["EarlyLook"]

_TAKERS = frozenset(
    {
        "ColdHotExpertMonitor",
        "ExpertMigrateCallback",
        "MFLossMonitor",
        "MaxLogitsMonitor",
        "TopkBiasBalanceCallback",
        "TrainingStateMonitor",
    }
)


class EarlyLook:
    """Calls ``look`` at the end of each step, before the first callback that takes something away.

    Args:
        callbacks: of the run, in their order.
        own: our callback; what comes after it takes nothing from it.
        look: is called once a step, sooner or later: by :meth:`now` if no such callback did.
    """

    def __init__(self, callbacks: Sequence[Any], own: Any, look: Callable[[], None]) -> None:
        self._look, self._due = look, False
        self._wrapped: list[Any] = []
        for callback in callbacks:
            if callback is own:
                break
            if _TAKERS & {kind.__name__ for kind in type(callback).__mro__}:
                self._wrap(callback)

    def _wrap(self, callback: Any) -> None:
        original = callback.on_train_step_end

        @functools.wraps(original)
        def looked_before(run_context: Any) -> Any:
            self.now()
            return original(run_context)

        callback.on_train_step_end = looked_before
        self._wrapped.append(callback)

    def begin(self) -> None:
        """A step begins."""
        self._due = True

    @property
    def seen(self) -> bool:
        """Whether the step that runs has come to its end."""
        return not self._due

    def now(self) -> None:
        """Looks, if nobody has in this step."""
        if self._due:
            self._due = False
            self._look()

    def remove(self) -> None:
        """Takes the wrappers away. Idempotent."""
        while self._wrapped:
            vars(self._wrapped.pop()).pop("on_train_step_end", None)
