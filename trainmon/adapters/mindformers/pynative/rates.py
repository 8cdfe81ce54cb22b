"""Learning rates of the update that is made, by parameter group, as the optimizer itself works them out.

A schedule is a cell, which the optimizer calls once an update: a hook on it sees what it returns, at no cost. The host's
own log calls it again, with the next step's number; what is called outside of an update does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mindspore import Parameter

from trainmon.adapters.mindspore_parts.parameters import OptimizerView

__all__ = ["Rates"]


class Rates:
    """Follows an optimizer's learning rates.

    Args:
        optimizer: of ``mindspore.nn``, or None.
        view: works out rates where no hook can see them.
    """

    def __init__(self, optimizer: Any, view: OptimizerView) -> None:
        self._view = view
        given = [] if optimizer is None else optimizer.learning_rate
        entries = list(given) if getattr(optimizer, "is_group_lr", False) else [given]
        # One a parameter; those of a group are one object.
        self._entries = (
            list({id(entry): entry for entry in entries}.values()) if optimizer is not None else []
        )
        self._handles: list[Any] = []
        self._seen: dict[int, Any] = {}
        self._updating = False

    def install(self) -> None:
        if self._handles:
            return
        for group, entry in enumerate(self._entries):
            if not isinstance(entry, Parameter) and hasattr(entry, "register_forward_hook"):
                self._handles.append(entry.register_forward_hook(self._hook(group)))

    def remove(self) -> None:
        """Idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, group: int) -> Callable[..., None]:
        def see(group: int, _cell: Any, _inputs: Any, output: Any) -> None:
            if self._updating:
                self._seen[group] = output

        return partial(see, group)

    def begin(self) -> None:
        """An update begins."""
        self._seen, self._updating = {}, True
        for group, entry in enumerate(self._entries):
            if isinstance(entry, Parameter):
                self._seen[group] = entry

    def end(self) -> None:
        """It has been made."""
        self._updating = False

    def take(self, updated: bool) -> dict[str, float]:
        """Of the update that was made in this step, or else would have been."""
        seen, self._seen = self._seen, {}
        if updated and self._entries and len(seen) == len(self._entries):
            return {str(group): _number(rate) for group, rate in sorted(seen.items())}
        return self._view.rates(ago=int(updated))


def _number(rate: Any) -> float:
    return float(np.asarray(rate.asnumpy(), np.float64).reshape(-1)[0])
