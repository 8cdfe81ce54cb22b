"""A watched torch model: what is looked at, the hooks for it, and the events that all hosts make alike.

An adapter says when things happen (``begin_step``, ``micro_end``, ``show_gradients``, ``step_end``); everything that
concerns the model and its optimizer is done here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from trainmon.adapters.torch_parts.accumulation import AccumulationHooks
from trainmon.adapters.torch_parts.inside import Inside, one_of_many
from trainmon.adapters.torch_parts.optimizers import OptimizerView, optimizers_of
from trainmon.adapters.torch_parts.parameters import NameOf, ParameterList, PieceOf
from trainmon.adapters.torch_parts.shards import without_graph
from trainmon.backend import Backend
from trainmon.backend.host import HostBackend
from trainmon.dist import Group
from trainmon.events import (
    EvalBegin,
    EvalEnd,
    GradsReady,
    MicroEnd,
    Observed,
    OptimizerBegin,
    OptimizerEnd,
    Phase,
    StepBegin,
    StepEnd,
    TokenLosses,
    TrainBegin,
)
from trainmon.monitor import TrainMonitor

__all__ = ["Watch", "all_ranks", "backend_for"]


def all_ranks(timeout: float) -> Group | None:
    """All ranks of torch.distributed, if there are several."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if torch.distributed.get_world_size() == 1:
        return None
    from trainmon.dist.torch_group import TorchGroup

    return TorchGroup(timeout)


def backend_for(model: torch.nn.Module, wanted: str) -> Backend:
    """The backend for where the parameters are.

    Raises:
        ValueError: ``wanted`` is none of ``auto``, ``host`` and ``torch``.
    """
    if wanted not in ("auto", "host", "torch"):
        raise ValueError(f"backend must be 'auto', 'host' or 'torch', not {wanted!r}")
    devices = {parameter.device for parameter in model.parameters()}
    on_device = [device for device in devices if device.type not in ("cpu", "meta")]
    if wanted == "host" or (wanted == "auto" and not on_device):
        return HostBackend()
    from trainmon.backend.torch import TorchBackend

    return TorchBackend(on_device[0] if on_device else torch.device("cpu"))


