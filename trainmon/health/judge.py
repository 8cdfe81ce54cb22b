"""Shows the values of each step to the rules' detectors and follows the alarms that come of it.

A judge sees only what all ranks have alike (merged values), and what it says is a pure function of that, in order: so
every rank's judge says the same at the same step.

A flag is what a detector raises on one value; `consecutive` of them in a row on a series are an alarm, which stands as
long as flags follow and ends with the first value that is none. A value that is not finite is a flag of rules with the
detector ``nonfinite``, and of every rule that may keep weights from being updated, whatever its detector. For others it
is like a null, which is no value: it neither adds to a row nor ends it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from trainmon.config import may_match
from trainmon.frame import Flags, Floats, Table
from trainmon.health.rules import PATIENT, Rule
from trainmon.ops import Detection, Detector, DetectorBank
from trainmon.series import concrete_name

__all__ = ["Alarm", "Judge", "Judgement"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """One rule on one series.

    Attributes:
        change: whether the alarm was raised at this step, stands, or ended with it.
        value: of the series.
        flags: in a row so far; of an alarm that ended, in all.
        text: what the detector saw.
    """

    rule: Rule
    series: str
    step: int
    change: Literal["raised", "standing", "ended"]
    value: float
    flags: int
    text: str


@dataclass(slots=True)
class Judgement:
    """What came of one step.

    Attributes:
        alarms: raised, standing and ended, in the order of rules and series.
        flagged: whether any detector flagged any value, alarm or not.
        nonfinite: series that are not finite, or that count values that are not.
    """

    alarms: list[Alarm] = field(default_factory=list)
    flagged: bool = False
    nonfinite: list[str] = field(default_factory=list)

    def with_later(self, other: Judgement) -> Judgement:
        """Both, of one step."""
        return Judgement(
            self.alarms + other.alarms, self.flagged or other.flagged, self.nonfinite + other.nonfinite
        )


@dataclass(slots=True)
class _Watch:
    """One rule on one series, while there is something to remember."""

    run: int = 0
    standing: bool = False
    quiet_until: int = 0


@dataclass(frozen=True, slots=True)
class _Flag:
    value: float
    text: str


class _Group:
    """Series that were first seen together, in one bank: scalars, or rows of one table."""

    def __init__(
        self, names: Sequence[str], owners: Sequence[int | None], bank: DetectorBank, table: str | None = None
    ) -> None:
        self.names, self.owners, self.bank, self.table = tuple(names), tuple(owners), bank, table
        self.places = {name: index for index, name in enumerate(names)}
        self._valid: Flags = np.ones(len(names), np.bool_)
        self._subjects: tuple[str, ...] | None = None
        self._rows = self._columns = np.empty(0, np.int64)

    @classmethod
    def of(cls, names: Sequence[str], rules: Sequence[Rule], table: str | None = None) -> _Group:
        # The first detector marks what is not finite, for all rules.
        detectors, owners = [Detector("nonfinite", {}, names)], list[int | None]([None])
        for number, rule in enumerate(rules):
            watched = [name for name in names if name in rule]
            if rule.detector == "nonfinite":
                # A count of values that are not finite is a number like any other.
                watched = [name for name in watched if _counts(name)]
                detector = Detector("threshold", {"above": 1.0}, watched)
            else:
                detector = Detector(rule.detector, rule.parameters, watched)
            if watched:
                detectors.append(detector)
                owners.append(number)
        return cls(names, owners, DetectorBank(detectors, names), table)

    def judged(self, name: str) -> bool:
        """Whether the series had a value in the step that was shown last."""
        return bool(self._valid[self.places[name]])

    def show(self, values: Floats, valid: Flags) -> Iterator[tuple[int | None, Detection]]:
        """The events of a step, each with the number of its rule; None: a value that is not finite."""
        self._valid = valid
        events = self.bank.update(values, valid)
        if len(events):
            for event, detection in zip(events, self.bank.describe(events), strict=True):
                yield self.owners[int(event["detector"])], detection

    def rows(self, table: Table) -> tuple[Floats, Flags]:
        """This group's values of a table, whichever rows it has in this step and in whatever order."""
        if self._subjects is not table.subjects and self._subjects != table.subjects:
            names = [concrete_name(table.series, subject) for subject in table.subjects]
            pairs = [(self.places[name], row) for row, name in enumerate(names) if name in self.places]
            both = np.array(pairs, np.int64).reshape(-1, 2)
            self._rows, self._columns, self._subjects = both[:, 0], both[:, 1], table.subjects
        values, valid = np.zeros(len(self.names)), np.zeros(len(self.names), np.bool_)
        values[self._rows], valid[self._rows] = table.values[self._columns], table.valid[self._columns]
        return values, valid

    def skip(self) -> None:
        """The series were not due."""
        self._valid = np.zeros(len(self.names), np.bool_)


