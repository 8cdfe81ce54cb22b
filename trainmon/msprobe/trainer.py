"""TrainerMonitorV2: msProbe's class, over trainmon's readings and files.

Steps are counted from 0. In a step that is written, rows are taken as things happen and written when it is over; in all
others nothing is read. Nothing that goes wrong in here reaches the training loop, but for what msProbe refuses too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from trainmon.adapters.base import current_rank
from trainmon.backend import Backend
from trainmon.backend.statistics import Reading, finished
from trainmon.msprobe.collectives import CollectiveRows
from trainmon.msprobe.config import Mode, MonitorSettings, load, logger, read_settings, slug
from trainmon.msprobe.tables import Rows, TableFiles, rounded, table_bytes

__all__ = ["TrainerMonitorV2"]

#: What msProbe reads of an optimizer's state.
_MOMENTS = ("exp_avg", "exp_avg_sq")
#: Written steps without rows after which the likely reason is said.
_PATIENCE = 3
_REASONS = {
    "module": "no module that targets select was called",
    "weight_grad": "no parameter has had a gradient when the optimizer stepped",
    "optimizer": "the optimizer keeps neither exp_avg nor exp_avg_sq",
    "param": "the optimizer has not stepped, or the model has no parameters",
    "cc": "torch.distributed was not called, or from no line of cc_codeline",
}
_NEEDS = {"weight_grad": "weight grad", "optimizer": "optimizer", "param": "param"}

_AddRow = Callable[[str, str, int, int, Reading], None]
_AddCall = Callable[[str, str, bool, list[Reading]], None]
_Row = tuple[str, int, Reading]


class _Hooks(Protocol):
    """Hooks that look at a flag."""

    def install(self) -> None: ...

    def watched(self) -> str: ...

    def arm(self, on: bool) -> None: ...

    def remove(self) -> None: ...


class _StepHooks(Protocol):
    def install(self) -> None: ...

    def remove(self) -> None: ...


class _Host(Protocol):
    """What a framework shows of a model; see :class:`trainmon.adapters.torch_rows.TorchRows`."""

    @property
    def backend(self) -> Backend | None: ...

    def calls(self, targets: Sequence[str], add: _AddRow) -> _Hooks: ...

    def accumulated(self, add: _AddRow, *, count: int, each: bool) -> _Hooks: ...

    def collectives(
        self,
        rank: int,
        add: _AddCall,
        *,
        before: bool,
        codelines: Sequence[str],
        say: Callable[[str], None] | None,
    ) -> _Hooks | None: ...

    def steps(self, before: Callable[[], None], after: Callable[[], None]) -> _StepHooks: ...

    def gradients(self) -> list[_Row]: ...

    def weights(self) -> list[_Row]: ...

    def moments(self, keys: Sequence[str]) -> list[tuple[str, list[_Row]]]: ...


class _Monitor:
    """One entry of ``monitors`` at work.

    Attributes:
        settings: what was asked for.
        rows, calls: those of the running step; of collectives by call.
        hooks: what has to be told which steps are looked at.
        update: the rows that the optimizer's running or failed step has added, from and to.
        micro: micro-batches of a step.
        empty: in how many written steps there were no rows so far; -1 once there were any.
    """

    def __init__(self, settings: MonitorSettings) -> None:
        self.settings = settings
        self.rows = Rows()
        self.calls = CollectiveRows()
        self.hooks: _Hooks | None = None
        self.update: tuple[int, int] | None = None
        self.micro = 1
        self.empty = 0


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
        write_errors: how often a table could not be written.

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
        self.start_step, self.stop_step = self._window.start, self._window.stop
        self.step_interval, self.collect_times = self._window.interval, self._window.times
        self.step_count_per_record = self._window.record
        self.output_dir = str(self._settings.output_dir)
        self.current_step = 0
        self.write_errors = 0
        self.monitors: dict[str, MonitorSettings] = {one.key: one for one in self._settings.monitors}
        self.rank = current_rank()
        self.writer = self._open_files()
        self._host: _Host | None = None
        self._steps: _StepHooks | None = None
        self._running: list[_Monitor] = []
        self._counts_itself = False
        self._due = False
        self._said_manual = False
        self._said_step = -1
        self._said_write = False

    # -- msProbe's calls --------------------------------------------------------------------------------------------

    def start(self, model: Any = None, optimizer: Any = None, **context: Any) -> None:
        """Starts all monitors that the configuration enables; nothing on other ranks than those it names.

        Args:
            model: a module or a list of them, None where a chunk is another rank's.
            optimizer: one, or a list of those that step together.
            **context: ``micro_batch_number`` or ``grad_acc_steps``, for ``weight_grad``.

        Raises:
            ValueError: a monitor needs a model or an optimizer; nothing has been started then.
            NotImplementedError: MindSpore.
        """
        if self._running or self._host is not None:
            return
        rank = current_rank()
        if rank != self.rank:  # made before the process group was
            self.rank = rank
            self.writer = self._open_files()
        if not self._is_target():
            return
        for settings in self._settings.monitors:
            _check_needs(settings.kind, model, optimizer)
        self._host = self._make_host(model, optimizer)
        try:
            for settings in self._settings.monitors:
                self._begin(settings, context)
            if optimizer is not None:
                self._counts_itself = self._settings.patch is not False
                self._steps = self._host.steps(self._before_update, self._after_update)
                self._steps.install()
        except BaseException:
            self._end()
            raise
        self._report()
        self._arm()

    def step(self, from_optimizer: bool = False) -> None:
        """Ends a training step: its rows are written if it is in the window."""
        if not self._is_target():
            return
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
            return
        dropped = sum(len(monitor.rows) + len(monitor.calls) for monitor in self._running)
        if dropped and self._settings.mode is not Mode.V2:
            logger.info("[monitor_v2] %d rows of the step that had begun are dropped", dropped)
        self._end()

    # -- beginning and end ------------------------------------------------------------------------------------------

    def _is_target(self) -> bool:
        return self._settings.ranks is None or self.rank in self._settings.ranks

    def _open_files(self) -> TableFiles:
        directory = self._settings.output_dir / f"rank_{self.rank}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning("[monitor_v2] %s can't be made: %s; tried again at each write", directory, error)
        return TableFiles(directory)

    def _make_host(self, model: Any, optimizer: Any) -> _Host:
        mode = self._settings.mode
        if self.framework != "pytorch":
            raise NotImplementedError(
                "[monitor_v2] this drop-in watches PyTorch; framework 'mindspore' is not built yet: use msProbe's own "
                "TrainerMonitorV2 there, or trainmon.MindSporeMonitor in Model.train"
            )
        from trainmon.adapters.torch_rows import TorchRows

        return TorchRows(
            model, optimizer, self._failed, _warn, as_msprobe=mode is Mode.V2, extended=mode is Mode.EXTENDED
        )

    def _begin(self, settings: MonitorSettings, context: Mapping[str, Any]) -> None:
        assert self._host is not None
        monitor = _Monitor(settings)
        add = monitor.rows.add
        if settings.kind == "module":
            monitor.hooks = self._host.calls(settings.targets, add)
        elif settings.kind == "weight_grad":
            told = (context.get("micro_batch_number"), context.get("grad_acc_steps"))
            counts = (*settings.micro_counts, *told)
            monitor.micro = next((int(one) for one in counts if isinstance(one, int) and one > 0), 1)
            monitor.hooks = self._host.accumulated(add, count=monitor.micro, each=settings.each_micro)
        elif settings.kind == "cc":
            monitor.hooks = self._collectives(settings, monitor.calls.add)
        self._running.append(monitor)
        if monitor.hooks is not None:
            monitor.hooks.install()

    def _collectives(self, settings: MonitorSettings, add: _AddCall) -> _Hooks | None:
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
                "[monitor_v2] monitor %r sees nothing: torch.distributed is not initialised; call start() after that",
                settings.key,
            )
        return hooks

    def _end(self) -> None:
        """Each monitor's hooks go, whatever becomes of the others'."""
        hooks = [monitor.hooks for monitor in self._running if monitor.hooks is not None]
        for one in (*hooks, self._steps):
            if one is not None:
                try:
                    one.remove()
                except Exception as error:
                    self._failed(error)
        self._running, self._steps, self._host = [], None, None
        self._counts_itself = self._due = False

    def _report(self) -> None:
        kinds = "; ".join(map(_described, self._running)) or "nothing"
        logger.info(
            "[monitor_v2] rank %d watches %s; steps written: %s; below %s",
            self.rank,
            kinds,
            self._window.written(),
            self._settings.output_dir,
        )

    # -- a step -----------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """The next step begins: is it looked at? Once none will be any more, hooks inside the model go."""
        self._due = self._window.due(self.current_step)
        over = self._window.over(self.current_step)
        for monitor in self._running:
            if monitor.hooks is not None:
                if over:
                    monitor.hooks.remove()
                else:
                    monitor.hooks.arm(self._due)

    def _before_update(self) -> None:
        if not self._due or self._host is None:
            return
        for monitor in self._running:
            self._attempt(self._take_before, monitor, self._host)

    def _take_before(self, monitor: _Monitor, host: _Host) -> None:
        kind = monitor.settings.kind
        if kind not in ("weight_grad", "param"):
            return
        self._forget_failed_update(monitor)
        start = len(monitor.rows)
        if kind == "weight_grad":
            _add(monitor, "reduced", host.gradients())
        elif monitor.settings.distribution:
            _add(monitor, "param_origin", host.weights())
        monitor.update = start, len(monitor.rows)

    def _take_after(self, monitor: _Monitor, host: _Host) -> None:
        monitor.update = None
        if monitor.settings.kind == "param" and monitor.settings.distribution:
            _add(monitor, "param_updated", host.weights())

    def _forget_failed_update(self, monitor: _Monitor) -> None:
        """Rows taken before an update that raised: it is tried again, or was not made. msProbe keeps them."""
        if monitor.update is not None and self._settings.mode is not Mode.V2:
            monitor.rows.drop(*monitor.update)
        monitor.update = None

    def _after_update(self) -> None:
        try:
            if self._due and self._host is not None:
                for monitor in self._running:
                    self._attempt(self._take_after, monitor, self._host)
            if self._counts_itself:
                self._advance()
        except Exception as error:
            self._failed(error)

    def _advance(self) -> None:
        step, due = self.current_step, self._due
        self.current_step += 1
        if due or self._window.due(step):
            self._window.collected += 1
            for monitor in self._running:
                self._attempt(self._write, monitor, step)
        for monitor in self._running:
            monitor.rows.clear()
            monitor.calls.clear()
            monitor.update = None
        self._arm()

    def _write(self, monitor: _Monitor, step: int) -> None:
        host, settings, rows = self._host, monitor.settings, monitor.rows
        if host is None:
            return
        self._forget_failed_update(monitor)
        if settings.kind == "optimizer" and settings.distribution:
            for key, found in host.moments(_MOMENTS):
                for name, stage, reading in found:
                    rows.add(f"{name}.{key}", key, stage, 0, reading)
        if settings.kind == "cc":
            rows, table = monitor.calls.merged(host.backend, plainly=self._settings.mode is Mode.V2)
        else:
            table = finished(rows.readings, host.backend)
        if not len(rows):
            self._say_empty(monitor)
            return
        monitor.empty = -1
        if self._settings.mode is Mode.V2:
            table = rounded(table)
        micro = settings.kind == "weight_grad"
        header = table_bytes(Rows(), table[:0], step, settings.ops, micro=micro, header=True)
        first, last = self._window.span(step)
        try:
            self.writer.append(
                f"{slug(settings.key)}_step{first}-{last}",
                header,
                table_bytes(rows, table, step, settings.ops, micro=micro),
            )
        except OSError as error:
            self.write_errors += 1
            if not self._said_write:
                self._said_write = True
                logger.warning("[monitor_v2] step %d can't be written: %s (training goes on)", step, error)
            return
        if self._said_write:
            self._said_write = False
            logger.warning(
                "[monitor_v2] step %d is written again; %d tables were lost", step, self.write_errors
            )

    def _say_empty(self, monitor: _Monitor) -> None:
        """Once, when the first steps that should have rows have none."""
        settings = monitor.settings
        silent = (
            settings.log_only
            or not settings.distribution
            or (settings.kind == "cc" and monitor.hooks is None)
        )
        if monitor.empty < 0 or silent:
            return
        monitor.empty += 1
        if monitor.empty == _PATIENCE:
            _warn(
                f"monitor {settings.key!r} had no rows in {_PATIENCE} written steps: {_REASONS[settings.kind]}"
            )

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


def _described(monitor: _Monitor) -> str:
    settings = monitor.settings
    if monitor.hooks is not None:
        return f"{settings.key} ({monitor.hooks.watched()})"
    off = settings.kind == "cc" or not settings.distribution
    return f"{settings.key} (nothing)" if off else settings.key


def _warn(text: str) -> None:
    logger.warning("[monitor_v2] %s", text)


def _add(monitor: _Monitor, scope: str, rows: Sequence[_Row]) -> None:
    for name, stage, reading in rows:
        monitor.rows.add(name, scope, stage, monitor.micro, reading)


def _check_needs(kind: str, model: Any, optimizer: Any) -> None:
    if kind in _NEEDS and optimizer is None:
        raise ValueError(f"Optimizer must be provided to start {_NEEDS[kind]} function")
    if kind in ("module", "optimizer", "param") and model is None:
        raise ValueError(f"Model must be provided to start {kind} function")
