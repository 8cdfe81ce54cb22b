"""The protocol of a group of ranks, and the group of one.

A report needs at most one SUM and one MAX all-reduce of a fixed size, which every rank starts at the same step whatever
it has seen. They are started when the step's numbers are there and waited for later, off the critical path. All
collectives are bounded in time: a rank that died, or never came, makes the group *lost*; everybody who is left learns
of it within the timeout, and nobody waits again.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "Gathering", "Group", "Lost", "Merging", "Single"]

Floats = NDArray[np.float64]


class Lost(RuntimeError):
    """The group can't be used any more: a rank died, or didn't come within the timeout."""


class Merging(Protocol):
    """A report on its way."""

    def wait(self) -> tuple[Floats, Floats]:
        """The merged sums and maxima, the same bits on every rank.

        Raises:
            Lost: the group was lost before or meanwhile.
        """
        ...


class Gathering(Protocol):
    """Everybody's values on their way."""

    def wait(self) -> Floats:
        """Shape ``[size, len(values)]``, row by rank.

        Raises:
            Lost: the group was lost before or meanwhile.
        """
        ...


class Group(Protocol):
    """Attributes:
    rank, size: this process's place among those that report together.
    lost: why the group can't be used any more; None while it can.
    """

    rank: int
    size: int
    lost: str | None

    def merge(self, sums: Floats, maxima: Floats) -> Merging:
        """Starts the one SUM and the one MAX all-reduce of a report.

        A NaN on any rank is NaN in the result, in maxima too, whatever the backend's maximum does with it.

        Args:
            sums, maxima: float64, one axis; the same lengths on every rank. Copied.

        Raises:
            Lost: the group was lost before.
        """
        ...

    def gather(self, values: Floats) -> Gathering:
        """Starts to collect everybody's values; the same length on every rank. Copied.

        Raises:
            Lost: the group was lost before.
        """
        ...

    def exchange(self, message: bytes) -> list[bytes]:
        """Everybody's message, by rank, of any length each. Two collectives: for moments that all ranks agreed on.

        Raises:
            Lost: the group was lost before or meanwhile.
        """
        ...

    def close(self) -> None:
        """Gives the group's resources back. Idempotent."""
        ...


class Single:
    """The group of one process: everything is merged already."""

    rank = 0
    size = 1
    lost: str | None = None

    def merge(self, sums: Floats, maxima: Floats) -> Merging:
        return _Merged(sums.copy(), maxima.copy())

    def gather(self, values: Floats) -> Gathering:
        return _Gathered(values[None].copy())

    def exchange(self, message: bytes) -> list[bytes]:
        return [message]

    def close(self) -> None:
        return


class _Gathered:
    def __init__(self, rows: Floats) -> None:
        self._rows = rows

    def wait(self) -> Floats:
        return self._rows


class _Merged:
    def __init__(self, sums: Floats, maxima: Floats) -> None:
        self._result = sums, maxima

    def wait(self) -> tuple[Floats, Floats]:
        return self._result
