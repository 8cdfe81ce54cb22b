"""Before and after the optimizer's update.

MindSpore's optimizers are Cells that are called with gradients, and have hooks; what only wraps one is looked into, and
what only has a ``step`` has a bound method put in its place. Of a compiled update nothing is seen: then steps begin and
end where the user counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import nn

from trainmon.adapters.base import replace_step
from trainmon.adapters.mindspore_rows.compiling import compiled, forget, is_compiling, key_of
from trainmon.adapters.rows_parts.kinds import Failed, Say

__all__ = ["StepHooks", "update_cell"]

#: Takes the gradients that an update is about to use; None: it was handed none.
Given = Callable[[Sequence[Any] | None], None]


def update_cell(optimizer: Any) -> Any:
    """The Cell that updates: the optimizer, or what it wraps; None if there is none."""
    for one in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(one, nn.Cell):
            return one
    return None


class StepHooks:
    """Of one optimizer.

    Args:
        before, after: called around an update; ``after`` only if it did not raise.
        given: is told the gradients before ``before`` is called, and None when that is done.
        compiled: whether the update is compiled with the model.
        say: is told that it is, where that turns out later.

    Attributes:
        counts: whether each update is seen.
    """

    def __init__(
        self,
        optimizer: Any,
        before: Callable[[], None],
        after: Callable[[], None],
        given: Given,
        failed: Failed,
        *,
        compiled: bool,
        say: Say,
    ) -> None:
        self._optimizer, self._given, self._failed = optimizer, given, failed
        self._before_all, self._after_all = before, after
        self.counts, self._say = not compiled, say
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        if not self.counts:
            return
        cell = update_cell(self._optimizer)
        if cell is None:
            self._undo.append(replace_step(self._optimizer, lambda: self._before(None), self._after))
            return
        key = key_of(self._compiled)
        handles = (
            cell.register_forward_pre_hook(self._pre_hook(key)),
            cell.register_forward_hook(self._hook()),
        )
        self._undo += [*(one.remove for one in handles), lambda: forget(key)]

    def remove(self) -> None:
        """Idempotent, and in any order with other hooks and wrappers."""
        while self._undo:
            self._undo.pop()()

    def _compiled(self) -> None:
        self.counts = False
        self._say(
            "the optimizer is compiled by @jit, so that its updates are not seen: call step() after each of them"
        )

    def _pre_hook(self, key: int) -> Callable[..., Any]:
        take = self._called

        def hook(_cell: Any, arguments: Any) -> Any:
            if is_compiling():  # @jit.cond: True
                return compiled(key)
            return take(arguments)

        return hook

    def _hook(self) -> Callable[..., Any]:
        take = self._after

        def hook(_cell: Any, _arguments: Any, _output: Any) -> Any:
            if is_compiling():  # @jit.cond: True
                return None
            return take()

        return hook

    def _called(self, arguments: Sequence[Any]) -> None:
        first = arguments[0] if len(arguments) == 1 else arguments
        self._before(first if isinstance(first, list | tuple) else arguments)

    def _before(self, values: Sequence[Any] | None) -> None:
        try:
            self._given(values)
            self._before_all()
            self._given(None)
        except Exception as error:
            self._failed(error)

    def _after(self) -> None:
        try:
            self._after_all()
        except Exception as error:
            self._failed(error)
