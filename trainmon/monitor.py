"""TrainMonitor, the engine: events of a run -> probes -> frame -> sinks. It imports no framework.

Every rank does the same at the same steps, whatever it has seen: the schedule decides when a report is made, and what
needs another collective (new parameters, a message for rank 0) is decided from merged values.

An exception inside trainmon never reaches the training loop: a probe that fails is said, and after three failures
switched off. All time that the training thread spends in here is measured.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

from trainmon.backend import Backend, Lazy, PackedRead
from trainmon.backend.host import HostBackend
from trainmon.config import ConfigError, ConfigWatch, TrainMonitorConfig, changed_sections, load_config
from trainmon.dist import Group, Lost, Merging, Single
from trainmon.events import (
    AttentionSeen,
    Decision,
    Event,
    ExceptionRaised,
    ExpertsSeen,
    GradientAccumulated,
    GradsReady,
    Host,
    MicroGradient,
    ModuleSeen,
    StepBegin,
    StepEnd,
    TrainBegin,
    TrainEnd,
)
from trainmon.findings import Finding
from trainmon.frame import Floats, Frame, Registry, ratio
from trainmon.governor import Governor
from trainmon.health import TrainingStopped
from trainmon.health.health import SERIES as HEALTH_SERIES
from trainmon.health.health import Outcome
from trainmon.messages import Told, found_together, pack_messages, together
from trainmon.pieces import LayerWatcher, share_layers, share_pieces
from trainmon.probes.base import ProbeContext, Sample
from trainmon.rankwise import RankWise
from trainmon.replicas import Check, Replicas
from trainmon.run import Run
from trainmon.series import catalogue
from trainmon.signals import TerminationHook
from trainmon.sinks.base import Message
from trainmon.sinks.blackbox import COLLECT, GATE, GATED, MERGE, MERGED, BlackBox
from trainmon.slots import Slot, build_slots
from trainmon.spread import RankSpread
from trainmon.summary import Summary
from trainmon.supervision import Supervision, check_health

__all__ = ["TrainMonitor"]

_logger = logging.getLogger("trainmon")

#: Events that show tensors: not made unless a probe wants them.
_VIEWS = (GradsReady, MicroGradient, GradientAccumulated, ModuleSeen, AttentionSeen, ExpertsSeen)
#: Messages that may wait for the next report.
_OUTBOX = 32
#: Findings of one rank that may wait for the next report; the first ones are nearest to the cause.
_FOUND = 64
#: Ends that all ranks come to at the same step.
_AGREED = ("completed", "stopped")
#: A probe is switched off after so many failures.
PATIENCE = 3
E = TypeVar("E", bound=Event)

#: What a rank says of a probe that is switched off, 1 of one that failed in this step.
_OFF = 2.0

#: The engine's own series (overhead) belong to no section; they are there in every published frame.
_OWN = "monitor"
_FAILED = object()


@dataclass(slots=True)
class _Pending:
    """A step whose numbers are on their way from the device."""

    event: StepEnd
    read: PackedRead
    samples: list[tuple[Slot, Sample]]
    due: frozenset[str]  # the same on all ranks
    wanted: int  # how many the configuration asked for
    check: Check | None  # of replicas, whose prints are the last value read
    failed: frozenset[int]  # slots of probes that raised in this step, or are off
    wall_time: float
    elapsed: float
    overhead_ns: int
    seconds: float | None


@dataclass(slots=True)
class _Report:
    """A step whose numbers are in a frame, on their way between the ranks."""

    pending: _Pending
    frame: Frame
    merging: Merging | None
    messages: list[Told]
    findings: list[Finding]


class TrainMonitor:
    """Watches one training run.

    Args:
        config: path of a YAML or JSON file, a mapping, a :class:`~trainmon.config.TrainMonitorConfig`, or None.
        bridge: an object with ``log(dict, step)`` that is handed each step's numbers; on ranks that write.
        **overrides: top-level keys; they beat the file.

    Attributes:
        config: the resolved configuration.
        overhead_ns: nanoseconds that the training thread has spent inside trainmon.
        step: the running or last step.

    Raises:
        ConfigError: the configuration is wrong; all problems at once, before anything has begun.
    """

    def __init__(self, config: Any = None, *, bridge: Any = None, **overrides: Any) -> None:
        self.config: TrainMonitorConfig = load_config(config, **overrides)
        self._watch = ConfigWatch(config, overrides, self.config)
        self._proposed: TrainMonitorConfig | None = None  # rank 0 has read it
        self._agreed: TrainMonitorConfig | None = None  # all ranks take it at their next step
        self._host: Host | None = None
        self.overhead_ns = 0
        self.step = 0
        self._slots = build_slots(self.config)
        self._listeners: dict[type, list[tuple[Slot, Any]]] = {}
        self._run: Run | None = None
        self._bridge = bridge
        self._box: BlackBox | None = None
        self._backend: Backend = HostBackend()
        self._group: Group = Single()
        self._alone = False  # the group is lost
        self._pending: _Pending | None = None
        self._report: _Report | None = None
        overhead = self.config.overhead
        self._governor = None if overhead is None else Governor(overhead, self._slots)
        self._shared: tuple[str, ...] | None = None  # parameters whose owners are known
        self._rankwise: RankWise | None = None
        self._replicas: Replicas | None = None
        self._supervision: Supervision | None = None
        self._outbox: list[Told] = []
        self._findings: list[Finding] = []
        self._order = itertools.count().__next__
        self._summary = Summary()
        self._overhead_marked = 0
        self._step_began: float | None = None
        self._said: set[str] = set()
        self._closed = False
        self._pid = os.getpid()
        self._ended: tuple[str, str | None] = ("completed", None)
        self._stop_reason: str | None = None
        self._termination: TerminationHook | None = None

    # -- the life of a run ------------------------------------------------------------------------------------------

    def begin(
        self,
        event: TrainBegin,
        backend: Backend | None = None,
        group: Group | None = None,
        host: Host | None = None,
    ) -> None:
        """The run starts: probes learn of it, series are registered, outputs open.

        Args:
            group: the ranks that report together, at the same point of their programs; None: this process alone.
            host: is asked when the configuration changes under way; None: it has no hooks.

        Raises:
            ConfigError: a sink's package is missing.
            ValueError: the ranks measure different things; says which.
        """
        if self._run is not None:
            raise RuntimeError("this TrainMonitor has begun already; make one for each run")
        entered = time.perf_counter_ns()
        self._backend = backend or self._backend
        self._group = group or self._group
        self._host = host
        self._began = time.perf_counter()
        self._begin_event = event
        self.step = event.resumed_step
        context = ProbeContext(event, self._backend, self.say, self._found, self._order)
        for slot in self._slots:
            slot.probe.begin(context)
            slot.fresh = False
        self._compare_ranks()
        self._register()
        units = {series.name: series.spec.unit for series in self._registry.series.values()}
        if self.config.health is not None:
            self._supervision = Supervision(
                self.config.health, event, self._slots, self._group, self._backend, self._registry
            )
            units |= {name: catalogue()[name].unit for name in HEALTH_SERIES}
        self._run = Run(self.config, event, units, event.host, share=self._of_rank_0, bridge=self._bridge)
        self._box = self._run.box
        self._summary.directory = self._run.info.directory
        self._listen()
        closer = weakref.WeakMethod(self.close)
        self._at_exit = lambda: (bound := closer()) and bound(status="unfinished", reason="the program ended")
        atexit.register(self._at_exit)
        self._termination = TerminationHook(lambda: self.close(status="terminated", reason="SIGTERM"))
        if self._supervision is not None:
            self._say_everywhere(self._supervision.idle)
        if event.layout.world > self._group.size:
            self.say(
                "warning",
                "ranks_not_merged",
                f"{event.layout.world} ranks, but no process group yet: values are not merged, what is shown is rank "
                f"{event.layout.rank}'s own; initialise torch.distributed before attach()",
                step=self.step,
            )
        self.overhead_ns += time.perf_counter_ns() - entered

    def _compare_ranks(self) -> None:
        """As the configuration has it."""
        comparison, replicas, several = self.config.comparison, self.config.replicas, self._group.size > 1
        self._rankwise = RankWise(comparison, self._group) if comparison is not None and several else None
        wanted = replicas is not None and several and self._begin_event.model is not None
        self._replicas = Replicas(replicas, self._group, self._backend) if replicas and wanted else None

    def _of_rank_0(self, message: bytes) -> bytes:
        """What rank 0 has to say to all; each rank's own where they can't be asked."""
        if not self._merges:
            return message
        try:
            return self._group.exchange(message)[0]
        except Lost as lost:
            self._lose(lost)
            return message

    def handle(self, event: Event) -> None:
        """Takes an event. Nothing that goes wrong in here reaches the caller."""
        self.offer(type(event), lambda: event)

    def offer(self, kind: type[E], make: Callable[[], E | None]) -> None:
        """Makes an event and takes it; for events that cost something: the time is counted, and what goes wrong while
        it is made does not reach the caller either. Views that no due probe wants are not made; None is no event."""
        entered = time.perf_counter_ns()
        try:
            if self._run is None or self._closed:
                return
            if kind in _VIEWS and not self.wants(kind):
                return
            event: Event | None = make()
            if event is None:
                return
            if isinstance(event, StepBegin):
                self._begin_step(event)
            elif isinstance(event, ExceptionRaised):
                self._ended = _how_it_ended(event)
            elif isinstance(event, TrainEnd):
                self._ended = event.reason, self._stop_reason if event.reason == "stopped" else None
            if self._box is not None:
                self._box.see(kind, event, self.step)
            for slot, method in self._listeners.get(kind, ()):
                if slot.active and self._attempt(slot, method, event) is _FAILED:
                    slot.trouble = True
            if isinstance(event, StepEnd):
                self._end_step(event)
        except Exception as error:
            self._internal_error(error)
        finally:
            self.overhead_ns += time.perf_counter_ns() - entered

    def listens(self, kind: type[Event]) -> bool:
        """Whether any probe wants events of this kind: what nobody listens to needs no hook."""
        return any(not slot.off for slot, _ in self._listeners.get(kind, ()))

    def wants(self, kind: type[Any]) -> bool:
        """Whether a probe takes events of this kind in this step."""
        return not self._closed and any(slot.active for slot, _ in self._listeners.get(kind, ()))

    def guard(self, work: Callable[[], None]) -> None:
        """Does an adapter's work: its time is counted, and what goes wrong in it does not reach the caller."""
        entered = time.perf_counter_ns()
        try:
            work()
        except Exception as error:
            self._internal_error(error)
        finally:
            self.overhead_ns += time.perf_counter_ns() - entered

    def before_update(self) -> Decision:
        """What the rules say of a step whose gradients were just shown, before weights change: on every rank the same, at
        the cost of one small collective; nothing is asked or merged unless ``health.gate`` says so."""
        entered = time.perf_counter_ns()
        try:
            if self._supervision is not None and not (self._closed or self._alone):
                self._look_before(self._supervision)
        except Exception as error:
            self._internal_error(error)
        finally:
            self.overhead_ns += time.perf_counter_ns() - entered
        return self.decide()

    def _look_before(self, supervision: Supervision) -> None:
        slots = supervision.asks()
        if not slots:
            return
        # What is found now is found again, and reported, at the end of the step.
        kept, self._findings = self._findings, []
        if self._box is not None and self._merges:
            self._box.mark(GATE, self.step)
        try:
            self._heed(supervision.look_before(self.step, slots, self._failed, self._find))
        except Lost as lost:
            self._lose(lost)
        finally:
            self._findings = kept
            if self._box is not None and self._merges:
                self._box.mark(GATED, self.step)

    def _find(self) -> list[Finding]:
        """The findings of all ranks at a moment that all agreed on."""
        return found_together(self._group.exchange(pack_messages([], self._findings)))

    def say(
        self,
        level: Literal["info", "warning", "error"],
        kind: str,
        text: str,
        *,
        step: int,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Tells the user something once: log, events.jsonl. What other ranks than 0 have to say of more than their own
        business travels with the next report and is said by rank 0."""
        told = Told(level, kind, text, step, dict(data or {}))
        if self._box is not None:
            self._box.message(Message(level, kind, text, step, 0.0))
        if not (self._merges and level != "info"):
            self._say(told)
        elif len(self._outbox) < _OUTBOX:
            self._outbox.append(told)
        elif len(self._outbox) == _OUTBOX:
            text = f"rank {self._group.rank} has more than {_OUTBOX} messages in one report: the rest is left out"
            self._outbox.append(Told("warning", "messages_left_out", text, step))

    def _found(self, finding: Finding) -> None:
        if self._supervision is not None and len(self._findings) < _FOUND:
            place = finding.place[0], self._begin_event.layout.stage
            self._findings.append(replace(finding, place=place))

    def _say(self, told: Told) -> None:
        if self._run is not None:
            self._run.say(told.level, told.kind, told.text, step=told.step, data=told.data)
        else:
            _logger.log(logging.getLevelName(told.level.upper()), "%s", told.text)

    def close(self, status: str | None = None, reason: str | None = None) -> None:
        """Publishes what is still on its way, writes all files and closes them. Idempotent."""
        if self._closed or self._run is None or os.getpid() != self._pid:
            return  # a forked child must not end its parent's run
        entered = time.perf_counter_ns()
        self._closed = True
        try:
            if status is None:
                status, reason = self._ended
            if status not in _AGREED:
                self._alone = True  # the others may be anywhere: no collective is started or waited for
            self._flush()
            if not self._alone:
                self._group.close()
            self._alone = True  # what is still said, this rank says itself
            if self._supervision is not None:
                self._say_everywhere(self._supervision.close())
            self._summary.overhead_share = self.overhead_share()
            switched_off = [slot.probe.name for slot in self._slots if slot.off]
            self._run.end(
                status,
                last_step=self._summary.last_step or self._begin_event.resumed_step,
                reason=reason,
                counters={
                    "steps": self._summary.steps,
                    "nonfinite_steps": self._summary.nonfinite_steps,
                    **({} if self._supervision is None else self._supervision.counters()),
                    "overhead_ns": self.overhead_ns,
                    "host_reads": self._backend.reads,
                    "probes_switched_off": switched_off,
                },
            )
            self._summary.switched_off = (*switched_off, *self._run.switched_off)
        except Exception as error:
            self._internal_error(error)
        finally:
            atexit.unregister(self._at_exit)
            if self._termination is not None:
                self._termination.remove()
            self.overhead_ns += time.perf_counter_ns() - entered

    @property
    def host_reads(self) -> int:
        """Transfers of numbers from a device so far: at most one a step."""
        return self._backend.reads

    def state_dict(self) -> dict[str, Any]:
        """What a later life of the run goes on from, as plain data."""
        health = None if self._supervision is None else self._supervision.health.state_dict()
        return {"step": self.step, "health": health}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state; one that can't be used is said, and all starts anew."""
        entered = time.perf_counter_ns()
        try:
            if self._supervision is not None and state.get("health") is not None:
                self._say_everywhere(self._supervision.load_state_dict(state["health"], self.step))
        except Exception as error:
            self._internal_error(error)
        finally:
            self.overhead_ns += time.perf_counter_ns() - entered

    def overhead_share(self) -> float | None:
        """Seconds inside trainmon over the seconds of all steps so far; None before the first step has ended."""
        seconds = self._summary.wall_seconds
        return self._overhead_marked * 1e-9 / seconds if seconds else None

    def summary(self) -> Summary:
        """What was seen so far."""
        self._summary.overhead_share = self.overhead_share()
        return self._summary

    def print_summary(self) -> None:
        """Prints the summary as a table on standard output."""
        self.summary().print()

    # -- steps ------------------------------------------------------------------------------------------------------

    def _begin_step(self, event: StepBegin) -> None:
        self.step, self._step_began = event.step, event.time
        if self._agreed is not None:
            self._adopt(self._agreed)
        for slot in self._slots:
            slot.arm(event.step)

    def _end_step(self, event: StepEnd) -> None:
        self._publish_report()
        self._collect()
        samples: list[tuple[Slot, Sample]] = []
        for slot in self._slots:
            if slot.active:
                sample = self._attempt(slot, slot.probe.close, event)
                if sample is _FAILED:
                    slot.trouble = True
                else:
                    samples.append((slot, sample))
        if self._group.size == 1 and any(slot.probe.stale for slot in self._slots if not slot.off):
            self._register()
        lazies: list[Lazy] = [lazy for _, sample in samples for lazy in sample.lazies]
        due = frozenset(slot.probe.name for slot in self._slots if slot.due and not slot.idle)
        check = self._look_at_replicas(event.step) if due else None
        if check is not None:
            lazies.append(check.prints)
        seconds = None if self._step_began is None else event.time - self._step_began
        spent = self.overhead_ns - self._overhead_marked
        self._overhead_marked = self.overhead_ns
        self._pending = _Pending(
            event=event,
            read=self._backend.read(lazies),
            samples=samples,
            due=due,
            wanted=len({slot.probe.name for slot in self._slots if slot.wanted and not slot.idle}),
            check=check,
            failed=frozenset(index for index, slot in enumerate(self._slots) if slot.trouble or slot.off),
            wall_time=time.time(),
            elapsed=time.perf_counter() - self._began,
            overhead_ns=spent,
            seconds=seconds,
        )
        for slot in self._slots:
            slot.trouble = False
        self._look_at_config()
        self._summary.steps += 1
        self._summary.last_step = event.step
        self._summary.wall_seconds += seconds or 0.0
        if not self._backend.deferred:
            self._collect()

    def _flush(self) -> None:
        """Publishes all that is on its way, in order."""
        self._publish_report()
        self._collect()
        self._publish_report()
        for told in self._outbox:
            self._say(told)
        self._outbox = []

    @property
    def _merges(self) -> bool:
        return self._group.size > 1 and not self._alone

    def _collect(self) -> None:
        """The numbers of a step are on the host: into a frame, and off to the other ranks."""
        pending, self._pending = self._pending, None
        if pending is None or self._run is None:
            return
        if self._box is not None and self._backend.deferred:
            self._box.mark(COLLECT, self.step)
        values, failed = pending.read.wait(), set(pending.failed)
        frame, at = self._frames[pending.event.step % 2], 0
        frame.clear(pending.event.step)
        for slot, sample in pending.samples:
            mine: Sequence[Floats] = values[at : at + len(sample.lazies)]
            at += len(sample.lazies)
            if self._attempt(slot, sample.write, frame, mine) is _FAILED:
                failed.add(self._slots.index(slot))
        findings = [finding for finding in self._findings if finding.step <= pending.event.step]
        self._findings = [finding for finding in self._findings if finding.step > pending.event.step]
        if not pending.due:
            return
        if pending.seconds is not None:
            frame.set(self._spent, pending.overhead_ns * 1e-9)
            frame.set(self._lasted, pending.seconds)
        frame.set(self._read, len(pending.due))
        frame.set(self._wanted, pending.wanted)
        if self._governor is not None:
            self._governor.write(frame)
        for index, slot in enumerate(self._slots):
            frame.set(self._trouble, _OFF if slot.off else float(index in failed), index)
        messages, self._outbox = self._outbox, []
        merging: Merging | None = None
        if self._merges:
            frame.set(self._config_changed, float(self._proposed is not None))
            stale = self._names_moved() or any(slot.probe.stale for slot in self._slots)
            frame.set(self._stale, float(stale))
            frame.set(self._alarm, float(bool(messages or findings)))
            try:
                merging = self._group.merge(*frame.pack())
                if self._rankwise is not None:
                    self._rankwise.start(frame)
                if self._replicas is not None and pending.check is not None:
                    self._replicas.start(pending.check, values[-1])
            except Lost as lost:
                self._lose(lost)
        self._report = _Report(pending, frame, merging, messages, findings)
        if self._group.size == 1:
            self._publish_report()

    def _publish_report(self) -> None:
        """The ranks have merged a step: derived, written, and what follows from it for all of them."""
        report, self._report = self._report, None
        if report is None or self._run is None:
            return
        frame, pending = report.frame, report.pending
        merged = self._wait(report)
        if merged:
            for slot in self._slots:
                if not slot.off and hasattr(slot.probe, "merged") and slot.probe.name in pending.due:
                    self._attempt(slot, slot.probe.merged, frame)
        else:
            frame.forget_shared()
        spreads = self._compare(merged)
        self._check_replicas(merged)
        # What one rank could not give is missing in what all have: a probe that fails anywhere is null everywhere.
        trouble = frame.get(self._trouble)[0]
        switched_off = {
            slot.probe.name for slot, mark in zip(self._slots, trouble, strict=True) if mark >= _OFF
        }
        snapshot = frame.snapshot(
            wall_time=pending.wall_time,
            elapsed=pending.elapsed,
            total_steps=self._begin_event.total_steps,
            due=lambda name: (name in pending.due and name not in switched_off) or name == _OWN,
            unknown={slot.probe.name for slot, mark in zip(self._slots, trouble, strict=True) if mark > 0},
            ranks=spreads,
        )
        stale, alarm = (frame.get(part)[0][0] > 0 for part in (self._stale, self._alarm))
        everybody: list[bytes] | None = None
        if report.merging is not None and merged and alarm:
            everybody = self._exchange(report)
        outcome = Outcome()
        if self._supervision is not None:
            findings = report.findings if everybody is None else found_together(everybody)
            outcome = self._supervision.report(snapshot, findings, self._looked(pending.due))
            published = self._supervision.published(merged)
            snapshot = replace(snapshot, scalars={**snapshot.scalars, **published})
        self._summary.add(snapshot)
        self._run.put(snapshot)
        self._tell(report.messages, everybody)
        self._heed(outcome)
        if merged:
            self._govern(frame, pending.event.step)
        if report.merging is None:
            self._agreed, self._proposed = self._proposed or self._agreed, None
        elif merged and frame.get(self._config_changed)[0][0] > 0:
            self._agree()
        if report.merging is not None and merged:
            if stale:
                self._register()
            if self._box is not None:  # behind all that a report waits for
                self._box.mark(MERGED, self.step)

    def _wait(self, report: _Report) -> bool:
        """Whether the frame holds what all ranks have."""
        if report.merging is None or self._alone:
            return self._group.size == 1
        if self._box is not None:
            self._box.mark(MERGE, self.step)
        try:
            report.frame.unpack(*report.merging.wait())
        except Lost as lost:
            self._lose(lost)
        except ValueError as error:
            self._internal_error(error)
        else:
            return True
        return False

    def _compare(self, merged: bool) -> dict[str, RankSpread]:
        """What the ranks' own values say, in steps in which they were gathered; the same on every rank."""
        if self._rankwise is None:
            return {}
        try:
            spreads = self._rankwise.finish(merged)
        except Lost as lost:
            self._lose(lost)
            return {}
        self._say_everywhere([_stands_out(*one, self.step) for one in self._rankwise.stand_out(spreads)])
        return spreads

    def _look_at_replicas(self, step: int) -> Check | None:
        model = self._begin_event.model
        if self._replicas is None or model is None or not self._merges:
            return None
        return self._replicas.look(step, model)

    def _check_replicas(self, merged: bool) -> None:
        if self._replicas is None:
            return
        try:
            mismatches = self._replicas.finish(merged)
        except Lost as lost:
            self._lose(lost)
            return
        for one in mismatches:
            told = Told("error", "replicas_differ", str(one), one.step, asdict(one))
            self._say(told) if self._group.rank == 0 else self._outbox.append(told)

    def _exchange(self, report: _Report) -> list[bytes]:
        """Some rank has something to say: everybody's messages and findings, by rank."""
        mine = pack_messages(report.messages, report.findings)
        try:
            return self._group.exchange(mine)
        except Lost as lost:
            self._lose(lost)
            return [pack_messages([])] * self._group.rank + [mine]

    def _tell(self, messages: list[Told], everybody: list[bytes] | None) -> None:
        """Rank 0 says what all ranks have to say, the others their own part if they write at all."""
        if everybody is None:
            for told in messages:
                self._say(told)
        elif self._group.rank == 0:
            for told in together(everybody, self._group.size):
                self._say(told)
        elif self._run is not None and self._run.writes:
            for told in messages:
                self._say(told)

    def _govern(self, frame: Frame, step: int) -> None:
        """Looks at the cost that all ranks have merged."""
        if self._governor is not None:
            (spent, _), (lasted, known) = frame.get(self._spent), frame.get(self._lasted)
            if known[0]:
                self._say_everywhere(self._governor.judge(frame, float(spent[0]), float(lasted[0]), step))

    def _heed(self, outcome: Outcome) -> None:
        """Says what came of a report, to the webhook too, and keeps the run's state in run.json."""
        self._say_everywhere(outcome.messages)
        if self._supervision is not None and self._run is not None:
            self._supervision.notify(outcome.notices, self._run.info.name)
            for told in outcome.messages:
                if told.kind == "health_state":
                    self._run.note_health(told.step, told.data["state"])

    def decide(self) -> Decision:
        """What the rules have decided since this was asked last, for the adapter to carry out; the same on every rank at
        the same point of its program, but for what follows from a lost rank."""
        decision = Decision() if self._supervision is None else self._supervision.take_decision()
        if decision.stop:
            self._stop_reason = decision.reason
        return decision

    def _looked(self, due: frozenset[str]) -> Callable[[str], bool]:
        """Whether a series belongs to a probe that is due; one that is not published is asked for no longer."""
        series = self._registry.series
        return lambda name: name not in series or series[name].probe in due

    def _say_everywhere(self, messages: Sequence[Told]) -> None:
        """What every rank has come to by itself; those that write say it."""
        if self._run is not None and (self._group.rank == 0 or self._run.writes):
            for told in messages:
                self._say(told)

    def _lose(self, lost: Lost) -> None:
        if not self._alone:
            self._alone = True
            text = f"{lost}: values of all ranks are null from now on (training goes on if it can)"
            self._say(Told("error", "ranks_lost", text, self.step))
            if self._supervision is not None:
                self._supervision.lost(self.step, str(lost))

    def _register(self) -> None:
        """Lays out all series anew: at the start, and when parameters came or went. All ranks do so together, with
        probes that are switched off too, so that their layouts stay alike."""
        registry = Registry()
        for slot in self._slots:
            slot.probe.register(registry)
        self._spent, self._lasted = (
            registry.part("monitor.spent", "max"),
            registry.part("monitor.step", "max"),
        )
        self._stale, self._alarm = (
            registry.part("monitor.stale", "max"),
            registry.part("monitor.alarm", "max"),
        )
        self._config_changed = registry.part("monitor.config", "max")
        self._trouble = registry.part("monitor.trouble", "max", max(len(self._slots), 1))
        registry.add("perf/monitor_overhead", (self._spent, self._lasted), ratio, probe=_OWN)
        self._read, self._wanted = registry.part("monitor.read", "sum"), registry.part("monitor.due", "sum")
        registry.add("perf/monitor_coverage", (self._read, self._wanted), ratio, probe=_OWN)
        if self._governor is not None:
            self._governor.register(registry)
        if self._rankwise is not None:
            self._rankwise.register(registry)
        everybody: list[bytes] = []
        if self._merges:
            try:
                everybody = self._group.exchange(registry.describe())
            except Lost as lost:
                self._lose(lost)
        try:
            registry.freeze(everybody)
        except ValueError as error:
            if self._run is None:
                raise
            self._lose(Lost(str(error)))
            registry.freeze()
        self._share_pieces()
        self._registry, self._frames = registry, (Frame(registry), Frame(registry))
        if self._supervision is not None:
            self._supervision.take_layout(registry)

    def _share_pieces(self) -> None:
        """Of ranks that hold the same piece of a parameter the lowest owns it; and of ranks that see the same tokens in
        the same part of a layer."""
        if not self._merges:
            return
        model = self._begin_event.model
        self._shared = None if model is None else tuple(model.parameter_names())
        watchers = [slot.probe for slot in self._slots if isinstance(slot.probe, LayerWatcher)]
        try:
            pieces = None if model is None else share_pieces(model, self._group)
            if watchers:
                share_layers(watchers, self._begin_event.layout, self._group)
        except Lost as lost:
            self._lose(lost)
            return
        if self._replicas is not None and model is not None and pieces is not None:
            self._replicas.register(model.parameter_names(), pieces)

    def _names_moved(self) -> bool:
        """Whether the model has other parameters than those whose owners are known."""
        model = self._begin_event.model
        return model is not None and tuple(model.parameter_names()) != self._shared

    def _listen(self) -> None:
        self._listeners = {}
        for kind in Event.__args__:
            method = "on_" + re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
            found = [
                (slot, getattr(slot.probe, method)) for slot in self._slots if hasattr(slot.probe, method)
            ]
            if found:
                self._listeners[kind] = found

    # -- a configuration that changes under way -------------------------------------------------------------------------

    def _look_at_config(self) -> None:
        """Rank 0 looks whether the configuration's file has changed; one that is wrong is said and ignored."""
        if self._group.rank != 0 or self._proposed is not None:
            return
        try:
            new = self._watch.poll()
            if new is not None and new.health is not None:
                check_health(new.health, self._begin_event)
        except ConfigError as error:
            text = f"the changed configuration is ignored, the old one goes on:\n{error}"
            self._say(Told("warning", "config_ignored", text, self.step))
            return
        self._proposed = new
        if self._watch.ignored:
            names = ", ".join(self._watch.ignored)
            text = f"the configuration's changes of {names} take effect when a run begins, not in this one"
            self._say(Told("warning", "config_fixed", text, self.step))

    def _agree(self) -> None:
        """Rank 0 has a new configuration: all ranks learn of it in the same report."""
        mine = b"" if self._proposed is None else json.dumps(self._proposed.to_dict()).encode()
        self._proposed = None
        try:
            self._agreed = load_config(json.loads(self._group.exchange(mine)[0]))
        except Lost as lost:
            self._lose(lost)

    def _adopt(self, new: TrainMonitorConfig) -> None:
        """Goes on with another configuration; what it doesn't touch keeps its state. All ranks at the same step."""
        self._agreed = None
        self._publish_report()
        self._collect()
        self._publish_report()
        old, self.config = self.config, new
        changed = changed_sections(old, new)
        if self._host is not None:
            self._begin_event = replace(self._begin_event, observed=self._host.observe())
        self._slots = build_slots(new, keep=self._slots, changed=changed)
        context = ProbeContext(self._begin_event, self._backend, self.say, self._found, self._order)
        for slot in self._slots:
            if slot.fresh:
                slot.probe.begin(context)
                slot.fresh = False
        self._governor = None if new.overhead is None else Governor(new.overhead, self._slots)
        if {"comparison", "replicas"} & set(changed):
            self._compare_ranks()
        if self._supervision is not None and "health" not in changed:
            self._supervision.take_slots(self._slots)
        self._listen()
        self._register()
        if "health" in changed:
            self._supervise_anew()
        if self._host is not None:
            self._host.install(self.step)
        if self._run is not None:
            self._run.configure(new)
        text = f"the configuration has changed: {', '.join(changed)}; from step {self.step} on"
        self._say_everywhere([Told("info", "config_changed", text, self.step, {"changed": list(changed)})])

    def _supervise_anew(self) -> None:
        """Other rules; detectors that stay go on from their state."""
        before, self._supervision = self._supervision, None
        section = self.config.health
        if section is not None:
            try:
                self._supervision = Supervision(
                    section, self._begin_event, self._slots, self._group, self._backend, self._registry
                )
            except ConfigError as error:  # of series that this run has; the same on every rank
                text = f"the changed rules are ignored, the old ones go on:\n{error}"
                self._say_everywhere([Told("warning", "config_ignored", text, self.step)])
                self._supervision = before
                if before is not None:
                    before.take_slots(self._slots)
                    before.take_layout(self._registry)
                return
        if before is not None:
            self._say_everywhere(before.close())
            if self._supervision is not None:
                state = before.health.state_dict()
                self._say_everywhere(self._supervision.load_state_dict(state, self.step))
                self._say_everywhere(self._supervision.idle)

    # -- failures ---------------------------------------------------------------------------------------------------

    def _attempt(self, slot: Slot, work: Callable[..., Any], *arguments: Any) -> Any:
        """What a probe's own code gives, or ``_FAILED``; its time is the probe's."""
        entered = time.perf_counter_ns()
        try:
            return work(*arguments)
        except Exception as error:
            self._failed(slot, error)
            return _FAILED
        finally:
            slot.spent_ns += time.perf_counter_ns() - entered

    def _failed(self, slot: Slot, error: Exception) -> None:
        slot.failures += 1
        _logger.debug("probe %s failed", slot.probe.name, exc_info=error)
        what = f"{type(error).__name__}: {error}"
        if slot.failures == 1:
            self.say(
                "warning", "probe_failed", f"{slot.probe.name}: {what} (training goes on)", step=self.step
            )
        if slot.failures >= PATIENCE and not slot.off:
            slot.off = True
            text = f"{slot.probe.name} is switched off after {PATIENCE} failures; the last: {what}"
            self.say("error", "probe_off", text, step=self.step, data={"probe": slot.probe.name})

    def _internal_error(self, error: Exception) -> None:
        """Says each kind of failure once; the rest is for whoever turns on debug logging."""
        _logger.debug("trainmon failed at step %d", self.step, exc_info=error)
        what = f"{type(error).__name__}: {error}"
        if what not in self._said:
            self._said.add(what)
            text = f"trainmon failed at step {self.step} (training goes on): {what}"
            self.say("warning", "internal_error", text, step=self.step)


def _stands_out(name: str, rank: int, spread: RankSpread, step: int) -> Told:
    text = (
        f"{name} of rank {rank} stands out among {spread.known} ranks: the median is {spread.median:.6g}, the least "
        f"{spread.low:.6g} (rank {spread.low_rank}), the most {spread.high:.6g} (rank {spread.high_rank})"
    )
    return Told("warning", "rank_stands_out", text, step, {"series": name, "rank": rank, **asdict(spread)})


def _how_it_ended(event: ExceptionRaised) -> tuple[str, str]:
    if isinstance(event.exception, KeyboardInterrupt):
        return "interrupted", "Ctrl-C"
    if isinstance(event.exception, TrainingStopped):
        return "stopped", event.exception.reason
    return "failed", f"{type(event.exception).__name__}: {event.exception}"
