"""What a run came to: numbers gathered while it went, for the table at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainmon.frame import Snapshot
from trainmon.health.machine import State
from trainmon.sinks.base import long_time, percent, short_number, short_time, significant, whole_number

__all__ = ["Summary"]


@dataclass(slots=True)
class Summary:
    """Running totals over the published frames.

    Attributes:
        steps: steps that ended in this life.
        last_step: number of the last one.
        first_loss, last_loss, best_loss: of ``loss/global``; ``best_step`` is where the best was seen.
        tokens: consumed in all, earlier lives included; None if not counted.
        token_rate: mean tokens per second, total tokens over total seconds.
        step_seconds: mean step time.
        nonfinite_steps: steps with a non-finite loss or gradient.
        health: the last state; ``unhealthy_step`` is the first step at which the run was unhealthy.
        skipped_steps: updates that rules have skipped.
        overhead_share: seconds inside trainmon over step seconds.
        largest_norm: of ``grad/norm``, with ``largest_norm_step``.
        switched_off: probes and sinks that failed too often.
        directory: where the files are; None if nothing was written.
        wall_seconds: seconds of all steps of this life.
    """

    steps: int = 0
    last_step: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    tokens: float | None = None
    token_rate: float | None = None
    step_seconds: float | None = None
    nonfinite_steps: int = 0
    health: State | None = None
    unhealthy_step: int | None = None
    skipped_steps: int = 0
    overhead_share: float | None = None
    largest_norm: float | None = None
    largest_norm_step: int | None = None
    switched_off: tuple[str, ...] = ()
    directory: Path | None = None
    wall_seconds: float = 0.0
    _seconds: float = 0.0
    _rated_tokens: float = 0.0
    _rated_seconds: float = 0.0
    _timed: int = field(default=0)

    def add(self, snapshot: Snapshot) -> None:
        """Takes one published frame."""
        scalars = snapshot.scalars
        loss, norm = scalars.get("loss/global"), scalars.get("grad/norm")
        if loss is not None:
            self.first_loss = loss if self.first_loss is None else self.first_loss
            self.last_loss = loss
            if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
                self.best_loss, self.best_step = loss, snapshot.step
        if norm is not None and math.isfinite(norm) and norm > (self.largest_norm or 0.0):
            self.largest_norm, self.largest_norm_step = norm, snapshot.step
        bad_loss = loss is not None and not math.isfinite(loss)
        self.nonfinite_steps += bool(bad_loss or scalars.get("grad/nonfinite"))
        self._add_rates(scalars)
        state = scalars.get("health/state")
        if state is not None:
            self.health = State(int(state))
            if self.health == State.UNHEALTHY and self.unhealthy_step is None:
                self.unhealthy_step = snapshot.step
            self.skipped_steps = int(scalars.get("health/skipped_steps") or 0)

    def _add_rates(self, scalars: Mapping[str, float | None]) -> None:
        seconds, rate = scalars.get("time/step"), scalars.get("perf/tokens_per_second")
        if scalars.get("data/tokens") is not None:
            self.tokens = scalars["data/tokens"]
        if seconds is not None:
            self._timed += 1
            self._seconds += seconds
            self.step_seconds = self._seconds / self._timed
            if rate is not None:
                self._rated_tokens += rate * seconds
                self._rated_seconds += seconds
                self.token_rate = self._rated_tokens / self._rated_seconds

    def rows(self) -> list[tuple[str, str]]:
        """What was seen, as ``(label, text)``; what is not known is left out."""
        rows = [("steps", f"{whole_number(self.steps)} (last: {self.last_step})")]
        if self.first_loss is not None and self.last_loss is not None:
            rows.append(("loss", f"{significant(self.first_loss)} → {significant(self.last_loss)} nat/token"))
        if self.best_loss is not None:
            rows.append(("best loss", f"{significant(self.best_loss)} at step {self.best_step}"))
        if self.largest_norm is not None:
            text = f"{significant(self.largest_norm)} at step {self.largest_norm_step}"
            rows.append(("largest gradient norm", text))
        rows.append(("steps with NaN or Inf", whole_number(self.nonfinite_steps)))
        if self.health is not None:
            bad = "" if self.unhealthy_step is None else f" (unhealthy first at step {self.unhealthy_step})"
            rows.append(("health", self.health.name.lower() + bad))
        if self.skipped_steps:
            rows.append(("steps skipped by rules", whole_number(self.skipped_steps)))
        if self.tokens is not None:
            rows.append(("tokens", whole_number(self.tokens)))
        if self.token_rate is not None:
            rows.append(("tokens per second", short_number(self.token_rate)))
        if self.step_seconds is not None:
            text = f"{short_time(self.step_seconds)} a step, {long_time(self.wall_seconds)} in all"
            rows.append(("time", text))
        if self.overhead_share is not None:
            rows.append(("time inside trainmon", percent(self.overhead_share)))
        if self.switched_off:
            rows.append(("switched off after failures", ", ".join(self.switched_off)))
        return rows

    def print(self) -> None:
        """Prints the table and the files on standard output, every name literally."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title="What trainmon saw", show_header=False, title_justify="left", title_style="bold")
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in self.rows():
            table.add_row(label, Text(text))
        console = Console()
        console.print(table)
        if self.directory is None:
            console.print(Text("No files were written."))
            return
        console.print(Text(f"Files in {self.directory}:"))
        for path in sorted(path for path in self.directory.rglob("*") if path.is_file()):
            name, size = path.relative_to(self.directory), path.stat().st_size
            console.print(Text(f"  {name}  {size:,} bytes"), soft_wrap=True)
