"""One run of MindFormers' PyNative trainer: from ``on_train_begin`` to ``on_train_end``, or to the program's end.

What its loops of 1.9.0, 2.0.0 and 2.1.0 tell differs, and is asked for where it is used.
"""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import mindspore

from trainmon.adapters.mindformers.pynative.experts import ExpertHooks
from trainmon.adapters.mindformers.pynative.forward import Forward
from trainmon.adapters.mindformers.pynative.gradients import GradientHooks
from trainmon.adapters.mindformers.pynative.logits import TrackedLogits
from trainmon.adapters.mindformers.pynative.optimizer import Chunks, HostOptimizer, with_gradients
from trainmon.adapters.mindformers.pynative.outputs import HostOutputs
from trainmon.adapters.mindformers.pynative.rates import Rates
from trainmon.adapters.mindformers.pynative.sayings import Sayings
from trainmon.adapters.mindformers.pynative.settings import HostSettings, read
from trainmon.adapters.mindformers.pynative.tracker import loss_parts
from trainmon.adapters.mindformers.pynative.values import DeviceSums, cells_of, local
from trainmon.adapters.mindspore_parts.outputs import number
from trainmon.adapters.mindspore_parts.parameters import ParameterList
from trainmon.backend.determinism import deterministic, reproduction
from trainmon.backend.mindspore import MindSporeBackend, MindSporeDevice
from trainmon.events import (
    ENGINE_ACTIONS,
    Action,
    AttentionSeen,
    Decision,
    EpochBegin,
    EpochEnd,
    ExceptionRaised,
    GradsReady,
    Layout,
    MicroEnd,
    Observed,
    OptimizerBegin,
    OptimizerEnd,
    Phase,
    StepBegin,
    StepEnd,
    TensorView,
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
        self._optimizer = given.get("optimizer")
        self._addressable = mindspore.get_context("device_target") == "CPU"
        self._layout = layout()
        apart = self._layout.rank if self._layout.world > 1 else None
        self._parameters = ParameterList(Chunks(cells), self._optimizer, self._addressable, apart)
        self._view = HostOptimizer(self._optimizer, self._parameters, self._addressable)
        self._forward = Forward(cells, monitor.guard)
        pipelined = (read(args, "parallelism", "pipeline_parallel") or 1) > 1
        self._gradients = GradientHooks(
            self._parameters, monitor, None if pipelined else lambda: self._forward.micro, self._addressable
        )
        self._experts = ExpertHooks(cells, monitor, self._forward, settings.experts, self._addressable)
        self._logits = TrackedLogits(cells, monitor, self._addressable)
        self._outputs = HostOutputs(monitor, args, state, settings, self._layout.world)
        self._sayings = Sayings(monitor)
        self._shift = 0 if resumed_step is None else resumed_step - int(state.global_step)
        self.step = int(state.global_step) + self._shift
        self._micros = self.step * self._accumulation()
        self._running = self._updated = self._stopped = False
        self._mark: float | None = None
        self._rates = Rates(self._optimizer, self._view)
        self._sums: tuple[list[str], DeviceSums] | None = None
        self._handles: list[Any] = []
        self._decision = Decision()
        _leave_the_last(self)
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
        self._at_exit = _when_the_program_ends(self)
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
        listens = self.monitor.listens
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
        wanted = (GradsReady, OptimizerBegin, OptimizerEnd, AttentionSeen)
        if self._optimizer is None or not any(listens(kind) for kind in wanted):
            self._unhook()
        elif not self._handles:
            self._handles = [
                self._optimizer.register_forward_pre_hook(self._before_update),
                self._optimizer.register_forward_hook(self._after_update),
            ]
            self._rates.install()

    # -- the step ---------------------------------------------------------------------------------------------------

    def step_begin(self) -> None:
        """A step begins; the host's state counts those that are done."""
        if self.over:
            return
        self.monitor.guard(self._reset_logits)
        self.step, self._running, self._updated = int(self._state.global_step) + 1 + self._shift, True, False
        self.monitor.handle(StepBegin(self.step, self._mark or time.perf_counter()))
        self._forward.arm()
        self._gradients.arm()
        self._logits.arm()
        records, ahead = self._settings.experts, self._accumulation()
        self._experts.arm(records is not None and self._micros % records.every + ahead >= records.every)
        self._sums = None

    def _reset_logits(self) -> None:
        """Where nobody else does, we stand in for the host's MaxLogitsMonitor."""
        if self._logits.reset_left_over():
            self._sayings.resets()
            self._outputs.logits(self.step, self._logits.values)
        self._logits.values = {}

    def _before_update(self, _cell: Any, inputs: Any) -> None:
        if not self._running or self.over:
            return
        self._updated = True
        self.monitor.guard(self._rates.begin)
        self.monitor.handle(OptimizerBegin(time.perf_counter()))
        self._logits.look()
        if self.monitor.config.gradients is not None:
            values = inputs[0] if len(inputs) == 1 else inputs
            if self._addressable:
                self.monitor.offer(GradsReady, lambda: self._ready(self._shown(values)))
            elif self.monitor.wants(GradsReady):
                self.monitor.guard(lambda: self._add_up(values))
        self._judge(self.monitor.before_update())

    def _after_update(self, _cell: Any, _inputs: Any, _output: Any) -> None:
        self._rates.end()
        if self._running and not self.over:
            self.monitor.handle(OptimizerEnd(time.perf_counter()))

    def _ready(self, view: TensorView) -> GradsReady:
        """As the optimizer gets them: the host has clipped them, if they were too large."""
        limit = self._settings.max_norm
        phase: Phase = "reduced" if limit == float("inf") else "clipped"
        return GradsReady(self.step, view, phase, limit or None)

    def _shown(self, values: Any) -> TensorView:
        """Gradients by the names of their parameters."""
        optimizer: Any = self._optimizer
        order = with_gradients(optimizer, values)
        if order is None or len(order) < len(self._parameters.names):
            there = set(order or ())
            self._sayings.misaligned(
                [one.name for at, one in enumerate(optimizer.parameters) if at not in there]
            )
        whole = dict(zip(order or (), values, strict=False))
        return self._parameters.gradients(
            [_piece(whole.get(index)) for index in range(len(self._parameters.names))]
        )

    def _add_up(self, values: Any) -> None:
        """On a device: two sums of each, read when the step ends."""
        order = with_gradients(self._optimizer, values) or []
        names = {
            index: name for name, index in zip(self._parameters.names, self._parameters.order, strict=True)
        }
        sums = DeviceSums()
        for value in values[: len(order)]:
            sums.add(_piece(value))
        self._sums = [names[index] for index in order], sums

    def _fetched(self) -> GradsReady | None:
        if self._sums is None:
            return None
        names, sums = self._sums
        sums.fetch()
        return self._ready(TensorView(names, sums.all(), self._parameters.shards(names)))

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
        if self._sums is not None:
            self.monitor.offer(GradsReady, self._fetched)
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
            learning_rates=self._rates.take(self._updated) or None,
            overflow=self._overflow(given),
        )

    def _overflow(self, given: Mapping[str, Any]) -> bool | None:
        """Whether the host has left out the update; None: it never does."""
        if not self._handles or not (self._settings.skips or "monitor" not in given):
            return None
        if not self._updated:
            self._sayings.skipped()
        return not self._updated

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
            number = int(self._state.global_step) // max(
                int(getattr(self._state, "epoch_step", None) or 1), 1
            )
            self.monitor.handle(EpochBegin(number + 1) if begins else EpochEnd(number))

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
        self._unhook()
        atexit.unregister(self._at_exit)
        for hooks in (self._gradients, self._experts, self._forward):
            self.monitor.guard(hooks.remove)

    def _unhook(self) -> None:
        self._rates.remove()
        while self._handles:
            self._handles.pop().remove()


