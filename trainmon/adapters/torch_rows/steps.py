"""Before and after the optimizer's step: its own hooks where it has them, else a bound method in place of ``step``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainmon.adapters.base import replace_step

__all__ = ["StepHooks"]


class StepHooks:
    """Of one optimizer, or of a list that step together: then before the first and after the last.

    Args:
        before, after: called around a step; ``after`` only if the step did not raise.

    Attributes:
        counts: whether each step of the optimizer is seen.
    """

    counts = True

    def __init__(self, optimizer: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        self._before_all, self._after_all = before, after
        self._active = False
        self._undo: list[Callable[[], None]] = []
        self._stepped: set[int] = set()

    def install(self) -> None:
        self._active = True
        for one in self._optimizers:
            if not self._hook(one):
                self._wrap(one)

    def remove(self) -> None:
        """Idempotent, and in any order with other hooks and wrappers."""
        self._active = False
        for undo in self._undo:
            undo()
        self._undo = []

    def _before(self) -> None:
        if self._active and not self._stepped:
            self._before_all()

    def _after(self, optimizer: Any) -> None:
        if not self._active:
            return
        self._stepped.add(id(optimizer))
        if len(self._stepped) >= len(self._optimizers):
            self._stepped.clear()
            self._after_all()

    def _hook(self, optimizer: Any) -> bool:
        """False where the optimizer can't: a wrapper that only looks like one."""
        if not isinstance(optimizer, torch.optim.Optimizer) or not getattr(
            type(optimizer).step, "hooked", False
        ):
            return False
        # Of a step that calls that of its base class, torch runs the hooks of both.
        if (
            sum(
                "step" in vars(base)
                for base in type(optimizer).__mro__[:-1]
                if base is not torch.optim.Optimizer
            )
            > 1
        ):
            return False
        try:
            before = optimizer.register_step_pre_hook(lambda *_: self._before())
            after = optimizer.register_step_post_hook(lambda *_: self._after(optimizer))
        except AttributeError:
            return False
        self._undo += [before.remove, after.remove]
        return True

    def _wrap(self, optimizer: Any) -> None:
        self._undo.append(replace_step(optimizer, self._before, lambda: self._after(optimizer)))