class Watch:
    """What is watched of a model, and where the run is.

    Args:
        name_of, piece_of: as of :class:`ParameterList`.

    Attributes:
        step: the running step, 1-based.
        micro: the running micro-batch, 0-based.
        parameters, optimizer: what the engine may ask.
        inside: hooks inside the model.
        shown: whether this step's gradients were shown before clipping.
        stepped: whether the optimizer has stepped in this step.
        hooked: the optimizers with hooks on their steps.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        monitor: TrainMonitor,
        name_of: NameOf | None = None,
        piece_of: PieceOf | None = None,
    ) -> None:
        self.monitor = monitor
        self._model, self._optimizer, self._name_of = model, optimizer, name_of
        self.parameters = ParameterList(model, optimizer, name_of, piece_of)
        self.optimizer = OptimizerView(optimizer, self.parameters)
        self.step = 0
        self.micro = 0
        self.shown = self.stepped = self._clipped = False
        self.inside = Inside(model, monitor, lambda: self.micro, name_of)
        self._accumulation = AccumulationHooks(self.parameters, monitor, lambda: self.micro)
        self.hooked: list[torch.optim.Optimizer] = []
        self._handles: list[Any] = []
        self._missed = 0
        self._partial_said = self._parts_said = False

    def begin(self, begin: TrainBegin, backend: Backend, group: Group | None) -> None:
        """The run starts; the first step has not begun yet."""
        self.step = begin.resumed_step
        begin = replace(begin, model=self.parameters, optimizer=self.optimizer, observed=self.inside.observed)
        self.monitor.begin(begin, backend, group, host=self)
        self.install(begin.resumed_step)
        self._say_unselected(begin.resumed_step)

    # -- what the engine asks ---------------------------------------------------------------------------------------

    def observe(self) -> Observed:
        """The configuration changes: the engine asks anew what can be looked at."""
        self.inside.remove()
        self.inside = Inside(self._model, self.monitor, lambda: self.micro, self._name_of)
        return self.inside.observed

    def install(self, step: int) -> None:
        """Installs the hooks that probes want now, and takes away the others."""
        if not self._wants_optimizer():
            self._unhook()
        self._hook_optimizers()
        self.inside.install(step)
        self._accumulation.install()

    # -- what adapters say ------------------------------------------------------------------------------------------

    def begin_step(self, step: int, began: float | None = None) -> None:
        """A step begins; ``began`` if it did so earlier (``time.perf_counter()``)."""
        self.step, self.micro = step, 0
        self.stepped = self.shown = self._clipped = False
        self.monitor.handle(StepBegin(step, time.perf_counter() if began is None else began))
        self.inside.arm()
        self._accumulation.arm()

    def micro_end(
        self,
        loss: Any,
        tokens: Any,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        parts: Mapping[str, Any] | None = None,
        token_losses: TokenLosses | None = None,
        loss_scale: Any = None,
    ) -> None:
        """A micro-batch is through."""
        step, micro = self.step, self.micro
        self.inside.counters_change()
        self.monitor.offer(
            MicroEnd,
            lambda: MicroEnd(
                step,
                micro,
                without_graph(loss),
                tokens,
                reduction,
                parts=self._named(parts),
                token_losses=token_losses,
                loss_scale=loss_scale,
            ),
        )
        self.micro += 1

    def show_gradients(
        self,
        phase: Phase,
        clip_norm: float | None = None,
        loss_scale: float | None = None,
        grad_norm: Any = None,
    ) -> None:
        """Gradients are alive."""
        self.shown |= phase == "reduced"
        self._clipped |= phase == "clipped"
        self.inside.counters_change()

        def make() -> GradsReady:
            self.parameters.refresh()
            rates = self.optimizer.learning_rates()
            view = self.parameters.gradients()
            self._say_partial()
            return GradsReady(self.step, view, phase, clip_norm, rates, loss_scale, grad_norm)

        self.monitor.offer(GradsReady, make)

    def show_clipped(self, clip_norm: float | None = None, grad_norm: Any = None) -> None:
        """Gradients as the optimizer gets them. Once they have been shown before clipping, only who wants to see them
        clipped needs them again."""
        gradients = self.monitor.config.gradients
        if self._clipped:
            return
        if not self.shown or (gradients is not None and gradients.clipped):
            self.show_gradients("clipped", clip_norm, grad_norm=grad_norm)

    def step_end(
        self, *, skipped: bool = False, loss_parts: Mapping[str, Any] | None = None, **facts: Any
    ) -> None:
        """The step is over; the next one has not begun.

        Args:
            skipped: its update was left out on purpose.
            loss_parts: named losses.
            **facts: other fields of :class:`StepEnd`. Without ``learning_rates`` those of an optimizer that did not step
                are read now.
        """
        self.inside.step_ends()
        now, step = time.perf_counter(), self.step

        def make() -> StepEnd:
            if "learning_rates" not in facts and not self.stepped:
                facts["learning_rates"] = self.optimizer.learning_rates()
            return StepEnd(step, now, loss_parts=self._named(loss_parts), **facts)

        self.monitor.offer(StepEnd, make)
        if not skipped:
            self._watch_optimizer()
        self._hook_optimizers()

    def evaluation(self, running: bool) -> None:
        """An evaluation begins or ends."""
        if running:
            self.monitor.handle(EvalBegin(time.perf_counter()))
        self.inside.pause(running)
        if not running:
            self.monitor.handle(EvalEnd(time.perf_counter()))

    def remove_hooks(self) -> None:
        """Idempotent."""
        self.inside.remove()
        self._accumulation.remove()
        self._unhook()

    # -- hooks on the optimizers' steps -----------------------------------------------------------------------------

    def _wants_optimizer(self) -> bool:
        return any(self.monitor.listens(kind) for kind in (GradsReady, OptimizerBegin, OptimizerEnd))

    def _hook_optimizers(self) -> None:
        """On those that do the work; a wrapper may have made them anew."""
        if not self._wants_optimizer():
            return
        inner = optimizers_of(self._optimizer)
        if [id(one) for one in inner] == [id(one) for one in self.hooked]:
            return
        self._unhook()
        self.hooked = inner
        for one in inner:
            self._handles.append(one.register_step_pre_hook(self._before_update))
            self._handles.append(one.register_step_post_hook(self._after_update))

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self.hooked = [], []

    def _before_update(self, *_arguments: Any) -> None:
        if self.stepped and len(self.hooked) > 1:
            return  # the next of a chain
        self.stepped = True
        self.monitor.handle(OptimizerBegin(time.perf_counter()))
        self.show_clipped()

    def _after_update(self, *_arguments: Any) -> None:
        self.monitor.handle(OptimizerEnd(time.perf_counter()))

    # -- what is said once ------------------------------------------------------------------------------------------

    def _named(self, parts: Any) -> dict[str, Any]:
        """Named losses; anything else is said once and left out, so that the loss itself is not."""
        if isinstance(parts, Mapping):
            return {str(name): without_graph(value) for name, value in parts.items()}
        if parts is not None and not self._parts_said:
            self._parts_said = True
            text = f"parts must map names to losses, such as {{'aux': loss}}, not {type(parts).__name__}: left out"
            self.monitor.say("warning", "parts_unnamed", text, step=self.step)
        return {}

    def _say_unselected(self, step: int) -> None:
        """A pattern that matches no parameter: its tables stay empty, which looks as if nothing happened."""
        config, names = self.monitor.config, self.parameters.parameter_names()
        for section in ("gradients", "weights", "moments", "updates", "spectral"):
            part = getattr(config, section)
            if part is None or part.target is None or one_of_many():
                continue
            selection = config.selection(section)
            if not any(name in selection for name in names):
                targets = ", ".join(repr(pattern.pattern) for pattern in part.target)
                text = f"{section}.target ({targets}) selects no parameter of this model"
                self.monitor.say("warning", "nothing_selected", text, step=step)

    def _say_partial(self) -> None:
        if self.parameters.partial is not None and not self._partial_said:
            self._partial_said = True
            self.monitor.say(
                "warning",
                "partial_gradients",
                f"the gradient of {self.parameters.partial} is still a sum to be made over ranks (a partial DTensor): "
                "such gradients are left out of all norms; reduce them before grads_ready()",
                step=self.step,
            )

    def _watch_optimizer(self) -> None:
        """An optimizer that never steps was probably replaced: its successor has no hooks."""
        if not self._handles:
            return
        self._missed = 0 if self.stepped else self._missed + 1
        if self._missed == 3:
            self.monitor.say(
                "warning",
                "optimizer_silent",
                "the optimizer given to attach() has not stepped for 3 steps; if it was replaced, attach again with the "
                "new one (learning rate and gradients after clipping are of the old one)",
                step=self.step,
            )