class Judge:
    """Rules at work.

    Args:
        rules: in the order in which their alarms come.

    Attributes:
        rules: as given.
        step: the last step that was judged; 0 before.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self.step = 0
        self._groups: list[_Group] = []
        self._subjects: dict[str, tuple[str, ...]] = {}  # of each table, as seen last
        self._watched: dict[str, bool] = {}  # whether a rule can watch rows of a table
        self._seen: set[str] = set()
        self._watches: dict[tuple[int, str], _Watch] = {}

    def watches(self, series: str) -> bool:
        """Whether any rule watches a series."""
        return any(series in rule for rule in self.rules)

    def look(
        self,
        step: int,
        scalars: Mapping[str, float | None],
        tables: Iterable[Table] = (),
        found: Mapping[str, str] | None = None,
    ) -> Judgement:
        """Judges one step; steps come in order.

        Args:
            scalars: by name, None for null; absent: not due.
            tables: values of single tensors.
            found: series of which somebody has found a value that is not finite, and how that is told: flags of the rules
                with the detector ``nonfinite``, whatever the series' own value.
        """
        self.step = step
        shown = {table.series: table for table in tables}
        self._grow(scalars, None)
        for table in shown.values():
            self._meet(table)
        flags: dict[tuple[int, str], _Flag] = {}
        judgement = Judgement()
        for group in self._groups:
            columns = self._values(group, scalars, shown)
            if columns is None:
                group.skip()
                continue
            for owner, detection in group.show(*columns):
                self._take(owner, detection, flags, judgement)
        for series, text in (found or {}).items():
            for number, rule in enumerate(self.rules):
                if rule.detector == "nonfinite" and series in rule:
                    flags.setdefault((number, series), _Flag(math.nan, text))
        self._follow(step, flags, judgement)
        return judgement

    def restart(self) -> None:
        """Forgets everything: training goes on from an earlier step."""
        for group in self._groups:
            group.bank.reset()
        self._watches = {}
        self.step = 0

    # -- values -----------------------------------------------------------------------------------------------------

    def _meet(self, table: Table) -> None:
        """Makes detectors for rows of a table that were not there before; nothing for a table that no rule can watch."""
        if table.series not in self._watched:
            globs = [glob for rule in self.rules for glob in rule.globs]
            self._watched[table.series] = any(may_match(glob, table.series) for glob in globs)
        known = self._subjects.get(table.series)
        if not self._watched[table.series] or known is table.subjects or known == table.subjects:
            return
        self._subjects[table.series] = table.subjects
        self._grow([concrete_name(table.series, one) for one in table.subjects], table.series)

    def _grow(self, names: Iterable[str], table: str | None) -> None:
        """Series that were not there before get detectors of their own."""
        fresh = [name for name in names if name not in self._seen]
        self._seen.update(fresh)
        watched = [name for name in fresh if self.watches(name)]
        if watched:
            self._groups.append(_Group.of(watched, self.rules, table))

    def _values(
        self, group: _Group, scalars: Mapping[str, float | None], shown: Mapping[str, Table]
    ) -> tuple[Floats, Flags] | None:
        if group.table is not None:
            table = shown.get(group.table)
            return None if table is None else group.rows(table)
        values = [scalars.get(name) for name in group.names]
        valid = np.array([value is not None for value in values])
        if not valid.any():
            return None
        return np.array([0.0 if value is None else value for value in values]), valid

    # -- flags and alarms -------------------------------------------------------------------------------------------

    def _take(
        self,
        owner: int | None,
        detection: Detection,
        flags: dict[tuple[int, str], _Flag],
        judgement: Judgement,
    ) -> None:
        series, value = detection.series, detection.value
        if owner is None:
            judgement.nonfinite.append(series)
            for number, rule in enumerate(self.rules):
                if series in rule and (rule.decides or rule.detector == "nonfinite"):
                    flags[number, series] = _Flag(value, f"{series} is {value:g}")
            return
        rule = self.rules[owner]
        if detection.verdict == "shift":
            return  # the new level, no flag any more
        if self.step > rule.warmup:
            judgement.flagged = True
        if rule.detector in PATIENT and detection.verdict == "flag":
            return
        text = f"{series} = {value:g}"
        if rule.detector == "nonfinite":
            judgement.nonfinite.append(series)
        else:
            text += f" ({rule.detector}: {detection.score:g}, limit {detection.limit:g})"
        flags[owner, series] = _Flag(value, text)

    def _follow(self, step: int, flags: Mapping[tuple[int, str], _Flag], judgement: Judgement) -> None:
        for where in sorted({*flags, *self._watches}):
            number, series = where
            rule, flag = self.rules[number], flags.get(where)
            if flag is None and (series in judgement.nonfinite or not self._judged(series)):
                continue
            watch = self._watches.setdefault(where, _Watch())
            if step <= rule.warmup:
                watch.run, watch.standing = 0, False
            elif flag is not None:
                judgement.flagged = True
                watch.run += 1
                raised = not watch.standing and watch.run >= rule.consecutive and step > watch.quiet_until
                if raised or watch.standing:
                    watch.standing = True
                    change: Literal["raised", "standing"] = "raised" if raised else "standing"
                    judgement.alarms.append(
                        Alarm(rule, series, step, change, flag.value, watch.run, flag.text)
                    )
            else:
                if watch.standing:
                    watch.quiet_until = step + rule.cooldown
                    text = f"{series} after {watch.run} flag{'s' if watch.run > 1 else ''}"
                    judgement.alarms.append(Alarm(rule, series, step, "ended", math.nan, watch.run, text))
                watch.run, watch.standing = 0, False
            if not watch.run and step >= watch.quiet_until:
                del self._watches[where]

    def _judged(self, series: str) -> bool:
        for group in self._groups:
            if series in group.places:
                return group.judged(series)
        return series not in self._seen

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain data that JSON and any checkpoint can hold."""
        return {
            "step": self.step,
            "rules": [rule.key for rule in self.rules],
            "groups": [
                {
                    "names": list(group.names),
                    "owners": list(group.owners),
                    "table": group.table,
                    "bank": base64.b64encode(group.bank.state.astype("<i8").tobytes()).decode(),
                }
                for group in self._groups
            ],
            "watches": [
                [*where, watch.run, watch.standing, watch.quiet_until]
                for where, watch in self._watches.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Goes on from a state; False: it is of other rules, and only detectors that these share with them go on.

        Raises:
            ValueError: the state is damaged.
        """
        self.restart()
        keys = [rule.key for rule in self.rules]
        same = list(state["rules"]) == keys
        groups = []
        for entry in state["groups"]:
            words = np.frombuffer(base64.b64decode(entry["bank"]), "<i8").astype(np.int64)
            bank = DetectorBank.from_state(words, entry["names"])
            if len(entry["owners"]) != len(bank.detectors):
                raise ValueError("the state of the rules is damaged: a bank has other detectors than it says")
            if same:
                groups.append(_Group(entry["names"], entry["owners"], bank, entry["table"]))
                continue
            names = [name for name in entry["names"] if self.watches(name)]
            if names:
                groups.append(_Group.of(names, self.rules, entry["table"]))
                groups[-1].bank.take_over(bank)
        self._groups = groups
        self._seen = {name for group in groups for name in group.names}
        self._subjects = {}
        numbers = {key: number for number, key in enumerate(keys)}
        self._watches = {
            (numbers[state["rules"][number]], str(series)): _Watch(int(run), bool(standing), int(quiet))
            for number, series, run, standing, quiet in state["watches"]
            if state["rules"][number] in numbers
        }
        self.step = int(state["step"])
        return same


def _counts(series: str) -> bool:
    """Whether a series counts values that are not finite."""
    parts = series.split("/")
    return len(parts) > 1 and parts[1] in ("nonfinite", "nonfinite_rows")
