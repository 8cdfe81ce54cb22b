"""The engine's side of health: what rules are shown, what is merged for them, and what becomes of their decisions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from trainmon.backend import Backend, Lazy
from trainmon.config import HealthConfig, WebhookConfig
from trainmon.dist import Group
from trainmon.events import Action, Decision, TrainBegin
from trainmon.findings import Finding
from trainmon.frame import Registry, Snapshot
from trainmon.gate import Gate
from trainmon.health.health import Health, Outcome
from trainmon.health.rules import check_actions
from trainmon.health.webhook import Webhook
from trainmon.messages import Told
from trainmon.probes.base import Sample
from trainmon.series import concrete_name
from trainmon.sinks.base import plain
from trainmon.slots import Slot

__all__ = ["Supervision", "check_health"]


class Supervision:
    """Health of one run, on one rank; all ranks come to the same.

    Args:
        section: the configuration.
        begin: the run.
        slots: the probes.
        group: the ranks.
        backend: where tensors live.

    Raises:
        ConfigError: a rule asks for what the host can't do.
    """

    def __init__(
        self,
        section: HealthConfig,
        begin: TrainBegin,
        slots: Sequence[Slot],
        group: Group,
        backend: Backend,
        registry: Registry,
    ) -> None:
        self._group, self._backend = group, backend
        self.take_slots(slots)
        self.take_layout(registry)
        self.health = Health(section, group.size, self._gate.names)
        check_actions(self.health.rules, begin.actions, begin.host)
        self.idle = self.health.check(_names(registry))
        self._on_lost = section.on_lost
        self._decision = Decision()
        self._webhook: Webhook | None = None
        if section.webhook is not None and group.rank == 0:
            self._webhook = _webhook(section.webhook)
            if self._webhook is None:
                text = (
                    f"nobody is notified: the environment variable {section.webhook.url_env} holds no address"
                )
                self.idle.append(Told("error", "webhook_missing", text, begin.resumed_step))

    def take_slots(self, slots: Sequence[Slot]) -> None:
        """Other probes, before their layout."""
        self._slots = slots
        self._askable = [slot for slot in slots if hasattr(slot.probe, "before_update")]

    def take_layout(self, registry: Registry) -> None:
        """New series; the detectors of old ones go on."""
        self._gate = Gate(registry, [slot.probe.name for slot in self._askable])
        self._wanted: frozenset[str] | None = None  # series that rules want before the update
        self._asked: frozenset[str] = frozenset()  # their probes
        # What a rank has for itself would make ranks decide differently.
        own = [one for one in registry.series.values() if any(part.reduce == "local" for part in one.parts)]
        self._own_tables = {one.name for one in own}
        self._own_scalars = {name for one in own for name in _concrete(one.name, one.subjects)}

    # -- before the update ------------------------------------------------------------------------------------------

    def asks(self) -> list[Slot]:
        """The probes whose numbers rules want before the update of this step; the same on every rank."""
        if not self.health.gated:
            return []
        if self._wanted is None:
            self._wanted = frozenset(name for name in self._gate.names if self.health.wants(name))
            self._asked = self._gate.probes_of(self._wanted)
        return [slot for slot in self._askable if slot.due and slot.probe.name in self._asked]

    def look_before(
        self,
        step: int,
        slots: Sequence[Slot],
        failed: Callable[[Slot, Exception], None],
        find: Callable[[], list[Finding]],
    ) -> Outcome:
        """Asks, merges and judges.

        Args:
            slots: of :meth:`asks`.
            failed: takes what a probe raised.
            find: the findings of all ranks; called on all of them or on none.

        Raises:
            Lost: a rank is gone.
        """
        frame, bad = self._gate.frame, set[str]()
        frame.clear(step)
        samples: list[tuple[Slot, Sample]] = []
        lazies: list[Lazy] = []
        for slot in slots:
            if slot.off:
                bad.add(slot.probe.name)
                continue
            try:
                sample: Sample = slot.probe.before_update()  # type: ignore[attr-defined]
            except Exception as error:
                bad.add(slot.probe.name)
                failed(slot, error)
            else:
                samples.append((slot, sample))
                lazies += sample.lazies
        values, at = self._backend.read(lazies).wait(), 0
        for slot, sample in samples:
            mine = values[at : at + len(sample.lazies)]
            at += len(sample.lazies)
            try:
                sample.write(frame, mine)
            except Exception as error:
                bad.add(slot.probe.name)
                failed(slot, error)
        # Every rank comes here, whatever went wrong on it: the others would wait.
        known = {slot.probe.name for slot in slots} - self._gate.take(
            self._group.gather(self._gate.row(bad)).wait()
        )
        outcome = self.health.look_before(step, self._gate.scalars(self._wanted or (), known), find)
        self._keep(outcome.decision)
        return outcome

    # -- reports ----------------------------------------------------------------------------------------------------

    def report(
        self, snapshot: Snapshot, findings: Sequence[Finding], looked: Callable[[str], bool]
    ) -> Outcome:
        """Judges a merged report.

        Args:
            findings: of all ranks.
            looked: whether a series was looked at in this step.
        """
        scalars = {name: value for name, value in snapshot.scalars.items() if name not in self._own_scalars}
        tables = [table for table in snapshot.tables if table.series not in self._own_tables]
        outcome = self.health.report(snapshot.step, scalars, tables, findings, looked)
        self._keep(outcome.decision)
        return outcome

    def published(self, merged: bool) -> Mapping[str, float | None]:
        """``health/...`` of the last report; null once ranks are lost."""
        values = self.health.values()
        return values if merged else dict.fromkeys(values)

    def counters(self) -> Mapping[str, object]:
        """For run.json."""
        return {"health": self.health.state.name.lower(), "skipped_steps": self.health.skipped_steps}

    def lost(self, step: int, text: str) -> None:
        """Ranks are gone: each of those that are left decides for itself."""
        if self._on_lost != "log":
            self._keep(Decision(step, frozenset({Action(self._on_lost)}), text))

    def take_decision(self) -> Decision:
        """What was decided since the last call."""
        decision, self._decision = self._decision, Decision()
        return decision

    def _keep(self, decision: Decision) -> None:
        if decision.actions:
            mine = self._decision
            self._decision = Decision(
                decision.step, mine.actions | decision.actions, mine.reason or decision.reason
            )

    # -- words ------------------------------------------------------------------------------------------------------

    def notify(self, notices: Sequence[Told], run: str) -> None:
        """Rank 0 tells the webhook."""
        if self._webhook is not None:
            for told in notices:
                facts = {"run": run, "state": self.health.state.name.lower(), **asdict(told)}
                self._webhook.put(plain(facts), urgent=told.level == "error")

    def close(self) -> list[Told]:
        """Ends the webhook; what it could not post is said."""
        if self._webhook is None:
            return []
        self._webhook.close()
        if not self._webhook.failed:
            return []
        text = f"{self._webhook.failed} posts to the webhook failed, the last with {self._webhook.error}"
        return [Told("warning", "webhook_failed", text, self.health.step)]

    # -- state ------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state: Mapping[str, object], step: int) -> list[Told]:
        """Goes on from a state; one that can't be used is said, and all starts anew."""
        try:
            return self.health.load_state_dict(state, step)
        except (ValueError, TypeError) as error:
            self.health.restart()
            return [Told("warning", "health_not_restored", f"{error}: detectors start anew", step)]


def check_health(section: HealthConfig, begin: TrainBegin) -> None:
    """Whether the host can do what the rules ask for.

    Raises:
        ConfigError: it can't.
    """
    check_actions(Health(section, 1, []).rules, begin.actions, begin.host)


def _webhook(section: WebhookConfig) -> Webhook | None:
    url = section.url or os.environ.get(section.url_env or "")
    return Webhook(url, every=section.every, timeout=section.timeout) if url else None


def _concrete(name: str, subjects: Sequence[str] | None) -> list[str]:
    if subjects is None or not name.endswith(">"):
        return [name]
    return [concrete_name(name, subject) for subject in subjects]


def _names(registry: Registry) -> list[str]:
    return [name for one in registry.series.values() for name in _concrete(one.name, one.subjects)]
