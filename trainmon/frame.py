"""Registry of series and Frame: the numbers of one step in one buffer.

Probes register *parts* (numbers that merge over micro-batches and ranks by sum, max, min or concatenation) and
*series* (published values that derive from parts after reduction). ``Registry.freeze`` lays all parts out as
``[SUM | MAX | LOCAL]`` in one float64 buffer, so that a sample is an index write, a cross-rank reduction is two
slices, and every sink renders the same snapshot.

Ranks lay out alike: each names the subjects of its own parts (the parameters of its pipeline stage, say), and all take
the union, so that the slices merge element by element.

Undefined is null: a validity flag that is off, ``None`` in a snapshot; never 0 and never an old value. Non-finite
values stay themselves.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainmon.series import SeriesSpec, catalogue, concrete_name
from trainmon.spread import RankSpread

__all__ = ["Derive", "Frame", "Part", "Registry", "Series", "Snapshot", "Table", "identity", "ratio", "root"]

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Reduce = Literal["sum", "max", "min", "cat", "local"]

#: Scopes whose values are shown as tables.
_LISTED = frozenset({"tensor", "local", "head", "expert"})
#: Scalars of a step. With more of them, values of layers are tables too.
SCALARS = 200

#: Maps the parts' values (each ``[size]`` float64) to ``(values, defined)``.
Derive = Callable[..., tuple[Floats, "Flags | bool"]]


def identity(value: Floats) -> tuple[Floats, bool]:
    """The part itself."""
    return value, True


def ratio(numerator: Floats, denominator: Floats) -> tuple[Floats, Flags]:
    """numerator / denominator; null where the denominator is 0."""
    return numerator / denominator, denominator != 0


def root(square: Floats) -> tuple[Floats, bool]:
    """sqrt of a merged sum of squares (the root is taken once, after all merging)."""
    return np.sqrt(square), True


@dataclass(slots=True)
class Part:
    """A mergeable slot of the frame: ``size`` float64 values at ``offset`` (assigned when the registry freezes).

    Attributes:
        subjects: one a value, if the values belong to named things; ranks may have different ones.
        places: where this rank's own values stand among all ranks'; None: they are all, in this order.
        early: known when gradients are ready, before weights are updated.
    """

    name: str
    reduce: Reduce
    size: int
    offset: int = -1
    index: int = -1
    subjects: tuple[str, ...] | None = None
    places: NDArray[np.int64] | None = None
    early: bool = False

    @property
    def own(self) -> int:
        """How many of the values are this rank's own."""
        return self.size if self.places is None else len(self.places)


@dataclass(frozen=True, slots=True)
class Series:
    """A published value, or one value per subject, with its derivation.

    Attributes:
        probe: the configuration section it belongs to, which several probes may share.
        owner: number of the very probe that registered it, as the engine counts them; -1 for the engine's own.
    """

    spec: SeriesSpec
    parts: tuple[Part, ...]
    derive: Derive
    subjects: tuple[str, ...] | None
    probe: str
    sees_null: bool = False
    optional: bool = False
    crowded: bool = False  # whether values of layers are too many for scalars
    owner: int = -1

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def listed(self) -> bool:
        """Whether this is a table (values of single tensors, of micro-batches) rather than a few scalars."""
        listed = self.spec.scope in _LISTED or (self.crowded and self.spec.scope == "layer")
        return self.subjects is not None and (self.numbered or listed)

    @property
    def numbered(self) -> bool:
        """Whether the subjects number the values of a name that has no subject of its own."""
        return self.subjects is not None and self.spec.subject is None


