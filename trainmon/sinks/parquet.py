"""Per-tensor tables as Parquet: ``tensors/<probe>_step<A>-<B>.parquet``, by the package ``pyarrow`` (an extra).

One row a step and tensor, with the columns ``step`` (int64), ``name`` (dictionary of text), then one float64 per series
of the probe. Null is null, NaN and infinities are themselves. A Parquet file can be read only when it is whole, so rows
wait in memory and appear as whole files: a killed run lacks at most the last ``steps_per_file`` steps, which the CSV
sink, where it is on, has.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainmon.frame import Snapshot, Table
from trainmon.sinks.base import (
    Cadence,
    Message,
    RunInfo,
    Unwritten,
    aligned,
    at_least,
    by_probe,
    column,
    file_stem,
    publish,
    table_files,
    table_subjects,
)

__all__ = ["ParquetSink", "read_parquet"]

_MISSING = "the parquet sink needs the package pyarrow: pip install trainmon[parquet]"
_METADATA = b"trainmon"
#: Where files can't be written, so many files' worth of rows wait for better times.
_PATIENCE = 4


class ParquetSink:
    """Writes the tables of the snapshots, one series of files a probe.

    Args:
        every: shows the first step and every multiple of this.
        steps_per_file: a file is written once so many steps wait for it,
        rows_per_file: or at least so many rows.
        compression: a codec of pyarrow.

    Raises:
        ImportError: the package ``pyarrow`` is not installed.
        ValueError: an argument is not a positive integer.
    """

    name = "parquet"

    def __init__(
        self,
        *,
        every: int = 1,
        steps_per_file: int = 100,
        rows_per_file: int = 100_000,
        compression: str = "zstd",
    ) -> None:
        at_least("steps_per_file", steps_per_file, 1)
        at_least("rows_per_file", rows_per_file, 1)
        if importlib.util.find_spec("pyarrow") is None:
            raise ImportError(_MISSING)
        self._cadence = Cadence(every)
        self._steps_per_file, self._rows_per_file = steps_per_file, rows_per_file
        self._compression = compression
        self._directory: Path | None = None
        self._waiting: dict[str, _Waiting] = {}
        self._begun: set[str] = set()

    def open(self, run: RunInfo) -> None:
        try:
            import pyarrow.parquet  # type: ignore[import-untyped]  # noqa: F401
        except ImportError as error:
            raise ImportError(f"{_MISSING} ({error})") from error
        if run.rank_directory is not None:
            self._directory = run.rank_directory / "tensors"
        self._run = run

    def write(self, snapshot: Snapshot) -> None:
        if self._directory is None or not self._cadence.due(snapshot.step):
            return
        errors = []
        for probe, tables in by_probe(snapshot).items():
            waiting = self._waiting.setdefault(probe, _Waiting())
            try:
                if waiting.steps and snapshot.step <= waiting.steps[-1]:
                    self._publish(probe, waiting)
                waiting.add(snapshot.step, tables)
                if len(waiting.steps) >= self._steps_per_file or waiting.rows >= self._rows_per_file:
                    self._publish(probe, waiting)
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _publish(self, probe: str, waiting: _Waiting) -> None:
        """Writes what waits. What can't be written goes on waiting, and is lost when too much does."""
        assert self._directory is not None
        first, last = waiting.steps[0], waiting.steps[-1]
        # A resumed life's first file says where it goes on, shown or not: older rows from there on are void.
        if probe not in self._begun and self._run.life > 1:
            first = min(first, self._run.resumed_step + 1)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            content = self._encode(waiting)
            number = 1
            while True:
                stem = file_stem(probe, first, last, self._run.life, number)
                path = self._directory / f"{stem}.parquet"
                if not path.exists():
                    break
                number += 1
            publish(path, content)
        except OSError as error:
            over = waiting.rows >= _PATIENCE * self._rows_per_file or (
                len(waiting.steps) >= _PATIENCE * self._steps_per_file
            )
            raise Unwritten(error, waiting.drop((len(waiting.steps) + 1) // 2) if over else 0) from error
        self._begun.add(probe)
        waiting.clear()

    def _encode(self, waiting: _Waiting) -> memoryview:
        import pyarrow as pa
        import pyarrow.parquet as parquet

        steps, names, codes, values, valid = waiting.columns()
        columns: dict[str, Any] = {
            "step": pa.array(steps),
            "name": pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names, pa.string())),
        }
        for name in values:
            columns[name] = pa.array(values[name], mask=~valid[name])
        facts = {
            "run": self._run.name,
            "life": self._run.life,
            "resumed_step": self._run.resumed_step,
            "rank": self._run.rank,
            "world": self._run.world,
            "units": waiting.units,
        }
        text = json.dumps(facts, ensure_ascii=False).encode("utf-8", "backslashreplace")
        table = pa.table(columns).replace_schema_metadata({_METADATA: text})
        stream = pa.BufferOutputStream()
        parquet.write_table(table, stream, compression=self._compression)
        return memoryview(stream.getvalue())

    def message(self, message: Message) -> None:
        """Messages are not tables."""

    def flush(self) -> None:
        """Writes what waits; what can't be written now is lost."""
        errors = []
        for probe, waiting in self._waiting.items():
            if waiting.steps:
                try:
                    self._publish(probe, waiting)
                except OSError as error:
                    errors.append(Unwritten(error, waiting.drop(len(waiting.steps))))
        if errors:
            raise Unwritten(errors[0], sum(error.records for error in errors))

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._waiting.clear()


