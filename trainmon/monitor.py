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
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from trainmon.backend import Backend, Lazy, PackedRead
from trainmon.backend.host import HostBackend
from trainmon.carried import content_of, go_on, restore, save, states_of
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
from trainmon.frame import Floats, Frame, Registry, Snapshot
from trainmon.governor import Governor
from trainmon.health import TrainingStopped
from trainmon.health.health import SERIES as HEALTH_SERIES
from trainmon.health.health import Outcome
from trainmon.messages import Told, found_together, pack_messages
from trainmon.own import OWN, OwnParts
from trainmon.pieces import LayerWatcher
from trainmon.probe_set import FAILED, ProbeSet
from trainmon.probes.base import ProbeContext, Sample
from trainmon.ranks import Ranks
from trainmon.reload import Reload
from trainmon.replicas import Check
from trainmon.run import Run
from trainmon.series import catalogue
from trainmon.signals import TerminationHook
from trainmon.sinks.blackbox import COLLECT, GATE, GATED, MERGE, MERGED
from trainmon.sinks.jsonl import last_record
from trainmon.slots import Slot, build_slots
from trainmon.summary import Summary
from trainmon.supervision import Supervision
from trainmon.voice import Voice

__all__ = ["TrainMonitor"]

_logger = logging.getLogger("trainmon")

