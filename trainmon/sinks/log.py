"""One line a step for a person: on the terminal above a progress bar, plain elsewhere, and in ``log.txt``.

Every name and text is shown as it is: nothing is read as markup, control characters are spelled out. A
terminal that goes away takes only the terminal's part with it; ``log.txt`` goes on.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, Literal, TextIO, cast

from trainmon.frame import Snapshot
from trainmon.sinks.base import (
    Cadence,
    Matches,
    Message,
    RecordFile,
    RunInfo,
    column,
    literal,
    long_time,
    ordered,
    percent,
    quantiles,
    scientific,
    short_number,
    short_time,
    significant,
    whole_number,
)

__all__ = ["LogSink", "format_message", "format_step"]

#: Series in the order of the line: label before, width of the number, how it reads, unit after.
_FIELDS: tuple[tuple[str, str, int, Callable[[float], str], str], ...] = (
    ("loss/global", "loss ", 7, significant, ""),
    ("grad/norm", "grad norm ", 7, significant, ""),
    ("optim/lr", "lr ", 9, scientific, ""),
    ("optim/loss_scale", "scale ", 5, short_number, ""),
    ("perf/tokens_per_second", "", 5, short_number, " tok/s"),
    ("perf/mfu", "MFU ", 5, percent, ""),
    ("memory/peak_allocated", "peak ", 5, short_number, "B"),
    ("time/step", "", 7, short_time, "/step"),
    ("perf/monitor_overhead", "monitor ", 5, percent, ""),
    ("time/eta", "ETA ", 5, long_time, ""),
)
#: Values of a table that are shown one by one.
_FEW = 8
_LEVELS = {"info": "", "warning": "WARNING: ", "error": "ERROR: "}
_STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


def format_step(
    snapshot: Snapshot, total_steps: int | None = None, further: Container[str] = frozenset()
) -> str:
    """The line of one step. Series that the snapshot lacks are left out, null is ``-``; ``further``: names of series that
    are shown after the usual ones."""
    total = snapshot.total_steps or total_steps
    where = f"{snapshot.step:>{len(str(total))}}/{total}" if total else f"{snapshot.step:>6}"
    parts = [f"step {where}"]
    for name, label, width, number, unit in _FIELDS:
        if name in snapshot.scalars:
            value = snapshot.scalars[name]
            shown = "-" if value is None else number(value)
            parts.append(f"{label}{shown:>{width}}{unit}")
    parts += _further(snapshot, further)
    bad = snapshot.scalars.get("grad/nonfinite")
    if bad:
        parts.append(f"!! {whole_number(bad)} NON-FINITE GRADIENT VALUES")
    if snapshot.scalars.get("optim/overflow"):
        parts.append("!! OVERFLOW")
    return "  ".join(parts).rstrip()


def _further(snapshot: Snapshot, names: Container[str]) -> list[str]:
    usual = {name for name, *_ in _FIELDS}
    parts = []
    for name, value in snapshot.scalars.items():
        if name in names and name not in usual:
            parts.append(f"{literal(name)} {'-' if value is None else significant(value)}")
    for table in snapshot.tables:
        series, order = column(table), ordered(table)
        if series not in names:
            continue
        if len(order) <= _FEW:
            shown = " ".join(significant(float(table.values[row])) for row in sorted(order)) or "-"
        else:
            middle, largest = quantiles(order)["p50"], order[-1]
            shown = f"{significant(float(table.values[middle]))}, at most {significant(float(table.values[largest]))}"
            shown += f" ({table.subjects[largest]})"
        parts.append(literal(f"{series} {shown}"))
    return parts


def format_message(message: Message) -> str:
    """The line of a message: its level, its step, its text on one line."""
    return f"{_LEVELS[message.level]}step {message.step}: {literal(message.text)}"


class LogSink:
    """Lines on ``stream`` and in ``rank_<r>/log.txt``.

    Args:
        every: a line at the first step and at every multiple of this; messages and the bar don't wait.
        progress: the bar: ``auto`` on the terminal of rank 0, True on the terminal of any rank, False never.
        file: whether to write ``log.txt``.
        series: names of further series on the line; of one with more values than a few the median and the largest.
        stream: where the console's part goes; None is ``sys.stderr`` at the time of opening.
    """

    name = "log"

    def __init__(
        self,
        *,
        every: int = 1,
        progress: Literal["auto"] | bool = "auto",
        file: bool = True,
        series: Sequence[re.Pattern[str]] = (),
        stream: TextIO | None = None,
    ) -> None:
        if progress not in ("auto", True, False):
            raise ValueError(f"progress must be 'auto', true or false, not {progress!r}")
        self._cadence = Cadence(every)
        self._progress = progress
        self._with_file = file
        self._further = Matches(series)
        self._stream = stream
        self._file: RecordFile | None = None
        self._console: _Plain | _Bar | None = None
        self._prefix = ""
        self._total: int | None = None

    def open(self, run: RunInfo) -> None:
        self._prefix = f"[rank {run.rank}] " if run.world > 1 else ""
        self._total = run.total_steps
        if self._console is None:
            self._console = self._choose(run)
        if self._with_file and run.rank_directory is not None:
            self._file = RecordFile(run.rank_directory / "log.txt")
            resumed = f", resumed after step {run.resumed_step}" if run.resumed_step else ""
            repair = "" if self._file.ends_with(b"\n") else "\n"
            self._to_file(time.time(), f"run {literal(run.name)}, life {run.life}{resumed}", repair)

    def _choose(self, run: RunInfo) -> _Plain | _Bar | None:
        stream: TextIO | None = self._stream or sys.stderr
        if stream is None or stream.closed:
            return None
        if stream is sys.__stderr__:
            stream = cast(TextIO, _Direct(cast(TextIO, stream)))
        wanted = self._progress
        if wanted == "auto":
            wanted = run.rank == 0 and os.environ.get("TERM") not in (None, "", "dumb")
        if wanted and stream.isatty():
            return _Bar(stream, literal(run.name), run.resumed_step)
        return _Plain(stream)

    def write(self, snapshot: Snapshot) -> None:
        line = None
        style = ""
        if self._cadence.due(snapshot.step):
            line = format_step(snapshot, self._total, self._further)
            style = _STYLES["error"] if "!!" in line else ""
        self._to_console(line, style, snapshot)
        if line is not None:
            self._to_file(snapshot.wall_time, line)

    def message(self, message: Message) -> None:
        line = format_message(message)
        self._to_console(line, _STYLES[message.level], None)
        self._to_file(message.wall_time, line)

    def flush(self) -> None:
        """Nothing to do: each line is written at once."""

    def close(self) -> None:
        if self._console is not None:
            self._guard(self._console.close)
            self._console = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _to_console(self, line: str | None, style: str, snapshot: Snapshot | None) -> None:
        console = self._console
        if console is None:
            return
        if snapshot is not None and isinstance(console, _Bar):
            total = snapshot.total_steps or self._total
            eta = snapshot.scalars.get("time/eta")
            self._guard(lambda: console.advance(snapshot.step, total, eta))
        if line is not None:
            self._guard(lambda: console.line(self._prefix + line, style))

    def _guard(self, action: Callable[[], None]) -> None:
        """Runs what writes to the console; if the console is gone, it stays off and nothing else suffers."""
        try:
            action()
        except (BlockingIOError, InterruptedError):
            # A terminal that takes no more at the moment: this line is lost there.
            return
        except (OSError, ValueError) as error:
            self._console = None
            self._to_file(time.time(), f"the console is gone ({error}); the log goes on here")

    def _to_file(self, wall_time: float, line: str, repair: str = "") -> None:
        if self._file is not None:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_time))
            self._file.write(f"{repair}{stamp}  {line}\n".encode("utf-8", "backslashreplace"))


class _Direct:
    """Standard error without its buffer and lock, which a child forked in between would inherit locked."""

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self._descriptor = stream.fileno()
        self.encoding = stream.encoding
        self.closed = False

    def write(self, content: str) -> int:
        rest = memoryview(content.encode(self.encoding, "backslashreplace"))
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        return len(content)

    def flush(self) -> None:
        """Nothing to do: nothing is buffered."""

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor


class _Plain:
    """Lines and nothing else: no escape sequence, no carriage return."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def line(self, content: str, style: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(content.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """The stream belongs to others."""


class _Bar:
    """Lines above a progress bar, drawn by the caller's thread only, at each call."""

    def __init__(self, stream: TextIO, name: str, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.text import Text

        class Quiet(Console):
            """Rich answers a broken pipe by ending the program and giving away its standard output."""

            def on_broken_pipe(self) -> None:
                raise BrokenPipeError("the terminal is gone")

        self._text = Text
        self._started = False
        self._done = done
        self._console = Quiet(
            file=stream, force_terminal=True, markup=False, highlight=False, emoji=False, soft_wrap=True
        )
        columns: tuple[Any, ...] = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[position]}", markup=False),
            TextColumn("{task.fields[eta]}", markup=False),
        )
        # Standard output stays the program's own: a redirected one would break its carriage returns, and a
        # forked child would inherit the redirection with its lock.
        self._progress = Progress(
            *columns, console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._progress.add_task(
            name, total=None, completed=done, position="", eta="", start=False
        )

    def advance(self, step: int, total: int | None, eta: float | None) -> None:
        if not self._started:
            self._progress.start()
            # Hidden, it would stay so in the user's shell after a kill.
            self._console.show_cursor(True)
            self._progress.start_task(self._task)
            self._started = True
        position = f"{step}/{total} {100 * step / total:.0f}%" if total else f"{step}"
        left = "" if eta is None else f"ETA {long_time(eta)}"
        self._progress.update(self._task, completed=step, total=total, position=position, eta=left)
        self._progress.refresh()

    def line(self, content: str, style: str) -> None:
        self._console.print(self._text(content, style=style), soft_wrap=True)

    def close(self) -> None:
        if self._started:
            self._progress.stop()
