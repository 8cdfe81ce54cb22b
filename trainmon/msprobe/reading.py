"""Tables of both monitors of msProbe, read back as columns.

Nothing that a run which was killed, restarted or edited leaves behind is an exception: what can't be read is left out and
said. Files are parsed by pyarrow where it is installed, else by Python's own reader; both give the same.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trainmon.msprobe.trees import TableFile, find_tables

__all__ = ["MonitorTable", "Problem", "Row", "Tree", "read"]

Int64: TypeAlias = npt.NDArray[np.int64]
Float64: TypeAlias = npt.NDArray[np.float64]
Texts: TypeAlias = npt.NDArray[np.object_]
Columns: TypeAlias = dict[str, Any]

_INTEGERS = ("vpp_stage", "step", "micro_step", "call")
_NAMES = ("module_name", "name")
_TEXTS = ("scope", "shape", "dtype", "id")
_KEYS = frozenset({*_INTEGERS, *_NAMES, "scope"})


class Row(NamedTuple):
    """One row. ``micro_step``, ``vpp_stage`` and ``call`` are -1 where the file has none."""

    rank: int
    step: int
    monitor: str
    name: str
    scope: str
    micro_step: int
    vpp_stage: int
    call: int
    stats: dict[str, float]


@dataclass(frozen=True, slots=True)
class Problem:
    """What could not be read.

    Attributes:
        rows: how many lines were left out; 0: the whole file.
    """

    path: Path
    text: str
    rows: int = 0

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


@dataclass(frozen=True, slots=True, eq=False)
class MonitorTable:
    """The rows of one monitor, of all ranks, as columns of one length, in order of rank, run and step of the files.

    Attributes:
        monitor: as Monitor V2 calls it; of the older monitor's tables that V2 has none of, the metric.
        rank, step: of each row.
        name: of the module with ``.input.0`` and the like, or of the parameter; as the file has it.
        scope: ``forward``, ``reduced``, ``exp_avg``, ...
        micro_step: -1 where the file has none. Monitor V2 counts from 1, the older monitor from 0.
        vpp_stage: -1 where the model is no list of chunks.
        call: -1, or which use of the module in its micro-batch.
        run: 0, or which of the older monitor's directories of this rank.
        stats: float64 by column of the files; NaN also where a row has none.
        valid: whether the row has the column.
        texts: ``shape``, ``dtype`` and ``id``, where some file has them; None where the row has none.
    """

    monitor: str
    rank: Int64
    step: Int64
    name: Texts
    scope: Texts
    micro_step: Int64
    vpp_stage: Int64
    call: Int64
    run: Int64
    stats: Mapping[str, Float64] = field(default_factory=dict)
    valid: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    texts: Mapping[str, Texts] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.step)

    def __iter__(self) -> Iterator[Row]:
        stats = {name: column.tolist() for name, column in self.stats.items()}
        valid = {name: column.tolist() for name, column in self.valid.items()}
        columns = (self.rank, self.step, self.name, self.scope, self.micro_step, self.vpp_stage, self.call)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for at, (rank, step, name, scope, micro, stage, call) in enumerate(rows):
            given = {key: values[at] for key, values in stats.items() if valid[key][at]}
            yield Row(rank, step, self.monitor, name, scope, micro, stage, call, given)

    def where(self, chosen: npt.ArrayLike) -> MonitorTable:
        """The rows that a mask or positions choose."""
        index: Any = np.asarray(chosen)
        columns: Columns = {}
        for one in fields(self)[1:]:
            value = getattr(self, one.name)
            if isinstance(value, np.ndarray):
                columns[one.name] = value[index]
            else:
                columns[one.name] = {key: column[index] for key, column in value.items()}
        return replace(self, **columns)

    def latest(self) -> tuple[MonitorTable, int]:
        """Of rows that say the same thing of the same step (a restart in the same directory, modules that are called
        several times) the last alone, in order; and how many others there were."""
        last: dict[tuple[Any, ...], int] = {}
        columns = (self.rank, self.step, self.name, self.scope, self.micro_step, self.vpp_stage, self.call)
        for at, key in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            last[key] = at
        if len(last) == len(self):
            return self, 0
        return self.where(np.sort(np.fromiter(last.values(), np.int64, len(last)))), len(self) - len(last)


@dataclass(frozen=True, slots=True)
class Tree:
    """What a directory holds.

    Attributes:
        tables: by monitor.
        problems: what was left out.
        layouts: ``v1`` or ``v2``, or both.
    """

    tables: Mapping[str, MonitorTable]
    problems: tuple[Problem, ...]
    layouts: frozenset[str]

    def __getitem__(self, monitor: str) -> MonitorTable:
        return self.tables[monitor]

    def __iter__(self) -> Iterator[Row]:
        for table in self.tables.values():
            yield from table


def read(
    path: str | os.PathLike[str],
    *,
    ranks: Iterable[int] | None = None,
    monitors: Iterable[str] | None = None,
    steps: range | None = None,
    time_start: str | None = None,
    time_end: str | None = None,
) -> Tree:
    """Reads the tables of Monitor V2, of trainmon's drop-in and of msProbe's older monitor.

    A last line that was not finished, lines of another length than their header and files that are no tables are left out
    and said in ``problems``; a header in the middle of a file holds for what follows it.

    Args:
        path: the output directory, one rank's directory, or one file.
        ranks, monitors, steps: only these; monitors as V2 calls them.
        time_start, time_end: see :func:`trainmon.msprobe.trees.find_tables`.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: it holds no tables.
        OSError: a file can't be read.
    """
    wanted = None if ranks is None else frozenset(ranks)
    kinds = None if monitors is None else frozenset(monitors)
    pieces: dict[str, list[tuple[TableFile, Columns]]] = {}
    problems: list[Problem] = []
    found = find_tables(path, time_start, time_end)
    for file in found:
        unwanted = (wanted is not None and file.rank not in wanted) or (
            kinds is not None and file.monitor not in kinds
        )
        if unwanted or (
            steps is not None and len(steps) and (file.first > max(steps) or file.last < min(steps))
        ):
            continue
        own = pieces.setdefault(file.monitor, [])
        own += [(file, columns) for columns in _segments(file.path, problems)]
    tables = {monitor: _joined(monitor, own) for monitor, own in pieces.items()}
    if steps is not None:
        tables = {
            key: one.where(np.isin(one.step, np.asarray(steps, np.int64))) for key, one in tables.items()
        }
    return Tree(tables, tuple(problems), frozenset(file.layout for file in found))


# -- a file ---------------------------------------------------------------------------------------------------------


def _segments(path: Path, problems: list[Problem]) -> list[Columns]:
    """The columns of a file; more than one set where its header changes."""
    data = path.read_bytes()
    if not data:
        return []
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        problems.append(Problem(path, "the last line is not finished", 1))
        data = data[:whole]
    if not data:
        return []
    header = next(csv.reader([data[: data.index(b"\n")].decode("utf-8", "backslashreplace")]))
    if not _is_header(header):
        problems.append(Problem(path, f"begins with no header of a table: {','.join(header)[:80]!r}"))
        return []
    columns = _by_arrow(data, header) if len(data) > _SMALL else None
    return [columns] if columns is not None else _by_hand(path, data, problems)


def _is_header(cells: list[str]) -> bool:
    return "vpp_stage" in cells and "step" in cells and any(name in cells for name in _NAMES)


#: Bytes from which on pyarrow is worth its call.
_SMALL = 1 << 14


def _by_arrow(data: bytes, header: list[str]) -> Columns | None:
    """None where pyarrow is missing, or finds anything that it doesn't expect."""
    if data.count(b'"') % 2 or len(set(header)) < len(header) or importlib.util.find_spec("pyarrow") is None:
        return None
    arrow: Any = importlib.import_module("pyarrow")
    parser: Any = importlib.import_module("pyarrow.csv")
    kinds = {name: arrow.float64() for name in header}
    kinds |= {name: arrow.int64() for name in _INTEGERS}
    kinds |= {name: arrow.dictionary(arrow.int32(), arrow.string()) for name in (*_NAMES, *_TEXTS)}
    try:
        table = parser.read_csv(
            arrow.BufferReader(data),
            read_options=parser.ReadOptions(use_threads=False),
            parse_options=parser.ParseOptions(newlines_in_values=b'"' in data),
            convert_options=parser.ConvertOptions(
                column_types={name: kinds[name] for name in header},
                null_values=[""],
                strings_can_be_null=False,
            ),
        )
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError):
        return None
    columns: Columns = {}
    for name in header:
        column = table.column(name).combine_chunks()
        if name in _INTEGERS:
            columns[name] = np.asarray(column.fill_null(-1), np.int64)
        elif name in _NAMES or name in _TEXTS:
            words = np.array([*column.dictionary.to_pylist(), ""], object)
            columns[name] = words[np.asarray(column.indices.fill_null(len(words) - 1))]
        else:
            columns[name] = column.to_numpy(zero_copy_only=False).astype(np.float64)
    return columns


