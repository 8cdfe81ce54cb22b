"""In the place of the host's ``TrainingStateMonitor``: its keys, tags and log lines, from trainmon's numbers.

    callbacks:
      - type: TrainingStateMonitor
        auto_register: trainmon_mf.TrainingStateMonitor

The host gives it ``monitor_config`` and what else it gives its own. It has its own's place among the callbacks, before
checkpoints are saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

from mindformers.core.callback.callback import TrainingStateMonitor as HostMonitor
from mindformers.tools.logger import logger

from trainmon.adapters.mindformers.graph.board import host_writer
from trainmon.adapters.mindformers.graph.callback import GraphMonitor
from trainmon.adapters.mindformers.graph.host_config import HostConfig, plain
from trainmon.adapters.mindformers.graph.lines import StateLines
from trainmon.adapters.mindformers.graph.session import GraphSession
from trainmon.adapters.mindformers.graph.settings import HostSettings, settings_of
from trainmon.adapters.mindspore_parts.session import Session

__all__ = ["TrainingStateMonitor"]

#: What the host gives: the first as configuration, the others are found elsewhere.
_GIVEN = (
    *(
        "origin_epochs",
        "dataset_size",
        "initial_epoch",
        "initial_step",
        "micro_batch_num",
        "global_batch_size",
    ),
    *("tensor_model_parallel_size", "check_for_nan_in_loss_and_grad", "use_skip_data_by_global_norm"),
    *("embedding_size", "use_local_norm", "step_interval"),
)


class TrainingStateMonitor(GraphMonitor, HostMonitor):  # type: ignore[misc]
    """The host's class by name, and by kind: the host finds its place in the list by that.

    Args:
        config: ``monitor_config``; a text names a file of ours.
        step_interval: of ``monitor_config``.
        **keys: configuration keys of trainmon, and what the host gives.
    """

    replaces = True
    given: tuple[dict[str, Any], dict[str, Any]]  # the host's section, and keys of ours
    _latest: ClassVar[weakref.ref[TrainingStateMonitor] | None] = None

    def __init__(self, **keys: Any) -> None:
        given = {name: keys.pop(name) for name in _GIVEN if name in keys}
        section = plain(keys.pop("config")) if isinstance(keys.get("config"), Mapping) else {}
        if given.get("step_interval") is not None:
            section.setdefault("step_interval", given["step_interval"])
        latest = None if TrainingStateMonitor._latest is None else TrainingStateMonitor._latest()
        if latest is not None and not (section or keys):
            # For the check of NaN the host adds another entry of the same type, and keeps the last.
            section, keys = latest.given
        self._section, self.given = section, (section, dict(keys))
        super().__init__(**keys)
        TrainingStateMonitor._latest = weakref.ref(self)

    def _settings(self, host: HostConfig, keys: dict[str, Any]) -> HostSettings:
        found = settings_of(host, self._section)
        found.put("tag_style", value="mindformers")
        return found

    def _bridge(self, source: Any) -> Any:
        return None  # its numbers go to the host's writer by the host's own tags

    def _open(self, params: Any) -> Session:
        TrainingStateMonitor._latest = None
        session = super()._open(params)
        assert isinstance(session, GraphSession)
        facts = session.facts
        world = max(session.world, 1)
        lines = StateLines(
            self.settings,
            facts.epochs or int(params.get("epoch_num") or 1),
            facts.steps_per_epoch if params.get("dataset_sink_mode") else int(params.get("batch_num") or 1),
            host_writer(),
            logger,
            logits=session.logits,
            local_losses=session.local_losses,
            samples=facts.global_batch / world if facts.global_batch else None,
            first_head=lambda heads: session.inside.head_rank * heads,
        )
        self.monitor.read_by(lines)
        return session
