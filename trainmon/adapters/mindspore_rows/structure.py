"""What flows through each Cell, and where it is called from: shapes and dtypes, no numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor, nn

from trainmon.adapters.mindspore_rows.calls import CallHooks
from trainmon.adapters.mindspore_rows.compiling import is_compiling
from trainmon.adapters.mindspore_rows.meter import Meter
from trainmon.adapters.rows_parts.call_sites import stack_of_call
from trainmon.adapters.rows_parts.kinds import Failed
from trainmon.adapters.rows_parts.names import Named
from trainmon.adapters.rows_parts.structure import Structure, add_gradient, described
from trainmon.backend.statistics import Facts, Reading

__all__ = ["StackHooks", "StructureHooks"]


class StructureHooks:
    """Describes the first call of each Cell in the steps that are looked at.

    Attributes:
        found: by Cell and ``input``, ``output``, ``input_grad``, ``output_grad``.
    """

    def __init__(self, cells: Sequence[Named], failed: Failed) -> None:
        self.found: Structure = {}
        self._cells, self._failed = cells, failed
        self._calls = CallHooks(cells, _Sizes(), self._gradient, failed)
        self._handles: list[Any] = []

    def install(self) -> None:
        self._calls.install()
        for named in self._cells:
            self._handles += [
                named.thing.register_forward_pre_hook(self._hook(named.name, "input")),
                named.thing.register_forward_hook(self._hook(named.name, "output")),
            ]

    def watched(self) -> str:
        return self._calls.watched()

    def arm(self, on: bool) -> None:
        self._calls.arm(on)

    def remove(self) -> None:
        """Idempotent."""
        self._calls.remove()
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, name: str, what: str) -> Callable[..., Any]:
        take = self._take

        def hook(_cell: Any, arguments: Any, output: Any = None) -> Any:
            if is_compiling():  # @jit.cond: True
                return None
            return take(name, what, arguments if what == "input" else output)

        return hook

    def _take(self, name: str, what: str, value: Any) -> None:
        try:
            self.found.setdefault(name, {}).setdefault(what, described(value, Tensor))
        except Exception as error:
            self._failed(error)

    def _gradient(
        self, name: str, scope: str, stage: int, micro: int, reading: Reading, call: int = 0
    ) -> None:
        if scope != "backward" or reading.facts is None:
            return
        add_gradient(self.found, name, reading.facts)


class StackHooks:
    """Takes the stack of the first call of each Cell in the steps that are looked at.

    Attributes:
        found: by Cell.
    """

    def __init__(self, cells: Sequence[Named], failed: Failed) -> None:
        self.on = False
        self.found: dict[str, str] = {}
        self._cells, self._failed = cells, failed
        self._handles: list[Any] = []

    def install(self) -> None:
        self._handles = [one.thing.register_forward_pre_hook(self._hook(one.name)) for one in self._cells]

    def watched(self) -> str:
        return f"{len(self._cells)} Cells"

    def arm(self, on: bool) -> None:
        self.on = on

    def remove(self) -> None:
        """Idempotent."""
        self.on = False
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, name: str) -> Callable[..., Any]:
        take = self._take

        def hook(_cell: Any, _arguments: Any) -> Any:
            if is_compiling():  # @jit.cond: True
                return None
            return take(name)

        return hook

    def _take(self, name: str) -> None:
        if self.on and name not in self.found:
            self.found[name] = stack_of_call(_INNER)


class _Sizes(Meter):
    """Reads no element."""

    def read(self, tensors: Sequence[Any]) -> list[Reading]:
        return [Reading(_NO_RECORDS, 0, facts=Facts(tuple(one.shape), str(one.dtype))) for one in tensors]


_NO_RECORDS: Any = None
_INNER = frozenset({__file__, str(sys.modules[nn.Cell.__module__].__file__)})
