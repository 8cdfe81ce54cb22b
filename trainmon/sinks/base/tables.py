"""Per-tensor tables in files: columns, rows in one order, and which rows a later life replaced.

Files are named ``<probe>_step<A>-<B>[_life<n>[_<k>]]``: rows from step A on that stand in earlier files, by life and then
by time, are replaced by the file's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np

from trainmon.frame import Flags, Floats, Snapshot, Table
from trainmon.sinks.base.tags import tag

__all__ = ["aligned", "by_probe", "column", "file_stem", "table_files", "table_subjects", "table_tag"]

_SUBJECT = re.compile(r"/<[a-z_]+>$")


def by_probe(snapshot: Snapshot) -> dict[str, list[Table]]:
    """The tables of a step, one list a probe: each is a file."""
    probes: dict[str, list[Table]] = {}
    for table in snapshot.tables:
        probes.setdefault(table.probe, []).append(table)
    return probes


def column(table: Table) -> str:
    """The name of a table's column: its series without the placeholder of the subject."""
    return _SUBJECT.sub("", table.series)


def table_tag(table: Table, style: str) -> str:
    """The tag below which a table's quantiles stand."""
    return tag(_SUBJECT.sub("/", table.series), style).rstrip("/")


def table_subjects(tables: Iterable[Table]) -> tuple[str, ...]:
    """The names of all rows, each once, in order of first appearance."""
    return tuple(dict.fromkeys(chain.from_iterable(table.subjects for table in tables)))


def aligned(table: Table | None, names: tuple[str, ...]) -> tuple[Floats, Flags]:
    """Values and validity of a table in the order of ``names``; null where it has no such subject."""
    if table is not None and table.subjects == names:
        return table.values, table.valid
    values, valid = np.zeros(len(names)), np.zeros(len(names), np.bool_)
    if table is not None:
        row_of = {name: row for row, name in enumerate(names)}
        rows = [row_of[subject] for subject in table.subjects]
        values[rows], valid[rows] = table.values, table.valid
    return values, valid


def file_stem(probe: str, first: int, last: int, life: int, number: int = 1) -> str:
    """The name of a file without its ending.

    Args:
        life: 1 for a new run.
        number: above 1 if a file of this life and these steps is there already.
    """
    stem = f"{probe}_step{first}-{last}"
    if life > 1 or number > 1:
        stem += f"_life{life}"
    return stem if number == 1 else f"{stem}_{number}"


def table_files(directory: Path, probe: str, ending: str) -> list[tuple[Path, int]]:
    """The files of a probe in the order in which they were written, each with the first step that it covers."""
    name = re.compile(
        rf"{re.escape(probe)}_step(\d+)-\d+(?:_life(\d+)(?:_\d+)?)?\.{re.escape(ending)}", re.ASCII
    )
    found = []
    for path in directory.iterdir():
        match = name.fullmatch(path.name)
        if match:
            found.append((int(match[2] or 1), path.stat().st_mtime_ns, int(match[1]), path))
    return [(path, first) for _, _, first, path in sorted(found)]