def _number(value: Any) -> float | None:
    """Of a tensor, or what the host has instead of one; None stays None, 0.0 stays 0.0."""
    return None if value is None else number(local(value))


def _piece(value: Any) -> Any:
    return None if value is None else local(value)


def layout() -> Layout:
    """This process among the ranks."""
    from trainmon.dist.mindspore_group import is_initialized

    if not is_initialized():
        return Layout()
    from mindspore.communication import get_group_size, get_rank

    return Layout(int(get_rank()), int(get_group_size()))


def _version() -> str:
    return str(getattr(sys.modules.get("mindformers"), "__version__", "unknown"))


_last: list[weakref.ref[Session]] = []


def _leave_the_last(session: Session) -> None:
    """Another training begins: one that was left by an exception, which nobody told, has ended before."""
    for kept in _last:
        earlier = kept()
        if earlier is not None:
            earlier.abandon()
    _last[:] = [weakref.ref(session)]


def _when_the_program_ends(session: Session) -> Callable[[], None]:
    """The host tells nobody that its loop was left by an exception: the interpreter knows, if that has ended it."""
    kept = weakref.ref(session)

    def close() -> None:
        found = kept()
        if found is not None and not found.over:
            error = getattr(sys, "last_value", None)
            if isinstance(error, BaseException):
                found.exception(error)

    atexit.register(close)
    return close
