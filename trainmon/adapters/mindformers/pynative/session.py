"""One run of MindFormers' PyNative trainer: from ``on_train_begin`` to ``on_train_end``, or to the program's end.

What its loops of 1.9.0, 2.0.0 and 2.1.0 tell differs, and is asked for where it is used.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Mapping
from typing import Any

import mindspore

from trainmon.adapters.mindformers.pynative import ends
from trainmon.adapters.mindformers.pynative.experts import ExpertHooks
from trainmon.adapters.mindformers.pynative.forward import Forward
from trainmon.adapters.mindformers.pynative.gradients import GradientHooks
from trainmon.adapters.mindformers.pynative.logits import TrackedLogits
from trainmon.adapters.mindformers.pynative.optimizer import Chunks, HostOptimizer
from trainmon.adapters.mindformers.pynative.outputs import HostOutputs
from trainmon.adapters.mindformers.pynative.sayings import Sayings
from trainmon.adapters.mindformers.pynative.settings import HostSettings, read
from trainmon.adapters.mindformers.pynative.tracker import loss_parts
from trainmon.adapters.mindformers.pynative.updates import UpdateHooks
from trainmon.adapters.mindformers.pynative.values import cells_of
from trainmon.adapters.mindspore_parts.outputs import number
from trainmon.adapters.mindspore_parts.parameters import ParameterList, own_piece
from trainmon.backend.determinism import deterministic, reproduction
from trainmon.backend.mindspore import MindSporeBackend, MindSporeDevice
from trainmon.events import (
    ENGINE_ACTIONS,
    Action,
    Decision,
    EpochBegin,
    EpochEnd,
    ExceptionRaised,
    Layout,
    MicroEnd,
    Observed,
    StepBegin,
    StepEnd,
    TrainBegin,
    TrainEnd,
)
from trainmon.frame import Snapshot
from trainmon.health import TrainingStopped
from trainmon.monitor import TrainMonitor

__all__ = ["ACTIONS", "HOST", "Session", "layout"]

HOST = "mindformers_pynative"
#: What rules may ask for. A step can't be skipped: the update is the host's own.
ACTIONS = ENGINE_ACTIONS | {Action.STOP, Action.RAISE}


class Session:
    """A run that is watched.

    Args:
        args, state: the host's configuration and its state, live.
        given: what hooks get by name: model, optimizer.
        settings: what the host's own sections ask for.
        resumed_step: the last step that an earlier life finished; None: as the host's state says.

    Attributes:
        over: whether it has ended.
        step: the running or last step.
    """

    def __init__(
        self,
        monitor: TrainMonitor,
        args: Any,
        state: Any,
        given: Mapping[str, Any],
        settings: HostSettings,
        resumed_step: int | None = None,
    ) -> None:
        self.monitor, self.over = monitor, False
        self._args, self._state, self._settings = args, state, settings
        cells = cells_of(given.get("model"))
        optimizer = given.get("optimizer")
        self._addressable = mindspore.get_context("device_target") == "CPU"
        self._layout = layout()
        apart = self._layout.rank if self._layout.world > 1 else None
        self._parameters = ParameterList(Chunks(cells), optimizer, self._addressable, apart)
        self._view = HostOptimizer(optimizer, self._parameters, self._addressable)
        self._forward = Forward(cells, monitor.guard)
        pipelined = (read(args, "parallelism", "pipeline_parallel") or 1) > 1
        self._gradients = GradientHooks(
            self._parameters, monitor, None if pipelined else lambda: self._forward.micro, self._addressable
        )
        self._experts = ExpertHooks(cells, monitor, self._forward, settings.experts, self._addressable)
        self._logits = TrackedLogits(cells, monitor, self._addressable)
        self._outputs = HostOutputs(monitor, args, state, settings, self._layout.world)
        self._sayings = Sayings(monitor)
        self._updates = UpdateHooks(
            optimizer,
            self._parameters,
            self._view,
            monitor,
            self._sayings,
            settings.max_norm,
            before=self._logits.look,
            judge=self._judge,
        )
        self._shift = 0 if resumed_step is None else resumed_step - int(state.global_step)
        self.step = int(state.global_step) + self._shift
        self._micros = self.step * self._accumulation()
        self._running = self._stopped = False
        self._mark: float | None = None
        self._decision = Decision()
        ends.leave_the_last(self)
        self._begin()

    def _begin(self) -> None:
        state, settings = self._state, self._settings
        if settings.deterministic:
            deterministic(frameworks=("mindspore",))
        begin = TrainBegin(
            model=self._parameters,
            optimizer=self._view,
            layout=self._layout,
            resumed_step=self.step,
            total_steps=int(state.max_steps) + self._shift,
            consumed_samples=getattr(state, "consumed_samples", None),
            host=HOST,
            actions=ACTIONS,
            host_config={"mindformers": _version()},
            reproduction=reproduction(),
            observed=self.observe(),
        )
        self.monitor.read_by(self._show)
        backend = MindSporeBackend() if self._addressable else MindSporeDevice(deferred=False)
        self.monitor.begin(begin, backend, host=self)
        self.install(self.step)
        self._at_exit = ends.when_the_program_ends(self)
        self._sayings.settings(settings)
        self._sayings.no_expert_layers(self._experts.missing())
        if self._layout.world > 1:
            self._sayings.ranks()
        if self.monitor.config.attention is not None:
            self._sayings.attention(self._logits.tracked)

    # -- what the engine asks ---------------------------------------------------------------------------------------

    def observe(self) -> Observed:
        return Observed(experts=self._experts.known(), attention=self._logits.known())

    def install(self, step: int) -> None:
        """Hooks for what probes listen to now; none where nobody does."""
        self._gradients.install()
        self._experts.install()
        loss = self.monitor.config.loss
        self._forward.kept = loss is not None and loss.micro
        if (
            self._gradients.installed
            or self._experts.wanted
            or self._forward.kept
            or self.monitor.config.throughput is not None
        ):
            self._forward.install()
        else:
            self._forward.remove()
        self._updates.install()

    # -- the step ---------------------------------------------------------------------------------------------------

    def step_begin(self) -> None:
        """A step begins; the host's state counts those that are done."""
        if self.over:
            return
        self.monitor.guard(self._reset_logits)
        self.step, self._running = int(self._state.global_step) + 1 + self._shift, True
        self.monitor.handle(StepBegin(self.step, self._mark or time.perf_counter()))
        self._forward.arm()
        self._gradients.arm()
        self._logits.arm()
        self._updates.arm()
        records, ahead = self._settings.experts, self._accumulation()
        self._experts.arm(records is not None and self._micros % records.every + ahead >= records.every)

    def _reset_logits(self) -> None:
        """Where nobody else does, we stand in for the host's MaxLogitsMonitor."""
        if self._logits.reset_left_over():
            self._sayings.resets()
            self._outputs.logits(self.step, self._logits.values)
        self._logits.values = {}

    def step_end(self, given: Mapping[str, Any]) -> Decision:
        """It has ended; returns what rules have decided."""
        if not self._running or self.over:
            return Decision()
        self._running, self._mark = False, time.perf_counter()
        self._forward.running = False
        self._logits.look()
        if not self._gradients.step_ends():
            self._sayings.unseen()
        counts = self._experts.step_ends()
        self._tell_micros()
        self._updates.step_ends()
        self._outputs.experts(self.step, self._micros + 1, counts)
        self._micros += self._forward.micros or self._accumulation()
        self.monitor.offer(StepEnd, lambda: self._facts(given))
        self._judge(self.monitor.decide())
        decision, self._decision = self._decision, Decision()
        return decision

    def _tell_micros(self) -> None:
        """Losses wait until now: reading one makes the host wait for its device."""
        losses, self._forward.losses = self._forward.losses, []
        for micro in range(self._forward.micros if losses or self._gradients.seen else 0):
            value = number(losses[micro]) if micro < len(losses) else None
            self.monitor.handle(MicroEnd(self.step, micro, value))

    def _facts(self, given: Mapping[str, Any]) -> StepEnd:
        return StepEnd(
            self.step,
            self._mark or time.perf_counter(),
            loss=_number(given.get("loss")),
            loss_parts=loss_parts(self._outputs.tracker.data()),
            tokens=self._forward.tokens,
            samples=self._samples(),
            grad_norm=_number(given.get("grad_norm")),
            learning_rates=self._updates.rates.take(self._updates.made) or None,
            overflow=self._overflow(given),
        )

    def _overflow(self, given: Mapping[str, Any]) -> bool | None:
        """Whether the host has left out the update; None: it never does."""
        if not self._updates.installed or not (self._settings.skips or "monitor" not in given):
            return None
        if not self._updates.made:
            self._sayings.skipped()
        return not self._updates.made

    def _samples(self) -> int | None:
        size = getattr(self._state, "global_batch_size", None) or read(
            self._args, "training", "global_batch_size"
        )
        return int(size) if size else None

    def _accumulation(self) -> int:
        return int(getattr(self._state, "num_accumulation_steps", None) or 1)

    def _judge(self, decision: Decision) -> None:
        """Raises at once where that is asked for; a stop waits for the step's end.

        Raises:
            TrainingStopped: a rule with the action ``raise``.
        """
        if decision.stop:
            self._decision = decision
        if Action.RAISE in decision.actions:
            error = TrainingStopped(decision)
            self.exception(error)
            raise error

    def _show(self, snapshot: Snapshot) -> None:
        """A step's numbers go where the host's own go, too."""
        self._outputs.step(snapshot, self.step, self._forward.micros or self._accumulation())

    # -- around steps -----------------------------------------------------------------------------------------------

    def epoch(self, begins: bool) -> None:
        """As the host counts: it compares steps with micro-batches, and begins none before the first."""
        if not self.over:
            size = max(int(getattr(self._state, "epoch_step", None) or 1), 1)
            done = int(self._state.global_step) // size
            self.monitor.handle(EpochBegin(done + 1) if begins else EpochEnd(done))

    def end(self) -> None:
        """Training is over. Idempotent."""
        if not self.over:
            self.monitor.guard(self._reset_logits)
            self._let_go()
            self.monitor.handle(TrainEnd(self.step, "stopped" if self._stopped else "completed"))
            self.monitor.close()

    def stop(self) -> None:
        """The host's loop ends with this step: it looks at the last one's number before each."""
        self._stopped = True
        self._state.max_steps = self._state.global_step

    def exception(self, error: BaseException) -> None:
        """Training was left by an exception. Idempotent."""
        if not self.over:
            self._let_go()
            self.monitor.handle(ExceptionRaised(self.step, "step", error))
            self.monitor.close()

    def abandon(self) -> None:
        """It is known to be over, and not how. Idempotent."""
        if not self.over:
            self._let_go()
            self.monitor.close(status="unfinished", reason="another training began in the same process")

    def _let_go(self) -> None:
        self.over, self._running = True, False
        atexit.unregister(self._at_exit)
        for hooks in (self._updates, self._gradients, self._experts, self._forward):
            self.monitor.guard(hooks.remove)


def _number(value: Any) -> float | None:
    """Of a tensor, or what the host has instead of one; None stays None, 0.0 stays 0.0."""
    return None if value is None else number(own_piece(value))


def layout() -> Layout:
    """This process among the ranks."""
    from trainmon.dist.mindspore_group import is_initialized

    if not is_initialized():
        return Layout()
    from mindspore.communication import get_group_size, get_rank

    return Layout(int(get_rank()), int(get_group_size()))


def _version() -> str:
    return str(getattr(sys.modules.get("mindformers"), "__version__", "unknown"))
