"""The callback of the GRAPH trainer (``run_mindformer.py`` with mode 0, ``mindformers.Trainer``).

Gives what :class:`~trainmon.MindSporeMonitor` gives of ``Model.train``, and: the loss as the trainer prints it, its
separate parts, norms of gradients on this rank before they are reduced, the norm to which gradients are clipped, largest
attention logits and the load of experts where the model keeps them. Can't give: micro-batches but those whose losses the
graph leaves in files, softmax denominators, forward and backward times. Stops by ``request_stop``, raises out of a hook;
can't skip a step: the graph does that by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainmon.adapters.mindformers.graph.board import HostBoard, host_writer
from trainmon.adapters.mindformers.graph.host_config import HostConfig, find_config, plain
from trainmon.adapters.mindformers.graph.session import GraphSession
from trainmon.adapters.mindformers.graph.settings import HostSettings, settings_of
from trainmon.adapters.mindspore_parts.callback import ModelCallback
from trainmon.adapters.mindspore_parts.session import Session
from trainmon.config import ConfigError, load_config
from trainmon.config.errors import Place, Problem
from trainmon.monitor import TrainMonitor

__all__ = ["GraphMonitor"]


class GraphMonitor(ModelCallback):
    """``callbacks: - type: TrainMonitor`` of a YAML, or an object in ``Trainer(callbacks=[...])``.

    Args:
        resumed_step: the last step that an earlier life finished. None: what the host says.
        clips: whether the training cell clips gradients before its optimizer gets them. None: as the YAML says.
        **keys: configuration keys; ``config`` names a file.

    Attributes:
        monitor: the engine of the running or last run.
        settings: what of the host's own configuration is followed.

    Raises:
        ConfigError: the configuration is wrong; nothing has begun.
    """

    host = "mindformers"
    #: Whether this stands where the host's own monitor would.
    replaces = False

    def __init__(self, *, resumed_step: int | None = None, clips: bool | None = None, **keys: Any) -> None:
        host = find_config()
        self.settings = self._settings(host, keys)
        if self.settings.problems:
            raise ConfigError([Problem(Place(), path, text) for path, text in self.settings.problems])
        source = self._source(host, plain(keys))
        under = self.settings.config

        def make() -> TrainMonitor:
            return TrainMonitor(source, under, bridge=self._bridge(source))

        super().__init__(make, resumed_step, clips)

    def _settings(self, host: HostConfig, keys: dict[str, Any]) -> HostSettings:
        """What is followed of the host's configuration; may take keys that are the host's."""
        return settings_of(host)

    def _source(self, host: HostConfig, keys: dict[str, Any]) -> Any:
        """Where the configuration is read: in the host's file, if it can be told which one that is."""
        top = host.get("trainmon")
        if keys and top:
            text = "the entry under callbacks configures the monitor, too; keep one of them"
            raise ConfigError([Problem(Place(), "trainmon", text)])
        file = host.source_of(keys)
        if file is not None:
            return file
        if keys:
            return keys
        return {"trainmon": top} if isinstance(top, Mapping) else {}

    def _bridge(self, source: Any) -> Any:
        """The host's event files, unless the configuration has a place of its own for numbers."""
        writer, sinks = host_writer(), load_config(source, self.settings.config).sinks
        if writer is None or sinks.tensorboard is not None or sinks.bridge is not None:
            return None
        return HostBoard(writer)

    def on_train_begin(self, run_context: Any) -> None:
        params = run_context.original_args()
        kin = [one for one in params.get("list_callback") or () if isinstance(one, GraphMonitor)]
        if kin and kin[-1] is not self:  # of one kind the host keeps the last
            self._expected = False
            return
        super().on_train_begin(run_context)
        if self.settings.print_struct:
            self.monitor.guard(lambda: self._print_struct(run_context))

    def on_train_step_begin(self, run_context: Any) -> None:
        super().on_train_step_begin(run_context)
        if self.settings.print_struct:
            run_context.request_stop()

    @staticmethod
    def _print_struct(run_context: Any) -> None:
        """Before anything is compiled; the run ends after the step that the host makes nevertheless."""
        params = run_context.original_args()
        network = params.get("network") or params.train_network
        for one in getattr(network, "network", network).trainable_params():
            print(f"{one.name}  {tuple(one.shape)}  {one.dtype}", flush=True)

    def _open(self, params: Any) -> Session:
        return GraphSession(
            self.monitor,
            params,
            self._resumed,
            self._clips,
            find_config(),
            self.settings,
            self,
            self.replaces,
        )
