"""TrainerMonitorV2: msProbe's class, over trainmon's readings and files.

Steps are counted from 0. In a step that is written, rows are taken as things happen and written when it is over; in all
others nothing is read. Nothing that goes wrong in here reaches the training loop, but for what msProbe refuses too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainmon.adapters.base import current_rank
from trainmon.msprobe.config import Mode, MonitorSettings, load, read_settings
from trainmon.msprobe.host import Host, StepHooks
from trainmon.msprobe.live import Change, LiveControl, is_live
from trainmon.msprobe.monitors import check_needs
from trainmon.msprobe.older import Older
from trainmon.msprobe.older_settings import OlderSettings, read_older
from trainmon.msprobe.output import Output
from trainmon.msprobe.saying import logger, warn
from trainmon.msprobe.tables import TableFiles
from trainmon.msprobe.watching import Watching

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
        self._older_settings = OlderSettings()
        if self._settings.mode is not Mode.V2:
            self._older_settings = read_older(self.config)
        self.framework = self._settings.framework
        self.output_dir = str(self._settings.output_dir)
        self.current_step = self._settings.first
        self.rank = current_rank()
        self.writer = self._open_files()
        self._show_settings()
        self._live: LiveControl | None = None
        if is_live(config_path, self._settings.mode):
            first = min(self._settings.ranks or {0})
            self._live = LiveControl(config_path, self._settings, writes=self.rank == first)  # type: ignore[arg-type]
        self._output = Output(
            self.writer,
            rounds=self._settings.mode is Mode.V2,
            asynchronous=self._settings.asynchronous,
            digits=self._older_settings.digits,
        )
        self._older = Older(self._older_settings, self._settings.mode, self._failed)
        self._given: tuple[Any, Any, Mapping[str, Any]] = (None, None, {})
        self._host: Host | None = None
        self._steps: StepHooks | None = None
        self._watching: Watching | None = None
        self._begun = False
        self._counts_itself = False
        self._discarded = 0
        self._said_manual = False
        self._said_step = -1

    @property
    def discarded(self) -> int:
        return self._discarded + (0 if self._watching is None else self._watching.discarded)

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
        if self._host is not None:
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
            if self._live is None:
                self._begin(self._host)
            # As in msProbe it holds while stopped, too.
            self._counts_itself = optimizer is not None and self._settings.patch is not False
            if optimizer is not None:
                self._steps = self._host.steps(self._before_update, self._after_update)
                self._steps.install()
        except BaseException:
            self._end()
            raise
        if self._live is not None:
            self._live.forget()
            logger.info("[monitor_v2] rank %d waits for dynamic_on in %s", self.rank, self._live.path)
        self._arm()

    def step(self, from_optimizer: bool = False) -> None:
        """Ends a training step: its rows are written if it is in the window."""
        if not self._is_target():
            if self._host is not None and not self._counts_itself:
                self._older.leave(self.current_step, self._host.more())
            return
        if not self._sees_updates():
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
        dropped = 0 if self._watching is None else len(self._watching)
        if dropped and self._settings.mode is not Mode.V2:
            logger.info("[monitor_v2] %d rows of the step that had begun are dropped", dropped)
        self._end()

    # -- beginning and end ------------------------------------------------------------------------------------------

    def _show_settings(self) -> None:
        """As msProbe's attributes."""
        self.monitors: dict[str, MonitorSettings] = {one.key: one for one in self._settings.monitors}
        window = self._settings.window
        self.start_step, self.stop_step = window.start, window.stop
        self.step_interval, self.collect_times = window.interval, window.times
        self.step_count_per_record = window.record

    def _take_start(self, context: Mapping[str, Any]) -> None:
        first = context.get("start_iteration")
        if self._settings.mode is Mode.V2 or first is None:
            return
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            warn(f"start_iteration must be an integer of at least 0, not {first!r}; ignored")
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

            return MindSporeRows(model, optimizer, self._failed, warn, **flags)
        from trainmon.adapters.torch_rows import TorchRows

        return TorchRows(model, optimizer, self._failed, warn, **flags)

    def _start_elsewhere(self, model: Any, optimizer: Any) -> None:
        """On a rank that is not watched, but ends with the others."""
        if not self._older.ends_training:
            return
        self._host = host = self._make_host(model, optimizer)
        if optimizer is not None and self._settings.patch is not False:
            self._counts_itself = True
            self._steps = host.steps(lambda: None, lambda: self._older.leave(self.current_step, host.more()))
            self._steps.install()

    def _begin(self, host: Host) -> None:
        """All monitors."""
        self._output.open(self.rank)
        self._watching = Watching(self._settings, self._older, host, self._output, self.rank, self._failed)
        goes_on, self._begun = self._begun, True
        self._watching.begin(self._given[2], self.config, self.current_step, goes_on=goes_on)

    def _end_monitors(self) -> None:
        if self._watching is not None:
            watching, self._watching = self._watching, None
            watching.end(self.current_step)
            self._discarded += watching.discarded

    def _end(self) -> None:
        self._end_monitors()
        self._output.close()
        if self._steps is not None:
            try:
                self._steps.remove()
            except Exception as error:
                self._failed(error)
        self._steps, self._host = None, None

    # -- a step -----------------------------------------------------------------------------------------------------

    def _sees_updates(self) -> bool:
        return self._steps is None or self._steps.counts

    def _arm(self) -> None:
        if self._watching is not None:
            self._watching.arm(self.current_step, counted=self._sees_updates())

    def _before_update(self) -> None:
        if self._watching is not None:
            self._watching.before_update()

    def _after_update(self) -> None:
        try:
            if self._watching is not None:
                self._watching.after_update()
            if self._counts_itself:
                self._advance()
        except Exception as error:
            self._failed(error)

    def _advance(self) -> None:
        step = self.current_step
        self.current_step += 1
        if self._watching is not None:
            self._watching.end_step(step, counted=self._sees_updates())
        elif self._live is None and self._settings.window.due(step):
            self._settings.window.collected += 1  # as in msProbe, while stopped too
        if self._older.ended(step) and self._host is not None:
            more = self._host.more()
            self._end()
            self._older.leave(step, more)
        if self._live is not None and self._host is not None:
            self._follow_edits(self._live, self._host)
        self._arm()

    def _follow_edits(self, live: LiveControl, host: Host) -> None:
        """What the edited configuration says holds from the next step on."""
        if self._watching is not None and self._settings.window.over(self.current_step):
            self._end_monitors()
            live.switch_off()
            logger.info(
                "[monitor_v2] step %d: all steps are collected, the monitoring ends", self.current_step - 1
            )
        change = live.poll(self.current_step)
        if change is not None and change.settings is not None:
            self._take(change, live, host)
        elif change is not None:
            if self._watching is not None:
                self._end_monitors()
                logger.info("[monitor_v2] step %d: the monitoring is switched off", self.current_step - 1)
            if change.config.get("dynamic_on"):
                live.switch_off()

    def _take(self, change: Change, live: LiveControl, host: Host) -> None:
        """Begins anew with an edited configuration."""
        assert change.settings is not None
        model, optimizer, _ = self._given
        try:
            for one in change.settings.monitors:
                check_needs(one.kind, model, optimizer)
        except ValueError as error:
            logger.error("[monitor_v2] %s is left out, the old configuration goes on: %s", live.path, error)
            return
        self._end_monitors()
        self.config, self._settings = change.config, change.settings
        self._show_settings()
        self._older = Older(change.older, self._settings.mode, self._failed)
        self._output.digits = change.older.digits
        try:
            self._begin(host)
        except BaseException:
            self._end_monitors()
            raise

    def _failed(self, error: Exception) -> None:
        """One warning a step."""
        logger.debug("trainmon failed at step %d", self.current_step, exc_info=error)
        if self._said_step != self.current_step:
            self._said_step = self.current_step
            what = f"{type(error).__name__}: {error}"
            logger.warning("[monitor_v2] step %d: %s (training goes on)", self.current_step, what)
