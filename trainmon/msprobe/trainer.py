"""TrainerMonitorV2: msProbe's class, over trainmon's readings and files.

Steps are counted from 0. In a step that is written, rows are taken as things happen and written when it is over; in all
others nothing is read. Nothing that goes wrong in here reaches the training loop, but for what msProbe refuses too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trainmon.adapters.base import current_rank
from trainmon.backend.base import Floats
from trainmon.backend.statistics import Fetched
from trainmon.msprobe.config import (
    FACTS,
    OPS,
    Mode,
    MonitorSettings,
    Settings,
    load,
    logger,
    read_settings,
    slug,
)
from trainmon.msprobe.host import AddCall, Hooks, Host, StepHooks
from trainmon.msprobe.live import LiveControl, is_live
from trainmon.msprobe.manifest import Manifest
from trainmon.msprobe.monitors import Monitor, check_needs
from trainmon.msprobe.older import Older
from trainmon.msprobe.older_settings import OlderSettings, read_older
from trainmon.msprobe.output import MonitorTable, Output
from trainmon.msprobe.saying import warn as _warn
from trainmon.msprobe.tables import Rows, TableFiles
from trainmon.msprobe.window import Window

__all__ = ["TrainerMonitorV2"]


class TrainerMonitorV2:
    """Watches a training run as msProbe's Monitor V2 does.

    Args:
        config_path: a JSON file, or the mapping that it would hold.
        fr: ``pytorch`` or ``mindspore`` (or an alias); beats the configuration.

    Attributes:
        framework, rank, output_dir: as found.
        config: what the file holds.
        monitors: settings by the key in the configuration.
        writer: the files.
        start_step, stop_step, step_interval, step_count_per_record, collect_times: the window.
        current_step: the step that runs, from 0.
        discarded: rows of steps whose gradients were thrown away (extended).
        write_errors: tables that could not be written, and steps that the writer thread dropped.

    Raises:
        RuntimeError: the file can't be read.
        TypeError: it holds no JSON object.
        ValueError: an unknown framework, or a format other than csv.
    """

    def __init__(
        self, config_path: str | os.PathLike[str] | Mapping[str, Any], fr: str | None = None
    ) -> None:
        self.config = load(config_path)
        self._settings = read_settings(self.config, fr)
        self.framework = self._settings.framework
        self._window = self._settings.window
        self._show_window()
        self.output_dir = str(self._settings.output_dir)
        self.current_step = self._settings.first
        self.monitors: dict[str, MonitorSettings] = {one.key: one for one in self._settings.monitors}
        self.rank = current_rank()
        self.writer = self._open_files()
        self._live: LiveControl | None = None
        if is_live(config_path, self._settings.mode):
            first = min(self._settings.ranks or {0})
            self._live = LiveControl(config_path, self._settings, writes=self.rank == first)  # type: ignore[arg-type]
            self._window = Window(0, 0, 1, 1, 0)
        self._given: tuple[Any, Any, Mapping[str, Any]] = (None, None, {})
        older = OlderSettings() if self._settings.mode is Mode.V2 else read_older(self.config)
        self._older = Older(older, self._settings.mode, self._failed)
        self._output = Output(
            self.writer,
            rounds=self._settings.mode is Mode.V2,
            asynchronous=self._settings.asynchronous,
            digits=older.digits,
        )
        self._manifest: Manifest | None = None
        self._discards: Hooks | None = None
        self._host: Host | None = None
        self._steps: StepHooks | None = None
        self._running: list[Monitor] = []
        self._counts_itself = False
        self._due = self._watching = self._begun = False
        self._said_manual = False
        self._said_step = -1

        self.discarded = 0

    @property
    def write_errors(self) -> int:
        return self._output.errors

    # -- msProbe's calls --------------------------------------------------------------------------------------------

    def start(self, model: Any = None, optimizer: Any = None, **context: Any) -> None:
        """Starts all monitors that the configuration enables; nothing on other ranks than those it names.

        Args:
            model: a module or a list of them, None where a chunk is another rank's.
            optimizer: one, or a list of those that step together.
            **context: ``micro_batch_number`` or ``grad_acc_steps``, for ``weight_grad``; ``start_iteration``, the number
                of the first step; ``dp_group`` and ``tp_group``, whose first ranks show what the others have, too;
                ``pp_stage``, for anomalies.

        Raises:
            ValueError: a monitor needs a model or an optimizer; nothing has been started then.
        """
        if self._running or self._host is not None:
            return
        rank = current_rank()
        if rank != self.rank:  # made before the process group was
            self.rank = rank
            self.writer = self._output.files = self._open_files()
        if not self._is_target():
            self._start_elsewhere(model, optimizer)
            return
        if self._live is None:
            for settings in self._settings.monitors:
                check_needs(settings.kind, model, optimizer)
        self._take_start(context)
        self._given = model, optimizer, context
        self._host = self._make_host(model, optimizer)
        try:
            self._output.open(self.rank)
            if self._live is None:
                self._begin_all(self._host, goes_on=self._begun)
            # As in msProbe it holds while stopped, too.
            self._counts_itself = optimizer is not None and self._settings.patch is not False
            if optimizer is not None:
                self._steps = self._host.steps(self._before_update, self._after_update)
                self._steps.install()
        except BaseException:
            self._end()
            raise
        if self._live is None:
            self._report(self._host)
        else:
            logger.info("[monitor_v2] rank %d waits for dynamic_on in %s", self.rank, self._live.path)
        self._arm()

    def step(self, from_optimizer: bool = False) -> None:
        """Ends a training step: its rows are written if it is in the window."""
        if not self._is_target():
            if self._host is not None and not self._counts_itself:
                self._leave_elsewhere(self._host)
            return
        if self._steps is not None and not self._steps.counts:
            self._counts_itself = False
        if self._counts_itself and not from_optimizer:
            if not self._said_manual:
                self._said_manual = True
                logger.warning(
                    "[monitor_v2] step() is ignored: the optimizer's step counts; set patch_optimizer_step to false to "
                    "count by hand"
                )
            return
        try:
            self._advance()
        except Exception as error:
            self._failed(error)

    def stop(self) -> None:
        """Takes all hooks away; rows of a step that has not ended are dropped. May be called again."""
        if not self._is_target():
            self._remove(self._steps)
            self._steps = self._host = None
            return
        dropped = sum(map(len, self._running))
        if dropped and self._settings.mode is not Mode.V2:
            logger.info("[monitor_v2] %d rows of the step that had begun are dropped", dropped)
        self._end()

    # -- beginning and end ------------------------------------------------------------------------------------------

    def _take_start(self, context: Mapping[str, Any]) -> None:
        first = context.get("start_iteration")
        if self._settings.mode is Mode.V2 or first is None:
            return
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            _warn(f"start_iteration must be an integer of at least 0, not {first!r}; ignored")
        elif self.current_step == self._settings.first:
            self.current_step = first

    def _is_target(self) -> bool:
        return self._settings.ranks is None or self.rank in self._settings.ranks

    def _open_files(self) -> TableFiles:
        directory = self._settings.output_dir / f"rank_{self.rank}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning("[monitor_v2] %s can't be made: %s; tried again at each write", directory, error)
        return TableFiles(directory)

    def _make_host(self, model: Any, optimizer: Any) -> Host:
        mode = self._settings.mode
        flags = {"as_msprobe": mode is Mode.V2, "extended": mode is Mode.EXTENDED}
        if self.framework == "mindspore":
            from trainmon.adapters.mindspore_rows import MindSporeRows

            return MindSporeRows(model, optimizer, self._failed, _warn, **flags)
        from trainmon.adapters.torch_rows import TorchRows

        return TorchRows(model, optimizer, self._failed, _warn, **flags)

    def _start_elsewhere(self, model: Any, optimizer: Any) -> None:
        """On a rank that is not watched, but ends with the others."""
        if not self._older.ends_training:
            return
        self._host = host = self._make_host(model, optimizer)
        if optimizer is not None and self._settings.patch is not False:
            self._counts_itself = True
            self._steps = host.steps(lambda: None, lambda: self._leave_elsewhere(host))
            self._steps.install()

    def _leave_elsewhere(self, host: Host) -> None:
        self._older.leave(self.current_step, host.more())

    def _begin_all(self, host: Host, *, goes_on: bool) -> None:
        _, _, context = self._given
        self._watching = self._begun = True
        self._older.leave_out(host.more(), context)
        for settings in self._settings.monitors:
            self._begin(settings, context)
        self._begin_older(host, context, goes_on=goes_on)
        if self._settings.mode is Mode.EXTENDED:
            self._discards = host.discards(self._discard)
            self._discards.install()

    def _begin(self, settings: MonitorSettings, context: Mapping[str, Any]) -> None:
        assert self._host is not None
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
        self._running.append(monitor)
        if monitor.hooks is not None:
            monitor.hooks.install()

    def _begin_older(self, host: Host, context: Mapping[str, Any], *, goes_on: bool) -> None:
        """After the monitors."""
        told = (context.get("micro_batch_number"), context.get("grad_acc_steps"))
        counts = (*(one.micro for one in self._running if one.settings.kind == "weight_grad"), *told, 1)
        self._older.begin(
            host.more(),
            self.rank,
            self._settings.output_dir,
            {one.settings.kind: one.chosen for one in self._running},
            self._settings.monitors,
            next(one for one in counts if isinstance(one, int) and one > 0),
            context,
            goes_on,
        )

    def _collectives(self, settings: MonitorSettings, add: AddCall) -> Hooks | None:
        assert self._host is not None
        if settings.ranks is not None and self.rank not in settings.ranks:
            return None
        hooks = self._host.collectives(
            self.rank,
            add,
            before=settings.before,
            codelines=settings.codelines,
            say=_warn if settings.log_only else None,
        )
        if hooks is None:
            logger.warning(
                "[monitor_v2] monitor %r sees nothing: %s is not initialised; call start() after that",
                settings.key,
                self._host.communication,
            )
        return hooks

    def _end(self) -> None:
        self._end_all()
        self._remove(self._steps)
        self._steps, self._host = None, None

    def _remove(self, hooks: Hooks | StepHooks | None) -> None:
        if hooks is not None:
            try:
                hooks.remove()
            except Exception as error:
                self._failed(error)

    def _end_all(self) -> None:
        """Each monitor's hooks go, whatever becomes of the others'."""
        for hooks in (*(monitor.hooks for monitor in self._running), self._discards):
            self._remove(hooks)
        self._running, self._discards = [], None
        self._due = self._watching = False
        self._output.close()
        self._older.end()
        if self._manifest is not None:
            self._manifest.ended(self.current_step, self._output.written, self.write_errors, self.discarded)
            self._manifest = None

    def _report(self, host: Host) -> None:
        watched = {monitor.settings.key: monitor.watched(host) for monitor in self._running}
        logger.info(
            "[monitor_v2] rank %d watches %s; steps written: %s; below %s",
            self.rank,
            "; ".join(f"{key} ({what})" for key, what in watched.items()) or "nothing",
            self._window.written(),
            self._settings.output_dir,
        )
        if self._settings.mode is Mode.EXTENDED:
            self._manifest = Manifest(self.writer.directory)
            self._manifest.begun(self.config, self.rank, self.current_step, watched)

    # -- a step -----------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """The next step begins: is it looked at? Once none will be any more, hooks inside the model go."""
        self._due = self._window.due(self.current_step)
        over = self._window.over(self.current_step)
        for hooks in (self._discards, *(monitor.hooks for monitor in self._running)):
            if hooks is not None:
                if over:
                    hooks.remove()
                else:
                    hooks.arm(self._due)
        self._older.arm(self._due, over)
        if self._due and self._steps is not None and not self._steps.counts:
            self._before_update()

    def _discard(self) -> None:
        """The gradients of the running step were thrown away: its rows go, too."""
        dropped = sum(map(len, self._running))
        for monitor in self._running:
            monitor.clear()
            if monitor.hooks is not None:
                monitor.hooks.arm(self._due)
        self.discarded += dropped
        logger.info(
            "[monitor_v2] step %d: the optimizer was not called, %d rows are dropped",
            self.current_step,
            dropped,
        )

    def _before_update(self) -> None:
        if not self._due or self._host is None:
            return
        for monitor in self._running:
            self._attempt(self._take_before, monitor, self._host)
        self._older.before_update()

    def _take_before(self, monitor: Monitor, host: Host) -> None:
        kind = monitor.settings.kind
        if kind not in ("weight_grad", "param"):
            return
        self._forget_failed_update(monitor)
        start = len(monitor.rows)
        if kind == "weight_grad":
            monitor.add("reduced", host.gradients(monitor.chosen))
        elif monitor.settings.distribution:
            monitor.add("param_origin", host.weights(monitor.chosen))
        monitor.update = start, len(monitor.rows)

    def _take_after(self, monitor: Monitor, host: Host) -> None:
        monitor.update = None
        if monitor.settings.kind == "param" and monitor.settings.distribution:
            monitor.add("param_updated", host.weights(monitor.chosen))

    def _forget_failed_update(self, monitor: Monitor) -> None:
        """Rows taken before an update that raised: it is tried again, or was not made. msProbe keeps them."""
        if monitor.update is not None and self._settings.mode is not Mode.V2:
            monitor.rows.drop(*monitor.update)
        monitor.update = None

    def _after_update(self) -> None:
        try:
            self._take_all_after()
            if self._counts_itself:
                self._advance()
        except Exception as error:
            self._failed(error)

    def _take_all_after(self) -> None:
        if self._due and self._host is not None:
            for monitor in self._running:
                self._attempt(self._take_after, monitor, self._host)

    def _advance(self) -> None:
        step, due = self.current_step, self._due
        self.current_step += 1
        if due or self._window.due(step):
            if self._steps is not None and not self._steps.counts:
                self._take_all_after()
            self._window.collected += 1
            self._attempt(self._publish, step)
        elif self._settings.mode is Mode.V2 and self._host is not None:
            self._attempt(self._host.note_state)
        for monitor in self._running:
            monitor.clear()
        if self._older.ended(step) and self._host is not None:
            more = self._host.more()
            self._end()
            self._older.leave(step, more)
        if self._live is not None and self._host is not None:
            self._follow_edits(self._live, self._host)
        self._arm()

    def _follow_edits(self, live: LiveControl, host: Host) -> None:
        """What the edited configuration says holds from the next step on."""
        if self._watching and self._window.over(self.current_step):
            self._end_all()
            live.switch_off()
            logger.info(
                "[monitor_v2] step %d: all steps are collected, the monitoring ends", self.current_step - 1
            )
        change = live.poll(self.current_step)
        if change is None:
            return
        if change.settings is None:
            if self._watching:
                self._end_all()
                logger.info("[monitor_v2] step %d: the monitoring is switched off", self.current_step - 1)
            if change.config.get("dynamic_on"):
                live.switch_off()
            return
        model, optimizer, _ = self._given
        try:
            for one in change.settings.monitors:
                check_needs(one.kind, model, optimizer)
        except ValueError as error:
            logger.error("[monitor_v2] %s is left out, the old configuration goes on: %s", live.path, error)
            return
        self._end_all()
        self._take_settings(change.config, change.settings, change.older)
        try:
            self._output.open(self.rank)
            self._begin_all(host, goes_on=True)
        except BaseException:
            self._end_all()
            raise
        self._report(host)

    def _take_settings(self, config: dict[str, Any], settings: Settings, older: OlderSettings) -> None:
        """Those of an edited configuration."""
        self.config, self._settings, self._window = config, settings, settings.window
        self.monitors = {one.key: one for one in settings.monitors}
        self._show_window()
        self._older = Older(older, settings.mode, self._failed)
        self._output.digits = older.digits

    def _show_window(self) -> None:
        window = self._window
        self.start_step, self.stop_step = window.start, window.stop
        self.step_interval, self.collect_times = window.interval, window.times
        self.step_count_per_record = window.record

    def _publish(self, step: int) -> None:
        """Hands the step's rows over, with one transfer from the device for all of them."""
        host = self._host
        if host is None:
            return
        for monitor in self._running:
            self._attempt(self._complete, monitor, host)
        first, last = self._window.span(step)
        filled = [monitor for monitor in self._running if len(monitor)]
        readings = [(*monitor.rows.readings, *monitor.calls.readings()) for monitor in filled]
        more = self._older.complete()
        fetched = Fetched([one for some in readings for one in some], host.backend, more)
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
        for monitor in self._running:
            if monitor in filled:
                monitor.empty = -1
            elif (reason := monitor.why_empty(host.reasons)) is not None:
                _warn(reason)
        if tables:
            self._output.put(step, tables)

    def _complete(self, monitor: Monitor, host: Host) -> None:
        self._forget_failed_update(monitor)
        if monitor.settings.kind == "optimizer" and monitor.settings.distribution:
            for key, found in host.moments(monitor.chosen):
                for name, stage, reading in found:
                    monitor.rows.add(f"{name}.{key}", key, stage, 0, reading)

    def _finishing(self, monitor: Monitor, fetched: Fetched) -> Callable[[], tuple[Rows, Floats]]:
        """What gives a monitor's rows later, without the monitor."""
        settings, older = monitor.settings, self._older
        finish = partial(fetched.table, wide=not set(settings.ops) <= {*OPS, *FACTS})
        if monitor.settings.kind == "cc":
            calls, plainly = monitor.calls.taken(), self._settings.mode is Mode.V2
            return lambda: calls.merged(finish, plainly=plainly)
        rows = monitor.rows.taken()
        return lambda: (older.finish(settings, rows, fetched), finish(rows.readings))

    # -- failures ---------------------------------------------------------------------------------------------------

    def _attempt(self, work: Callable[..., None], *arguments: Any) -> None:
        """One monitor's failure is not the others'."""
        try:
            work(*arguments)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """One warning a step."""
        logger.debug("trainmon failed at step %d", self.current_step, exc_info=error)
        if self._said_step != self.current_step:
            self._said_step = self.current_step
            what = f"{type(error).__name__}: {error}"
            logger.warning("[monitor_v2] step %d: %s (training goes on)", self.current_step, what)
