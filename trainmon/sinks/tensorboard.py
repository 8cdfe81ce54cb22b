"""TensorBoard event files, through the package ``tensorboard`` alone (an extra, imported on open).

Frames its events with that package's ``RecordWriter`` rather than its ``EventFileWriter``: the latter starts
a thread of its own that dies for good at the first full disk. Here an event that does not fit is cut off and
the next is tried.

Scalars keep their names (in the run's tag style). A per-tensor table becomes ``<series>/p50``, ``p95``,
``max`` and ``worst_1`` ... with the names of the worst as a text, so the number of tags does not grow with
the model.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainmon.frame import Snapshot, Table
from trainmon.sinks.base import (
    Cadence,
    Matches,
    Message,
    RecordFile,
    RunInfo,
    at_least,
    column,
    ordered,
    quantiles,
    table_tag,
    tag,
)

__all__ = ["EventFile", "TensorBoardSink"]

_MISSING = "the tensorboard sink needs the package tensorboard: pip install trainmon[tensorboard]"
_MARK = "events.out.tfevents."


class EventFile:
    """A new event file, which sorts behind those that are there.

    Args:
        directory: made if need be.
        ending: of the file's name.

    Attributes:
        earlier: time in the name of the newest file that was there; -1 if there was none.
        event, summary, tensor, types: TensorBoard's modules of messages.

    Raises:
        ImportError: the package ``tensorboard`` is not installed.
        OSError: the file can't be made or written.
    """

    def __init__(self, directory: Path, ending: str) -> None:
        try:
            from tensorboard.compat import proto  # type: ignore[import-untyped]
            from tensorboard.summary.writer import record_writer  # type: ignore[import-untyped]

            modules = ("event_pb2", "summary_pb2", "tensor_pb2", "types_pb2")
            found = [importlib.import_module(f"{proto.__name__}.{name}") for name in modules]
        except ImportError as error:
            raise ImportError(f"{_MISSING} ({error})") from error
        self.event: Any
        self.summary: Any
        self.tensor: Any
        self.types: Any
        self.event, self.summary, self.tensor, self.types = found
        directory.mkdir(parents=True, exist_ok=True)
        self.earlier = _last_stamp(directory)
        # Readers go through the files in the order of their names: the new one must come last even if the
        # clock was set back or the earlier life began in this very second.
        stamp = max(int(time.time()), self.earlier + 1)
        path = directory / f"{_MARK}{stamp:010d}.{socket.gethostname()}.{os.getpid()}.{ending}"
        self._file = RecordFile(path, exclusive=True)
        self._records = record_writer.RecordWriter(self._file)
        try:
            self.write(self.event.Event(wall_time=time.time(), file_version="brain.Event:2"))
        except BaseException:
            self.discard()
            raise

    def number(self, name: str, value: float) -> Any:
        """A scalar as a part of a summary, as float32 holds it."""
        return self.summary.Summary.Value(tag=name, simple_value=_single(value))

    def write_summary(self, step: int, wall_time: float, values: list[Any]) -> None:
        """One event with values of one step."""
        summary = self.summary.Summary(value=values)
        self.write(self.event.Event(wall_time=wall_time, step=step, summary=summary))

    def write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        self._file.close()

    def discard(self) -> None:
        """Closes the file and takes it away."""
        self._file.close()
        self._file.path.unlink(missing_ok=True)


class TensorBoardSink:
    """Writes ``rank_<r>/tensorboard/``.

    Args:
        every: shows the first step and every multiple of this.
        worst: number of tensors with the largest values (NaN counts as largest) that a table shows.
        exclude: series to leave out, by name.

    Raises:
        ImportError: the package ``tensorboard`` is not installed.
        ValueError: an argument out of range.
    """

    name = "tensorboard"

    def __init__(self, *, every: int = 1, worst: int = 5, exclude: Sequence[re.Pattern[str]] = ()) -> None:
        at_least("worst", worst, 0)
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError(_MISSING)
        self._cadence = Cadence(every)
        self._worst = worst
        self._excluded = Matches(exclude)
        self._style = "slash"
        self._file: EventFile | None = None
        self._named: dict[str, tuple[str, ...]] = {}

    def open(self, run: RunInfo) -> None:
        if run.rank_directory is None:
            return
        self._style = run.tag_style
        self._file = EventFile(run.rank_directory / "tensorboard", str(run.life))
        try:
            if self._file.earlier >= 0 or run.resumed_step > 0:
                # Makes readers drop what earlier lives logged from the next step on.
                event = self._file.event
                start = event.SessionLog(status=event.SessionLog.START)
                self._file.write(
                    event.Event(wall_time=time.time(), step=run.resumed_step + 1, session_log=start)
                )
        except BaseException:
            self._file.discard()
            raise

    def write(self, snapshot: Snapshot) -> None:
        if self._file is None or not self._cadence.due(snapshot.step):
            return
        values = [
            self._file.number(tag(name, self._style), value)
            for name, value in snapshot.scalars.items()
            if value is not None and name not in self._excluded
        ]
        named = dict(self._named)
        for table in snapshot.tables:
            if column(table) not in self._excluded:
                values += self._condense(self._file, table, named)
        if values:
            self._file.write_summary(snapshot.step, snapshot.wall_time, values)
            self._named = named

    def _condense(self, file: EventFile, table: Table, named: dict[str, tuple[str, ...]]) -> list[Any]:
        """Quantiles and the worst few of a table."""
        order = ordered(table)
        if not order:
            return []
        base = table_tag(table, self._style)
        worst = order[::-1][: self._worst]
        numbers = list(quantiles(order).items())
        numbers += [(f"worst_{number}", index) for number, index in enumerate(worst, 1)]
        values = [file.number(f"{base}/{label}", float(table.values[index])) for label, index in numbers]
        names = tuple(table.subjects[index] for index in worst)
        if names and named.get(base) != names:
            named[base] = names
            # Four spaces make Markdown show every character as it is.
            lines = [f"    {number}. {name}" for number, name in enumerate(names, 1)]
            plugin = file.summary.SummaryMetadata.PluginData(plugin_name="text")
            text = file.tensor.TensorProto(
                dtype=file.types.DT_STRING,
                string_val=["\n".join(lines).encode("utf-8", "backslashreplace")],
            )
            text.tensor_shape.dim.add(size=1)
            metadata = file.summary.SummaryMetadata(plugin_data=plugin)
            values.append(file.summary.Summary.Value(tag=f"{base}/worst", metadata=metadata, tensor=text))
        return values

    def message(self, message: Message) -> None:
        """Messages go to the log and to ``events.jsonl``."""

    def flush(self) -> None:
        """Nothing to do: each event is written at once."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _single(value: float) -> float:
    """``value`` as float32 holds it: infinite beyond the range, where protobuf would raise."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _last_stamp(directory: Path) -> int:
    """Largest time in the names of the event files there; -1 if there are none."""
    stamps = [-1]
    for path in directory.glob(f"{_MARK}*"):
        digits = path.name.removeprefix(_MARK).split(".", 1)[0]
        if digits.isdigit():
            stamps.append(int(digits))
    return max(stamps)