#: Events that show tensors: not made unless a probe wants them.
_VIEWS = (GradsReady, MicroGradient, GradientAccumulated, ModuleSeen, AttentionSeen, ExpertsSeen)
#: Ends that all ranks come to at the same step.
_AGREED = ("completed", "stopped")
E = TypeVar("E", bound=Event)


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
        under: configuration keys that hold where neither ``config`` nor ``overrides`` say otherwise.
        bridge: an object with ``log(dict, step)`` that is handed each step's numbers; on ranks that write.
        **overrides: top-level keys; they beat the file.

    Attributes:
        config: the resolved configuration.
        overhead_ns: nanoseconds that the training thread has spent inside trainmon.
        step: the running or last step.

    Raises:
        ConfigError: the configuration is wrong; all problems at once, before anything has begun.
    """

    def __init__(
        self,
        config: Any = None,
        under: Mapping[str, Any] | None = None,
        /,
        *,
        bridge: Any = None,
        **overrides: Any,
    ) -> None:
        self.config: TrainMonitorConfig = load_config(config, under, **overrides)
        self._reload = Reload(ConfigWatch(config, overrides, self.config, under))
        self._host: Host | None = None
        self.overhead_ns = 0
        self.step = 0
        self._run: Run | None = None
        self._bridge = bridge
        self._backend: Backend = HostBackend()
        self._voice = Voice()
        self._probes = ProbeSet(build_slots(self.config), self._voice)
        self._ranks = Ranks(Single(), self._voice, self._lost)
        self._pending: _Pending | None = None
        self._report: _Report | None = None
        overhead = self.config.overhead
        self._governor = None if overhead is None else Governor(overhead, self._probes.slots)
        self._supervision: Supervision | None = None
        self._order = itertools.count().__next__
        self._summary = Summary()
        self._overhead_marked = 0
        self._step_began: float | None = None
        self._step_open = False
        self._said: set[str] = set()
        self._closed = False
        self._pid = os.getpid()
        self._ended: tuple[str, str | None] = ("completed", None)
        self._stop_reason: str | None = None
        self._termination: TerminationHook | None = None
        self._at_begin: Callable[[], object] = lambda: None
        self._before: dict[str, Any] = {}  # of the step that this life goes on from
        self._readers: list[Callable[[Snapshot], None]] = []

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
        if group is not None:
            self._ranks = Ranks(group, self._voice, self._lost)
        self._host = host
        self._began = time.perf_counter()
        self._begin_event = event
        self.step = self._voice.step = event.resumed_step
        self._begin_probes()
        self._ranks.configure(self.config, self._backend, event.model)
        self._register()
        units = {series.name: series.spec.unit for series in self._registry.series.values()}
        if self.config.health is not None:
            self._supervision = Supervision(
                self.config.health,
                event,
                self._probes.slots,
                self._ranks.group,
                self._backend,
                self._registry,
            )
            units |= {name: catalogue()[name].unit for name in HEALTH_SERIES}
        self._run = Run(
            self.config, event, units, event.host, share=self._ranks.of_rank_0, bridge=self._bridge
        )
        self._voice.run = self._run
        self._summary.directory = self._run.info.directory
        self._look_back(self._run)
        self._probes.listen()
        closer = weakref.WeakMethod(self.close)
        self._at_exit = lambda: (bound := closer()) and bound(status="unfinished", reason="the program ended")
        atexit.register(self._at_exit)
        self._termination = TerminationHook(lambda: self.close(status="terminated", reason="SIGTERM"))
        if self._supervision is not None:
            self._voice.everywhere(self._supervision.idle)
        if event.layout.world > self._ranks.group.size:
            self.say(
                "warning",
                "ranks_not_merged",
                f"{event.layout.world} ranks, but no process group yet: values are not merged, what is shown is rank "
                f"{event.layout.rank}'s own; the ranks' process group has to be there before trainmon begins",
                step=self.step,
            )
        self.overhead_ns += time.perf_counter_ns() - entered
        self._at_begin()

    def _look_back(self, run: Run) -> None:
        """What an earlier life of the run, in the same directory, published at the step that this one goes on from."""
        step, directory = self._begin_event.resumed_step, run.info.rank_directory
        if step == 0 or directory is None or self._ranks.group.rank != 0:
            return
        try:
            self._before.update(last_record(directory / "scalars.jsonl", step))
        except OSError:  # there was none, or none here
            return

    def _begin_probes(self) -> None:
        context = ProbeContext(
            self._begin_event, self._backend, self.say, self._found, self._order, self._before
        )
        self._probes.begin(context)

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
            if self._voice.box is not None:
                self._voice.box.see(kind, event, self.step)
            self._probes.give(kind, event)
            if isinstance(event, StepEnd):
                self._end_step(event)
        except Exception as error:
            self._internal_error(error)
        finally:
            self.overhead_ns += time.perf_counter_ns() - entered

    def listens(self, kind: type[Event]) -> bool:
        """Whether any probe wants events of this kind: what nobody listens to needs no hook."""
        return self._probes.listens(kind)

    def wants(self, kind: type[Any]) -> bool:
        """Whether a probe takes events of this kind in this step."""
        return not self._closed and self._probes.wants(kind)

    def guard(self, work: Callable[[], None]) -> None:
        """Does an adapter's work: its time is counted, and what goes wrong in it does not reach the caller."""
        entered = time.perf_counter_ns()
        try:
            work()
        except Exception as error:
            self._internal_error(error)
        finally:
            self.overhead_ns += time.perf_counter_ns() - entered

    def read_by(self, reader: Callable[[Snapshot], None]) -> None:
        """Each finished frame is shown to ``reader``, too, on the training thread and on every rank: for hosts that have
        a place of their own for numbers. With several ranks that is a step late."""
        self._readers.append(reader)

    def before_update(self) -> Decision:
        """What the rules say of a step whose gradients were just shown, before weights change: on every rank the same, at
        the cost of one small collective; nothing is asked or merged unless ``health.gate`` says so."""
        supervision = self._supervision
        if supervision is not None and not (self._closed or self._ranks.alone):
            self.guard(lambda: self._look_before(supervision))
        return self.decide()

    def _look_before(self, supervision: Supervision) -> None:
        slots = supervision.asks()
        if not slots:
            return
        # What is found now is found again, and reported, at the end of the step.
        kept, self._voice.findings = self._voice.findings, []
        self._mark(GATE)
        try:
            self._heed(supervision.look_before(self.step, slots, self._probes.failed, self._find))
        except Lost as lost:
            self._ranks.lose(lost)
        finally:
            self._voice.findings = kept
            self._mark(GATED)

    def _mark(self, mark: int) -> None:
        """Notes in the black box that the ranks wait for each other, or no longer do."""
        if self._voice.box is not None and self._ranks.merge:
            self._voice.box.mark(mark, self.step)

    def _find(self) -> list[Finding]:
        """The findings of all ranks at a moment that all agreed on.

        Raises:
            Lost: a rank is gone.
        """
        return found_together(self._ranks.group.exchange(pack_messages([], self._voice.findings)))

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
        self._voice.say(level, kind, text, step=step, data=data)

    def _found(self, finding: Finding) -> None:
        if self._supervision is not None:
            place = finding.place[0], self._begin_event.layout.stage
            self._voice.found(replace(finding, place=place))

    def _lost(self, why: str) -> None:
        if self._supervision is not None:
            self._supervision.lost(self.step, why)

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
                self._ranks.alone = True  # the others may be anywhere: no collective is started or waited for
            self._flush()
            self._ranks.close()
            if self._supervision is not None:
                self._voice.everywhere(self._supervision.close())
            self._summary.overhead_share = self.overhead_share()
            switched_off = self._probes.switched_off
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
        """What a later life of the run goes on from, as plain data, the same on every rank."""
        health = None if self._supervision is None else self._supervision.health.state_dict()
        return {"step": self.step, "health": health, "probes": states_of(slot.probe for slot in self._probes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state; one that can't be used is said, and all starts anew. Before the run begins it waits."""
        if self._run is None:
            self._at_begin = lambda: self.load_state_dict(state)
            return
        self.guard(lambda: self._voice.everywhere(self._go_on(state)))

    def _go_on(self, state: Mapping[str, Any]) -> list[Told]:
        health = None if self._supervision is None else self._supervision.load_state_dict
        running = self.step + (self._step_began is None)
        return go_on(state, self.step, running, health, [slot.probe for slot in self._probes])

    def save_state(self, path: str | os.PathLike[str], state: Mapping[str, Any] | None = None) -> bool:
        """Writes the state, or an earlier ``state_dict()``, to a file, whole or not at all; rank 0 does, for all. Whether
        it is there; why not is said."""
        if self._ranks.group.rank != 0:
            return True
        trouble = save(path, self.state_dict() if state is None else state, self.step)
        if trouble is not None:
            self._voice.now(trouble)
        return trouble is None

    def load_state(self, path: str | os.PathLike[str] | None) -> bool:
        """Goes on from the state in a file, which rank 0 reads for all: to be called on every rank. Whether there was one
        that can be used; if not, why is said, and all starts anew. Before the run begins it waits until then, and the
        answer is yes. None: this rank knows of none, which is not said."""
        if self._run is None:
            self._at_begin = lambda: self.load_state(path)
            return True
        entered = time.perf_counter_ns()
        content = b""
        try:
            if self._ranks.group.rank == 0:
                content, trouble = content_of(path, self.step)
                if trouble is not None:
                    self._voice.now(trouble)
            content = self._ranks.of_rank_0(content)  # every rank comes here
            if content:
                self._voice.everywhere(self._go_on(json.loads(content)))
        except Exception as error:
            self._internal_error(error)
        finally:
            self.overhead_ns += time.perf_counter_ns() - entered
        return bool(content)

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
        again = (
            self._step_open and event.step == self.step
        )  # begun in vain before, by a host whose data ended
        self.step, self._step_began, self._step_open = event.step, event.time, True
        self._voice.step = event.step
        agreed = self._reload.take()
        if agreed is not None:
            self._adopt(agreed)
        if again and agreed is None:
            return
        self._probes.arm(event.step)

    def _end_step(self, event: StepEnd) -> None:
        self._step_open = False
        self._publish_report()
        self._collect()
        samples = self._probes.samples(event)
        if self._ranks.group.size == 1 and any(slot.probe.stale for slot in self._probes if not slot.off):
            self._register()
        lazies: list[Lazy] = [lazy for _, sample in samples for lazy in sample.lazies]
        due = self._probes.due
        check = self._ranks.look_at_replicas(event.step, self._begin_event.model) if due else None
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
            wanted=self._probes.wanted,
            check=check,
            failed=self._probes.take_trouble(),
            wall_time=time.time(),
            elapsed=time.perf_counter() - self._began,
            overhead_ns=spent,
            seconds=seconds,
        )
        self._reload.look(self._begin_event, self._voice)
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
        for told in self._voice.take_messages():
            self._voice.now(told)

    def _collect(self) -> None:
        """The numbers of a step are on the host: into a frame, and off to the other ranks. What Ctrl-C cuts off stays
        for ``close``."""
        pending = self._pending
        if pending is None:
            return
        try:
            report = None if self._run is None else self._enter(pending)
        except Exception:
            self._pending = None
            raise
        self._report, self._pending = report, None
        if self._ranks.group.size == 1:
            self._publish_report()

    def _enter(self, pending: _Pending) -> _Report | None:
        """A step's numbers, in a frame; None if nothing was due."""
        if self._voice.box is not None and self._backend.deferred:
            self._voice.box.mark(COLLECT, self.step)
        values, failed = pending.read.wait(), set(pending.failed)
        frame, at = self._frames[pending.event.step % 2], 0
        frame.clear(pending.event.step)
        for slot, sample in pending.samples:
            mine: Sequence[Floats] = values[at : at + len(sample.lazies)]
            at += len(sample.lazies)
            if self._probes.attempt(slot, sample.write, frame, mine) is FAILED:
                failed.add(self._probes.slots.index(slot))
        findings = self._voice.take_findings(pending.event.step)
        if not pending.due:
            return None
        self._own.write_cost(
            frame, pending.overhead_ns * 1e-9, pending.seconds, len(pending.due), pending.wanted
        )
        self._own.write_trouble(frame, failed)
        if self._governor is not None:
            self._governor.write(frame)
        messages = self._voice.take_messages()
        frame.set(self._own.config, float(self._reload.proposes))
        stale = self._ranks.moved(self._begin_event.model) or any(slot.probe.stale for slot in self._probes)
        frame.set(self._own.stale, float(stale))
        frame.set(self._own.alarm, float(bool(messages or findings)))
        merging = self._ranks.start(frame, pending.check, values[-1] if values else None)
        return _Report(pending, frame, merging, messages, findings)

    def _publish_report(self) -> None:
        """The ranks have merged a step: derived, written, and what follows from it for all of them."""
        report = self._report
        if self._ranks.group.size > 1:
            self._report = None  # what was merged once is not merged again
        if report is None or self._run is None:
            return
        try:
            self._publish(self._run, report)
        except Exception:
            self._report = None
            raise

    def _publish(self, run: Run, report: _Report) -> None:
        frame, pending = report.frame, report.pending
        merged = self._wait(report)
        if merged:
            for slot in self._probes:
                if not slot.off and hasattr(slot.probe, "merged") and slot.probe.name in pending.due:
                    self._probes.attempt(slot, slot.probe.merged, frame)
        else:
            frame.forget_shared()
        spreads = self._ranks.compare(merged)
        failed, switched_off = self._own.trouble(frame)
        snapshot = frame.snapshot(
            wall_time=pending.wall_time,
            elapsed=pending.elapsed,
            total_steps=self._begin_event.total_steps,
            due=lambda name: name in pending.due or name == OWN,
            unknown=failed,
            off=switched_off,
            ranks=spreads,
        )
        together = report.merging is not None and merged
        stale, alarm, reload = (
            together and self._own.raised(frame, part)
            for part in (self._own.stale, self._own.alarm, self._own.config)
        )
        everybody: list[bytes] | None = None
        if alarm:
            mine = pack_messages(report.messages, report.findings)
            everybody = self._ranks.exchange(mine) or [
                *[pack_messages([])] * self._ranks.group.rank,
                mine,
            ]
        outcome = Outcome()
        if self._supervision is not None:
            findings = report.findings if everybody is None else found_together(everybody)
            outcome = self._supervision.report(snapshot, findings, self._looked(pending.due))
            published = self._supervision.published(merged)
            snapshot = replace(snapshot, scalars={**snapshot.scalars, **published})
        self._report = None
        self._summary.add(snapshot)
        run.put(snapshot)
        for reader in self._readers:
            self._show(reader, snapshot)
        self._voice.tell(report.messages, everybody)
        self._heed(outcome)
        if merged and self._governor is not None:
            self._govern(self._governor, frame)
        if reload or report.merging is None:
            self._reload.agree(self._ranks)
        if stale:
            self._register()
        if together:  # behind all that a report waits for
            self._mark(MERGED)

    def _show(self, reader: Callable[[Snapshot], None], snapshot: Snapshot) -> None:
        try:
            reader(snapshot)
        except Exception as error:
            self._internal_error(error)

    def _wait(self, report: _Report) -> bool:
        """Whether the frame holds what all ranks have."""
        if report.merging is not None:
            self._mark(MERGE)
        try:
            return self._ranks.finish(report.frame, report.merging)
        except ValueError as error:
            self._internal_error(error)
            return False

    def _govern(self, governor: Governor, frame: Frame) -> None:
        """Looks at the cost that all ranks have merged."""
        cost = self._own.cost(frame)
        if cost is not None:
            self._voice.everywhere(governor.judge(frame, *cost, frame.step))

    def _heed(self, outcome: Outcome) -> None:
        """Says what came of a report, to the webhook too, and keeps the run's state in run.json."""
        self._voice.everywhere(outcome.messages)
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

    def _register(self) -> None:
        """Lays out all series anew: at the start, and when parameters came or went. All ranks do so together, with
        probes that are switched off too, so that their layouts stay alike.

        Raises:
            ValueError: the ranks measure different things; only at the start.
        """
        registry = Registry()
        for registry.owner, slot in enumerate(self._probes):
            slot.probe.register(registry)
        registry.owner = -1
        self._own = OwnParts(registry, self._probes.slots)
        if self._governor is not None:
            self._governor.register(registry)
        self._ranks.freeze(registry, first=self._run is None)
        watchers = [slot.probe for slot in self._probes if isinstance(slot.probe, LayerWatcher)]
        self._ranks.share(self._begin_event.model, watchers, self._begin_event.layout)
        self._registry, self._frames = registry, (Frame(registry), Frame(registry))
        if self._supervision is not None:
            self._supervision.take_layout(registry)

    # -- a configuration that changes under way -------------------------------------------------------------------------

    def _adopt(self, new: TrainMonitorConfig) -> None:
        """Goes on with another configuration; what it doesn't touch keeps its state. All ranks at the same step."""
        self._publish_report()
        self._collect()
        self._publish_report()
        old, self.config = self.config, new
        changed = changed_sections(old, new)
        if self._host is not None:
            self._begin_event = replace(self._begin_event, observed=self._host.observe())
        remembered = states_of(slot.probe for slot in self._probes)
        self._probes.replace(build_slots(new, keep=self._probes.slots, changed=changed))
        made = [slot.probe for slot in self._probes if slot.fresh]
        self._begin_probes()
        self._voice.everywhere(restore(made, remembered, self.step))
        self._governor = None if new.overhead is None else Governor(new.overhead, self._probes.slots)
        if {"comparison", "replicas"} & set(changed):
            self._ranks.configure(new, self._backend, self._begin_event.model)
        if self._supervision is not None and "health" not in changed:
            self._supervision.take_slots(self._probes.slots)
        self._probes.listen()
        self._register()
        if "health" in changed:
            self._supervise_anew()
        if self._host is not None:
            self._host.install(self.step)
        if self._run is not None:
            self._run.configure(new)
        text = f"the configuration has changed: {', '.join(changed)}; from step {self.step} on"
        self._voice.everywhere([Told("info", "config_changed", text, self.step, {"changed": list(changed)})])

    def _supervise_anew(self) -> None:
        """Other rules; detectors that stay go on from their state."""
        before, self._supervision = self._supervision, None
        section = self.config.health
        if section is not None:
            try:
                self._supervision = Supervision(
                    section,
                    self._begin_event,
                    self._probes.slots,
                    self._ranks.group,
                    self._backend,
                    self._registry,
                )
            except ConfigError as error:  # of series that this run has; the same on every rank
                text = f"the changed rules are ignored, the old ones go on:\n{error}"
                self._voice.everywhere([Told("warning", "config_ignored", text, self.step)])
                self._supervision = before
                if before is not None:
                    before.take_slots(self._probes.slots)
                    before.take_layout(self._registry)
                return
        if before is not None:
            self._voice.everywhere(before.close())
            if self._supervision is not None:
                state = before.health.state_dict()
                self._voice.everywhere(self._supervision.load_state_dict(state, self.step))
                self._voice.everywhere(self._supervision.idle)

    # -- failures ---------------------------------------------------------------------------------------------------

    def _internal_error(self, error: Exception) -> None:
        """Says each kind of failure once; the rest is for whoever turns on debug logging."""
        _logger.debug("trainmon failed at step %d", self.step, exc_info=error)
        what = f"{type(error).__name__}: {error}"
        if what not in self._said:
            self._said.add(what)
            text = f"trainmon failed at step {self.step} (training goes on): {what}"
            self.say("warning", "internal_error", text, step=self.step)


def _how_it_ended(event: ExceptionRaised) -> tuple[str, str]:
    if isinstance(event.exception, KeyboardInterrupt):
        return "interrupted", "Ctrl-C"
    if isinstance(event.exception, TrainingStopped):
        return "stopped", event.exception.reason
    return "failed", f"{type(event.exception).__name__}: {event.exception}"
