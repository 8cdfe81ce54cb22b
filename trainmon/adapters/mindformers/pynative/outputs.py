"""Where the host's own numbers go: its log and its event files. What its sections ask for goes there, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainmon.adapters.mindformers.pynative.experts import ExpertCounts
from trainmon.adapters.mindformers.pynative.lines import expert_lines, logit_lines, state_lines, teller
from trainmon.adapters.mindformers.pynative.settings import HostSettings, read
from trainmon.adapters.mindformers.pynative.tracker import Tracker
from trainmon.frame import Snapshot
from trainmon.monitor import TrainMonitor

__all__ = ["HostOutputs"]


class HostOutputs:
    """Writes what of a run's numbers belongs there.

    Args:
        args, state: the host's configuration and its state, live.
        world: number of ranks.

    Attributes:
        tracker: the host's store of a step's numbers.
    """

    def __init__(
        self, monitor: TrainMonitor, args: Any, state: Any, settings: HostSettings, world: int
    ) -> None:
        self.tracker, self._tell = Tracker(), teller()
        self._monitor, self._state, self._settings, self._world = monitor, state, settings, world
        # 1.9.0, which prints no losses of micro-batches, has no such section; nor are there any with a pipeline.
        pipelined = (read(args, "parallelism", "pipeline_parallel") or 1) > 1
        self._losses = read(args, "monitor", "moe_monitor") is None or pipelined

    def step(self, snapshot: Snapshot, running: int, accumulation: int) -> None:
        """A step's numbers.

        Args:
            running: the step that ends now; the snapshot may be of an earlier one.
            accumulation: micro-batches of the step.
        """
        gradients = self._monitor.config.gradients
        increments = gradients is not None and gradients.increment
        lines = state_lines(
            snapshot, self._settings, accumulation, losses=self._losses, increments=increments
        )
        self._print(lines)
        if self._through_host and snapshot.step == running:
            samples = getattr(self._state, "consumed_samples", None)
            self.tracker.save(snapshot, self._monitor.config.tag_style, samples)

    def experts(self, step: int, first: int, counts: Iterable[ExpertCounts]) -> None:
        """Tokens of experts; ``first`` is the number of the step's first micro-batch in the run."""
        if self._settings.experts is not None:
            self._print(expert_lines(step, first, self._settings.experts, counts))

    def logits(self, step: int, logits: Mapping[str, Any]) -> None:
        """The largest attention logits, in place of the host's MaxLogitsMonitor."""
        self._print(logit_lines(step, int(self._state.max_steps), logits))

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._tell(line)

    @property
    def _through_host(self) -> bool:
        """Whether our numbers go into the host's event files: it has some, we have none, and they come in time."""
        return (
            self._settings.tensorboard is not None
            and self.tracker.there
            and self._world == 1
            and self._monitor.config.sinks.tensorboard is None
        )
