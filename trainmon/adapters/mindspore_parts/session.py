"""One run of ``Model.train`` or ``Model.fit``: from its first epoch's begin, when it is known where it goes on.

Between two looks of the host lies a step; in dataset sink mode as many as run on the device meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mindspore
from mindspore import nn

from trainmon.adapters.mindspore_parts.compiled import (
    CompiledGradients,
    ReducedGradients,
    reducer_of,
    sparse_parameters,
)
from trainmon.adapters.mindspore_parts.outputs import Outputs, number, read_outputs
from trainmon.adapters.mindspore_parts.parameters import OptimizerView, ParameterList, find_optimizer
from trainmon.backend.determinism import reproduction
from trainmon.backend.mindspore import MindSporeBackend, MindSporeDevice
from trainmon.dist import Group
from trainmon.events import (
    ENGINE_ACTIONS,
    Action,
    DataBegin,
    DataEnd,
    Decision,
    EpochBegin,
    EpochEnd,
    EvalBegin,
    EvalEnd,
    ExceptionRaised,
    GradsReady,
    Layout,
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
from trainmon.health import TrainingStopped
from trainmon.monitor import TrainMonitor

__all__ = ["ACTIONS", "Session", "is_graph"]

#: What rules may ask for. A step can't be skipped: the cell that steps is the host's.
ACTIONS = ENGINE_ACTIONS | {Action.STOP, Action.RAISE}
#: Step cells whose own ``construct`` gives the optimizer the gradients as they are.
_PLAIN_CELLS = (nn.TrainOneStepCell, nn.TrainOneStepWithLossScaleCell)


def is_graph() -> bool:
    """Whether what runs now is compiled as a whole."""
    return bool(mindspore.get_context("mode") == mindspore.GRAPH_MODE)


def host_addresses() -> bool:
    """Whether tensors lie in memory that the host can read where it is."""
    return bool(mindspore.get_context("device_target") == "CPU")


class Session:
    """A run that is watched.

    Args:
        params: MindSpore's parameters of the run, live.
        resumed_step: the last step that an earlier life finished; None: as the host says.
        clips: whether the step cell clips gradients; None: MindSpore's own don't, others may.
        host: what the host is called.

    Attributes:
        over: whether it has ended.
    """

    optimizer_view = OptimizerView

    def __init__(
        self,
        monitor: TrainMonitor,
        params: Any,
        resumed_step: int | None,
        clips: bool | None,
        host: str = "mindspore",
    ) -> None:
        self.monitor, self.over, self.host = monitor, False, host
        self._params = params
        cell = self._cell = params.train_network
        self._optimizer = find_optimizer(params.get("optimizer"), cell, params.get("network"))
        self._addressable = host_addresses()
        group = _all_ranks()
        apart = params.get("parallel_mode") not in (None, "stand_alone", "data_parallel")
        layout = self._layout(group)
        network = params.get("network") or cell
        self._parameters = ParameterList(
            network, self._optimizer, self._addressable, layout.rank if apart else None
        )
        self._view = self.optimizer_view(self._optimizer, self._parameters, self._addressable)
        construct = type(cell).construct
        self._compiles = is_graph() or hasattr(construct, "__wrapped__")
        plain = any(construct is one.construct for one in _PLAIN_CELLS)
        self._clips = not plain if clips is None else clips
        self._sparse = sparse_parameters(network) if self._compiles else set()
        whole = self._compiles and self._optimizer is not None and not apart and not self._sparse
        self._reducer = self._find_reducer(plain) if whole else None
        self._compiled: CompiledGradients | ReducedGradients | None = None
        self._handles: list[Any] = []
        self._last = int(params.get("cur_step_num") or 0)
        self._base = self._resumed(resumed_step) - self._last
        self._done = self.step = self._base + self._last
        self._running = False
        self._sunk = 1  # steps since the host last looked
        self._mark: float | None = None
        self._idle: float | None = None  # since when MindSpore does nothing but fetch data
        self._rates: dict[str, float] = {}
        self._scale: float | None = None
        self._decision = Decision()
        self._said: set[str] = set()
        self._world = layout.world
        self._begin(layout, None if apart else group)

    def _begin(self, layout: Layout, group: Group | None) -> None:
        params = self._params
        batches = int(params.get("batch_num") or 0)
        total = self._base + int(params.epoch_num) * batches if batches else None
        begin = TrainBegin(
            model=self._parameters,
            optimizer=self._view,
            layout=layout,
            resumed_step=self._done,
            total_steps=total,
            host=self.host,
            actions=ACTIONS,
            host_config=self._host_config(),
            reproduction=reproduction(),
            observed=self.observe(),
        )
        # MindSpore's own callbacks wait for each step.
        backend = MindSporeBackend() if self._addressable else MindSporeDevice(deferred=False)
        self.monitor.begin(begin, backend, group, host=self)
        self.install(self._done)
        if not self._addressable:
            self._tell_once(
                "info",
                "device_tensors",
                "weights and moments are in a device's memory: their norms and spectra are made there, in float32",
            )

    def _layout(self, group: Group | None) -> Layout:
        return Layout() if group is None else Layout(group.rank, group.size)

    def _host_config(self) -> dict[str, Any]:
        return {"mode": "GRAPH" if is_graph() else "PYNATIVE"}

    def _resumed(self, told: int | None) -> int:
        """Steps of earlier lives: as the user says, as a resuming host says, or by the epoch that it begins with."""
        if told is not None:
            return told
        initial = self._params.get("initial_step")
        if isinstance(initial, int):
            return initial
        return (int(self._params.get("cur_epoch_num") or 1) - 1) * int(self._params.get("batch_num") or 0)

    # -- what the engine asks ---------------------------------------------------------------------------------------

    def observe(self) -> Observed:
        return Observed()

    def install(self, step: int) -> None:
        """Hooks for what probes listen to now; once a graph is compiled none can be added to it."""
        gradients = self._wants_gradients()
        if gradients and self._by_sums and self._world > 1 and self._reducer is None:
            self._tell_once(
                "info",
                "gradients_unreduced",
                "hooks in a compiled step see gradients before they are reduced over ranks: norms of gradients are null "
                "but for the global norm that a step cell returns",
            )
        elif gradients and self._by_sums and self._compiled is None and self._needs_hooks():
            if self._mark is not None:
                text = "gradients were switched on after the step was compiled: they are seen in the next run only"
                self._tell_once("warning", "compiled_already", text)
                return
            section = self.monitor.config.gradients
            count = section is not None and section.nonfinite
            self._compiled = self._hook(count)
        wanted = gradients or any(self.monitor.listens(kind) for kind in (OptimizerBegin, OptimizerEnd))
        if self._compiles or self._optimizer is None or not wanted:
            self._unhook()
        elif not self._handles:
            optimizer = self._optimizer
            self._handles = [
                optimizer.register_forward_pre_hook(self._before_update),
                optimizer.register_forward_hook(self._after_update),
            ]

    def _find_reducer(self, plain: bool) -> nn.Cell | None:
        """What the step cell reduces its gradients by, if they can be seen behind that."""
        return reducer_of(self._cell, plain)

    def _hook(self, count: bool) -> CompiledGradients | ReducedGradients:
        parameters = self._parameters
        if self._reducer is not None:
            updated = list(self._optimizer.parameters)
            return ReducedGradients(self._reducer, updated, parameters.order, self._addressable, count)
        if self._sparse:
            self._tell_once(
                "info",
                "gradients_sparse",
                "gradients of parameters of sparse Cells come as rows, which hooks can't sum up: their norms are null",
            )
        return CompiledGradients(parameters.parameters, self._addressable, count, self._sparse)

    def _needs_hooks(self) -> bool:
        """Whether nobody else sums up the gradients of a compiled step."""
        return True

    def _wants_gradients(self) -> bool:
        """Whether anybody looks at them: rates, which gradients bring elsewhere, come with the step's end."""
        return self.monitor.config.gradients is not None and self.monitor.listens(GradsReady)

    @property
    def _by_sums(self) -> bool:
        """Whether gradients can be seen only from within the backward pass, or only where they are."""
        return self._compiles or not self._addressable or self._optimizer is None

    @property
    def _sinks(self) -> bool:
        """Whether the device runs several steps before the host looks again."""
        return bool(self._params.get("dataset_sink_mode"))

    # -- the step ---------------------------------------------------------------------------------------------------

    def step_begin(self) -> None:
        """A step begins, or a sink of several."""
        if self.over:
            return
        now = int(self._params.cur_step_num)
        self._sunk = now - self._last if self._sinks else 1
        self.step, self._running = self._base + now, True
        self._began = time.perf_counter() if self._mark is None else self._mark
        if self._sunk > 1:
            self._arm_slots()
            self._tell_once(
                "info",
                "sink_mode",
                f"dataset sink mode: the device runs {self._sunk} steps on its own, of which only the last is "
                "seen: loss, gradients and learning rate are those of this step, time is the mean of all, and cadences "
                "fire at the steps that are seen",
            )
            return
        arrived = time.perf_counter()
        self._arm(self._began)
        if self._idle is not None:
            self.monitor.handle(DataBegin(self._idle))
            self.monitor.handle(DataEnd(arrived))

    def _arm(self, began: float) -> None:
        self.monitor.handle(StepBegin(self.step, began))
        if self._sunk <= 1 and self.monitor.wants(GradsReady):
            self._arm_slots()
        self.monitor.guard(self._look_up)

    def _arm_slots(self) -> None:
        if self._compiled is not None:
            self.monitor.guard(self._compiled.arm)

    def _look_up(self) -> None:
        """What the coming update will use, before the step changes it."""
        self._rates = self._view.rates()
        scale = getattr(self._cell, "scale_sense", None)
        self._scale = number(scale) if scale is not None else None

    def _before_update(self, _cell: Any, inputs: Any) -> None:
        if not self._running or self.over:
            return
        self.monitor.handle(OptimizerBegin(time.perf_counter()))
        if not self._by_sums and self.monitor.config.gradients is not None:
            values = inputs[0] if len(inputs) == 1 else inputs
            phase: Phase = "clipped" if self._clips else "reduced"
            self._show(lambda: self._parameters.gradients(values), phase, self._fixed_scale())
            self._judge(self.monitor.before_update())

    def _after_update(self, _cell: Any, _inputs: Any, _output: Any) -> None:
        if self._running and not self.over:
            self.monitor.handle(OptimizerEnd(time.perf_counter()))

    def _show(self, view: Callable[[], TensorView], phase: Phase, scale: float | None) -> None:
        rates, limit = self._rates or None, self._clip_limit()

        def make() -> GradsReady | None:
            seen = view()
            if not len(seen):  # of no gradient there is no norm, not even zero
                return None
            return GradsReady(self.step, seen, phase, limit, learning_rates=rates, loss_scale=scale)

        self.monitor.offer(GradsReady, make)

    def _clip_limit(self) -> float | None:
        """The norm to which the step cell clips, where it is known."""
        return None

    def _fixed_scale(self) -> float | None:
        """What an optimizer takes off itself."""
        scale = getattr(self._optimizer, "loss_scale", 1.0)
        return float(scale) if isinstance(scale, int | float) and scale != 1.0 else None

    def _backward_scale(self) -> float | None:
        """What is on gradients where they are seen: cells that adapt their scale take it off before they reduce."""
        if self._scale is not None:
            return self._scale if self._reducer is None else None
        sens = getattr(self._cell, "sens", None)
        return float(sens) if isinstance(sens, int | float) and sens not in (0, 1) else None

    def _sums(self) -> TensorView:
        found = [] if self._compiled is None else self._compiled.read()
        pairs = [pair for pair in zip(self._parameters.names, found, strict=True) if pair[1] is not None]
        if not pairs:
            self._tell_once(
                "warning",
                "graph_without_hooks",
                "no gradient was seen: the step was compiled before this run's hooks were there, or the backward pass "
                "does not go through the model's parameters; norms of gradients are null",
            )
        names = [name for name, _ in pairs]
        return TensorView(names, [sums for _, sums in pairs], self._parameters.shards(names))

    def step_end(self) -> Decision:
        """It has ended; returns what rules have decided."""
        if not self._running or self.over:
            return Decision()
        now, end = int(self._params.cur_step_num), time.perf_counter()
        # A step that failed has no end, and one that is done again comes after a later one.
        self._last = now
        if self._sunk > 1:
            self._arm(end - (end - self._began) / self._sunk)
            self.monitor.guard(self._look_back)
        self._running, self._done, self._mark = False, self.step, end
        self._show_sums()
        self.monitor.offer(StepEnd, lambda: self._facts(end))
        self._judge(self.monitor.decide())
        decision, self._decision = self._decision, Decision()
        self._idle = time.perf_counter()
        return decision

    def _show_sums(self) -> None:
        if self._compiled is not None and (self._by_sums and self.monitor.wants(GradsReady)):
            self._show(self._sums, "reduced", self._backward_scale())

    def _look_back(self) -> None:
        """The rate of the update that was the last; what scaled it can't be told any more."""
        self._rates, self._scale = self._view.rates(ago=1), None

    def _facts(self, end: float) -> StepEnd:
        found: Outputs = read_outputs(self._params.get("net_outputs"))
        if found.unread:
            self._tell_once(
                "info",
                "outputs_unread",
                f"of what the training step returns {found.unread} entries were not understood and are left out",
            )
        returned = {} if found.learning_rate is None else {"0": found.learning_rate}
        return StepEnd(
            self.step,
            end,
            loss=found.loss,
            loss_parts=found.parts,
            samples=self._samples(),
            grad_norm=found.grad_norm,
            learning_rates=self._rates or returned or None,
            overflow=found.overflow,
            loss_scale=found.loss_scale if self._scale is None else self._scale,
            steps=max(self._sunk, 1),
        )

    def _samples(self) -> int | None:
        """Of the batch at hand: the last of an epoch may be smaller."""
        batch = self._params.get("train_dataset_element")
        first = batch[0] if isinstance(batch, tuple | list) and batch else batch
        shape = getattr(first, "shape", None)
        if shape:
            return int(shape[0])
        size = getattr(self._params.get("train_dataset"), "get_batch_size", lambda: None)()
        return int(size) if size else None

    def _judge(self, decision: Decision) -> None:
        """Raises at once where that is asked for; a stop waits for the step's end.

        Raises:
            TrainingStopped: a rule with the action ``raise``; on every rank at the same step.
        """
        if decision.stop:
            self._decision = decision
        if Action.RAISE in decision.actions:
            error = TrainingStopped(decision)
            self.exception(error)
            raise error

    # -- around steps -----------------------------------------------------------------------------------------------

    def epoch(self, begins: bool) -> None:
        self._idle = None
        number_ = self._params.get("cur_epoch_num")
        if isinstance(number_, int) and not self.over:
            self.monitor.handle(EpochBegin(number_) if begins else EpochEnd(number_))

    def evaluation(self, running: bool) -> None:
        self._idle, now = None, time.perf_counter()
        if not self.over:
            self.monitor.handle(EvalBegin(now) if running else EvalEnd(now))

    def end(self, stopped: bool) -> None:
        """Training is over. Idempotent."""
        if not self.over:
            self._let_go()
            self.monitor.handle(TrainEnd(self._done, "stopped" if stopped else "completed"))
            self.monitor.close()

    def exception(self, error: BaseException) -> None:
        """Training was left by an exception. Idempotent."""
        if not self.over:
            self._let_go()
            self.monitor.handle(ExceptionRaised(self.step, "step", error))
            self.monitor.close()

    def _let_go(self) -> None:
        self.over, self._running = True, False
        self._unhook()
        if self._compiled is not None:
            self.monitor.guard(self._compiled.remove)

    def _unhook(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _tell_once(self, level: Any, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self.monitor.say(level, kind, text, step=self.step)


def _all_ranks() -> Group | None:
    from trainmon.dist.mindspore_group import MindSporeGroup, is_initialized

    if not is_initialized():
        return None
    group = MindSporeGroup()
    return group if group.size > 1 else None
