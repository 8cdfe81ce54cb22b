"""Rows of a step and the files they go to: columns, bytes and restarts as msProbe has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainmon.backend.base import Floats
from trainmon.backend.statistics import COLUMNS, Reading
from trainmon.ops import csv_rows
from trainmon.sinks.base import RecordFile

__all__ = ["Clock", "Rows", "TableFiles", "decimals", "rounded", "table_bytes"]


class Clock:
    """Numbers what happens in a step, from 0."""

    def __init__(self) -> None:
        self._next = 0

    def tick(self) -> int:
        self._next += 1
        return self._next - 1

    def restart(self) -> None:
        self._next = 0


@dataclass(slots=True)
class Rows:
    """Rows of one monitor since the last step, in order. They hold no tensor.

    Attributes:
        orders: place of each among all monitors' rows; empty without a clock.
        more: columns that readings don't give, by name.
    """

    names: list[str] = field(default_factory=list)
    scopes: list[str] = field(default_factory=list)
    stages: list[int | None] = field(default_factory=list)
    micros: list[int] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    orders: list[int] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    clock: Clock | None = None

    def add(
        self, name: str, scope: str, stage: int | None, micro: int, reading: Reading, call: int = 0
    ) -> None:
        self.names.append(name)
        self.scopes.append(scope)
        self.stages.append(stage)
        self.micros.append(micro)
        self.readings.append(reading)
        self.calls.append(call)
        if self.clock is not None:
            self.orders.append(self.clock.tick())

    def __len__(self) -> int:
        return len(self.names)

    def clear(self) -> None:
        self.drop(0, len(self.names))

    def drop(self, start: int, stop: int) -> None:
        """Takes rows back."""
        for column in self._columns():
            del column[start:stop]

    def taken(self) -> Rows:
        """All rows, as they are now; here there are none any more."""
        rows = Rows()
        for theirs, column in zip(rows._columns(), self._columns(), strict=True):
            theirs.extend(column)
        self.clear()
        return rows

    def _columns(self) -> tuple[list[Any], ...]:
        return self.names, self.scopes, self.stages, self.micros, self.readings, self.calls, self.orders


def rounded(table: Floats) -> Floats:
    """Each value as float32 holds it; beyond its range infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return table.astype(np.float32).astype(np.float64)


def decimals(table: Floats, digits: int) -> Floats:
    """Each value with so many decimals, rounded as written numbers are."""
    values = [round(value, digits) for value in table.ravel().tolist()]
    return np.array(values, np.float64).reshape(table.shape)


def table_bytes(
    rows: Rows,
    table: Floats,
    step: int,
    ops: Sequence[str],
    *,
    keys: Sequence[str] = (),
    header: bool = False,
) -> bytes:
    """Rows as msProbe spells them: CRLF, shortest float64.

    Args:
        table: by :data:`COLUMNS`, or the first of them.
        keys: columns before the statistics: ``micro_step``, ``call``.
    """
    columns: list[tuple[str, Any]] = [
        ("vpp_stage", _stages(rows)),
        ("step", np.full(len(rows), step, np.int64)),
    ]
    columns += [("module_name", rows.names), ("scope", rows.scopes)]
    own = {"micro_step": rows.micros, "call": rows.calls}
    columns += [(key, np.array(own[key], np.int64)) for key in keys]
    for name in ops:
        if header:
            columns.append((name, []))
        elif name in rows.more:
            columns.append((name, rows.more[name]))
        else:
            columns.append((name, np.ascontiguousarray(table[:, COLUMNS.index(name)])))
    return _crlf(columns, header)


def _stages(rows: Rows) -> Any:
    if None in rows.stages:
        return ["" if stage is None else str(stage) for stage in rows.stages]
    return np.array(rows.stages, np.int64)


def _crlf(columns: list[tuple[str, Any]], header: bool) -> bytes:
    texts = [values for _, values in columns if isinstance(values, list)]
    if not any("\n" in text for values in texts for text in values):
        return csv_rows(columns, header=header).replace(b"\n", b"\r\n")
    # A name with the end of a line in it: row by row, so that only the rows' own ends are replaced.
    head = csv_rows([(name, []) for name, _ in columns], header=True) if header else b""
    size = len(columns[0][1])
    lines = [
        head,
        *(csv_rows([(name, values[row : row + 1]) for name, values in columns]) for row in range(size)),
    ]
    return b"".join(line[:-1] + b"\r\n" for line in lines if line)


class TableFiles:
    """``<directory>/<slug>_step<A>-<B>.csv``, opened for each write, so that nothing is lost when somebody removes them.

    A file that begins with another header is left as it is: rows go to ``.part2.csv`` and so on. A row that was not
    finished stays alone on its line.

    Attributes:
        directory: where.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._checked: dict[Path, tuple[bytes, Path]] = {}  # header and file by the plain path

    def append(self, stem: str, header: bytes, rows: bytes) -> None:
        """Writes whole rows, the header before them if the file is new or empty.

        Raises:
            OSError: nothing could be written; the file is as it was.
        """
        plain = self.directory / f"{stem}.csv"
        file = RecordFile(self._place(plain, header), mode=0o666)
        try:
            if not file.size:
                rows = header + rows
            elif not file.ends_with(b"\n"):  # a run was killed while it wrote a row
                rows = b"\r\n" + rows
            file.write(rows)
        finally:
            file.close()

    def _place(self, plain: Path, header: bytes) -> Path:
        known = self._checked.get(plain)
        if known is not None and known[0] == header:
            return known[1]
        path, part = plain, 1
        while not _takes(path, header):
            part += 1
            path = plain.with_name(f"{plain.stem}.part{part}.csv")
        if len(self._checked) >= 64:  # the files of earlier steps
            self._checked.clear()
        self._checked[plain] = header, path
        return path


def _takes(path: Path, header: bytes) -> bool:
    """Whether a file is new, empty, or begins with this header."""
    try:
        with open(path, "rb") as stream:
            return stream.read(len(header)) in (b"", header)
    except FileNotFoundError:
        return True
