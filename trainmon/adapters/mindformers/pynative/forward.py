"""When the model runs forward: where a micro-batch begins, what it has for a loss, and how many tokens went in.

The host has no hook for micro-batches; its model is a cell, which has. What is called between a forward pass and the
next one is the backward pass: a router that runs there repeats what it has done before (recomputation).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainmon.adapters.mindspore_parts.parameters import own_piece

__all__ = ["Forward"]


class Forward:
    """Follows the chunks of a model on this rank: the first tells micro-batches apart, the last has the loss.

    Args:
        guard: does the work of a hook, so that nothing of it reaches the host.

    Attributes:
        micro: the running micro-batch, 0-based; that of the backward pass after it, too.
        running: whether a forward pass runs, so that what cells do is done for the first time.
        losses: what micro-batches of this step had for a loss, undivided, if they are ``kept``; none where the output is
            something else.
        kept: whether losses are kept until the step ends.
        tokens: places in the input that went in, in this step; None: not seen.
    """

    def __init__(self, cells: Sequence[Any], guard: Callable[[Callable[[], None]], None]) -> None:
        self._cells, self._guard = list(cells), guard
        self._handles: list[Any] = []
        self.kept = False
        self._are_losses: bool | None = (
            None  # known from the first output on: asking makes the host wait for it
        )
        self.arm()

    def arm(self) -> None:
        """A step begins."""
        self.micro, self.running = -1, False
        self.losses: list[Any] = []
        self.tokens: int | None = None

    @property
    def micros(self) -> int:
        """Micro-batches of this step so far."""
        return self.micro + 1

    def install(self) -> None:
        if self._handles:
            return
        for index, cell in enumerate(self._cells):
            before = self._begin if index == 0 else self._enter
            after = self._end if index == len(self._cells) - 1 else self._leave
            self._handles.append(cell.register_forward_pre_hook(self._guarded(before), with_kwargs=True))
            self._handles.append(cell.register_forward_hook(self._guarded(after)))

    def _guarded(self, work: Callable[..., None]) -> Callable[..., None]:
        return lambda _cell, *seen: self._guard(lambda: work(*seen))

    def remove(self) -> None:
        """Idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def _begin(self, arguments: Any, keywords: Mapping[str, Any]) -> None:
        self.micro += 1
        self.running = True
        ids = keywords.get("input_ids") if keywords else None
        if ids is None and arguments:
            ids = arguments[0]
        size = getattr(ids, "size", None)
        if isinstance(size, int) and not isinstance(size, bool):
            self.tokens = (self.tokens or 0) + size

    def _enter(self, _arguments: Any, _keywords: Mapping[str, Any]) -> None:
        self.running = True

    def _leave(self, _arguments: Any, _output: Any) -> None:
        self.running = False

    def _end(self, _arguments: Any, output: Any) -> None:
        self.running = False
        if self.kept and self._are_losses is not False:
            loss = _loss(output)
            if self._are_losses is None:
                self._are_losses = getattr(loss, "size", None) == 1
            if self._are_losses:
                self.losses.append(loss)


def _loss(output: Any) -> Any:
    """As the host looks for it: by its name, the output itself, or the first of several."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, tuple | list):
        output = output[0] if output else None
    return own_piece(output)
