"""What hooks hand on, and what takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trainmon.backend.statistics import Reading

__all__ = ["AddCall", "AddRow", "Chosen", "Failed", "Row", "Say"]

#: Name, stage, reading.
Row = tuple[str, int, Reading]
#: Whether rows of a name are wanted.
Chosen = Callable[[str], bool]
#: Takes what went wrong in a hook.
Failed = Callable[[Exception], None]
#: Takes a sentence for the user.
Say = Callable[[str], None]
#: Takes what a call between ranks had in an argument: operation, tag, whether before the call, readings of its tensors.
AddCall = Callable[[str, str, bool, list[Reading]], None]


class AddRow(Protocol):
    """Takes a row: name, scope, stage, micro-batch, reading, and which call of a module in it."""

    def __call__(
        self, name: str, scope: str, stage: int, micro: int, reading: Reading, call: int = 0
    ) -> None: ...
