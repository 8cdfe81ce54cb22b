"""Calls of Cells: inputs before the call, outputs after it, and the gradients of both, by position.

MindSpore's own hooks, which stand in the Cell only in steps that are looked at: a backward hook puts an operator into the
graph. It is called when the gradients of inputs are known, of a Cell whose inputs need none when backward is over; what
has no gradient comes as None and is no row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mindspore import Tensor

from trainmon.adapters.mindspore_rows.compiling import is_compiling
from trainmon.adapters.mindspore_rows.meter import Meter
from trainmon.adapters.rows_parts.kinds import AddRow, Failed
from trainmon.adapters.rows_parts.names import Named

__all__ = ["CallHooks"]


_DEPTH = 8  # of containers within containers


class CallHooks:
    """Hooks on Cells.

    Args:
        cells: which.
        add: takes rows.
        extended: indices of gradients count the tensors that have none, containers are looked into to any depth, and
            micro-batches and the calls in them are counted.
        evaluation: calls of Cells that aren't in training have rows, too, where any ever is.
    """

    def __init__(
        self,
        cells: Sequence[Named],
        meter: Meter,
        add: AddRow,
        failed: Failed,
        *,
        extended: bool = False,
        evaluation: bool = True,
    ) -> None:
        self._cells, self._meter, self._add, self._failed = cells, meter, add, failed
        self._extended, self._evaluation = extended, evaluation
        self._handles: list[Any] = []
        self._trains = False
        self._passes = _Passes()

    def install(self) -> None:
        """Nothing yet: see :meth:`arm`."""

    def watched(self) -> str:
        """What is hooked, in words."""
        return f"{len(self._cells)} Cells"

    def arm(self, on: bool) -> None:
        """A step begins."""
        self._passes = _Passes()
        if on == bool(self._handles):
            return
        if not on:
            self.remove()
            return
        for named in self._cells:
            cell = named.thing
            self._handles += [
                cell.register_forward_pre_hook(self._before(named), with_kwargs=True),
                cell.register_forward_hook(self._after(named)),
                cell.register_backward_hook(self._backward(named)),
            ]

    def remove(self) -> None:
        """Idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def _before(self, named: Named) -> Callable[..., Any]:
        take = self._inputs

        # A compiler calls it without keywords.
        def hook(_cell: Any, arguments: Any, keywords: Any = None) -> Any:
            if is_compiling():  # @jit.cond: True
                return None
            return take(named, arguments, keywords)

        return hook

    def _after(self, named: Named) -> Callable[..., Any]:
        take = self._outputs

        def hook(_cell: Any, _arguments: Any, output: Any) -> Any:
            if is_compiling():  # @jit.cond: True
                return None
            return take(named, output)

        return hook

    def _backward(self, named: Named) -> Callable[..., Any]:
        take = self._gradients

        def hook(_cell: Any, inputs: Any, outputs: Any) -> Any:
            if is_compiling():  # @jit.cond: True
                return None
            return take(named, inputs, outputs)

        return hook

    def _inputs(self, named: Named, arguments: Sequence[Any], keywords: Mapping[str, Any] | None) -> None:
        self._trains = self._trains or named.thing.training
        if not self._is_seen(named):
            return
        self._passes.begin(named.name)
        self._rows(named, "input", "forward", self._found([*arguments, *(keywords or {}).values()]))

    def _outputs(self, named: Named, output: Any) -> None:
        if self._is_seen(named):
            self._rows(named, "output", "forward", self._found(output))

    def _gradients(self, named: Named, inputs: Any, outputs: Any) -> None:
        self._passes.go_back()
        for kind, found in (("grad_input", inputs), ("grad_output", outputs)):
            values = list(found) if isinstance(found, list | tuple) else [found]
            if not self._extended:
                values = [one for one in values if one is not None]
            there = [(at, one) for at, one in enumerate(values) if isinstance(one, Tensor)]
            self._rows(named, kind, "backward", there)
        self._passes.gone_back(named.name)

    def _is_seen(self, named: Named) -> bool:
        """MindSpore's Cells are made as if for evaluation, and not everybody says that they are to be trained."""
        return self._evaluation or named.thing.training or not self._trains

    def _found(self, values: Any) -> list[tuple[int, Any]]:
        """Tensors by position: of what a list or tuple holds those that are themselves."""
        if self._extended:
            return list(enumerate(_all_tensors(values)))
        values = values if isinstance(values, list | tuple) else [values]
        return list(enumerate(one for one in values if isinstance(one, Tensor)))

    def _rows(self, named: Named, kind: str, scope: str, tensors: Sequence[tuple[int, Any]]) -> None:
        try:
            readings = self._meter.read([tensor for _, tensor in tensors])
            micro, call = self._passes.place(named.name)
            for (at, _), reading in zip(tensors, readings, strict=True):
                self._add(f"{named.name}.{kind}.{at}", scope, named.stage, micro, reading, call)
        except Exception as error:
            self._failed(error)


class _Passes:
    """Micro-batches of a step, from 1, and the calls of each Cell in them, from 0: one begins with the first call after a
    backward pass. Backward passes go through a Cell's calls from the last to the first."""

    def __init__(self) -> None:
        self._micro, self._went_back = 1, False
        self._calls: Counter[str] = Counter()

    def begin(self, name: str) -> None:
        if self._went_back:
            self._micro, self._went_back = self._micro + 1, False
            self._calls.clear()
        self._calls[name] += 1

    def go_back(self) -> None:
        self._went_back = True

    def gone_back(self, name: str) -> None:
        self._calls[name] -= 1

    def place(self, name: str) -> tuple[int, int]:
        """Micro-batch and call of what goes on now."""
        return self._micro, max(self._calls[name] - 1, 0)


def _all_tensors(value: Any, depth: int = 0) -> Iterator[Any]:
    """Those in lists, tuples and mappings, depth first."""
    if isinstance(value, Tensor):
        yield value
    elif depth < _DEPTH and isinstance(value, list | tuple | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _all_tensors(part, depth + 1)
