"""The search for NaN and infinite elements: how many over all ranks, and which tensor of this rank is the first."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trainmon.findings import Finding, Stage, kinds_of
from trainmon.frame import Flags, Floats, Frame, Registry

__all__ = ["NonFiniteCount"]


def _total(nans: Floats, highs: Floats, lows: Floats, most: Floats) -> tuple[Floats, bool]:
    """Over owners; but what only a replica has is never 0."""
    return np.maximum(nans + highs + lows, most), True


class NonFiniteCount:
    """Takes tables of summaries (``backend.SUMMARY_COLUMNS``) of all tensors of a kind.

    Args:
        quantity: the kind of tensor, in a word.
        stage: of the step in which its values are made.
        prefix: of the parts, and of the series ``<prefix>/nonfinite``.
    """

    def __init__(self, quantity: str, stage: Stage, prefix: str) -> None:
        self._quantity, self._stage, self._prefix = quantity, stage, prefix

    def register(
        self, registry: Registry, *, probe: str, published: bool = True, early: bool = False
    ) -> None:
        """The counts, and their series if it is ``published``; ``early``: they are known before the update."""
        self._counts = tuple(
            registry.part(f"{self._prefix}.{kind}", "sum", early=early)
            for kind in ("n_nan", "n_posinf", "n_neginf")
        )
        self._any = registry.part(f"{self._prefix}.any", "max", early=early)
        if published:
            registry.add(f"{self._prefix}/nonfinite", (*self._counts, self._any), _total, probe=probe)

    def write_seen(self, frame: Frame, bad: bool) -> None:
        """Enters whether there is any, where they were not counted or there is none."""
        for part in self._counts:
            frame.set(part, 0.0)
        frame.set(self._any, float(bad))

    def write(
        self, frame: Frame, step: int, names: Sequence[str], owned: Flags, table: Floats, note: str = ""
    ) -> Finding | None:
        """Enters the counts. Returns what is not finite: the tensor that came first in the computation."""
        counts = table[:, 2:5]
        if not counts.any():
            self.write_seen(frame, False)
            return None
        for part, total in zip(self._counts, counts[owned].sum(axis=0), strict=True):
            frame.set(part, float(total))
        frame.set(self._any, float(counts.sum()))
        bad = np.flatnonzero(counts.any(axis=1))
        # Backward goes from the last parameters to the first.
        first = int(bad[-1 if self._stage == "backward" else 0])
        return Finding(
            step=step,
            stage=self._stage,
            quantity=self._quantity,
            name=names[first],
            series=f"{self._prefix}/nonfinite",
            call=len(table) - 1 - first if self._stage == "backward" else first,
            counts=kinds_of(counts[first].tolist()),
            index=None if math.isnan(table[first, 5]) else int(table[first, 5]),
            more=len(bad) - 1,
            note=note,
        )
