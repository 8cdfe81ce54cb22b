"""Checkpoints of the host: what is told of them, and what rules and probes remember, kept in them.

Checkpoints of the host don't hold what callbacks know. A save may be announced on another thread or not at all, and one
that is written in the background is there steps later, when the state of its own step has to be at hand still.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmon.adapters.hyperparallel.reading import read
from trainmon.events import Load, Save
from trainmon.monitor import TrainMonitor

__all__ = ["Checkpoints"]

#: Our file in a checkpoint of the host.
STATE = "trainmon_state.json"
#: States of steps whose checkpoints are not there yet.
_HELD = 4


class Checkpoints:
    """Saves and loads of one run.

    Args:
        trainer: tells whether it saves in the background, and every how many steps.

    Attributes:
        resumed: directory of the checkpoint that the host has loaded.
        given: whether the user has given a state.
    """

    def __init__(self, monitor: TrainMonitor, trainer: Any) -> None:
        self._monitor = monitor
        self._late = _background(trainer)
        self._thread: int | None = None
        self._waiting: list[
            tuple[Save | Load, bool]
        ] = []  # to be told; whether another thread has announced it
        self._unkept: str | None = None  # directory of one that was written, and lacks our state
        self._kept: str | None = None
        self._states: dict[int, Mapping[str, Any]] = {}
        self._expected: dict[str, int] = {}  # directories that are not complete yet, and their steps
        self.resumed: Any = None
        self.given = False

    def begin(self) -> None:
        """The run begins, on this thread."""
        self._thread = threading.get_ident()
        if not self.given:  # every rank comes here, whatever it has loaded
            state = None if self.resumed is None else os.path.join(str(self.resumed), STATE)
            self._monitor.load_state(state if state is not None and os.path.exists(state) else None)

    def saved(self, step: int, path: Any, within: bool) -> None:
        """A checkpoint was written; on any thread.

        Args:
            within: whether a step is running, to which it belongs; else it is the next one's.
        """
        here = threading.get_ident() == self._thread
        if here:
            self._unkept = str(path)
        if here and within:
            self._monitor.handle(Save(step, str(path)))
        else:
            self._waiting.append((Save(step, str(path)), not here and self._thread is not None))

    def loaded(self, step: int, path: Any) -> None:
        """A checkpoint was read; before the run begins."""
        self.resumed = path
        self._waiting.append((Load(step, str(path)), False))

    def tell(self) -> None:
        """What could not be told when it was announced."""
        while self._waiting:
            event, elsewhere = self._waiting.pop(0)
            self._monitor.handle(event)
            if elsewhere:
                self._keep_late(event.path)

    def step_ends(self, step: int) -> None:
        """Holds what is known after a step whose checkpoint is written in the background."""
        if any(step % every == 0 for every in self._late):
            self._hold(step)

    def keep(self) -> None:
        """Writes what is known into the checkpoint that was announced."""
        directory, self._unkept = self._unkept, None
        if directory is not None:
            self._write(directory)

    def look(self, directory: str | None, step: int) -> None:
        """Looks whether there is a checkpoint, which nobody announces; before the next step begins.

        Args:
            directory: where that of ``step``, the last one that has ended, would be.
        """
        for expected, number in list(self._expected.items()):
            self._keep_late(expected)
            if _complete(expected):
                del self._expected[expected]
                self._waiting.append((Save(number, expected), False))
        if directory is None or directory == self._kept or directory in self._expected:
            return
        there = os.path.isdir(directory)
        if there:
            self._write(directory)
            self._states.pop(step, None)
        if there and _complete(directory):
            self._waiting.append((Save(step, directory), False))
        elif there or step in self._states:
            self._expected[directory] = step

    def _hold(self, step: int) -> None:
        self._states[step] = self._monitor.state_dict()
        while len(self._states) > _HELD:
            del self._states[next(iter(self._states))]

    def _keep_late(self, directory: str) -> None:
        """Into a checkpoint of an earlier step, which its name tells: those that are written in the background."""
        number = re.search(r"\d+$", os.path.basename(directory.rstrip(os.sep)))
        state = None if number is None else self._states.get(int(number[0]))
        if number is not None and state is not None and os.path.isdir(directory):
            del self._states[int(number[0])]
            self._monitor.save_state(os.path.join(directory, STATE), state)

    def _write(self, directory: str) -> None:
        if directory != self._kept and os.path.isdir(directory):
            self._kept = directory
            self._monitor.save_state(os.path.join(directory, STATE))


def _complete(directory: str) -> bool:
    """The host writes a file of metadata last."""
    return any(Path(directory).glob("*.metadata"))


def _background(trainer: Any) -> set[int]:
    """Every how many steps checkpoints are written in the background: as each place says where sections may be."""
    found = set()
    for root in (("args", "train"), ("args",), ("config",)):
        section = read(trainer, *root, "checkpoint")
        every = read(section, "save_steps")
        late = read(section, "save_async") or read(section, "is_async")
        if late is True and isinstance(every, int) and every > 0:
            found.add(every)
    return found
