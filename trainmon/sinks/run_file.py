"""``run.json``: what a run is, its lives, and how each ended. Written by rank 0, published by rename.

::

    {"schema": 1, "run": name, "created": unix seconds, "config": {...}, "versions": {...}, "units": {...},
     "lives": [{"life": 1, "started": ..., "resumed_step": 0, "status": "completed", "ended": ...,
     "last_step": 150,
                "reason": null, "counters": {...}, "reproduction": {...}}]}

A status is ``running`` while the life lasts, ``unknown`` if it left no word (a kill), else what :meth:`RunFile.end` was
told. A life whose health changed has ``health``: ``[step, state]`` of each change.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmon.sinks.base import plain, publish

__all__ = ["RunFile", "read_run"]

_NAME = "run.json"
#: Changes of the health that a life keeps.
_CHANGES = 100
_logger = logging.getLogger("trainmon")


def read_run(directory: str | Path) -> dict[str, Any] | None:
    """The content of ``<directory>/run.json``; None if there is none.

    Raises:
        ValueError: the file is damaged: not a JSON object with a list of lives.
        OSError: it can't be read.
    """
    path = Path(directory) / _NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        record = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    lives = record.get("lives") if isinstance(record, dict) else None
    if not isinstance(lives, list) or not all(
        isinstance(life, dict) and isinstance(life.get("life"), int) for life in lives
    ):
        raise ValueError(f"{path} is damaged: it holds no list of lives")
    result: dict[str, Any] = record
    return result


class RunFile:
    """The run's own record; made by :meth:`begin`.

    Attributes:
        life: number of this life, from 1.
    """

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self._path = path
        self._record = record
        self._ended = False
        self.life: int = record["lives"][-1]["life"]

    @classmethod
    def begin(
        cls,
        directory: Path,
        *,
        name: str,
        resumed_step: int = 0,
        config: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
        units: Mapping[str, str] | None = None,
        reproduction: Mapping[str, Any] | None = None,
    ) -> RunFile:
        """Adds a life to the run in ``directory`` (made if need be) and publishes the file.

        A damaged file is renamed to ``run.json.damaged``, with a number if that exists, and a new one begins.

        Raises:
            OSError: the directory can't be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / _NAME
        now = time.time()
        try:
            record = read_run(directory)
        except ValueError as error:
            aside = _set_aside(path)
            _logger.warning("%s; it was renamed to %s", error, aside.name)
            record = None
        if record is None:
            record = {"schema": 1, "run": name, "created": now, "lives": []}
        for life in record["lives"]:
            if life.get("status") == "running":
                life["status"] = "unknown"
        number = max((life["life"] for life in record["lives"]), default=0) + 1
        record["lives"].append(
            {
                "life": number,
                "started": now,
                "resumed_step": resumed_step,
                "status": "running",
                "reproduction": plain(reproduction or {}),
            }
        )
        for key, value in (("config", config), ("versions", versions), ("units", units)):
            if value is not None:
                record[key] = plain(value)
        run = cls(path, record)
        run._publish()
        return run

    def note_health(self, step: int, state: str) -> None:
        """Records that the health of this life changed; the last changes are kept.

        Raises:
            OSError: the file can't be written.
        """
        changes = self._record["lives"][-1].setdefault("health", [])
        changes.append([step, state])
        del changes[:-_CHANGES]
        self._publish()

    def configure(self, config: Mapping[str, Any]) -> None:
        """The configuration has changed under way.

        Raises:
            OSError: the file can't be written.
        """
        self._record["config"] = plain(config)
        self._publish()

    def end(
        self,
        status: str,
        *,
        last_step: int,
        reason: str | None = None,
        counters: Mapping[str, Any] | None = None,
    ) -> None:
        """Records how this life ended; only the first call counts.

        Args:
            status: ``completed``, ``interrupted``, ``failed`` or a word of the caller's.
            last_step: last finished step.
            reason: one sentence.
            counters: what was counted, e.g. dropped records.

        Raises:
            OSError: the file can't be written.
        """
        if self._ended:
            return
        self._record["lives"][-1].update(
            status=status,
            ended=time.time(),
            last_step=last_step,
            reason=reason,
            counters=plain(counters or {}),
        )
        self._publish()
        self._ended = True

    def _publish(self) -> None:
        text = json.dumps(self._record, ensure_ascii=False, allow_nan=False, indent=2) + "\n"
        publish(self._path, text.encode("utf-8", "backslashreplace"))


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.damaged")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged{number}")
    path.rename(aside)
    return aside
