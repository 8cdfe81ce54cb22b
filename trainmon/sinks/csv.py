"""Per-tensor tables as CSV: ``tensors/<probe>_step<A>-<B>.csv``, one row a step and tensor.

Columns are ``step``, ``name``, then one per series of the probe. An empty cell is null; non-finite values
are ``nan``, ``inf``, ``-inf``. A file covers the steps A to B and is never reopened: a resumed run starts a
new one, whose name says its life.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from trainmon.frame import Snapshot, Table
from trainmon.ops import csv_rows
from trainmon.sinks.base import (
    Cadence,
    Message,
    RecordFile,
    RunInfo,
    aligned,
    at_least,
    by_probe,
    column,
    file_stem,
    table_files,
    table_subjects,
)

__all__ = ["CsvSink", "read_csv"]


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
        self._resumed_step = 0
        self._begun: set[str] = set()
        self._files: dict[str, _TableFile] = {}

    def open(self, run: RunInfo) -> None:
        if run.rank_directory is not None:
            self._directory = run.rank_directory / "tensors"
        self._life = run.life
        self._resumed_step = run.resumed_step

    def write(self, snapshot: Snapshot) -> None:
        if self._directory is None or not self._cadence.due(snapshot.step):
            return
        for probe, tables in by_probe(snapshot).items():
            columns = [column(table) for table in tables]
            file = self._files.get(probe)
            if file is None or file.rows >= self._rows_per_file or not file.takes(snapshot.step, columns):
                if file is not None:
                    file.close()
                    del self._files[probe]
                block = (snapshot.step - 1) // self._steps_per_file
                last = (block + 1) * self._steps_per_file
                # A resumed life's first file says where it goes on, shown or not: older rows from there on are void.
                first = snapshot.step
                if probe not in self._begun:
                    first = min(first, self._resumed_step + 1) if self._life > 1 else first
                file = _TableFile(self._directory, probe, first, last, self._life, columns)
                self._begun.add(probe)
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
        self._file = _create(directory, probe, first, last, life)
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
        names = table_subjects(tables)
        given = dict(zip(columns, tables, strict=True))
        cells: dict[str, Any] = {"step": np.full(len(names), step), "name": names}
        valid = {}
        for name in self._columns:
            cells[name], valid[name] = aligned(given.get(name), names)
        self._file.write(csv_rows(cells, valid))
        self._latest = step
        self.rows += len(names)

    def close(self) -> None:
        self._file.close()


def _create(directory: Path, probe: str, first: int, last: int, life: int) -> RecordFile:
    """A new file that overwrites none: this life or an unknown one may have left one for the same steps."""
    number = 1
    while True:
        try:
            return RecordFile(
                directory / f"{file_stem(probe, first, last, life, number)}.csv", exclusive=True
            )
        except FileExistsError:
            number += 1


def read_csv(directory: str | Path, probe: str, *, latest: bool = False) -> list[dict[str, Any]]:
    """The rows of a probe's CSV files: ``step`` (int), ``name``, then a float, or None for null, a column.

    Args:
        directory: ``<output_dir>/<run>/rank_<r>/tensors``.
        probe: the configuration section, e.g. ``gradients``.
        latest: drop what a later life of the run replaced, so that each step stands once.

    Raises:
        OSError: a file can't be read.
        ValueError: a file is no table of trainmon's.
    """
    rows: list[dict[str, Any]] = []
    for path, first in table_files(Path(directory), probe, "csv"):
        if latest:
            rows = [row for row in rows if row["step"] < first]
        with path.open(newline="", encoding="utf-8") as stream:
            for row in csv.DictReader(stream):
                cells = {name: float(cell) if cell else None for name, cell in row.items() if name != "name"}
                rows.append({**cells, "step": int(row["step"]), "name": row["name"]})
    return rows
