"""Statistics of single tensors that are taken now and finished later: many readings, few calls, one transfer.

A reading is what one read of a tensor left behind: the C kernels' record for tensors in host memory, or a place in what a
device is still computing. Readings hold no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from trainmon.backend.base import STATISTICS, Backend, Floats, Lazy
from trainmon.ops import STATS_DTYPE, finish_stats, merge_stats, tensor_stats

__all__ = ["Reading", "finished", "host_readings", "of_zeros", "with_zeros"]

Records: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """One tensor's statistics.

    Attributes:
        source: records of host tensors, or numbers of :meth:`Backend.statistics` on their way.
        row: which of them.
        undefined: names of :data:`STATISTICS` that this tensor doesn't have (the order of complex numbers).
        others: names that another reading of the same tensor gives, and that one.
    """

    source: Records | Lazy
    row: int
    undefined: tuple[str, ...] = ()
    others: tuple[tuple[str, Reading], ...] = ()


def host_readings(tensors: Sequence[Any]) -> list[Reading]:
    """Reads tensors of the host once each, now."""
    records = tensor_stats(tensors)
    return [Reading(records, row) for row in range(len(records))]


def of_zeros(count: int) -> Reading:
    """The reading of so many zeros, which nobody has to make."""
    record = tensor_stats([np.zeros(min(count, 1))])
    record["n"] = record["n_zero"] = count
    return Reading(record, 0)


def with_zeros(reading: Reading, count: int) -> Reading:
    """A sparse tensor's stored elements and so many zeros beside them; of host tensors."""
    if not count or isinstance(reading.source, Lazy):
        return reading
    pieces = np.concatenate([reading.source[reading.row : reading.row + 1], of_zeros(count).source])
    return replace(reading, source=merge_stats(pieces).reshape(1), row=0)


def finished(readings: Sequence[Reading], backend: Backend | None) -> Floats:
    """The numbers of readings, shape ``[len(readings), len(STATISTICS)]``; waits for one transfer at most.

    Args:
        backend: where lazy ones come from; None: there are none.
    """
    table = np.empty((len(readings), len(STATISTICS)))
    hosted = [at for at, one in enumerate(readings) if not isinstance(one.source, Lazy)]
    if hosted:
        records = np.empty(len(hosted), STATS_DTYPE)
        for place, at in enumerate(hosted):
            records[place] = readings[at].source[readings[at].row]  # type: ignore[index]
        table[hosted] = propagating(records)
    if len(hosted) < len(readings) and backend is not None:
        _fill_lazy(table, readings, backend)
    for at, one in enumerate(readings):
        for name, other in one.others:
            column = STATISTICS.index(name)
            table[at, column] = finished([other], backend)[0, column]
        for name in one.undefined:
            table[at, STATISTICS.index(name)] = np.nan
    return table


def propagating(records: Records) -> Floats:
    """Records as :meth:`Backend.statistics` gives them."""
    summary = finish_stats(records)
    table = np.empty((len(records), len(STATISTICS)))
    table[:, 0] = records["n"]
    for column, name in enumerate(("min", "max", "mean", "norm"), start=1):
        table[:, column] = summary[name]
    table[:, 5] = records["n_nan"]
    return table


def _fill_lazy(table: Floats, readings: Sequence[Reading], backend: Backend) -> None:
    sources: dict[int, Lazy] = {}
    for one in readings:
        if isinstance(one.source, Lazy):
            sources.setdefault(id(one.source), one.source)
    tables = dict(zip(sources, backend.read(list(sources.values())).wait(), strict=True))
    for at, one in enumerate(readings):
        if isinstance(one.source, Lazy):
            table[at] = tables[id(one.source)][one.row]
