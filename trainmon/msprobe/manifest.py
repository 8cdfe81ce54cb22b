"""``rank_<r>/manifest.jsonl``: when runs in a directory began and ended, and what was watched; extended only."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np

import trainmon
from trainmon.msprobe.config import logger
from trainmon.sinks.base import RecordFile

__all__ = ["Manifest"]


class Manifest:
    """Records of one directory. What can't be written is left out.

    Args:
        directory: ``rank_<r>``.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "manifest.jsonl"

    def begun(
        self, config: Mapping[str, Any], rank: int, first_step: int, watched: Mapping[str, str]
    ) -> None:
        """A run: ``config`` is the SHA-256 of its JSON with sorted keys."""
        text = json.dumps(config, sort_keys=True, default=str)
        self._append(
            event="run",
            rank=rank,
            first_step=first_step,
            config=hashlib.sha256(text.encode()).hexdigest(),
            versions=_versions(),
            watched=watched,
        )

    def ended(self, next_step: int, rows: Mapping[str, int], errors: int, discarded: int) -> None:
        """Its end: rows written by monitor, tables that were lost, rows that were dropped."""
        self._append(event="end", next_step=next_step, rows=rows, errors=errors, discarded=discarded)

    def _append(self, event: str, **facts: Any) -> None:
        record = {"event": event, "time": time.time(), **facts}
        try:
            file = RecordFile(self._path, mode=0o666)
            try:
                file.write(json.dumps(record).encode() + b"\n")
            finally:
                file.close()
        except OSError as error:
            logger.warning("[monitor_v2] %s can't be written: %s", self._path, error)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "numpy": np.__version__}
    with contextlib.suppress(PackageNotFoundError):  # a tree that isn't installed
        found["trainmon"] = trainmon.__version__
    for name in ("torch", "mindspore"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found