def _by_hand(path: Path, data: bytes, problems: list[Problem]) -> list[Columns]:
    found: list[Columns] = []
    header: list[str] = []
    rows: list[list[str]] = []
    places: list[int] = []
    bad: list[int] = []
    reader = csv.reader(io.StringIO(data.decode("utf-8", "backslashreplace"), newline=""))
    try:
        for cells in reader:
            if _is_header(cells):
                found.append(_columns(header, rows, places, bad))
                header, rows, places = cells, [], []
            elif len(cells) == len(header):
                rows.append(cells)
                places.append(reader.line_num)
            elif cells:
                bad.append(reader.line_num)
    except csv.Error as error:
        problems.append(Problem(path, f"is no CSV from line {reader.line_num} on: {error}", 1))
    found.append(_columns(header, rows, places, bad))
    if bad:
        text = f"{len(bad)} lines don't fit their header, the first is line {min(bad)}"
        problems.append(Problem(path, text, len(bad)))
    return [columns for columns in found if columns]


def _columns(header: list[str], rows: list[list[str]], places: list[int], bad: list[int]) -> Columns:
    """The columns of rows; those with a cell that is no number are left out, and their places added to ``bad``."""
    try:
        return _converted(header, rows) if rows else {}
    except ValueError:
        good = []
        for row, place in zip(rows, places, strict=True):
            try:
                _converted(header, [row])
                good.append(row)
            except ValueError:
                bad.append(place)
        return _converted(header, good) if good else {}


