"""What becomes of the rows of a written step: numbers, text, files; at once, or in the writer thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trainmon.backend.base import Floats
from trainmon.frame import Snapshot
from trainmon.msprobe.config import logger
from trainmon.msprobe.tables import Rows, TableFiles, decimals, rounded, table_bytes
from trainmon.sinks.base import Message, RunInfo
from trainmon.sinks.writer import Writer

__all__ = ["MonitorTable", "Output"]

#: Written steps that may wait for the writer thread.
WAITING = 256
#: Bytes that a row takes while it waits.
_ROW = 512


@dataclass(frozen=True, slots=True)
class MonitorTable:
    """One monitor's rows of a step.

    Attributes:
        stem: of the file.
        count: rows, or what they are merged from.
        finish: gives rows and numbers, when whatever they wait for has come.
        ops: columns of statistics.
        keys: columns between scope and statistics.
        watch: looks at step, rows and numbers before they are written.
    """

    stem: str
    count: int
    finish: Callable[[], tuple[Rows, Floats]]
    ops: Sequence[str]
    keys: Sequence[str]
    watch: Callable[[int, Rows, Floats], None] | None = None


@dataclass(frozen=True, slots=True)
class _Step(Snapshot):
    """All monitors' rows of a step, as the writer thread takes them."""

    monitors: Sequence[MonitorTable] = ()

    @property
    def waiting_bytes(self) -> int:
        return _ROW * sum(one.count for one in self.monitors)


class Output:
    """Writes tables; what can't be written is counted and said, and tried anew with the next step.

    Args:
        rounds: values as float32 holds them.
        digits: decimals that are kept; None: every digit.
        asynchronous: by another thread, which drops the oldest steps if it can't keep up.

    Attributes:
        files: where to; may be replaced while nothing is open.
        errors: tables that could not be written, or steps that were dropped.
        written: rows written by the stem of their file's monitor.
    """

    def __init__(
        self, files: TableFiles, *, rounds: bool, asynchronous: bool, digits: int | None = None
    ) -> None:
        self.files = files
        self.written: dict[str, int] = {}
        self.digits = digits
        self._rounds, self._asynchronous = rounds, asynchronous
        self._sink = _Sink(self)
        self._writer: Writer | None = None
        self._lost = 0

    @property
    def errors(self) -> int:
        return self._lost + self._sink.errors + (0 if self._writer is None else self._writer.dropped)

    def open(self, rank: int) -> None:
        """A run begins: starts the thread, if there is to be one."""
        self.written = {}
        if self._asynchronous and self._writer is None:
            self._writer = Writer([self._sink], RunInfo(None, "msprobe", rank=rank), WAITING, tell=_tell)

    def put(self, step: int, monitors: Sequence[MonitorTable]) -> None:
        """Takes a step's tables: written when this returns, or soon."""
        taken = _Step(step, time.time(), 0.0, {}, monitors=monitors)
        if self._writer is None:
            self._sink.write(taken)
        else:
            self._writer.put(taken)

    def close(self) -> None:
        """Writes what waits; a disk that hangs is given up after some seconds. May be called again."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            self._lost += writer.dropped + writer.unwritten

    def write(self, step: _Step, table: MonitorTable) -> None:
        """One table to its file.

        Raises:
            OSError: it could not be written.
        """
        rows, numbers = table.finish()
        if table.watch is not None:
            table.watch(step.step, rows, numbers)
        if self._rounds:
            numbers = rounded(numbers)
        elif self.digits is not None:
            numbers = decimals(numbers, self.digits)
            for name, column in rows.more.items():
                if isinstance(column, np.ndarray):
                    rows.more[name] = decimals(column, self.digits)
        header = table_bytes(Rows(), numbers[:0], step.step, table.ops, keys=table.keys, header=True)
        self.files.append(
            table.stem, header, table_bytes(rows, numbers, step.step, table.ops, keys=table.keys)
        )
        monitor = table.stem.rpartition("_step")[0]
        self.written[monitor] = self.written.get(monitor, 0) + len(rows)


def _tell(message: Message) -> None:
    logger.warning("[monitor_v2] %s", message.text)


class _Sink:
    """What the writer thread drives, or whoever ends a step."""

    name = "csv"

    def __init__(self, output: Output) -> None:
        self.errors = 0
        self._output = output
        self._failing = False
        self._said_step = -1

    def open(self, run: RunInfo) -> None:
        """Files are opened for each write."""

    def write(self, snapshot: Snapshot) -> None:
        assert isinstance(snapshot, _Step)
        failed = False
        for table in snapshot.monitors:
            try:
                self._output.write(snapshot, table)
            except Exception as error:
                failed = True
                self._count(snapshot.step, error)
        if self._failing and not failed:
            self._failing = False
            logger.warning(
                "[monitor_v2] step %d is written again; %d tables were lost", snapshot.step, self.errors
            )

    def _count(self, step: int, error: Exception) -> None:
        self.errors += 1
        logger.debug("step %d can't be written", step, exc_info=error)
        if not self._failing:
            self._failing = True
            logger.warning("[monitor_v2] step %d can't be written: %s (training goes on)", step, error)

    def message(self, message: Message) -> None:
        """Messages go to logging."""

    def flush(self) -> None:
        """Nothing to do: the rows of a step are written at once."""

    def close(self) -> None:
        """Nothing stays open."""
