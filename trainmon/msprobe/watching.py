"""Monitors at work, from their beginning to their end: rows are taken as things happen and handed over step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trainmon.backend.base import Floats
from trainmon.backend.statistics import Fetched
from trainmon.msprobe.config import FACTS, OPS, Mode, MonitorSettings, Settings, slug
from trainmon.msprobe.host import AddCall, Hooks, Host
from trainmon.msprobe.manifest import Manifest
from trainmon.msprobe.monitors import Monitor
from trainmon.msprobe.older import Older
from trainmon.msprobe.output import MonitorTable, Output
from trainmon.msprobe.saying import logger, warn
from trainmon.msprobe.tables import Rows

__all__ = ["Watching"]


class Watching:
    """All monitors that a configuration enables, on one rank.

    Args:
        output: takes rows; it is open.
        older: what the configuration has of the older monitor's keys.
        failed: takes what goes wrong; no monitor's failure is the others'.

    Attributes:
        running: the monitors.
        discarded: rows of steps whose gradients were thrown away.
    """

    def __init__(
        self,
        settings: Settings,
        older: Older,
        host: Host,
        output: Output,
        rank: int,
        failed: Callable[[Exception], None],
    ) -> None:
        self.running: list[Monitor] = []
        self.discarded = 0
        self._settings, self._older, self._host, self._output = settings, older, host, output
        self._rank, self._failed, self._window = rank, failed, settings.window
        self._discards: Hooks | None = None
        self._manifest: Manifest | None = None
        self._due = False
        self._step = 0

    def __len__(self) -> int:
        """Rows of the running step."""
        return sum(map(len, self.running))

    # -- beginning and end ------------------------------------------------------------------------------------------

    def begin(
        self, context: Mapping[str, Any], config: Mapping[str, Any], step: int, *, goes_on: bool
    ) -> None:
        """Hooks everything.

        Args:
            context: what the user has passed to ``start()``.
            step: the first.
            goes_on: monitors were at work before, in the same run.
        """
        self._step = step
        self._older.leave_out(self._host.more(), context)
        for settings in self._settings.monitors:
            self._begin(settings, context)
        self._begin_older(context, goes_on=goes_on)
        if self._settings.mode is Mode.EXTENDED:
            self._discards = self._host.discards(self._discard)
            self._discards.install()
        self._report(config)

    def _begin(self, settings: MonitorSettings, context: Mapping[str, Any]) -> None:
        monitor = Monitor(settings, extended=self._settings.mode is Mode.EXTENDED)
        monitor.chosen = self._older.chosen(settings, monitor.chosen)
        monitor.rows.clock = self._older.clock
        add = self._older.filtered(settings, monitor.rows.add)
        if settings.kind == "module":
            monitor.hooks = self._host.calls(
                add, monitor.chosen, evaluation=settings.evaluation, repeated=settings.repeated
            )
        elif settings.kind == "weight_grad":
            told = (context.get("micro_batch_number"), context.get("grad_acc_steps"))
            counts = (*settings.micro_counts, *told)
            monitor.micro = next((int(one) for one in counts if isinstance(one, int) and one > 0), 1)
            monitor.hooks = self._host.accumulated(
                add, monitor.chosen, count=monitor.micro, each=settings.each_micro, own=settings.own
            )
        elif settings.kind == "cc":
            monitor.hooks = self._collectives(settings, monitor.calls.add)
        shown = self._older.shown(settings, monitor.chosen)
        if shown is not None:
            monitor.chosen, monitor.empty = shown, -1
        self.running.append(monitor)
        if monitor.hooks is not None:
            monitor.hooks.install()

    def _begin_older(self, context: Mapping[str, Any], *, goes_on: bool) -> None:
        """After the monitors."""
        told = (context.get("micro_batch_number"), context.get("grad_acc_steps"))
        counts = (*(one.micro for one in self.running if one.settings.kind == "weight_grad"), *told, 1)
        self._older.begin(
            self._host.more(),
            self._rank,
            self._settings.output_dir,
            {one.settings.kind: one.chosen for one in self.running},
            self._settings.monitors,
            next(one for one in counts if isinstance(one, int) and one > 0),
            context,
            goes_on,
        )

    def _collectives(self, settings: MonitorSettings, add: AddCall) -> Hooks | None:
        if settings.ranks is not None and self._rank not in settings.ranks:
            return None
        hooks = self._host.collectives(
            self._rank,
            add,
            before=settings.before,
            codelines=settings.codelines,
            say=warn if settings.log_only else None,
        )
        if hooks is None:
            logger.warning(
                "[monitor_v2] monitor %r sees nothing: %s is not initialised; call start() after that",
                settings.key,
                self._host.communication,
            )
        return hooks

    def _report(self, config: Mapping[str, Any]) -> None:
        watched = {monitor.settings.key: monitor.watched(self._host) for monitor in self.running}
        logger.info(
            "[monitor_v2] rank %d watches %s; steps written: %s; below %s",
            self._rank,
            "; ".join(f"{key} ({what})" for key, what in watched.items()) or "nothing",
            self._window.written(),
            self._settings.output_dir,
        )
        if self._settings.mode is Mode.EXTENDED:
            self._manifest = Manifest(self._output.files.directory)
            self._manifest.begun(config, self._rank, self._step, watched)

    def end(self, step: int) -> None:
        """Each monitor's hooks go, whatever becomes of the others'; what was handed over is written.

        Args:
            step: the one that begins, or has begun.
        """
        for hooks in (*(monitor.hooks for monitor in self.running), self._discards):
            if hooks is not None:
                self._attempt(hooks.remove)
        self.running, self._discards, self._due = [], None, False
        self._output.close()
        self._older.end()
        if self._manifest is not None:
            self._manifest.ended(step, self._output.written, self._output.errors, self.discarded)
            self._manifest = None

    # -- a step -----------------------------------------------------------------------------------------------------

    def arm(self, step: int, *, counted: bool) -> None:
        """A step begins: is it looked at? Once none will be any more, hooks inside the model go.

        Args:
            counted: each update is seen; if not, one begins with the step.
        """
        self._step = step
        self._due, over = self._window.due(step), self._window.over(step)
        for hooks in (self._discards, *(monitor.hooks for monitor in self.running)):
            if hooks is not None:
                if over:
                    hooks.remove()
                else:
                    hooks.arm(self._due)
        self._older.arm(self._due, over)
        if self._due and not counted:
            self.before_update()

    def before_update(self) -> None:
        """The optimizer begins its step."""
        if not self._due:
            return
        for monitor in self.running:
            self._attempt(self._take_before, monitor)
        self._older.before_update()

    def after_update(self) -> None:
        """The optimizer has made its step."""
        if not self._due:
            return
        for monitor in self.running:
            self._attempt(self._take_after, monitor)

    def end_step(self, step: int, *, counted: bool) -> None:
        """A step is over: its rows are handed over if it is in the window."""
        if self._due or self._window.due(step):
            if not counted:
                self.after_update()
            self._window.collected += 1
            self._attempt(self._publish, step)
        elif self._settings.mode is Mode.V2:
            self._attempt(self._host.note_state)
        for monitor in self.running:
            monitor.clear()

    def _discard(self) -> None:
        """The gradients of the running step were thrown away: its rows go, too."""
        dropped = len(self)
        for monitor in self.running:
            monitor.clear()
            if monitor.hooks is not None:
                monitor.hooks.arm(self._due)
        self.discarded += dropped
        logger.info(
            "[monitor_v2] step %d: the optimizer was not called, %d rows are dropped", self._step, dropped
        )

    def _take_before(self, monitor: Monitor) -> None:
        kind = monitor.settings.kind
        if kind not in ("weight_grad", "param"):
            return
        self._forget_failed_update(monitor)
        start = len(monitor.rows)
        if kind == "weight_grad":
            monitor.add("reduced", self._host.gradients(monitor.chosen))
        elif monitor.settings.distribution:
            monitor.add("param_origin", self._host.weights(monitor.chosen))
        monitor.update = start, len(monitor.rows)

    def _take_after(self, monitor: Monitor) -> None:
        monitor.update = None
        if monitor.settings.kind == "param" and monitor.settings.distribution:
            monitor.add("param_updated", self._host.weights(monitor.chosen))

    def _forget_failed_update(self, monitor: Monitor) -> None:
        """Rows taken before an update that raised: it is tried again, or was not made. msProbe keeps them."""
        if monitor.update is not None and self._settings.mode is not Mode.V2:
            monitor.rows.drop(*monitor.update)
        monitor.update = None

    def _publish(self, step: int) -> None:
        """Hands the step's rows over, with one transfer from the device for all of them."""
        for monitor in self.running:
            self._attempt(self._complete, monitor)
        first, last = self._window.span(step)
        filled = [monitor for monitor in self.running if len(monitor)]
        readings = [(*monitor.rows.readings, *monitor.calls.readings()) for monitor in filled]
        more = self._older.complete()
        fetched = Fetched([one for some in readings for one in some], self._host.backend, more)
        tables = [
            MonitorTable(
                f"{slug(monitor.settings.key)}_step{first}-{last}",
                len(own),
                self._finishing(monitor, fetched),
                monitor.settings.ops,
                monitor.keys,
                self._older.watch(monitor.settings),
            )
            for monitor, own in zip(filled, readings, strict=True)
        ]
        tables += self._older.tables((first, last), fetched)
        for monitor in self.running:
            if monitor in filled:
                monitor.empty = -1
            elif (reason := monitor.why_empty(self._host.reasons)) is not None:
                warn(reason)
        if tables:
            self._output.put(step, tables)

    def _complete(self, monitor: Monitor) -> None:
        self._forget_failed_update(monitor)
        if monitor.settings.kind == "optimizer" and monitor.settings.distribution:
            for key, found in self._host.moments(monitor.chosen):
                for name, stage, reading in found:
                    monitor.rows.add(f"{name}.{key}", key, stage, 0, reading)

    def _finishing(self, monitor: Monitor, fetched: Fetched) -> Callable[[], tuple[Rows, Floats]]:
        """What gives a monitor's rows later, without the monitor."""
        settings, older = monitor.settings, self._older
        finish = partial(fetched.table, wide=not set(settings.ops) <= {*OPS, *FACTS})
        if settings.kind == "cc":
            calls, plainly = monitor.calls.taken(), self._settings.mode is Mode.V2
            return lambda: calls.merged(finish, plainly=plainly)
        rows = monitor.rows.taken()
        return lambda: (older.finish(settings, rows, fetched), finish(rows.readings))

    def _attempt(self, work: Callable[..., None], *arguments: Any) -> None:
        """One monitor's failure is not the others'."""
        try:
            work(*arguments)
        except Exception as error:
            self._failed(error)
