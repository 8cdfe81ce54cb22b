"""What becomes of a spike: followed from the first flag of an alarm until its class is certain (formulas.md §6)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainmon.health.judge import Alarm
from trainmon.health.rules import SPIKES, Rule
from trainmon.ops import SpikeClass, classify_spike

__all__ = ["Ended", "Spikes"]

#: Values before a spike that its bound is made from, and after it until its class is certain.
_BEFORE, _AFTER = 128, 101
#: Of a run that is not finite any more, no more is waited for.
_DEAD = 5
#: Series that are followed.
_SERIES = 64


@dataclass(frozen=True, slots=True)
class Ended:
    """A spike whose class is certain."""

    series: str
    step: int
    kind: SpikeClass
    text: str


class Spikes:
    """Follows scalars that a rule watches for upward jumps; one spike a series at a time."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = [rule for rule in rules if rule.detector in SPIKES and not rule.parameters.get("down")]
        self._keys = {rule.key for rule in self._rules}
        self._logs: dict[str, bool | None] = {}
        self._history: dict[str, deque[tuple[int, float]]] = {}
        self._open: dict[str, tuple[int, list[float], list[float]]] = {}

    def follow(self, step: int, scalars: Mapping[str, float | None], alarms: Iterable[Alarm]) -> list[Ended]:
        """Takes one step; returns the spikes that are decided by it."""
        for name in [name for name in scalars if name not in self._logs]:
            self._follows(name)
        for name, history in self._history.items():
            value = scalars.get(name)
            if value is not None:
                history.append((step, value))
                if name in self._open:
                    self._open[name][2].append(value)
        for alarm in alarms:
            if alarm.change == "raised" and alarm.rule.key in self._keys and alarm.series in self._history:
                self._begin(alarm)
        ended = []
        for series in list(self._open):
            known = self._decided(series)
            if known is not None:
                began = self._open.pop(series)[0]
                ended.append(Ended(series, began, known, _sentence(series, began, known)))
        return ended

    def _follows(self, name: str) -> bool:
        if name not in self._logs:
            rules = [rule for rule in self._rules if name in rule]
            if not rules or len(self._history) >= _SERIES:
                self._logs[name] = None
            else:
                self._logs[name] = any(rule.parameters.get("log") for rule in rules)
                self._history[name] = deque(maxlen=_BEFORE + _AFTER)
        return self._logs[name] is not None

    def _begin(self, alarm: Alarm) -> None:
        if alarm.series in self._open:
            return
        shown = list(self._history[alarm.series])
        first = max(0, len(shown) - alarm.flags)
        before = [value for _, value in shown[:first][-_BEFORE:] if math.isfinite(value)]
        if before:
            self._open[alarm.series] = shown[first][0], before, [value for _, value in shown[first:]]

    def _decided(self, series: str) -> SpikeClass | None:
        _, before, after = self._open[series]
        dead = len(after) >= _DEAD and not any(map(math.isfinite, after[-_DEAD:]))
        if self._logs[series]:
            before, after = _logarithms(before), _logarithms(after)
            if not before or not after:
                return None
        found = classify_spike(before, after)
        if found.kind == "recovering" or len(after) >= _AFTER or dead:
            return found
        return None

    def restart(self) -> None:
        """The step went back."""
        self._open = {}
        for history in self._history.values():
            history.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": {name: [list(one) for one in shown] for name, shown in self._history.items()},
            "open": {name: list(spike) for name, spike in self._open.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.restart()
        for name, shown in state["history"].items():
            if self._follows(name):
                self._history[name].extend((int(step), float(value)) for step, value in shown)
        for name, (step, before, after) in state["open"].items():
            if name in self._history:
                self._open[name] = int(step), list(map(float, before)), list(map(float, after))


def _logarithms(values: Iterable[float]) -> list[float]:
    return [math.log(value) if value > 0 else value for value in values if not value <= 0]


def _sentence(series: str, step: int, known: SpikeClass) -> str:
    text = f"the spike of {series} at step {step} is {known.kind}"
    if known.kind == "recovering":
        return f"{text}: back after {known.time_to_recover} step{'s' if known.time_to_recover != 1 else ''}"
    if known.kind == "lingering":
        return f"{text}: it has not come back to where it was, and does not rise"
    return f"{text}: it has not come back, and rises or is not finite"
