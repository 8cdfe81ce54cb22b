"""JSON Lines: one object a step in ``scalars.jsonl``, one a message in ``events.jsonl``, and their reader.

Null is ``null``. JSON has no NaN or infinity, so these stand as the strings ``"NaN"``, ``"Infinity"``,
``"-Infinity"``. Where ranks were compared, ``ranks.jsonl`` has one object a comparison. Each life of a run begins
with ``{"record": "run", "life": n, "resumed_step": s, ...}``.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainmon.frame import Snapshot
from trainmon.sinks.base import Cadence, Message, RecordFile, RunInfo, plain

__all__ = ["JsonlSink", "last_record", "read_jsonl"]

_LOOK_BACK = 64 << 20

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlSink:
    """Writes ``rank_<r>/scalars.jsonl``, ``rank_<r>/events.jsonl`` and, with several ranks, ``rank_<r>/ranks.jsonl``.

    Args:
        every: shows the first step and every multiple of this.
    """

    name = "jsonl"

    def __init__(self, *, every: int = 1) -> None:
        self._cadence = Cadence(every)
        self._scalars: RecordFile | None = None
        self._events: RecordFile | None = None
        self._ranks: RecordFile | None = None
        self._life: dict[str, Any] = {}

    def open(self, run: RunInfo) -> None:
        directory = run.rank_directory
        if directory is None:
            return
        life = {
            "record": "run",
            "run": run.name,
            "life": run.life,
            "resumed_step": run.resumed_step,
            "time": time.time(),
            "rank": run.rank,
            "world": run.world,
            "units": dict(run.units),
        }
        self._scalars = self._begin(self._scalars, directory / "scalars.jsonl", life)
        del life["units"]
        self._events = self._begin(self._events, directory / "events.jsonl", life)
        self._life, self._directory = life, directory

    @staticmethod
    def _begin(known: RecordFile | None, path: Path, life: Mapping[str, Any]) -> RecordFile:
        if known is not None:
            # Opened before the disk was full; its life record stands already.
            return known
        file = RecordFile(path)
        try:
            # A kill may have left half a line: end it, so that the next record stands on a line of its own.
            repair = b"" if file.ends_with(b"\n") else b"\n"
            file.write(repair + _line(life))
        except BaseException:
            file.close()
            raise
        return file

    def write(self, snapshot: Snapshot) -> None:
        if self._scalars is not None and self._cadence.due(snapshot.step):
            record = {"step": snapshot.step, "time": snapshot.wall_time, **snapshot.scalars}
            self._scalars.write(_line(record))
        if snapshot.ranks and self._life:
            self._ranks = self._begin(self._ranks, self._directory / "ranks.jsonl", self._life)
            compared = {name: asdict(spread) for name, spread in snapshot.ranks.items()}
            self._ranks.write(_line({"step": snapshot.step, "time": snapshot.wall_time, "series": compared}))

    def message(self, message: Message) -> None:
        if self._events is not None:
            record = {
                "step": message.step,
                "time": message.wall_time,
                "level": message.level,
                "kind": message.kind,
                "text": message.text,
                "data": message.data,
            }
            self._events.write(_line(record))

    def flush(self) -> None:
        """Nothing to do: every record is written at once."""

    def close(self) -> None:
        for file in (self._scalars, self._events, self._ranks):
            if file is not None:
                file.close()
        self._scalars = self._events = self._ranks = None


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(plain(record), ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    # Lone surrogates (from undecodable file names) can't be encoded as UTF-8.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def read_jsonl(path: str | Path, *, latest: bool = False) -> list[dict[str, Any]]:
    """The records of a ``scalars.jsonl`` or ``events.jsonl``, in file order.

    ``"NaN"``, ``"Infinity"``, ``"-Infinity"`` among the values of a step or in the data of a message are
    read back as floats. Lines that are not whole, which a kill may leave, are passed over.

    Args:
        latest: drop what a later life of the run replaced: on each ``run`` record, the step records after its
            ``resumed_step``, so that each step stands once.

    Raises:
        OSError: the file can't be read.
    """
    records: list[dict[str, Any]] = []
    for line in Path(path).read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict):
            continue
        if record.get("record") == "run":
            resumed = record.get("resumed_step")
            if latest and isinstance(resumed, int):
                records = [old for old in records if "record" in old or old.get("step", 0) <= resumed]
        elif "kind" in record:
            record["data"] = _restore(record.get("data"))
        elif isinstance(record.get("series"), dict):
            record["series"] = _restore(record["series"])
        else:
            record = {name: _SPECIAL.get(v, v) if isinstance(v, str) else v for name, v in record.items()}
        records.append(record)
    return records


def last_record(path: str | Path, step: int) -> dict[str, Any]:
    """The newest record of a step in a ``scalars.jsonl``, looked for near its end; empty if there is none.

    Raises:
        OSError: the file can't be read.
    """
    with Path(path).open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _LOOK_BACK))
        lines = file.read().split(b"\n")
    start = f'{{"step": {step},'.encode()
    for line in reversed(lines):
        if line.startswith(start):
            try:
                return dict(json.loads(line))
            except ValueError:  # half a line of a kill
                continue
    return {}


def _restore(value: Any) -> Any:
    if isinstance(value, str):
        return _SPECIAL.get(value, value)
    if isinstance(value, list):
        return [_restore(item) for item in value]
    if isinstance(value, dict):
        return {key: _restore(item) for key, item in value.items()}
    return value
