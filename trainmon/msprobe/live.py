"""Monitoring that is switched on and off by editing the configuration, as msProbe's older monitor has it.

With ``DYNAMIC_MONITOR=True`` in the environment nothing is watched until the file says ``"dynamic_on": true``. After each
step a rank looks at the file's time, and reads it only if that has changed. What it says then holds from the next step
on, whatever ``start_step``; what is wrong is said and changes nothing. After ``collect_times`` writes the monitoring
ends, and one rank sets ``dynamic_on`` to false in the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainmon.msprobe.config import Mode, Settings, load, read_settings
from trainmon.msprobe.older_settings import OlderSettings, read_older
from trainmon.msprobe.saying import heard, logger, warn
from trainmon.msprobe.window import Window
from trainmon.sinks.base import publish

__all__ = ["Change", "LiveControl", "is_live"]

#: What a running training can't change.
_FIXED = ("output_dir", "mode", "framework", "ranks", "patch", "asynchronous")
_WORDS = {"ranks": "rank", "patch": "patch_optimizer_step", "asynchronous": "async_write", "mode": "extended"}
_ON = re.compile(rb'("dynamic_on"\s*:\s*)true')


@dataclass(frozen=True, slots=True)
class Change:
    """What an edit asks for.

    Attributes:
        settings, older: from the next step on; None: nothing is watched any more.
    """

    config: dict[str, Any]
    settings: Settings | None = None
    older: OlderSettings = OlderSettings()


def is_live(config: object, mode: Mode) -> bool:
    """Whether the file switches the monitoring: msProbe's environment variable says so, and there is a file."""
    wanted = os.environ.get("DYNAMIC_MONITOR", "").lower() in ("true", "1")
    return wanted and mode is not Mode.V2 and not isinstance(config, Mapping)


class LiveControl:
    """Looks at one file.

    Args:
        settings: of the start; what can't be changed is kept.
        writes: whether this rank is the one that changes the file.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Settings, *, writes: bool) -> None:
        self.path = Path(path).absolute()
        self._settings, self._writes = settings, writes
        self._seen: tuple[int, int, int] | None = None
        self._read = b""  # what was taken last
        self._ended: str | None = None  # digest of what the file becomes when it is over

    def forget(self) -> None:
        """What the file says is looked at anew."""
        self._seen = None

    def poll(self, step: int) -> Change | None:
        """What has changed since the last look, if it can be taken; one error line if it can't.

        Args:
            step: the next one, with which a change begins.
        """
        stamp = self._stamp()
        if stamp is None or stamp == self._seen:
            return None  # editors write a new file and rename it: for a moment there is none
        self._seen = stamp
        try:
            content = self.path.read_bytes()
            if _digest(content) == self._ended:
                return None  # one of the ranks has come to the end
            config = load(self.path)
            change = self._change(config, step)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            logger.error("[monitor_v2] %s is left out, the old configuration goes on: %s", self.path, error)
            return None
        self._read = content
        self._ended = _digest(_switched_off(content))
        return change

    def switch_off(self) -> None:
        """The monitoring is over: the file says so, unless somebody has edited it meanwhile."""
        if not self._writes or not self._read:
            return
        try:
            if self.path.read_bytes() != self._read:
                return
            path = self.path.resolve()
            mode = path.stat().st_mode
            publish(path, _switched_off(self._read))
            with contextlib.suppress(OSError):
                os.chmod(path, mode & 0o7777)
        except OSError as error:
            logger.warning("[monitor_v2] dynamic_on can't be set to false in %s: %s", self.path, error)

    def _change(self, config: dict[str, Any], step: int) -> Change:
        """
        Raises:
            ValueError: with everything that is wrong.
            TypeError: a wrong alert.
        """
        on = config.get("dynamic_on", False)
        if not isinstance(on, bool):
            raise ValueError(f"dynamic_on must be true or false, not {on!r}")
        if not on:
            return Change(config)
        if config.get("collect_times") == 0:
            return Change(config)
        with heard() as wrong:
            settings, older = read_settings(config, self._settings.framework), read_older(config)
        if wrong:
            raise ValueError("; ".join(wrong))
        for name in _FIXED:
            if getattr(settings, name) != getattr(self._settings, name):
                warn(f"{_WORDS.get(name, name)} can't be changed while the training runs; ignored")
        if older.structure == "exit":
            warn(
                'print_struct "exit" can\'t be had while the training runs: ranks see an edit at steps of their own'
            )
            older = replace(older, structure="yes")
        window = settings.window
        stop = step + window.times * window.interval
        window = Window(step, stop, window.interval, window.record, window.times)
        kept = {name: getattr(self._settings, name) for name in _FIXED}
        return Change(config, replace(settings, window=window, **kept), older)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            state = os.stat(self.path)
        except OSError:
            return None
        return state.st_mtime_ns, state.st_size, state.st_ino


def _switched_off(content: bytes) -> bytes:
    """The same file with ``dynamic_on`` false: alike on every rank, and by its end not what a user would make of it."""
    changed, count = _ON.subn(rb"\1false", content)
    if count != 1:
        config = json.loads(content)
        changed = json.dumps({**config, "dynamic_on": False}, indent=4, ensure_ascii=False).encode()
    spaces = len(content) - len(content.rstrip(b" "))
    return changed.rstrip() + b"\n" + b" " * (spaces + 1)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
