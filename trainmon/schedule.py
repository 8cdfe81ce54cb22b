"""When a probe or sink fires: cadence inside a window, re-armed when the step goes back after a resume."""

from __future__ import annotations

__all__ = ["Schedule"]


class Schedule:
    """Fires at the first step that it sees inside the window and whenever ``step % every == 0``.

    Args:
        every: cadence in steps.
        start: first step of the window, 1-based.
        stop: last step, included; None for no end.
        interval: only every so many steps counted from ``start``.
        count: fire at most so many times; None for no limit.

    ``due`` is asked once a step, in order. A step that is not later than the last one (a resume at an earlier
    checkpoint) re-arms the schedule: the window opens again and ``count`` starts anew.
    """

    __slots__ = ("_fired", "_last", "count", "every", "interval", "start", "stop")

    def __init__(
        self,
        every: int = 1,
        *,
        start: int = 1,
        stop: int | None = None,
        interval: int = 1,
        count: int | None = None,
    ) -> None:
        self.every, self.start, self.stop, self.interval, self.count = every, start, stop, interval, count
        self._fired = 0
        self._last: int | None = None

    def due(self, step: int) -> bool:
        """Whether ``step`` is looked at."""
        if self._last is not None and step <= self._last:
            self._fired = 0
        self._last = step
        if step < self.start or (self.stop is not None and step > self.stop):
            return False
        if (step - self.start) % self.interval or (self.count is not None and self._fired >= self.count):
            return False
        if self._fired and step % self.every:
            return False
        self._fired += 1
        return True
