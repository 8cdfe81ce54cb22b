"""The few numbers that are known before weights are updated, merged over ranks at once.

Parts that a probe marks as ``early`` are gathered in one collective, row by rank, and merged here: every rank gets the
same bits, and a NaN of one rank survives a maximum.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from trainmon.frame import Floats, Frame, Registry

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
        parts = [part for part in registry.parts.values() if part.early]
        self._series = [
            series
            for series in registry.series.values()
            if series.subjects is None and all(part.early for part in series.parts)
        ]
        self.names = frozenset(series.name for series in self._series)
        # Where the parts stand in the frame; the frame keeps minima negated, so that they are maxima here.
        slots = [(part.offset + index, part.reduce) for part in parts for index in range(part.size)]
        self._places = np.array([place for place, _ in slots], np.int64)
        self._added = np.array([reduce in ("sum", "cat") for _, reduce in slots], np.bool_)

    def probes_of(self, names: Collection[str]) -> frozenset[str]:
        """The probes that series belong to."""
        return frozenset(series.probe for series in self._series if series.name in names)

    def row(self, failed: Collection[str]) -> Floats:
        """What this rank knows: values, whether each is known, which probes failed."""
        known = self.frame.valid[self._places]
        values = np.where(known, self.frame.values[self._places], 0.0)
        return np.concatenate([values, known, [float(name in failed) for name in self._probes]])

    def take(self, rows: Floats) -> frozenset[str]:
        """Puts what all ranks know into the frame; returns the probes that failed on any of them."""
        total = len(self._places)
        values, known = rows[:, :total], rows[:, total : 2 * total] > 0
        # NaN stays NaN in both.
        added = np.where(known, values, 0.0).sum(axis=0)
        largest = np.where(known, values, -np.inf).max(axis=0)
        self.frame.values[self._places] = np.where(self._added, added, largest)
        self.frame.valid[self._places] = np.logical_or.reduce(known, axis=0)
        failed = rows[:, 2 * total :].max(axis=0).tolist()
        return frozenset(name for name, bad in zip(self._probes, failed, strict=True) if bad)

    def scalars(self, names: Collection[str], probes: Collection[str]) -> dict[str, float | None]:
        """These series, those of other probes than these left out."""
        with np.errstate(all="ignore"):
            return {
                series.name: self.frame.value(series)
                for series in self._series
                if series.name in names and series.probe in probes
            }
