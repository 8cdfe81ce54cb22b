"""What a sink is: something that is shown each finished frame and each message of a run.

Sinks are driven by the writer thread only, one call at a time, so they need no locks. A sink that raises is
counted, switched off after three failures in a row, and said once; it never reaches the training loop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from trainmon.frame import Snapshot

__all__ = ["Cadence", "Matches", "Message", "RunInfo", "Sink", "at_least", "literal"]


#: Control characters, which a terminal would obey rather than show.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_CONTROLS.update({ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"})


def literal(text: str) -> str:
    """``text`` on one line with every control character spelled out, all others as they are."""
    return text.translate(_CONTROLS)


def at_least(key: str, value: object, least: int) -> None:
    """Checks an option.

    Raises:
        ValueError: ``value`` is not an integer of at least ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} must be an integer of at least {least}, not {value!r}")


class Cadence:
    """Which steps a sink with ``every: N`` shows: the first that it is offered, and every multiple of N.

    Raises:
        ValueError: ``every`` is not a positive integer.
    """

    def __init__(self, every: int) -> None:
        at_least("every", every, 1)
        self.every = every
        self._first: int | None = None

    def due(self, step: int) -> bool:
        """Whether ``step`` is shown."""
        if self._first is None:
            self._first = step
        return step == self._first or step % self.every == 0


class Matches:
    """The names in which one of some regular expressions is found; each name is searched once."""

    def __init__(self, patterns: Sequence[re.Pattern[str]]) -> None:
        self._patterns = tuple(patterns)
        self._known: dict[str, bool] = {}

    def __contains__(self, name: object) -> bool:
        if not self._patterns or not isinstance(name, str):
            return False
        if name not in self._known:
            self._known[name] = any(pattern.search(name) for pattern in self._patterns)
        return self._known[name]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a sink may know of the run when it opens.

    Attributes:
        directory: ``<output_dir>/<run>``; None when nothing may be written (an unwritable output directory).
        name: run name.
        rank: this process's rank.
        world: number of ranks.
        life: 1 for a new run, one more for each resume in the same directory.
        resumed_step: last step finished before this life; 0 for a new run.
        total_steps: last step if known.
        tag_style: ``slash``, ``megatron`` or ``mindformers``.
        units: unit by catalogue name of the series that this run publishes.
    """

    directory: Path | None
    name: str
    rank: int = 0
    world: int = 1
    life: int = 1
    resumed_step: int = 0
    total_steps: int | None = None
    tag_style: str = "slash"
    units: Mapping[str, str] = field(default_factory=dict)

    @property
    def rank_directory(self) -> Path | None:
        """``<output_dir>/<run>/rank_<r>``."""
        return None if self.directory is None else self.directory / f"rank_{self.rank}"


@dataclass(frozen=True, slots=True)
class Message:
    """Something said once, beside the numbers: a non-finite tensor, a probe switched off, the run's end.

    Attributes:
        level: how loud.
        kind: stable identifier, e.g. ``nonfinite_gradient``.
        text: one sentence for a person; plain text, never markup.
        step: the step it belongs to.
        wall_time: Unix seconds.
        data: the facts as JSON values.
    """

    level: Literal["info", "warning", "error"]
    kind: str
    text: str
    step: int
    wall_time: float
    data: Mapping[str, Any] = field(default_factory=dict)


class Sink(Protocol):
    """Opened once, shown snapshots and messages in order, closed once. All calls come from one thread."""

    name: str

    def open(self, run: RunInfo) -> None: ...

    def write(self, snapshot: Snapshot) -> None: ...

    def message(self, message: Message) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...
