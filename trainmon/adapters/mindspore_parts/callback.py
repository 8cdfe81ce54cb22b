"""The callback that turns ``Model.train`` and ``Model.fit`` into events, whoever calls them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from mindspore.train import Callback

from trainmon.adapters.base import Watched
from trainmon.adapters.mindspore_parts.guarded import guarded
from trainmon.adapters.mindspore_parts.session import ACTIONS, Session, is_graph
from trainmon.config import ConfigError
from trainmon.config.errors import Place, Problem
from trainmon.events import TrainBegin
from trainmon.monitor import TrainMonitor
from trainmon.supervision import check_health

__all__ = ["ModelCallback"]

_logger = logging.getLogger("trainmon")


class ModelCallback(Watched, Callback):  # type: ignore[misc]
    """A callback of ``mindspore.train.Model``; a second ``train`` with the same object is another run.

    Args:
        make: makes the engine of a run.
        resumed_step: the last step that an earlier life finished; None: as the host says.
        clips: whether the training step cell clips gradients; None: MindSpore's own don't, others may.

    Attributes:
        monitor: the engine of the running or last run.

    Raises:
        ConfigError: a rule asks for what can't be done here; nothing has begun.
    """

    host = "mindspore"

    def __init__(
        self, make: Callable[[], TrainMonitor], resumed_step: int | None = None, clips: bool | None = None
    ) -> None:
        Callback.__init__(self)  # and of no other kind that a host may want this to be
        self._make = make
        self.monitor = make()
        self._check()
        self._resumed, self._clips = resumed_step, clips
        self._session: Session | None = None
        self._expected = False  # a run that has not begun yet
        self._state: str | os.PathLike[str] | Mapping[str, Any] | None = None

    def _check(self) -> None:
        health = self.monitor.config.health
        if health is None:
            return
        check_health(health, TrainBegin(actions=ACTIONS, host=self.host))
        if health.gate == "before_update" and is_graph():
            text = "a compiled step (GRAPH mode) can't be looked into before its update; use late"
            raise ConfigError([Problem(Place(), "health.gate", text)])

    # -- what MindSpore calls ---------------------------------------------------------------------------------------

    def __enter__(self) -> ModelCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Of ``train``, and within ``fit`` of every evaluation: only an exception ends the run here."""
        if error is not None and self._session is not None:
            self._session.exception(error)

    @guarded
    def on_train_begin(self, run_context: Any) -> None:
        if self._session is not None:  # an earlier run's
            self._session.end(stopped=False)
            self._session, self.monitor = None, self._make()
            self._check()
        self._expected = True

    @guarded
    def on_train_epoch_begin(self, run_context: Any) -> None:
        params = run_context.original_args()
        if self._expected:
            self._expected = False
            self._session = self._open(params)
            state, self._state = self._state, None
            if isinstance(state, Mapping):
                self.monitor.load_state_dict(state)
            elif state is not None:
                self.monitor.load_state(state)
        if self._session is not None:
            self._session.epoch(begins=True)

    def _open(self, params: Any) -> Session:
        """A run begins; ``params`` are the host's of it."""
        return Session(self.monitor, params, self._resumed, self._clips, self.host)

    @guarded
    def on_train_step_begin(self, run_context: Any) -> None:
        if self._session is not None:
            self._session.step_begin()

    @guarded
    def on_train_step_end(self, run_context: Any) -> None:
        if self._session is not None and self._session.step_end().stop:
            run_context.request_stop()

    @guarded
    def on_train_epoch_end(self, run_context: Any) -> None:
        if self._session is not None:
            self._session.epoch(begins=False)

    @guarded
    def on_train_end(self, run_context: Any) -> None:
        if self._session is not None:
            self._session.end(stopped=run_context.get_stop_requested())

    @guarded
    def on_eval_begin(self, run_context: Any) -> None:
        if self._session is not None:
            self._session.evaluation(running=True)

    @guarded
    def on_eval_end(self, run_context: Any) -> None:
        if self._session is not None:
            self._session.evaluation(running=False)

    # -- what the user may call -------------------------------------------------------------------------------------

    def load_state(self, state: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        """The coming run goes on from a state or its file; one that can't be used is said, and all starts anew."""
        self._state = state

    def _failed(self, error: Exception) -> None:
        """Says what went wrong in here, once."""
        if self._session is None:  # there is no run that could say it
            _logger.warning("trainmon does not watch this training: %s: %s", type(error).__name__, error)

        def again() -> None:
            raise error

        self.monitor.guard(again)
