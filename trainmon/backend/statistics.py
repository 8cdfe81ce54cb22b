"""Statistics of single tensors that are taken now and finished later: many readings, few calls, one transfer.

A reading is what one read of a tensor left behind: the C kernels' record for tensors in host memory, or a place in what a
device is still computing. Readings hold no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from trainmon.backend.base import STATISTICS, Backend, Floats, Lazy
from trainmon.ops import STATS_DTYPE, finish_stats, merge_stats, tensor_stats

__all__ = ["COLUMNS", "Facts", "Fetched", "Reading", "finished", "host_readings", "of_zeros", "with_zeros"]

Records: TypeAlias = np.ndarray[Any, Any]

#: What a reading can say: :data:`STATISTICS`, and what else a record holds. ``sum``, ``sumsq``, ``absmax`` and ``rms``
#: propagate NaN and infinities; ``first_bad`` is -1 if every element is finite.
COLUMNS = (*STATISTICS, "sum", "sumsq", "absmax", "rms", "n_posinf", "n_neginf", "n_zero", "first_bad")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a tensor is, beside its numbers.

    Attributes:
        identity: the host's number for the object.
        zeros: share of the elements nearer to zero than each of these distances; NaN of none.
    """

    shape: tuple[int, ...]
    dtype: str
    identity: int = 0
    zeros: Mapping[float, float | Lazy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """One tensor's statistics.

    Attributes:
        source: records of host tensors, or numbers of :meth:`Backend.statistics` on their way.
        row: which of them.
        undefined: names of :data:`STATISTICS` that this tensor doesn't have (the order of complex numbers).
        others: names that another reading of the same tensor gives, and that one.
        facts: for who has asked for them.
    """

    source: Records | Lazy
    row: int
    undefined: tuple[str, ...] = ()
    others: tuple[tuple[str, Reading], ...] = ()
    facts: Facts | None = None


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
    return Fetched(readings, backend).table(readings)


class Fetched:
    """Numbers of many readings that are on their way in one transfer, which is waited for where they are asked for.

    Args:
        readings: all that will be asked for.
        backend: where lazy ones come from; None: there are none.
        more: other numbers that are on their way.
    """

    def __init__(
        self, readings: Iterable[Reading], backend: Backend | None, more: Iterable[Lazy] = ()
    ) -> None:
        sources: dict[int, Lazy] = {id(one): one for one in more if one.handles}
        for one in _with_others(readings):
            if isinstance(one.source, Lazy):
                sources.setdefault(id(one.source), one.source)
            for share in () if one.facts is None else one.facts.zeros.values():
                if isinstance(share, Lazy):
                    sources[id(share)] = share
        self._sources = sources  # kept, so that their ids stay theirs
        self._read = None if backend is None or not sources else backend.read(list(sources.values()))
        self._tables: dict[int, Floats] | None = None

    def table(self, readings: Sequence[Reading], *, wide: bool = False) -> Floats:
        """By :data:`STATISTICS`, or ``wide`` by :data:`COLUMNS`: shape ``[len(readings), columns]``. Of tensors on a
        device the counts and ``first_bad`` are not known: NaN."""
        table = np.empty((len(readings), len(COLUMNS if wide else STATISTICS)))
        hosted = [at for at, one in enumerate(readings) if not isinstance(one.source, Lazy)]
        if hosted:
            records = np.empty(len(hosted), STATS_DTYPE)
            for place, at in enumerate(hosted):
                records[place] = readings[at].source[readings[at].row]  # type: ignore[index]
            table[hosted] = _all_columns(records) if wide else propagating(records)
        if len(hosted) < len(readings):
            tables = self._arrived()
            for at, one in enumerate(readings):
                if isinstance(one.source, Lazy):
                    numbers = tables[id(one.source)][one.row]
                    table[at] = _derived(numbers) if wide else numbers
        for at, one in enumerate(readings):
            for name, other in one.others:
                column = STATISTICS.index(name)
                table[at, column] = self.table([other])[0, column]
            for name in one.undefined:
                table[at, STATISTICS.index(name)] = np.nan
            if wide and "norm" in one.undefined:  # it has no numbers at all
                table[at, len(STATISTICS) :] = np.nan
        return table

    def numbers(self, lazy: Lazy) -> Floats:
        """What has become of one of ``more``, or of a fact."""
        return self._arrived()[id(lazy)] if lazy.handles else lazy.finish()

    def _arrived(self) -> dict[int, Floats]:
        if self._tables is None:
            results = [] if self._read is None else self._read.wait()
            self._tables = dict(zip(self._sources, results, strict=True))
        return self._tables


def _with_others(readings: Iterable[Reading]) -> Iterator[Reading]:
    for one in readings:
        yield one
        yield from _with_others(other for _, other in one.others)


def _all_columns(records: Records) -> Floats:
    """Records by :data:`COLUMNS`."""
    summary = finish_stats(records)
    table = np.empty((len(records), len(COLUMNS)))
    table[:, : len(STATISTICS)] = propagating(records)
    with np.errstate(over="ignore"):
        squares = np.ldexp(records["sumsq_scaled"], 2 * records["scale_exponent"].astype(np.int32))
        squares = np.where(np.isfinite(summary["norm"]), squares, np.square(summary["norm"]))
    table[:, 6], table[:, 7] = summary["sum"], squares
    for column, name in enumerate(("absmax", "rms"), start=8):
        table[:, column] = summary[name]
    for column, name in enumerate(("n_posinf", "n_neginf", "n_zero", "first_bad"), start=10):
        table[:, column] = records[name]
    return table


def _derived(numbers: Floats) -> Floats:
    """One row by :data:`COLUMNS` from one by :data:`STATISTICS`."""
    n, least, most, mean, norm, _ = numbers
    row: Floats = np.full(len(COLUMNS), np.nan)
    row[: len(STATISTICS)] = numbers
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        row[6:10] = mean * n if n else 0.0, norm * norm, np.maximum(-least, most), norm / np.sqrt(n)
    return row


def propagating(records: Records) -> Floats:
    """Records as :meth:`Backend.statistics` gives them."""
    summary = finish_stats(records)
    table = np.empty((len(records), len(STATISTICS)))
    table[:, 0] = records["n"]
    for column, name in enumerate(("min", "max", "mean", "norm"), start=1):
        table[:, column] = summary[name]
    table[:, 5] = records["n_nan"]
    return table
