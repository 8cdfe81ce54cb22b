"""Per-tensor tables as CSV: ``tensors/<probe>_step<A>-<B>.csv``, one row a step and tensor.

Columns are ``step``, ``name``, then one per series of the probe. An empty cell is null; non-finite values
are ``nan``, ``inf``, ``-inf``. A file covers the steps A to B and is never reopened: a resumed run starts a
new one.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from trainmon.frame import Flags, Floats, Snapshot, Table
from trainmon.ops import csv_rows
from trainmon.sinks.base import Cadence, Message, RecordFile, RunInfo, at_least

__all__ = ["CsvSink"]


class CsvSink:
    """Writes the tables of each snapshot, one series of files a probe.

    Args:
        every: shows the first step and every multiple of this.
        steps_per_file: a new file begins after each multiple of this many steps.
        rows_per_file: a new file begins at the next step once a file holds this many rows.

    Raises:
        ValueError: an argument is not a positive integer.
    """

    name = "csv"

    def __init__(self, *, every: int = 1, steps_per_file: int = 1000, rows_per_file: int = 1_000_000) -> None:
        at_least("steps_per_file", steps_per_file, 1)
        at_least("rows_per_file", rows_per_file, 1)
        self._cadence = Cadence(every)
        self._rows_per_file = rows_per_file
        self._steps_per_file = steps_per_file
        self._directory: Path | None = None
        self._life = 1
        self._files: dict[str, _TableFile] = {}

    def open(self, run: RunInfo) -> None:
        if run.rank_directory is not None:
            self._directory = run.rank_directory / "tensors"
        self._life = run.life

    def write(self, snapshot: Snapshot) -> None:
        if self._directory is None or not self._cadence.due(snapshot.step):
            return
        probes: dict[str, list[Table]] = {}
        for table in snapshot.tables:
            probes.setdefault(table.probe, []).append(table)
        for probe, tables in probes.items():
            columns = [table.series.removesuffix("/<p>") for table in tables]
            file = self._files.get(probe)
            if file is None or file.rows >= self._rows_per_file or not file.takes(snapshot.step, columns):
                if file is not None:
                    file.close()
                    del self._files[probe]
                block = (snapshot.step - 1) // self._steps_per_file
                last = (block + 1) * self._steps_per_file
                file = _TableFile(self._directory, probe, snapshot.step, last, self._life, columns)
                self._files[probe] = file
            file.append(snapshot.step, tables, columns)

    def message(self, message: Message) -> None:
        """Messages are not tables."""

    def flush(self) -> None:
        """Nothing to do: the rows of a step are written at once."""

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


class _TableFile:
    """One CSV file: the rows of one probe for the steps ``first`` to ``last``."""

    def __init__(
        self, directory: Path, probe: str, first: int, last: int, life: int, columns: list[str]
    ) -> None:
        self._steps = range(first, last + 1)
        self._latest = first - 1
        self.rows = 0
        self._columns = columns
        stem = f"{probe}_step{first}-{last}"
        self._file = _create(directory, stem, life)
        try:
            self._file.write(csv_rows({name: [] for name in ("step", "name", *columns)}, header=True))
        except BaseException:
            # Without its header the file is nothing: the name is free for the next try.
            self._file.close()
            self._file.path.unlink(missing_ok=True)
            raise

    def takes(self, step: int, columns: list[str]) -> bool:
        """Whether these rows belong here; a step that goes back begins a new file."""
        return step in self._steps and step > self._latest and set(columns) <= set(self._columns)

    def append(self, step: int, tables: list[Table], columns: list[str]) -> None:
        names = tuple(dict.fromkeys(chain.from_iterable(table.subjects for table in tables)))
        given = dict(zip(columns, tables, strict=True))
        cells: dict[str, Any] = {"step": np.full(len(names), step), "name": names}
        valid = {}
        for column in self._columns:
            cells[column], valid[column] = _aligned(given.get(column), names)
        self._file.write(csv_rows(cells, valid))
        self._latest = step
        self.rows += len(names)

    def close(self) -> None:
        self._file.close()


def _create(directory: Path, stem: str, life: int) -> RecordFile:
    """A new file that overwrites none: an earlier life may have left one for the same steps."""
    suffix, number = "", life
    while True:
        try:
            return RecordFile(directory / f"{stem}{suffix}.csv", exclusive=True)
        except FileExistsError:
            suffix = f"_life{number}"
            number += 1


def _aligned(table: Table | None, names: tuple[str, ...]) -> tuple[Floats, Flags]:
    """Values and validity of a table in the order of ``names``; null where it has no such subject."""
    if table is not None and table.subjects == names:
        return table.values, table.valid
    values, valid = np.zeros(len(names)), np.zeros(len(names), np.bool_)
    if table is not None:
        row_of = {name: row for row, name in enumerate(names)}
        rows = [row_of[subject] for subject in table.subjects]
        values[rows], valid[rows] = table.values, table.valid
    return values, valid
