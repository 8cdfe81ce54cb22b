"""Tables of both of msProbe's monitors in one SQLite file, in the schema that msProbe's trend viewer reads."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trainmon.msprobe.converting import each_rank
from trainmon.msprobe.reading import MonitorTable, Tree, read
from trainmon.msprobe.saying import logger
from trainmon.msprobe.trees import find_tables, metric_of

__all__ = ["FILE", "data2db"]

FILE = "monitor_data.trend.db"

#: Largest size of a number; infinities stand one further out.
_MOST = 1e9
_LAYER = re.compile(r"layers?\.\d+")
_SCHEMA = """
CREATE TABLE monitoring_targets (
    target_id INTEGER PRIMARY KEY, target_name TEXT, vpp_stage INTEGER, micro_step INTEGER DEFAULT 0,
    UNIQUE (target_name, vpp_stage, micro_step));
CREATE TABLE monitoring_metrics (metric_id INTEGER PRIMARY KEY, metric_name TEXT UNIQUE);
CREATE TABLE monitoring_tags (
    tag_id INTEGER PRIMARY KEY, tag_name TEXT, category TEXT, metric_id INTEGER,
    UNIQUE (tag_name, category, metric_id));
CREATE TABLE tag_target_mapping (tag_id INTEGER, target_id INTEGER, PRIMARY KEY (tag_id, target_id));
"""

Int64: TypeAlias = npt.NDArray[np.int64]
Target: TypeAlias = tuple[str, int, int]


def data2db(
    data: str | os.PathLike[str],
    db: str | os.PathLike[str],
    *,
    mapping: Mapping[str, str] | str | os.PathLike[str] | None = None,
    micro_step: bool = True,
    process_num: int = 1,
) -> Path:
    """Writes ``monitor_data.trend.db``; of rows that say the same thing of the same step the last counts.

    Args:
        data: the output of Monitor V2, of trainmon's drop-in or of msProbe's older monitor.
        db: the directory for the file, which is replaced.
        mapping: parts of names and what stands for them, or a JSON file with such an object.
        micro_step: the axis counts micro-batches, as many a step as any rank has; else steps, and each micro-batch is a
            target of its own.
        process_num: ranks that are read at once.

    Returns:
        The file. NaN is NULL there, numbers end at 1e9 and infinities stand one behind that.

    Raises:
        ValueError: no tables, ``process_num`` below 1, a mapping that is none.
        FileNotFoundError: there is no such path.
        OSError, sqlite3.Error: something can't be read or written; there is no new file then.
    """
    words = _words(mapping)
    ranks = sorted({file.rank for file in find_tables(data)})
    trees = each_rank(_read_rank, [(str(data), rank) for rank in ranks], process_num)
    for problem in (problem for tree in trees for problem in tree.problems):
        logger.warning("%s", problem)
    tables = [table.latest()[0] for tree in trees for table in tree.tables.values()]
    folder = Path(db)
    folder.mkdir(parents=True, exist_ok=True)
    temporary, path = folder / f".{FILE}.{os.getpid()}", folder / FILE
    temporary.unlink(missing_ok=True)
    try:
        connection = sqlite3.connect(temporary)
        try:
            with connection:
                _Database(connection, words, micro_step).write([one for one in tables if len(one)])
        finally:
            connection.close()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _read_rank(data: str, rank: int) -> Tree:
    return read(data, ranks=[rank])


def _words(mapping: Any) -> dict[str, str]:
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping):
        with open(mapping, encoding="utf-8") as stream:
            mapping = json.load(stream)
    if not isinstance(mapping, Mapping) or not all(isinstance(one, str) for one in mapping.values()):
        raise ValueError("the mapping must be an object of texts")
    return dict(mapping)


class _Database:
    def __init__(self, connection: sqlite3.Connection, words: Mapping[str, str], micro: bool) -> None:
        self._connection, self._words, self._micro = connection, words, micro
        self._targets: dict[Target, int] = {}
        self._metrics: dict[str, int] = {}
        self._tags: dict[tuple[str, str, int], int] = {}

    def write(self, tables: list[MonitorTable]) -> None:
        stats = list(dict.fromkeys(name for table in tables for name in table.stats))
        columns = "".join(f", {_quoted(name)} REAL" for name in stats)
        self._connection.executescript(
            f"{_SCHEMA} CREATE TABLE trend_data (rank INTEGER, step INTEGER, target_id INTEGER, metric_id INTEGER"
            f"{columns}, PRIMARY KEY (rank, step, target_id, metric_id)) WITHOUT ROWID;"
        )
        axis = _axis(tables) if self._micro else None
        marks = ", ".join("?" * (4 + len(stats)))
        seen: dict[str, dict[str, None]] = {}
        steps: list[int] = []
        for table in tables:
            for scope in dict.fromkeys(table.scope.tolist()):
                part = table.where(table.scope == scope)
                metric = metric_of(table.monitor, scope)
                places = part.step if axis is None else axis(part)
                steps += [int(places.min()), int(places.max())]
                seen.setdefault(metric, {}).update(dict.fromkeys(part.stats))
                self._connection.executemany(
                    f"INSERT OR REPLACE INTO trend_data VALUES ({marks})",
                    self._rows(part, metric, places, stats),
                )
        self._write_names(seen, steps, max(int(table.rank.max()) for table in tables))

    def _rows(
        self, table: MonitorTable, metric: str, steps: Int64, stats: list[str]
    ) -> Iterable[tuple[Any, ...]]:
        number = self._metrics.setdefault(metric, len(self._metrics) + 1)
        targets = self._numbered(table, number)
        nothing = [None] * len(table)
        values = [_clamped(table, name) if name in table.stats else nothing for name in stats]
        yield from zip(
            table.rank.tolist(), steps.tolist(), targets, [number] * len(table), *values, strict=True
        )

    def _numbered(self, table: MonitorTable, metric: int) -> list[int]:
        micros = [0] * len(table) if self._micro else np.maximum(table.micro_step, 0).tolist()
        numbers = []
        for name, stage, micro in zip(table.name.tolist(), table.vpp_stage.tolist(), micros, strict=True):
            for part, word in self._words.items():
                name = name.replace(part, word)
            key = (name, stage, micro)
            if key not in self._targets:
                self._targets[key] = len(self._targets) + 1
            numbers.append(self._targets[key])
            layer = _LAYER.search(name)
            self._tag(name, "module", metric, numbers[-1])
            if layer is not None:
                self._tag(layer[0], "layer", metric, numbers[-1])
        return numbers

    def _tag(self, name: str, category: str, metric: int, target: int) -> None:
        key = (name, category, metric)
        if key not in self._tags:
            self._tags[key] = len(self._tags) + 1
        self._connection.execute(
            "INSERT OR IGNORE INTO tag_target_mapping VALUES (?, ?)", (self._tags[key], target)
        )

    def _write_names(self, seen: Mapping[str, Iterable[str]], steps: list[int], rank: int) -> None:
        run = self._connection.executemany
        run(
            "INSERT INTO monitoring_targets VALUES (?, ?, ?, ?)",
            [(at, *key) for key, at in self._targets.items()],
        )
        run(
            "INSERT INTO monitoring_metrics VALUES (?, ?)", [(at, name) for name, at in self._metrics.items()]
        )
        run("INSERT INTO monitoring_tags VALUES (?, ?, ?, ?)", [(at, *key) for key, at in self._tags.items()])
        columns = "".join(f", {_quoted(name)} TEXT" for name in seen)
        self._connection.execute(
            f"CREATE TABLE global_stats (min_step INTEGER, max_step INTEGER, max_rank INTEGER{columns})"
        )
        marks = ", ".join("?" * (3 + len(seen)))
        lists = [",".join(names) for names in seen.values()]
        self._connection.execute(
            f"INSERT INTO global_stats VALUES ({marks})", (min(steps), max(steps), rank, *lists)
        )


def _axis(tables: list[MonitorTable]) -> Callable[[MonitorTable], Int64]:
    """Where a row stands when micro-batches are counted through: each step has as many as any rank has in it."""
    counts: dict[int, int] = {}
    firsts: list[int] = []
    for table in tables:
        for step, micro in np.unique(np.stack([table.step, table.micro_step], axis=1), axis=0).tolist():
            counts[step] = max(counts.get(step, 1), micro + 1 if micro >= 0 else 1)
            if micro >= 0:
                firsts.append(micro)
    first = min(firsts, default=0)  # Monitor V2 counts from 1, the older monitor from 0
    steps = sorted(counts)
    starts = np.cumsum([0, *(max(counts[step] - first, 1) for step in steps)])
    start = dict(zip(steps, starts.tolist(), strict=False))

    def places(table: MonitorTable) -> Int64:
        begin = np.array([start[step] for step in table.step.tolist()], np.int64)
        return begin + np.maximum(table.micro_step - first, 0)

    return places


def _clamped(table: MonitorTable, name: str) -> list[float | None]:
    column, valid = table.stats[name], table.valid[name]
    with np.errstate(invalid="ignore"):
        values = np.where(np.isinf(column), np.sign(column) * (_MOST + 1), np.clip(column, -_MOST, _MOST))
    absent = (np.isnan(column) | ~valid).tolist()
    return [None if gone else value for value, gone in zip(values.tolist(), absent, strict=True)]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
