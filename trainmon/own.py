"""The engine's own parts of a frame: what it measures of itself, and what ranks tell each other with every report."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainmon.frame import Frame, Part, Registry, ratio
from trainmon.slots import Slot

__all__ = ["OWN", "OwnParts"]

#: The section of the engine's own series, which are there in every published frame.
OWN = "monitor"
#: What a rank says of a probe that is switched off, 1 of one that failed in this step.
_OFF = 2.0


class OwnParts:
    """Attributes:
    stale: some rank has parameters that came or went.
    alarm: some rank has something to say.
    config: rank 0 has a new configuration.
    """

    def __init__(self, registry: Registry, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._spent, self._lasted = (
            registry.part("monitor.spent", "max"),
            registry.part("monitor.step", "max"),
        )
        self._read, self._wanted = registry.part("monitor.read", "sum"), registry.part("monitor.due", "sum")
        self._trouble = registry.part("monitor.trouble", "max", max(len(slots), 1))
        self.stale, self.alarm = registry.part("monitor.stale", "max"), registry.part("monitor.alarm", "max")
        self.config = registry.part("monitor.config", "max")
        registry.add("perf/monitor_overhead", (self._spent, self._lasted), ratio, probe=OWN)
        registry.add("perf/monitor_coverage", (self._read, self._wanted), ratio, probe=OWN)

    def write_cost(self, frame: Frame, spent: float, lasted: float | None, read: int, wanted: int) -> None:
        """Seconds inside trainmon and of the step (None: not known); sections looked at and asked for."""
        if lasted is not None:
            frame.set(self._spent, spent)
            frame.set(self._lasted, lasted)
        frame.set(self._read, read)
        frame.set(self._wanted, wanted)

    def write_trouble(self, frame: Frame, failed: Collection[int]) -> None:
        """Which probes, by their place, failed in this step or are off."""
        for index, slot in enumerate(self._slots):
            frame.set(self._trouble, _OFF if slot.off else float(index in failed), index)

    def cost(self, frame: Frame) -> tuple[float, float] | None:
        """Merged seconds inside trainmon and of the step; None if no rank knows them."""
        (spent, _), (lasted, known) = frame.get(self._spent), frame.get(self._lasted)
        return (float(spent[0]), float(lasted[0])) if known[0] else None

    def trouble(self, frame: Frame) -> tuple[set[int], set[int]]:
        """Numbers of the probes that failed on some rank, and of those that are off on some: what one rank could not
        give is missing in what all have."""
        marks = list(enumerate(frame.get(self._trouble)[0].tolist()))
        return {index for index, mark in marks if mark > 0}, {index for index, mark in marks if mark >= _OFF}

    @staticmethod
    def raised(frame: Frame, part: Part) -> bool:
        """Whether some rank has raised a flag."""
        return bool(frame.get(part)[0][0] > 0)
