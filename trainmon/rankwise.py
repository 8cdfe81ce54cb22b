"""The numbers of single ranks side by side, every few reports.

What is merged hides who it came from. So each rank's own values of every scalar that is comparable (its loss, times,
rates, memory, norms of a device, not the squares of the pieces that it happens to own) are gathered now and then: one
all-gather of a few hundred numbers, started and waited for with the report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from trainmon.config.schema import ComparisonConfig
from trainmon.dist import Gathering, Group
from trainmon.frame import Frame, Registry, Series
from trainmon.schedule import Schedule
from trainmon.spread import RankSpread, compare_ranks

__all__ = ["RankWise"]

#: Comparisons in a row in which a rank must stand out before it is said.
_HITS = 3


class RankWise:
    """Gathers and compares; every rank gets the same result.

    Args:
        section: when, and how far a rank must stand out.
        group: the ranks.
    """

    def __init__(self, section: ComparisonConfig, group: Group) -> None:
        self._schedule = Schedule(section.every)
        self._bound = section.outlier
        self._group = group
        self._series: list[Series] = []
        self._gathering: Gathering | None = None
        self._hits: dict[tuple[str, int], int] = {}

    def register(self, registry: Registry) -> None:
        """Takes the scalars of a new layout, the same on every rank; what is on its way stays with the old one."""
        self._next = [one for one in registry.series.values() if one.subjects is None and one.spec.compared]

    def start(self, frame: Frame) -> None:
        """Sends this rank's own values, before they are merged, if it is time to.

        Raises:
            Lost: the group is lost.
        """
        if self._next and self._schedule.due(frame.step):
            self._series = self._next
            self._gathering = self._group.gather(np.concatenate(frame.own(self._series)))

    def finish(self, merged: bool) -> dict[str, RankSpread]:
        """The comparison that was started with this report, by series; empty if there was none.

        Raises:
            Lost: the group is lost.
        """
        gathering, self._gathering = self._gathering, None
        if gathering is None or not merged:
            return {}
        rows = gathering.wait()
        values, valid = np.split(rows, 2, axis=1)
        spreads = compare_ranks(values, valid > 0, self._bound)
        return {
            one.name: spread for one, spread in zip(self._series, spreads, strict=True) if spread is not None
        }

    def stand_out(self, spreads: Mapping[str, RankSpread]) -> Iterator[tuple[str, int, RankSpread]]:
        """Series and rank that stood out in this and the comparisons before it, each once until it is over."""
        now = {(name, rank): spread for name, spread in spreads.items() for rank in spread.outliers}
        for key in [key for key in self._hits if key[0] in spreads and key not in now]:
            del self._hits[key]
        for key, spread in now.items():
            self._hits[key] = self._hits.get(key, 0) + 1
            if self._hits[key] == _HITS:
                yield *key, spread
