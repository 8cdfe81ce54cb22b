"""Which steps are written, and into which file."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Window"]


@dataclass(slots=True)
class Window:
    """Steps are counted from 0.

    Attributes:
        start, stop: first step, and the one after the last.
        interval: every so many steps from ``start``.
        record: how many training steps share a file.
        times: how many steps are written at most.
        collected: how many were.
    """

    start: int
    stop: int
    interval: int
    record: int
    times: int
    collected: int = field(default=0)

    def due(self, step: int) -> bool:
        """Whether a step is written if the ones before it were as they should."""
        return (
            self.collected < self.times
            and self.start <= step < self.stop
            and (step - self.start) % self.interval == 0
        )

    def over(self, step: int) -> bool:
        """Whether no step from this one on is written."""
        if self.collected >= self.times:
            return True
        first = max(step, self.start)
        return first + (self.start - first) % self.interval >= self.stop

    def span(self, step: int) -> tuple[int, int]:
        """First and last step of the file that a step belongs to."""
        first = step
        if step >= self.start:
            first = self.start + (step - self.start) // self.record * self.record
        return first, first + self.record - 1

    def written(self, most: int = 8) -> str:
        """The steps that will be written, in words."""
        steps: list[int] = []
        step = self.start
        while step < self.stop and len(steps) < min(self.times, most):
            steps.append(step)
            step += self.interval
        more = len(steps) < self.times and step < self.stop
        return (", ".join(map(str, steps)) or "none") + (", ..." if more else "")
