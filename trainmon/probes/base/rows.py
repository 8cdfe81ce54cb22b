"""Rows of a table with one value a tensor: the selected names in the order in which they came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainmon.events import TensorView
from trainmon.frame import Flags, Floats, Frame, Part

__all__ = ["Rows", "Selected", "contributing", "owned_flags"]


class Selected(Protocol):
    """Whether a name is looked at (:class:`trainmon.config.Selection`)."""

    def __contains__(self, name: str, /) -> bool: ...


class Rows:
    """Which tensors have a row, and where.

    Args:
        selected: whether a name gets a row.
    """

    def __init__(self, selected: Selected) -> None:
        self._selected = selected
        self.names: tuple[str, ...] = ()
        self._row_of: dict[str, int] = {}
        self._asked: Sequence[str] = ()
        self._answer: NDArray[np.int64] = np.zeros(0, np.int64)

    def extend(self, names: Sequence[str]) -> bool:
        """Gives selected names that are new a row; whether there were any: the table then has to be registered anew."""
        if not (self.at(names) < 0).any():
            return False
        new = [name for name in names if name not in self._row_of and name in self._selected]
        if not new:
            return False
        self.names = tuple(dict.fromkeys((*self.names, *new)))
        self._row_of = {name: row for row, name in enumerate(self.names)}
        self._asked, self._answer = (), np.zeros(0, np.int64)
        return True

    def at(self, names: Sequence[str]) -> NDArray[np.int64]:
        """The row of each name, -1 for none."""
        if self._asked is not names and list(self._asked) != list(names):
            self._answer = np.array([self._row_of.get(name, -1) for name in names], np.int64)
        self._asked = names
        return self._answer

    def write(
        self, frame: Frame, part: Part, names: Sequence[str], values: Floats, where: Flags | bool = True
    ) -> None:
        """Writes the values of those names that have a row in ``part``, as it was registered, and where ``where``."""
        rows = self.at(names)
        mine = (rows >= 0) & (rows < part.own) & where
        frame.put(part, values[mine], rows[mine])


def owned_flags(view: TensorView) -> Flags:
    """Whether this rank is the one that contributes each tensor."""
    if not view.shards:
        return np.ones(len(view), np.bool_)
    return np.array([shard.owner for shard in view.shards], np.bool_)


def contributing(owned: Flags, squares: Floats) -> Flags:
    """Which sums of squares this rank adds to those of all ranks: its own, and those of replicas that are not finite,
    which must not be lost because another rank, whose copy is fine, owns the tensor."""
    mine: Flags = owned | ~np.isfinite(squares)
    return mine