@dataclass(frozen=True, slots=True)
class Table:
    """Per-subject values of one step: ``values[i]`` belongs to ``subjects[i]`` where ``valid[i]``."""

    series: str
    probe: str
    unit: str
    subjects: tuple[str, ...]
    values: Floats
    valid: Flags


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The finished frame of one step, as sinks see it. Immutable and self-contained.

    Attributes:
        step: 1-based step.
        wall_time: Unix seconds at the end of the step.
        elapsed: seconds since the run began, monotonic.
        scalars: published scalars by concrete name; ``None`` is null. Series of probes that were not due are absent.
        tables: per-tensor values.
        total_steps: last step of the run if known.
        ranks: by series, what the ranks' own values say; empty in steps in which they were not compared.
    """

    step: int
    wall_time: float
    elapsed: float
    scalars: Mapping[str, float | None]
    tables: tuple[Table, ...] = ()
    total_steps: int | None = None
    ranks: Mapping[str, RankSpread] = dataclasses.field(default_factory=dict)

    @property
    def waiting_bytes(self) -> int:
        """What its tables take while it waits to be written."""
        return sum(table.values.nbytes + table.valid.nbytes for table in self.tables)


class Registry:
    """Collects parts and series, then fixes the layout."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}
        self.series: dict[str, Series] = {}
        self.sum_size = 0
        self.max_size = 0
        self.size = 0
        self.owner = -1  # of the series that are added now
        self._frozen = False

    def part(
        self,
        name: str,
        reduce: Reduce,
        size: int = 1,
        *,
        subjects: Sequence[str] | None = None,
        early: bool = False,
    ) -> Part:
        """The part of this name, made on first use; series share parts by naming them alike.

        Args:
            size: number of values, the same on every rank.
            subjects: one name a value instead; the ranks' own are merged by name.
            early: whether the probe can give it before weights are updated (``Probe.before_update``).

        Raises:
            ValueError: the part exists with another reduce, size or subjects, or the layout is fixed already.
        """
        names = None if subjects is None else tuple(subjects)
        if names is not None:
            size = len(names)
        known = self.parts.get(name)
        if known is not None:
            if (known.reduce, known.size, known.subjects) != (reduce, size, names):
                raise ValueError(
                    f"part {name!r} is already a {known.reduce} of {known.size}, not {reduce} of {size}"
                )
            return known
        if self._frozen:
            raise ValueError(f"part {name!r} comes after the layout was fixed")
        part = self.parts[name] = Part(name, reduce, size, index=len(self.parts), subjects=names, early=early)
        return part

    def add(
        self,
        name: str,
        parts: Sequence[Part],
        derive: Derive = identity,
        *,
        probe: str,
        subjects: Sequence[str] | None = None,
        sees_null: bool = False,
        optional: bool = False,
        given: Mapping[str, str] | None = None,
    ) -> Series:
        """Registers a series of the catalogue.

        Args:
            name: catalogue name, e.g. ``grad/norm/<p>``.
            parts: the parts that ``derive`` takes, in order.
            derive: see :data:`Derive`.
            probe: the configuration section it belongs to.
            subjects: one per value for a name with ``<...>``; for another name its values are numbered by them
                (micro-batches) and shown as a table up to the last one that is known.
            sees_null: ``derive`` takes ``(values, valid)`` of each part and says by itself what is defined; otherwise
                a value is null where any part is.
            optional: a scalar, or a row of a table, that is left out, rather than null, in steps that don't define it.
            given: what stands for other ``<...>`` of the name than the last, e.g. ``{"state": "exp_avg"}``.
        """
        spec = catalogue().get(name)
        if spec is None:
            raise ValueError(f"{name!r} is not in the catalogue of series")
        for word, value in (given or {}).items():
            name = name.replace(f"<{word}>", value)
        if name != spec.name:
            spec = dataclasses.replace(spec, name=name)
        if spec.subject is not None and subjects is None:
            raise ValueError(f"{name!r}: a subject for each value is needed")
        if name in self.series or self._frozen:
            raise ValueError(f"{name!r} is registered twice or after the layout was fixed")
        names = None if subjects is None else tuple(subjects)
        series = Series(spec, tuple(parts), derive, names, probe, sees_null, optional, owner=self.owner)
        self.series[name] = series
        return series

    def describe(self) -> bytes:
        """This rank's parts and series, for the other ranks' :meth:`freeze`."""
        subjects: dict[tuple[str, ...], int] = {}  # many parts have the same
        parts = [
            [
                part.name,
                part.reduce,
                part.size,
                None if part.subjects is None else subjects.setdefault(part.subjects, len(subjects)),
            ]
            for part in self.parts.values()
        ]
        series = [[name, [part.name for part in one.parts]] for name, one in self.series.items()]
        # Names repeat: a tenth of the size for thousands of ranks.
        described = {"parts": parts, "series": series, "subjects": list(subjects)}
        return zlib.compress(json.dumps(described).encode())

    def freeze(self, everybody: Sequence[bytes] = ()) -> None:
        """Assigns offsets: all sums, then maxima and minima (kept negated), then local values.

        Args:
            everybody: what ``describe`` gave on each rank, in the same order on all of them; empty for one rank.

        Raises:
            ValueError: the ranks have other parts or series than this one; names the rank and the first of them.
        """
        if len(everybody) > 1:
            self._unite([json.loads(zlib.decompress(message)) for message in everybody])
        offset = 0
        blocks: tuple[tuple[Reduce, ...], ...] = (("sum", "cat"), ("max", "min"), ("local",))
        ends = []
        for block in blocks:
            for part in self.parts.values():
                if part.reduce in block:
                    part.offset = offset
                    offset += part.size
            ends.append(offset)
        self.sum_size, self.max_size, self.size = ends[0], ends[1] - ends[0], offset
        if (
            sum(1 if s.subjects is None else len(s.subjects) for s in self.series.values() if not s.listed)
            > SCALARS
        ):
            for name, series in self.series.items():
                self.series[name] = dataclasses.replace(series, crowded=True)
        self._frozen = True

    def _unite(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        mine = json.loads(zlib.decompress(self.describe()))
        for rank, other in enumerate(ranks):
            for kind in ("series", "parts"):
                ours, theirs = ([entry[:2] for entry in side[kind]] for side in (mine, other))
                if ours != theirs:
                    differing = next(
                        (x for x in (*ours, *theirs) if x not in ours or x not in theirs), ours[:1]
                    )
                    raise ValueError(
                        f"rank {rank} measures something else than this one, first {kind} {differing[0]!r}: all ranks "
                        "need the same configuration, the same version of trainmon and a model of one kind"
                    )
            for (name, _, size, subjects), part in zip(other["parts"], self.parts.values(), strict=True):
                if subjects is None and part.reduce != "local" and size != part.size:
                    raise ValueError(f"rank {rank} has {size} values of part {name!r}, this one {part.size}")
        unions: dict[tuple[int | None, ...], tuple[str, ...]] = {}  # of parts that are alike on every rank
        places: dict[tuple[int | None, ...], NDArray[np.int64]] = {}
        for number, part in enumerate(self.parts.values()):
            if part.subjects is None:
                continue
            alike = tuple(other["parts"][number][3] for other in ranks)
            if alike not in unions:
                merged: dict[str, None] = {}
                for other, subjects in zip(ranks, alike, strict=True):
                    merged.update(dict.fromkeys(() if subjects is None else other["subjects"][subjects]))
                unions[alike] = tuple(merged)
                where = {subject: index for index, subject in enumerate(merged)}
                places[alike] = np.array([where[own] for own in part.subjects], np.int64)
            if part.subjects != unions[alike]:
                part.places = places[alike]
                part.subjects, part.size = unions[alike], len(unions[alike])
        for series in list(self.series.values()):
            named = [part.subjects for part in series.parts if part.subjects is not None]
            if named and series.subjects is not None:
                self.series[series.name] = dataclasses.replace(series, subjects=named[0])


def _place(part: Part, index: int) -> int:
    return part.offset + (index if part.places is None else int(part.places[index]))


class Frame:
    """One step's samples: a float64 buffer plus one validity flag a value."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.values: Floats = np.empty(registry.size)
        self.valid: Flags = np.empty(registry.size, np.bool_)
        self.step = 0
        self.clear(0)

    @property
    def sums(self) -> Floats:
        """The slice that one SUM all-reduce merges."""
        return self.values[: self.registry.sum_size]

    @property
    def maxima(self) -> Floats:
        """The slice that one MAX all-reduce merges; minima stand in it negated."""
        start = self.registry.sum_size
        return self.values[start : start + self.registry.max_size]

    def clear(self, step: int) -> None:
        """Empties the frame for ``step``."""
        self.step = step
        self.values.fill(0.0)
        self.maxima.fill(-np.inf)
        self.valid.fill(False)

    def set(self, part: Part, value: float, index: int = 0) -> None:
        """Writes one value; a later write replaces it."""
        at = _place(part, index)
        self.values[at] = -value if part.reduce == "min" else value
        self.valid[at] = True

    def add(self, part: Part, value: float, index: int = 0) -> None:
        """Merges one more value by the part's own reduce. NaN stays NaN in maxima too."""
        at = _place(part, index)
        if not self.valid[at]:
            self.set(part, value, index)
        elif part.reduce in ("max", "min"):
            self.values[at] = np.maximum(self.values[at], -value if part.reduce == "min" else value)
        else:
            self.values[at] += value

    def fill(self, part: Part, values: Floats, valid: Flags | bool = True) -> None:
        """Writes all of this rank's own values at once."""
        where: Any = slice(part.offset, part.offset + part.size)
        if part.places is not None:
            where = part.offset + part.places
        self.values[where] = -values if part.reduce == "min" else values
        self.valid[where] = valid

    def put(self, part: Part, values: Floats, indices: NDArray[np.int64]) -> None:
        """Writes some of this rank's own values."""
        at = part.offset + (indices if part.places is None else part.places[indices])
        self.values[at] = -values if part.reduce == "min" else values
        self.valid[at] = True

    def replace(self, part: Part, values: Floats, valid: Flags | bool = True) -> None:
        """Writes the values of all ranks' subjects at once, after merging."""
        where = slice(part.offset, part.offset + part.size)
        self.values[where] = -values if part.reduce == "min" else values
        self.valid[where] = valid

    def get(self, part: Part) -> tuple[Floats, Flags]:
        """``(values, valid)`` of a part, all ranks' subjects, in its own sign."""
        where = slice(part.offset, part.offset + part.size)
        values = self.values[where]
        return (-values if part.reduce == "min" else values), self.valid[where]

    def pack(self) -> tuple[Floats, Floats]:
        """What the ranks merge: sums (values, then how many ranks know each value, then the step) and maxima (values,
        then the step). Unknown values are 0 and -inf; a NaN stays one."""
        shared = self.registry.sum_size + self.registry.max_size
        step = [float(self.step)]
        return np.concatenate([self.sums, self.valid[:shared], step]), np.concatenate([self.maxima, step])

    def unpack(self, sums: Floats, maxima: Floats) -> None:
        """Takes the merged values of all ranks; valid is what any of them knew.

        Raises:
            ValueError: the ranks were not at the same step.
        """
        shared = self.registry.sum_size + self.registry.max_size
        ranks = sums[-1] / self.step if self.step else 1.0
        if maxima[-1] != self.step or ranks != round(ranks):
            raise ValueError(f"ranks report different steps: this one {self.step}, another {maxima[-1]:g}")
        self.sums[:] = sums[: self.registry.sum_size]
        self.maxima[:] = maxima[:-1]
        self.valid[:shared] = sums[self.registry.sum_size : -1] > 0

    def own(self, chosen: Sequence[Series]) -> tuple[Floats, Floats]:
        """This rank's own values of single-valued series, before anything is merged, and 1.0 where they are known."""
        values, known = np.zeros(len(chosen)), np.zeros(len(chosen))
        with np.errstate(all="ignore"):
            for index, series in enumerate(chosen):
                value, valid = self._derive(series)
                if valid[0]:
                    values[index], known[index] = value[0], 1.0
        return values, known

    def forget_shared(self) -> None:
        """Makes null what should have been merged and was not: one rank's own value is no global one."""
        self.valid[: self.registry.sum_size + self.registry.max_size] = False

    def snapshot(
        self,
        *,
        wall_time: float,
        elapsed: float,
        total_steps: int | None,
        due: Callable[[str], bool],
        unknown: Collection[int] = (),
        off: Collection[int] = (),
        ranks: Mapping[str, RankSpread] | None = None,
    ) -> Snapshot:
        """Derives every series of the probes that were due. The frame may be cleared afterwards.

        Args:
            due: whether the section of this name was due in this step.
            unknown: owners whose values are null in this step, whatever the frame holds.
            off: owners whose series are published no longer.
            ranks: what the ranks' own values say, if they were compared.
        """
        scalars: dict[str, float | None] = {}
        tables: list[Table] = []
        with np.errstate(all="ignore"):
            for series in self.registry.series.values():
                if series.owner in off or not due(series.probe):
                    continue
                values, valid = self._derive(series)
                if series.owner in unknown:
                    valid = np.zeros_like(valid)
                if series.optional and not valid.any():
                    continue
                if series.subjects is None:
                    scalars[series.name] = float(values[0]) if valid[0] else None
                elif series.listed:
                    tables.append(self._table(series, values, valid))
                else:
                    for subject, value, known in zip(series.subjects, values, valid, strict=True):
                        scalars[concrete_name(series.name, subject)] = float(value) if known else None
        return Snapshot(self.step, wall_time, elapsed, scalars, tuple(tables), total_steps, ranks or {})

    def value(self, series: Series) -> float | None:
        """A scalar series; None is null."""
        values, valid = self._derive(series)
        return float(values[0]) if valid[0] else None

    def _derive(self, series: Series) -> tuple[Floats, Flags]:
        """Values and validity of a series; either may be a view into the frame."""
        if series.sees_null:
            result, defined = series.derive(*(self.get(part) for part in series.parts))
            return result, np.broadcast_to(defined, result.shape)
        columns: list[Floats] = []
        known: Flags | None = None
        for part in series.parts:
            values, valid = self.get(part)
            columns.append(values)
            known = valid if known is None else known & valid
        result, defined = series.derive(*columns)
        if known is None:
            raise ValueError(f"{series.name} has no parts")
        return result, known if defined is True else known & defined

    @staticmethod
    def _table(series: Series, values: Floats, valid: Flags) -> Table:
        """A table that outlives the frame; numbered values end with the last one that is known."""
        names = series.subjects or ()
        end = len(names)
        if series.optional and not valid.all():
            there = np.flatnonzero(valid)
            some = tuple(names[index] for index in there.tolist())
            return Table(series.name, series.probe, series.spec.unit, some, values[there], valid[there])
        if series.numbered:
            end = int(np.flatnonzero(valid)[-1]) + 1 if valid.any() else 0
        return Table(
            series.name, series.probe, series.spec.unit, names[:end], values[:end].copy(), valid[:end].copy()
        )
