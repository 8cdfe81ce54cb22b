"""Rows of collectives: one a tag and step, merged over calls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trainmon.backend.base import STATISTICS, Floats
from trainmon.backend.statistics import COLUMNS, Reading
from trainmon.msprobe.tables import Rows

__all__ = ["CollectiveRows"]

_N, _MIN, _MAX, _MEAN, _NORM, _NANS = range(len(STATISTICS))


class CollectiveRows:
    """What the calls of a step had in their arguments, by operation and tag."""

    def __init__(self) -> None:
        self._tags: dict[str, tuple[dict[str, list[list[Reading]]], dict[str, list[list[Reading]]]]] = {}

    def add(self, operation: str, tag: str, before: bool, readings: list[Reading]) -> None:
        """Takes one argument of one call: a tensor's reading, or those of a list."""
        tags = self._tags.setdefault(operation, ({}, {}))[0 if before else 1]
        tags.setdefault(tag, []).append(readings)

    def clear(self) -> None:
        self._tags.clear()

    def taken(self) -> CollectiveRows:
        """What there is now; here there is nothing any more."""
        rows = CollectiveRows()
        rows._tags, self._tags = self._tags, {}
        return rows

    def __len__(self) -> int:
        return sum(len(tags) for pair in self._tags.values() for tags in pair)

    def readings(self) -> list[Reading]:
        """All that :meth:`merged` needs finished, in its order."""
        return [one for _, groups in self._calls() for group in groups for one in group]

    def _calls(self) -> list[tuple[str, list[list[Reading]]]]:
        return [(tag, calls) for pair in self._tags.values() for tags in pair for tag, calls in tags.items()]

    def merged(self, finish: Callable[[list[Reading]], Floats], *, plainly: bool) -> tuple[Rows, Floats]:
        """The rows: operations in the order in which they were first seen, what went in before what came out.

        Args:
            finish: gives the numbers of readings.
            plainly: over calls the norm is the sum of their norms and the mean that of their means, as msProbe has it;
                else they are what the calls' tensors would give together.
        """
        table = finish(self.readings())
        rows = Rows()
        lines = []
        at = 0
        for tag, groups in self._calls():
            pieces = []
            for group in groups:
                pieces.append(_together(table[at : at + len(group)]))
                at += len(group)
            merged = _plain(np.stack(pieces)) if plainly else _together(np.stack(pieces))
            rows.add(tag, "comm", None, 0, groups[0][0])
            lines.append(merged)
        return rows, np.stack(lines) if lines else table[:0]


def _together(table: Floats) -> Floats:
    """The statistics of tensors taken as one: means weighted by elements, norms by their squares, NaN winning."""
    filled = table[table[:, _N] > 0]
    if len(table) == 1 or not len(filled):
        first: Floats = table[0]
        return first
    merged: Floats = np.empty(table.shape[1])
    n = filled[:, _N]
    with np.errstate(invalid="ignore", over="ignore"):
        merged[_N] = n.sum()
        merged[_MIN], merged[_MAX] = filled[:, _MIN].min(), filled[:, _MAX].max()
        merged[_MEAN] = (filled[:, _MEAN] * (n / merged[_N])).sum()
        largest = filled[:, _NORM].max()
        scale = largest if 0 < largest < np.inf else 1.0  # squares of large norms would overflow
        merged[_NORM] = scale * np.sqrt(np.square(filled[:, _NORM] / scale).sum())
        merged[_NANS] = filled[:, _NANS].sum()
        if len(merged) > len(STATISTICS):
            _more_together(filled, merged)
    return merged


def _more_together(filled: Floats, merged: Floats) -> None:
    """Columns beyond the statistics; ``first_bad`` is a place in what the tensors are one after the other."""
    added = [COLUMNS.index(name) for name in ("sum", "sumsq", "n_posinf", "n_neginf", "n_zero")]
    merged[added] = filled[:, added].sum(axis=0)
    largest, rms, first = (COLUMNS.index(name) for name in ("absmax", "rms", "first_bad"))
    merged[largest] = filled[:, largest].max()
    merged[rms] = merged[_NORM] / np.sqrt(merged[_N])
    bad = np.flatnonzero(filled[:, first] != -1)
    merged[first] = filled[: bad[0], _N].sum() + filled[bad[0], first] if len(bad) else -1


def _plain(table: Floats) -> Floats:
    with np.errstate(invalid="ignore", over="ignore"):
        merged: Floats = table.sum(axis=0)
        merged[_MIN], merged[_MAX] = table[:, _MIN].min(), table[:, _MAX].max()
        merged[_MEAN] = table[:, _MEAN].mean()
    return merged
