"""The few numbers that are known before weights are updated, merged over ranks at once.

Parts that a probe marks as ``early`` are gathered in one collective, row by rank, and merged here: every rank gets the
same bits, and a NaN of one rank survives a maximum.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from trainmon.frame import Flags, Floats, Frame, Registry

__all__ = ["Gate"]


class Gate:
    """The early parts of a layout, and a frame of its own for them.

    Args:
        registry: the layout; the same parts on every rank.
        probes: names of probes that can be asked before the update; each rank says which of them failed.

    Attributes:
        frame: where the probes write.
        names: series that derive from early parts alone.
    """

    def __init__(self, registry: Registry, probes: Sequence[str]) -> None:
        self.frame = Frame(registry)
        self._probes = tuple(probes)
        self._parts = [part for part in registry.parts.values() if part.early]
        self._series = [
            series
            for series in registry.series.values()
            if series.subjects is None and all(part.early for part in series.parts)
        ]
        self.names = frozenset(series.name for series in self._series)

    def probes_of(self, names: Collection[str]) -> frozenset[str]:
        """The probes that series belong to."""
        return frozenset(series.probe for series in self._series if series.name in names)

    def row(self, failed: Collection[str]) -> Floats:
        """What this rank knows: values, whether each is known, which probes failed."""
        columns = [self.frame.get(part) for part in self._parts]
        return np.concatenate(
            [
                *(np.where(valid, values, 0.0) for values, valid in columns),
                *(valid for _, valid in columns),
                [float(name in failed) for name in self._probes],
            ]
        )

    def take(self, rows: Floats) -> frozenset[str]:
        """Puts what all ranks know into the frame; returns the probes that failed on any of them."""
        sizes = [part.size for part in self._parts]
        total, ends = sum(sizes), np.cumsum([0, *sizes])
        values, known = rows[:, :total], rows[:, total : 2 * total] > 0
        for part, start in zip(self._parts, ends, strict=False):
            columns = slice(start, start + part.size)
            self.frame.fill(part, *_merged(part.reduce, values[:, columns], known[:, columns]))
        failed = rows[:, 2 * total :].max(axis=0).tolist()
        return frozenset(name for name, bad in zip(self._probes, failed, strict=True) if bad)

    def scalars(self, due: Collection[str]) -> dict[str, float | None]:
        """The series of these probes."""
        with np.errstate(all="ignore"):
            return {series.name: self.frame.value(series) for series in self._series if series.probe in due}


def _merged(reduce: str, values: Floats, known: Flags) -> tuple[Floats, Flags]:
    """Over the ranks that know a value; NaN stays NaN."""
    if reduce in ("sum", "cat"):
        merged = np.where(known, values, 0.0).sum(axis=0)
    elif reduce == "max":
        merged = np.where(known, values, -np.inf).max(axis=0)
    else:
        merged = np.where(known, values, np.inf).min(axis=0)
    return merged, np.logical_or.reduce(known, axis=0)
