"""The probes of a run: which events each of them takes, and what becomes of one that raises."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainmon.events import Event, StepEnd
from trainmon.probes.base import ProbeContext, Sample
from trainmon.slots import Slot
from trainmon.voice import Voice

__all__ = ["FAILED", "PATIENCE", "ProbeSet"]

_logger = logging.getLogger("trainmon")

#: A probe is switched off after so many failures.
PATIENCE = 3
#: What an attempt gives that failed.
FAILED = object()


class ProbeSet:
    """Probes in the order in which they take events; a failure of one touches no other.

    Attributes:
        slots: the probes; all ranks have the same.
    """

    def __init__(self, slots: Sequence[Slot], voice: Voice) -> None:
        self.slots = slots
        self._voice = voice
        self._listeners: dict[type, list[tuple[Slot, Any]]] = {}

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def replace(self, slots: Sequence[Slot]) -> None:
        """Goes on with others; they have not begun, and nobody listens before :meth:`listen`."""
        self.slots = slots

    def begin(self, context: ProbeContext) -> None:
        """Tells those that have not begun of the run."""
        for slot in self.slots:
            if slot.fresh:
                slot.probe.begin(context)
                slot.fresh = False

    def listen(self) -> None:
        """Looks up who takes which kind of event: ``StepEnd`` by a method ``on_step_end``, and so on."""
        self._listeners = {}
        for kind in Event.__args__:
            method = "on_" + re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
            found = [
                (slot, getattr(slot.probe, method)) for slot in self.slots if hasattr(slot.probe, method)
            ]
            if found:
                self._listeners[kind] = found

    def listens(self, kind: type) -> bool:
        """Whether any probe wants events of this kind."""
        return any(not slot.off for slot, _ in self._listeners.get(kind, ()))

    def wants(self, kind: type) -> bool:
        """Whether a probe takes events of this kind in this step."""
        for slot, _ in self._listeners.get(kind, ()):  # noqa: SIM110 (called for each gradient: no generator)
            if slot.active:
                return True
        return False

    def give(self, kind: type, event: object) -> None:
        """Hands an event to all that take it in this step."""
        for slot, method in self._listeners.get(kind, ()):
            if slot.active and self.attempt(slot, method, event) is FAILED:
                slot.trouble = True

    def arm(self, step: int) -> None:
        """A step begins."""
        for slot in self.slots:
            slot.arm(step)

    def samples(self, event: StepEnd) -> list[tuple[Slot, Sample]]:
        """What the step's probes have to show."""
        samples: list[tuple[Slot, Sample]] = []
        for slot in self.slots:
            if slot.active:
                sample = self.attempt(slot, slot.probe.close, event)
                if sample is FAILED:
                    slot.trouble = True
                else:
                    samples.append((slot, sample))
        return samples

    def take_trouble(self) -> frozenset[int]:
        """Numbers of the slots whose probes raised in this step, or are off."""
        troubled = frozenset(index for index, slot in enumerate(self.slots) if slot.trouble or slot.off)
        for slot in self.slots:
            slot.trouble = False
        return troubled

    @property
    def due(self) -> frozenset[str]:
        """Sections that are shown in this step; on all ranks the same."""
        return frozenset(slot.probe.name for slot in self.slots if slot.due and not slot.idle)

    @property
    def wanted(self) -> int:
        """How many sections the configuration asked for in this step."""
        return len({slot.probe.name for slot in self.slots if slot.wanted and not slot.idle})

    @property
    def switched_off(self) -> list[str]:
        """Titles of the probes that are off for good."""
        return [slot.title for slot in self.slots if slot.off]

    def attempt(self, slot: Slot, work: Callable[..., Any], *arguments: Any) -> Any:
        """What a probe's own code gives, or ``FAILED``; its time is the probe's."""
        entered = time.perf_counter_ns()
        try:
            return work(*arguments)
        except Exception as error:
            self.failed(slot, error)
            return FAILED
        finally:
            slot.spent_ns += time.perf_counter_ns() - entered

    def failed(self, slot: Slot, error: Exception) -> None:
        """Says a probe's first failure and switches it off after the last that is borne."""
        slot.failures += 1
        _logger.debug("probe %s failed", slot.title, exc_info=error)
        what, step = f"{type(error).__name__}: {error}", self._voice.step
        if slot.failures == 1:
            text = f"{slot.title}: {what} (training goes on)"
            self._voice.say("warning", "probe_failed", text, step=step)
        if slot.failures >= PATIENCE and not slot.off:
            slot.off = True
            text = f"{slot.title} is switched off after {PATIENCE} failures; the last: {what}"
            self._voice.say("error", "probe_off", text, step=step, data={"probe": slot.title})