def _converted(header: list[str], rows: list[list[str]]) -> Columns:
    columns: Columns = {}
    for name, cells in zip(header, zip(*rows, strict=True), strict=True):
        if name in _INTEGERS:
            columns[name] = np.array([int(cell or -1) for cell in cells], np.int64)
        elif name in _NAMES or name in _TEXTS:
            columns[name] = np.array(cells, object)
        else:
            columns[name] = np.array([float(cell or "nan") for cell in cells], np.float64)
    return columns


# -- all of them ----------------------------------------------------------------------------------------------------


def _joined(monitor: str, pieces: list[tuple[TableFile, Columns]]) -> MonitorTable:
    sizes = [len(columns["step"]) for _, columns in pieces]
    names = dict.fromkeys(name for _, columns in pieces for name in columns)
    stats = [name for name in names if name not in _KEYS and name not in _TEXTS]

    def together(name: str, kind: Any, absent: Any) -> Any:
        parts = [
            columns[name] if name in columns else np.full(size, absent, kind)
            for (_, columns), size in zip(pieces, sizes, strict=True)
        ]
        return np.concatenate(parts) if parts else np.empty(0, kind)

    def repeated(values: list[Any], kind: Any) -> Any:
        return np.repeat(np.array(values, kind), sizes)

    scope = [
        columns["scope"] if "scope" in columns else np.full(size, file.scope, object)
        for (file, columns), size in zip(pieces, sizes, strict=True)
    ]
    named = [columns["module_name" if "module_name" in columns else "name"] for _, columns in pieces]
    return MonitorTable(
        monitor=monitor,
        rank=repeated([file.rank for file, _ in pieces], np.int64),
        step=together("step", np.int64, -1),
        name=np.concatenate(named) if named else np.empty(0, object),
        scope=np.concatenate(scope) if scope else np.empty(0, object),
        micro_step=together("micro_step", np.int64, -1),
        vpp_stage=together("vpp_stage", np.int64, -1),
        call=together("call", np.int64, -1),
        run=repeated([file.run for file, _ in pieces], np.int64),
        stats={name: together(name, np.float64, np.nan) for name in stats},
        valid={name: repeated([name in columns for _, columns in pieces], np.bool_) for name in stats},
        texts={name: together(name, object, None) for name in names if name in ("shape", "dtype", "id")},
    )
