"""What rules would have said of a run that is over: alarms, what they cost, what they would have caught."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from trainmon.health.judge import Judge
from trainmon.health.rules import SPIKES, Rule
from trainmon.ops import RULES

__all__ = ["Label", "Replayed", "every_detector", "replay"]

#: Detectors that are told what is too much.
_NEED_A_LIMIT = frozenset({"global_norm_spike"})


@dataclass(frozen=True, slots=True)
class Label:
    """Steps of which somebody knows that something was wrong, both ends included."""

    start: int
    stop: int
    name: str = ""

    def __str__(self) -> str:
        steps = str(self.start) if self.start == self.stop else f"{self.start}-{self.stop}"
        return f"{self.name} ({steps})" if self.name else steps


@dataclass(slots=True)
class Replayed:
    """One rule on one series.

    Attributes:
        rule: its name.
        detector: its id.
        series: the series.
        steps: of the run in which the series had a value.
        alarms: steps at which one was raised.
        caught: labels with an alarm near them, each with its lead: steps from the first such alarm to the label's start,
            negative if it came after.
        missed: labels without.
        elsewhere: alarms that are near no label.
    """

    rule: str
    detector: str
    series: str
    steps: int = 0
    alarms: list[int] = field(default_factory=list)
    caught: dict[str, int] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    elsewhere: int = 0

    @property
    def per_thousand(self) -> float:
        """Alarms per 1,000 steps."""
        return 1000 * len(self.alarms) / self.steps

    @property
    def lead(self) -> float | None:
        """Median lead over the labels that were caught."""
        return median(self.caught.values()) if self.caught else None

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "rule": self.rule,
            "detector": self.detector,
            "series": self.series,
            "steps": self.steps,
            "alarms": self.alarms,
            "alarms_per_1000": self.per_thousand,
            "caught": self.caught,
            "missed": self.missed,
            "lead": self.lead,
            "elsewhere": self.elsewhere,
        }


def every_detector(series: Sequence[str] = ("loss/global", "grad/norm")) -> tuple[Rule, ...]:
    """Each detector of spikes at its defaults on each series; norms by their logarithms where a detector can."""
    rules = []
    for detector in RULES:
        if detector not in SPIKES or detector in _NEED_A_LIMIT:
            continue
        for name in series:
            log = "log" in RULES[detector] and name.startswith("grad/")
            rules.append(Rule(detector, (name,), detector, {"log": 1.0} if log else {}))
    return (*rules, Rule("nonfinite", tuple(series), "nonfinite"))


def replay(
    records: Iterable[Mapping[str, Any]],
    rules: Sequence[Rule],
    labels: Sequence[Label] = (),
    *,
    before: int = 100,
    after: int = 20,
) -> list[Replayed]:
    """Shows a run to rules.

    Args:
        records: of ``scalars.jsonl``, as :func:`trainmon.sinks.jsonl.read_jsonl` reads them, each step once.
        labels: what should have been noticed.
        before, after: an alarm from so many steps before a label's start to so many after its end is about it.

    Returns:
        One for each rule and series that it watches and that has values, in the order of the rules.
    """
    judge = Judge(rules)
    found: dict[tuple[int, str], Replayed] = {}
    watching: dict[str, list[Replayed]] = {}
    numbers = {rule.key: number for number, rule in enumerate(rules)}
    for record in records:
        step = record.get("step")
        if not isinstance(step, int):
            continue
        scalars = {name: value for name, value in record.items() if "/" in name and _is_value(name, value)}
        alarms = judge.look(step, scalars).alarms
        for name, value in scalars.items():
            if name not in watching:
                some = [number for number, rule in enumerate(rules) if name in rule]
                for number in some:
                    found[number, name] = Replayed(rules[number].name, rules[number].detector, name)
                watching[name] = [found[number, name] for number in some]
            if value is not None:
                for one in watching[name]:
                    one.steps += 1
        for alarm in alarms:
            if alarm.change == "raised":
                found[numbers[alarm.rule.key], alarm.series].alarms.append(step)
    for one in found.values():
        _compare(one, labels, before, after)
    return [found[key] for key in sorted(found) if found[key].steps]


def _is_value(name: str, value: Any) -> bool:
    return not name.startswith("health/") and (
        value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    )


def _compare(one: Replayed, labels: Sequence[Label], before: int, after: int) -> None:
    near = set[int]()
    for label in labels:
        about = [step for step in one.alarms if label.start - before <= step <= label.stop + after]
        near.update(about)
        if about:
            one.caught[str(label)] = label.start - about[0]
        else:
            one.missed.append(str(label))
    one.elsewhere = len(one.alarms) - len(near)
