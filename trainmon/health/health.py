"""The health of a run: what rules, findings and spikes say of each report, and what is to be done.

Everything here is a pure function of what all ranks have alike, so every rank comes to the same at the same step
without a word between them.

Two judges share the rules. With ``gate: before_update`` the rules that may keep weights from being updated judge the
series that are known by then when gradients are ready; all else is judged when the step's report is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainmon.config import ConfigError, HealthConfig, Place, Problem
from trainmon.events import Action, Decision
from trainmon.findings import Finding
from trainmon.frame import Table
from trainmon.health.episode import Episode
from trainmon.health.judge import Alarm, Judge, Judgement
from trainmon.health.machine import Machine, State
from trainmon.health.rules import rules_of
from trainmon.health.spikes import Spikes
from trainmon.messages import Told

__all__ = ["SERIES", "Health", "Outcome"]

#: What is published.
SERIES = ("health/state", "health/nonfinite_steps", "health/skipped_steps")
_FORMAT = 1
_ENDING = frozenset({Action.STOP, Action.RAISE})


@dataclass(slots=True)
class Outcome:
    """What came of one report, or of one look before the update.

    Attributes:
        messages: to be said once for all ranks.
        notices: of these, what a webhook is to hear.
        decision: what the host is to do.
    """

    messages: list[Told] = field(default_factory=list)
    notices: list[Told] = field(default_factory=list)
    decision: Decision = field(default_factory=Decision)


class Health:
    """Judges a run.

    Args:
        config: the section.
        world: number of ranks.
        early: series that are known before the update.

    Attributes:
        rules: all of them.
        gated: whether rules look before the update.
    """

    def __init__(self, config: HealthConfig, world: int, early: Iterable[str] = ()) -> None:
        self.rules = rules_of(config)
        self.gated = config.gate == "before_update" and any(rule.decides for rule in self.rules)
        self._early = frozenset(early) if self.gated else frozenset()
        late = [rule for rule in self.rules if not (self.gated and Action.SKIP_STEP in rule.actions)]
        self._late = Judge([replace(rule, without=self._early) if rule.decides else rule for rule in late])
        self._gate = Judge([replace(rule, only=self._early) for rule in self.rules if rule.decides])
        self._machine = Machine(config.calm)
        self._spikes = Spikes(self.rules)
        self._episode = Episode(world)
        self._at_gate: dict[int, tuple[Judgement, bool]] = {}  # and whether the step was skipped
        self._said: set[str] = set()
        self.nonfinite_steps = 0
        self.skipped_steps = 0

    @property
    def step(self) -> int:
        """The last step that was judged."""
        return max(self._late.step, self._gate.step)

    @property
    def state(self) -> State:
        """The state after the last report."""
        return self._machine.state

    def wants(self, series: str) -> bool:
        """Whether a rule that looks before the update watches a series."""
        return self._gate.watches(series)

    def check(self, names: Iterable[str]) -> list[Told]:
        """The rules against the series of this run; returns what the user should know.

        Raises:
            ConfigError: a rule would skip a step by a series that is known only after it.
        """
        names, problems, idle = list(names), list[Problem](), list[Told]()
        for rule in self.rules:
            watched = [name for name in names if name in rule]
            late = [name for name in watched if name not in self._early]
            # A glob may match more than is known by then; a name means what it says.
            late = late if len(late) == len(watched) else [name for name in late if name in rule.globs]
            if Action.SKIP_STEP in rule.actions and late:
                known = ", ".join(sorted(self._early)) or "none in this run"
                problems.append(
                    Problem(
                        Place(),
                        f"{rule.place}.series",
                        f"skip_step: {late[0]} is not known before the update; known then: {known}",
                    )
                )
            if not watched and rule.place:
                text = f"rule {rule.name!r} watches nothing: no series of this run is called {' or '.join(rule.globs)}"
                idle.append(Told("warning", "rule_idle", text, 0, {"rule": rule.name}))
        if problems:
            raise ConfigError(problems)
        return idle

    # -- before the update ------------------------------------------------------------------------------------------

    def look_before(
        self, step: int, scalars: Mapping[str, float | None], find: Callable[[], Sequence[Finding]]
    ) -> Outcome:
        """The rules that may keep weights as they are, on what is known of a step before its update.

        Args:
            find: the findings of all ranks, asked for when a value that is not finite makes a decision.
        """
        outcome = Outcome()
        if step < self._gate.step:
            outcome.messages += self._restart(step)
        judgement = self._gate.look(step, scalars)
        acting = any(alarm.change == "raised" for alarm in judgement.alarms)
        if acting and judgement.nonfinite:
            findings = find()
            if findings:
                outcome.messages += self._episode.follow(step, findings)
        self._tell(judgement.alarms, step, outcome)
        self._decide(judgement.alarms, step, outcome, late=False)
        # A loop with two optimizers shows gradients twice in a step.
        earlier, skipped = self._at_gate.get(step, (Judgement(), False))
        self._at_gate[step] = earlier.with_later(judgement), skipped or outcome.decision.skip
        return outcome

    # -- reports ----------------------------------------------------------------------------------------------------

    def report(
        self,
        step: int,
        scalars: Mapping[str, float | None],
        tables: Sequence[Table] = (),
        findings: Sequence[Finding] = (),
        looked: Callable[[str], bool] = lambda series: True,
    ) -> Outcome:
        """Judges the report of a step.

        Args:
            scalars, tables: what is published, without values that a rank has for itself.
            findings: of all ranks.
            looked: whether a series was looked at in this step.
        """
        outcome = Outcome()
        if step <= self._late.step:
            outcome.messages += self._restart(step)
        excused = scalars.get("optim/overflow") == 1
        if excused:
            # A loss scaler has found them first: it skipped the update and lowers its scale.
            scalars = {name: value for name, value in scalars.items() if not name.startswith("grad/")}
            findings = [finding for finding in findings if finding.stage != "backward"]
        outcome.messages += self._episode.follow(step, findings, looked)
        cause = self._episode.cause
        found = {finding.series: cause.text for finding in findings} if cause else {}
        judgement = self._late.look(step, scalars, tables, found)
        alarms = list(judgement.alarms)
        before, skipped = self._at_gate.get(step, (None, False))
        self._at_gate = {later: seen for later, seen in self._at_gate.items() if later > step}
        self.skipped_steps += skipped
        if before is None and self.gated:
            before = self._gate.look(step, {name: scalars.get(name) for name in self._early}, (), found)
            alarms += before.alarms
        self._tell(alarms, step, outcome)
        self._decide(alarms, step, outcome, late=True)
        self._follow(step, scalars, judgement, None if excused else before, findings, outcome)
        return outcome

    def values(self) -> dict[str, float | None]:
        """What is published of the last report."""
        values = (float(self.state), float(self.nonfinite_steps), float(self.skipped_steps))
        return dict(zip(SERIES, values, strict=True))

    def _follow(
        self,
        step: int,
        scalars: Mapping[str, float | None],
        judgement: Judgement,
        before: Judgement | None,
        findings: Sequence[Finding],
        outcome: Outcome,
    ) -> None:
        """Spikes, counts and state."""
        alarms = [*judgement.alarms, *(before.alarms if before else ())]
        nonfinite = bool(judgement.nonfinite or findings or (before and before.nonfinite))
        flagged = judgement.flagged or bool(before and before.flagged)
        self.nonfinite_steps += nonfinite
        divergent = False
        for spike in self._spikes.follow(step, scalars, alarms):
            worse = spike.kind.kind == "divergent"
            divergent |= worse
            data = {
                "series": spike.series,
                "began": spike.step,
                "class": spike.kind.kind,
                "time_to_recover": spike.kind.time_to_recover,
                "bound": spike.kind.bound,
            }
            outcome.messages.append(
                Told("warning" if worse else "info", "spike_class", spike.text, step, data)
            )
        marked = any(
            alarm.change != "ended" and alarm.rule.actions & {Action.MARK_UNHEALTHY, *_ENDING}
            for alarm in alarms
        )
        old = self.state
        if self._machine.follow(flagged=flagged, unhealthy=nonfinite or marked or divergent):
            names = old.name.lower(), self.state.name.lower()
            level: Any = "warning" if self.state == State.UNHEALTHY else "info"
            outcome.messages.append(
                Told(
                    level,
                    "health_state",
                    f"the run is {names[1]} (was {names[0]})",
                    step,
                    {"state": names[1]},
                )
            )

    # -- what is said and done --------------------------------------------------------------------------------------

    def _text(self, alarm: Alarm) -> str:
        """What an alarm is about; of values that are not finite the first cause, where it is known."""
        if alarm.rule.detector == "nonfinite" and self._episode.cause is not None:
            return self._episode.cause.text
        return alarm.text

    def _tell(self, alarms: Iterable[Alarm], step: int, outcome: Outcome) -> None:
        """One message a rule for what was raised, one for what ended."""
        by_rule: dict[tuple[str, str], list[Alarm]] = {}
        for alarm in alarms:
            if alarm.change != "standing" and alarm.rule.actions & {Action.LOG, Action.NOTIFY}:
                by_rule.setdefault((alarm.rule.key, alarm.change), []).append(alarm)
        for (_, change), some in by_rule.items():
            rule = some[0].rule
            name = rule.name
            # What is not finite is told with its first cause already, and its end, too.
            told = rule.detector == "nonfinite" and (change == "ended" or self._episode.cause is not None)
            texts = list(dict.fromkeys(self._text(alarm) for alarm in some))
            more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
            message = Told(
                "warning" if change == "raised" else "info",
                "alarm" if change == "raised" else "alarm_over",
                f"rule {name!r}{'' if change == 'raised' else ' is over'}: {'; '.join(texts[:3])}{more}",
                step,
                {
                    "rule": name,
                    "detector": rule.detector,
                    "actions": sorted(rule.actions),
                    "series": {alarm.series: alarm.value for alarm in some},
                },
            )
            if Action.LOG in rule.actions and not told:
                outcome.messages.append(message)
            if Action.NOTIFY in rule.actions and change == "raised":
                outcome.notices.append(message)

    def _decide(self, alarms: Iterable[Alarm], step: int, outcome: Outcome, *, late: bool) -> None:
        acting = [alarm for alarm in alarms if alarm.change != "ended" and alarm.rule.decides]
        actions = {action for alarm in acting for action in alarm.rule.actions}
        if late and Action.SKIP_STEP in actions and "gate" not in self._said:
            self._said.add("gate")
            text = "skip_step: grads_ready() was not called before the update, so no step can be skipped"
            outcome.messages.append(Told("warning", "gate_missed", text, step))
        wanted = _ENDING if late else _ENDING | {Action.SKIP_STEP}
        actions &= wanted
        if not actions:
            return
        acting = [alarm for alarm in acting if alarm.rule.actions & wanted]
        reasons = [f"rule {alarm.rule.name!r}: {self._text(alarm)}" for alarm in acting]
        outcome.decision = Decision(step, frozenset(actions), "; ".join(dict.fromkeys(reasons)))
        if actions & _ENDING and "end" not in self._said:
            self._said.add("end")
            text = f"all ranks stop: {outcome.decision.reason}"
            message = Told("error", "stop", text, step, {"actions": sorted(actions)})
            outcome.messages.append(message)
            outcome.notices.append(message)
        elif not actions & _ENDING and any(alarm.change == "raised" for alarm in acting):
            text = f"the update of step {step} is skipped: {outcome.decision.reason}"
            outcome.messages.append(Told("warning", "step_skipped", text, step))

    # -- state ------------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Forgets what detectors have learnt; counts and state stay."""
        self._late.restart()
        self._gate.restart()
        self._spikes.restart()
        self._episode.restart()
        self._at_gate = {}

    def _restart(self, step: int) -> list[Told]:
        last = self.step
        self.restart()
        text = f"the step went back from {last} to {step}: detectors start anew"
        return [Told("info", "health_restarted", text, step)]

    def state_dict(self) -> dict[str, Any]:
        """All that has been learnt, as plain data: for the checkpoint."""
        return {
            "format": _FORMAT,
            "late": self._late.state_dict(),
            "gate": self._gate.state_dict(),
            "machine": self._machine.state_dict(),
            "spikes": self._spikes.state_dict(),
            "nonfinite_steps": self.nonfinite_steps,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> list[Told]:
        """Goes on from a state; returns what is to be said.

        Args:
            step: the last step that was finished.

        Raises:
            ValueError: no state of this kind, or a damaged one.
        """
        if state.get("format") != _FORMAT:
            raise ValueError("this is no health state, or one of another version of trainmon")
        try:
            same = [
                judge.load_state_dict(state[name])
                for name, judge in (("late", self._late), ("gate", self._gate))
            ]
            self._machine.load_state_dict(state["machine"])
            self._spikes.load_state_dict(state["spikes"])
            self.nonfinite_steps = int(state["nonfinite_steps"])
            self.skipped_steps = int(state["skipped_steps"])
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"the health state is damaged: {type(error).__name__}: {error}") from error
        self._episode.restart()
        self._at_gate = {}
        text = f"health restored: {self.state.name.lower()}"
        if not all(same):
            text += "; the rules are others than those of the state: detectors that both have go on, new ones start"
        return [Told("info", "health_restored", text, step)]
