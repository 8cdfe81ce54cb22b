"""The callback of MindFormers' PyNative trainer, 1.9.0 to 2.1.0: six hooks, no base class.

Gives: train, epoch and step events, losses of the step and of micro-batches, gradients of micro-batches by hooks on
parameters and as the optimizer gets them, the host's global norm, learning rates of the step, samples, tokens, what
expert layers count, the largest attention logits that the model keeps. Can't give: forward and backward times, the wait
for data. Stops by the last step's number, raises out of a hook; can't skip a step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainmon.adapters.base import Watched
from trainmon.adapters.mindformers.pynative.session import ACTIONS, HOST, Session, layout
from trainmon.adapters.mindformers.pynative.settings import HostSettings, read, settings_of
from trainmon.adapters.mindspore_parts.guarded import guarded
from trainmon.config import ConfigError
from trainmon.config.errors import Place, Problem
from trainmon.events import TrainBegin
from trainmon.monitor import TrainMonitor
from trainmon.supervision import check_health

__all__ = ["PyNativeMonitor"]


class PyNativeMonitor(Watched):
    """``Trainer(config, callbacks=[PyNativeMonitor(...)])``, or ``- type: TrainMonitor`` under ``callbacks:``.

    Without any key of its own the host's top-level section ``trainmon:`` is the configuration. A second ``train`` with
    the same object is another run.

    Args:
        config: path of a YAML or JSON file, a mapping, or None.
        host_settings: follow the host's ``monitor.train_state`` and ``monitor.moe_monitor`` where the configuration says
            nothing.
        resumed_step: the last step that an earlier life finished; None: what the host says.
        **keys: top-level configuration keys: those of the entry in the host's YAML file.

    Attributes:
        monitor: the engine of the running or last run.

    Raises:
        ConfigError: the configuration is wrong, or a rule asks for what can't be done here; nothing has begun.
    """

    def __init__(
        self, config: Any = None, *, host_settings: bool = True, resumed_step: int | None = None, **keys: Any
    ) -> None:
        self._config, self._keys = config, keys
        self._follows, self._resumed = host_settings, resumed_step
        self._session: Session | None = None
        self._state: str | os.PathLike[str] | Mapping[str, Any] | None = None
        self.monitor = self._make(config, {})

    def _make(self, config: Any, under: Mapping[str, Any]) -> TrainMonitor:
        monitor = TrainMonitor(config, under, **self._keys)
        if monitor.config.health is not None:
            check_health(monitor.config.health, TrainBegin(actions=ACTIONS, host=HOST))
        return monitor

    # -- what the host calls ----------------------------------------------------------------------------------------

    @guarded
    def on_train_begin(self, args: Any, state: Any, **given: Any) -> None:
        if self._session is not None:  # an earlier run's
            self._session.end()
            self._session = None
        settings = settings_of(args, layout().world) if self._follows else HostSettings()
        self.monitor = self._make(self._source(args), settings.config)
        if self._state is not None:
            kept, self._state = self._state, None
            if isinstance(kept, Mapping):
                self.monitor.load_state_dict(kept)
            else:
                self.monitor.load_state(kept)
        self._session = Session(self.monitor, args, state, given, settings, self._resumed)

    @guarded
    def on_epoch_begin(self, args: Any, state: Any, **given: Any) -> None:
        if self._session is not None:
            self._session.epoch(begins=True)

    @guarded
    def on_step_begin(self, args: Any, state: Any, **given: Any) -> None:
        if self._session is not None:
            self._session.step_begin()

    @guarded
    def on_step_end(self, args: Any, state: Any, **given: Any) -> None:
        if self._session is not None and self._session.step_end(given).stop:
            self._session.stop()

    @guarded
    def on_epoch_end(self, args: Any, state: Any, **given: Any) -> None:
        if self._session is not None:
            self._session.epoch(begins=False)

    @guarded
    def on_train_end(self, args: Any, state: Any, **given: Any) -> None:
        if self._session is not None:
            self._session.end()

    # -- what the user may call -------------------------------------------------------------------------------------

    def load_state(self, state: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        """The coming run goes on from a state or its file; one that can't be used is said, and all starts anew."""
        self._state = state

    def _source(self, args: Any) -> Any:
        """The configuration; the host's top-level section where nothing else is given.

        Raises:
            ConfigError: both are given.
        """
        section = read(args, "trainmon")
        section = section.to_dict() if hasattr(section, "to_dict") else section
        if section is None:
            return self._config
        if self._config is None and not self._keys:
            return {"trainmon": section}
        text = "the entry TrainMonitor under callbacks: has keys of its own, too; keep one of them"
        raise ConfigError([Problem(Place(), "trainmon", text)])

    def _failed(self, error: Exception) -> None:
        """Says what went wrong in here, once."""

        def again() -> None:
            raise error

        self.monitor.guard(again)