@dataclass(slots=True)
class _Waiting:
    """The tables of some steps, in order, as the snapshots hold them."""

    steps: list[int] = field(default_factory=list)
    tables: list[list[Table]] = field(default_factory=list)
    rows: int = 0
    units: dict[str, str] = field(default_factory=dict)

    def add(self, step: int, tables: list[Table]) -> None:
        self.steps.append(step)
        self.tables.append(tables)
        self.rows += len(table_subjects(tables))
        for table in tables:
            self.units[column(table)] = table.unit

    def clear(self) -> None:
        self.drop(len(self.steps))

    def drop(self, steps: int) -> int:
        """Forgets the oldest; returns how many those are."""
        del self.steps[:steps], self.tables[:steps]
        self.rows = sum(len(table_subjects(tables)) for tables in self.tables)
        return steps

    def columns(self) -> tuple[Any, list[str], Any, dict[str, Any], dict[str, Any]]:
        """Step and code of each row, the names that the codes stand for, values and validity by column."""
        code_of: dict[str, int] = {}
        subjects = [table_subjects(tables) for tables in self.tables]
        codes = []
        for names in subjects:
            for name in names:
                code_of.setdefault(name, len(code_of))
            codes.append(np.array([code_of[name] for name in names], np.int32))
        values: dict[str, list[Any]] = {name: [] for name in self.units}
        valid: dict[str, list[Any]] = {name: [] for name in self.units}
        for tables, names in zip(self.tables, subjects, strict=True):
            given = {column(table): table for table in tables}
            for name in self.units:
                cells, known = aligned(given.get(name), names)
                values[name].append(cells)
                valid[name].append(known)
        steps = np.repeat(np.array(self.steps, np.int64), [len(names) for names in subjects])
        spelled = [name.encode("utf-8", "backslashreplace").decode() for name in code_of]
        return (
            steps,
            spelled,
            np.concatenate(codes),
            {name: np.concatenate(cells) for name, cells in values.items()},
            {name: np.concatenate(flags) for name, flags in valid.items()},
        )


def read_parquet(directory: str | Path, probe: str, *, latest: bool = False) -> Any:
    """The rows of a probe's Parquet files as one ``pyarrow.Table``.

    Args:
        directory: ``<output_dir>/<run>/rank_<r>/tensors``.
        probe: the configuration section, e.g. ``gradients``.
        latest: drop what a later life of the run replaced, so that each step stands once.

    Raises:
        ImportError: the package ``pyarrow`` is not installed.
        OSError: a file can't be read.
    """
    try:
        import pyarrow as pa
        import pyarrow.compute as compute  # type: ignore[import-untyped]
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(f"{_MISSING} ({error})") from error
    parts: list[Any] = []
    for path, first in table_files(Path(directory), probe, "parquet"):
        if latest:
            parts = [part.filter(compute.less(part["step"], first)) for part in parts]
        # Read from an open file: a path would be searched for partitions in its names.
        with path.open("rb") as stream:
            part = parquet.read_table(stream).replace_schema_metadata(None)
        place = part.schema.get_field_index("name")
        parts.append(part.set_column(place, "name", part["name"].cast(pa.string())))
    if not parts:
        return pa.table({"step": pa.array([], pa.int64()), "name": pa.array([], pa.string())})
    return pa.concat_tables(parts, promote_options="default")
