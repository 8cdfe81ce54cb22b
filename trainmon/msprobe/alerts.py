"""Alerts on the numbers of rows: the rules of msProbe's older monitor, and two beside them.

Every tensor has an average of its own for each statistic, over all steps that are written. A value that is not finite
touches no average, and no rule about averages judges before its warm-up is over. `trainmon.ops.DetectorBank` does the
counting, one call a monitor and step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trainmon.backend.base import STATISTICS, Floats
from trainmon.msprobe.anomalies import tag_of
from trainmon.msprobe.tables import Rows
from trainmon.ops import VERDICTS, Detector, DetectorBank

__all__ = ["Alert", "AlertRule", "AlertSettings", "Alerts", "read_alerts"]

Int64: TypeAlias = npt.NDArray[np.int64]

#: Rule: detector, the parameter that `threshold` is, and its default; None: it must be given.
_RULES: Mapping[str, tuple[str, str, float | None]] = {
    "AnomalyTurbulence": ("turbulence", "theta", None),
    "AnomalyNan": ("threshold", "above", math.inf),
    "AnomalyRobust": ("mad", "k", 6.0),
    "AnomalyDrop": ("cusum", "h", 10.0),
}
_NAN = "AnomalyNan"
_WARMUP = {"AnomalyTurbulence": 10, _NAN: 0, "AnomalyRobust": 32, "AnomalyDrop": 32}
#: Statistics of which averages are looked at.
_AVERAGED = ("norm", "mean")
_WATCHED = ("min", "max", "mean", "norm")
_SHIFT = VERDICTS.index("shift")


@dataclass(frozen=True, slots=True)
class AlertRule:
    """One entry of ``rules``.

    Attributes:
        name: ``rule_name``.
        threshold: None only of ``AnomalyNan``: then NaN alone counts.
        warmup: values of a statistic that go by before it is judged.
    """

    name: str
    threshold: float | None
    warmup: int

    def detector(self, places: Sequence[int]) -> Detector:
        kind, parameter, _ = _RULES[self.name]
        parameters = {parameter: self.threshold}
        if self.name == _NAN and self.threshold is not None:  # above it, which the detector has at it
            parameters[parameter] = math.nextafter(self.threshold, math.inf)
        if kind in ("mad", "cusum"):
            parameters["warmup"] = float(self.warmup)
        if self.name == "AnomalyDrop":
            parameters["down"] = 1.0
        return Detector(kind, parameters, places)


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """``alert`` of the configuration."""

    rules: tuple[AlertRule, ...]
    dump: bool


@dataclass(frozen=True, slots=True)
class Alert:
    """A row that broke a rule.

    Attributes:
        row: which of the rows that were shown.
        tag: the tensor's name and what of it.
        occurrence: which of the rows with this tag, from 0, and of how many.
        average: that the rule compared with; None where it has none.
    """

    rule: str
    row: int
    tag: str
    occurrence: tuple[int, int]
    statistic: str
    value: float
    average: float | None

    def text(self, step: int) -> str:
        against = "" if self.average is None else f", average {self.average:g}"
        return f"{self.rule}: {self.statistic} of {self.tag} is {self.value:g} at step {step}{against}"


def read_alerts(config: Mapping[str, Any]) -> AlertSettings | None:
    """``alert: {"rules": [{"rule_name": ..., "args": {"threshold": ..., "warmup": ...}}], "dump": false}``.

    Returns:
        None if there is no such key, or no rules in it.

    Raises:
        TypeError: an unknown rule, or a threshold or warm-up that is negative or no number, as msProbe has it.
    """
    section = config.get("alert")
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise TypeError(f"[monitor_v2] alert must be an object, not {section!r}")
    rules, dump = section.get("rules", []), section.get("dump", False)
    if not isinstance(rules, list):
        raise TypeError(f"[monitor_v2] alert.rules must be a list, not {rules!r}")
    if not isinstance(dump, bool):
        raise TypeError(f"[monitor_v2] alert.dump must be true or false, not {dump!r}")
    read = tuple(_rule(one, f"alert.rules[{at}]") for at, one in enumerate(rules))
    return AlertSettings(read, dump) if read else None


def _rule(rule: Any, place: str) -> AlertRule:
    if not isinstance(rule, Mapping):
        raise TypeError(f"[monitor_v2] {place} must be an object, not {rule!r}")
    name: Any = rule.get("rule_name")
    arguments = rule.get("args") or {}
    if name not in _RULES:
        raise TypeError(f"[monitor_v2] {place}.rule_name must be one of {', '.join(_RULES)}, not {name!r}")
    if not isinstance(arguments, Mapping):
        raise TypeError(f"[monitor_v2] {place}.args must be an object, not {arguments!r}")
    default = _RULES[name][2]
    if "threshold" not in arguments and default is None:
        raise TypeError(f"[monitor_v2] {place}.args.threshold is missing: {name} needs one")
    threshold: float | None = None
    if "threshold" in arguments:
        threshold = _number(arguments["threshold"], f"{place}.args.threshold")
    elif name != _NAN:
        threshold = default
    warmup = _WARMUP[name]
    if "warmup" in arguments:
        warmup = int(_number(arguments["warmup"], f"{place}.args.warmup"))
    made = AlertRule(name, threshold, warmup)
    if threshold is not None:
        try:
            DetectorBank([made.detector([0])], 1)
        except (TypeError, ValueError) as error:
            raise TypeError(f"[monitor_v2] {place}.args: {error}") from error
    return made


def _number(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise TypeError(f"[monitor_v2] {place} must be a number of at least 0, not {value!r}")
    return float(value)


class _Group:
    """Tags that were first seen together, in one bank: a series a tag and statistic."""

    def __init__(self, tags: int, statistics: Sequence[str], rules: Sequence[AlertRule]) -> None:
        width = len(statistics)
        self.bank_rules: list[AlertRule | None] = [None]
        detectors = [Detector("nonfinite")]
        for rule in rules:
            if rule.threshold is None:
                continue
            watched = [at for at, name in enumerate(statistics) if rule.name == _NAN or name in _AVERAGED]
            places = [tag * width + at for tag in range(tags) for at in watched]
            if places:
                detectors.append(rule.detector(places))
                self.bank_rules.append(rule)
        self.bank = DetectorBank(detectors, tags * width)
        self.seen = np.zeros(tags * width, np.int64)


@dataclass(frozen=True, slots=True)
class _Part:
    """Where rows of one step stand in a group: ``rows[i]`` is occurrence ``turns[i]`` of its tag at ``places[i]``."""

    group: _Group
    rows: Int64
    turns: Int64
    places: Int64
    depth: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """The parts for rows of these names, which seldom change from step to step."""

    names: list[str]
    scopes: list[str]
    stages: list[int | None]
    tags: list[str]
    turns: list[int]
    times: list[int]
    parts: list[_Part]

    def fits(self, rows: Rows) -> bool:
        return rows.names == self.names and rows.scopes == self.scopes and rows.stages == self.stages


class Alerts:
    """Rules at work on one monitor's rows.

    Args:
        monitor: one of the five.
        ops: the monitor's statistics.
    """

    def __init__(self, rules: Sequence[AlertRule], monitor: str, ops: Sequence[str]) -> None:
        self._rules, self._monitor = tuple(rules), monitor
        self._statistics = [name for name in ops if name in _WATCHED] or ["norm"]
        self._columns = [STATISTICS.index(name) for name in self._statistics]
        self._known: dict[tuple[str, str, int | None], tuple[_Group, int]] = {}
        self._plan: _Plan | None = None

    def look(self, rows: Rows, table: Floats) -> list[Alert]:
        """Judges the rows of a step; one alert a row at most, in order of rows.

        Args:
            table: by :data:`STATISTICS`.
        """
        if not len(rows):
            return []
        plan = self._plan
        if plan is None or not plan.fits(rows):
            plan = self._plan = self._planned(rows)
        found: dict[int, dict[int, list[tuple[AlertRule | None, float, float]]]] = {}
        for part in plan.parts:
            self._show(part, table, found)
        alerts = []
        for row in sorted(found):
            alert = self._first(row, plan, table, found[row])
            if alert is not None:
                alerts.append(alert)
        return alerts

    def _planned(self, rows: Rows) -> _Plan:
        keys = list(zip(rows.names, rows.scopes, rows.stages, strict=True))
        fresh = [key for key in dict.fromkeys(keys) if key not in self._known]
        if fresh:
            group = _Group(len(fresh), self._statistics, self._rules)
            self._known.update((key, (group, place)) for place, key in enumerate(fresh))
        seen: Counter[tuple[str, str, int | None]] = Counter()
        turns = []
        for key in keys:
            turns.append(seen[key])
            seen[key] += 1
        members: dict[int, list[int]] = {}
        for row, key in enumerate(keys):
            members.setdefault(id(self._known[key][0]), []).append(row)
        parts = []
        for own in members.values():
            places = [self._known[keys[row]] for row in own]
            depth = max(turns[row] for row in own) + 1
            parts.append(
                _Part(
                    places[0][0],
                    np.array(own, np.int64),
                    np.array([turns[row] for row in own], np.int64),
                    np.array([place for _, place in places], np.int64),
                    depth,
                )
            )
        tags = [tag_of(self._monitor, name, scope) for name, scope, _ in keys]
        times = [seen[key] for key in keys]
        return _Plan(list(rows.names), list(rows.scopes), list(rows.stages), tags, turns, times, parts)

    def _show(
        self,
        part: _Part,
        table: Floats,
        found: dict[int, dict[int, list[tuple[AlertRule | None, float, float]]]],
    ) -> None:
        group, width = part.group, len(self._columns)
        size = group.seen.size
        values, valid = np.zeros((part.depth, size)), np.zeros((part.depth, size), np.bool_)
        at = part.places[:, None] * width + np.arange(width)
        shown = table[part.rows][:, self._columns]
        nans, norms = (table[part.rows, STATISTICS.index(name)][:, None] for name in ("nans", "norm"))
        # What a tensor doesn't have, as the least of no elements, is null and no alert.
        undefined = np.isnan(shown) & (nans == 0) & np.isfinite(norms)
        values[part.turns[:, None], at] = np.abs(shown)
        valid[part.turns[:, None], at] = ~undefined
        before = np.cumsum(valid & np.isfinite(values), axis=0) + group.seen
        events = group.bank.update(values, valid)
        group.seen = before[-1]
        if not len(events):
            return
        row_at = np.full((part.depth, size // width), -1, np.int64)
        row_at[part.turns, part.places] = part.rows
        for event in events:
            turn, series = int(event["step"]), int(event["series"])
            rule = group.bank_rules[int(event["detector"])]
            # A flagged value is one of those that have been counted.
            if rule is not None and (before[turn, series] <= rule.warmup or event["verdict"] == _SHIFT):
                continue
            row, statistic = int(row_at[turn, series // width]), series % width
            limit = float(event["limit"])
            found.setdefault(row, {}).setdefault(statistic, []).append((rule, limit, float(event["value"])))

    def _first(
        self,
        row: int,
        plan: _Plan,
        table: Floats,
        found: Mapping[int, Sequence[tuple[AlertRule | None, float, float]]],
    ) -> Alert | None:
        """The first statistic that broke a rule, with the first rule that it broke."""
        for statistic in sorted(found):
            name = self._statistics[statistic]
            events = found[statistic]
            broken = {rule.name: limit for rule, limit, _ in events if rule is not None}
            unfinished = [value for rule, _, value in events if rule is None]
            for rule in self._rules:
                average = None
                if unfinished:
                    isnan = math.isnan(unfinished[0])
                    if rule.name == _NAN:
                        if not isnan and rule.threshold is None:
                            continue
                    elif isnan or name not in _AVERAGED:
                        continue
                elif rule.name not in broken:
                    continue
                elif rule.name == "AnomalyTurbulence":
                    average = broken[rule.name] / (1 + (rule.threshold or 0.0))
                value = float(table[row, self._columns[statistic]])
                turn = plan.turns[row], plan.times[row]
                return Alert(rule.name, row, plan.tags[row], turn, name, value, average)
        return None
