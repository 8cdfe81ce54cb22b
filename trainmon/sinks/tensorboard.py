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
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

from trainmon.frame import Snapshot, Table
from trainmon.sinks.base import (
    Cadence,
    Message,
    RecordFile,
    RunInfo,
    at_least,
    ordered,
    quantiles,
    table_tag,
    tag,
)

__all__ = ["TensorBoardSink"]

_MISSING = "the tensorboard sink needs the package tensorboard: pip install trainmon[tensorboard]"
_MARK = "events.out.tfevents."


class TensorBoardSink:
    """Writes ``rank_<r>/tensorboard/``.

    Args:
        every: shows the first step and every multiple of this.
        worst: number of tensors with the largest values (NaN counts as largest) that a table shows.

    Raises:
        ImportError: the package ``tensorboard`` is not installed.
        ValueError: an argument out of range.
    """

    name = "tensorboard"

    def __init__(self, *, every: int = 1, worst: int = 5) -> None:
        at_least("worst", worst, 0)
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError(_MISSING)
        self._cadence = Cadence(every)
        self._worst = worst
        self._style = "slash"
        self._file: RecordFile | None = None
        self._records: Any = None
        self._protos: Any = None
        self._named: dict[str, tuple[str, ...]] = {}

    def open(self, run: RunInfo) -> None:
        if run.rank_directory is None:
            return
        try:
            from tensorboard.compat import proto  # type: ignore[import-untyped]
            from tensorboard.summary.writer import record_writer  # type: ignore[import-untyped]

            modules = ("event_pb2", "summary_pb2", "tensor_pb2", "types_pb2")
            self._protos = tuple(importlib.import_module(f"{proto.__name__}.{name}") for name in modules)
        except ImportError as error:
            raise ImportError(f"{_MISSING} ({error})") from error
        event_pb2 = self._protos[0]
        self._style = run.tag_style
        directory = run.rank_directory / "tensorboard"
        directory.mkdir(parents=True, exist_ok=True)
        earlier = _last_stamp(directory)
        # Readers go through the files in the order of their names: the new one must come last even if the
        # clock was set back or the earlier life began in this very second.
        stamp = max(int(time.time()), earlier + 1)
        path = directory / f"{_MARK}{stamp:010d}.{socket.gethostname()}.{os.getpid()}.{run.life}"
        self._file = RecordFile(path, exclusive=True)
        self._records = record_writer.RecordWriter(self._file)
        try:
            self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
            if earlier >= 0 or run.resumed_step > 0:
                # Makes readers drop what earlier lives logged from the next step on.
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._write(
                    event_pb2.Event(wall_time=time.time(), step=run.resumed_step + 1, session_log=start)
                )
        except BaseException:
            self._file.close()
            path.unlink(missing_ok=True)
            raise

    def write(self, snapshot: Snapshot) -> None:
        if self._file is None or not self._cadence.due(snapshot.step):
            return
        event_pb2, summary_pb2, _, _ = self._protos
        values = [
            summary_pb2.Summary.Value(tag=tag(name, self._style), simple_value=_single(value))
            for name, value in snapshot.scalars.items()
            if value is not None
        ]
        named = dict(self._named)
        for table in snapshot.tables:
            values += self._condense(table, named)
        if values:
            summary = summary_pb2.Summary(value=values)
            self._write(event_pb2.Event(wall_time=snapshot.wall_time, step=snapshot.step, summary=summary))
            self._named = named

    def _condense(self, table: Table, named: dict[str, tuple[str, ...]]) -> list[Any]:
        """Quantiles and the worst few of a table."""
        _, summary_pb2, tensor_pb2, types_pb2 = self._protos
        order = ordered(table)
        if not order:
            return []
        base = table_tag(table, self._style)
        worst = order[::-1][: self._worst]
        numbers = list(quantiles(order).items())
        numbers += [(f"worst_{number}", index) for number, index in enumerate(worst, 1)]
        values = [
            summary_pb2.Summary.Value(tag=f"{base}/{label}", simple_value=_single(float(table.values[index])))
            for label, index in numbers
        ]
        names = tuple(table.subjects[index] for index in worst)
        if names and named.get(base) != names:
            named[base] = names
            # Four spaces make Markdown show every character as it is.
            lines = [f"    {number}. {name}" for number, name in enumerate(names, 1)]
            plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
            text = tensor_pb2.TensorProto(
                dtype=types_pb2.DT_STRING,
                string_val=["\n".join(lines).encode("utf-8", "backslashreplace")],
            )
            text.tensor_shape.dim.add(size=1)
            metadata = summary_pb2.SummaryMetadata(plugin_data=plugin)
            values.append(summary_pb2.Summary.Value(tag=f"{base}/worst", metadata=metadata, tensor=text))
        return values

    def message(self, message: Message) -> None:
        """Messages go to the log and to ``events.jsonl``."""

    def flush(self) -> None:
        """Nothing to do: each event is written at once."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


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
