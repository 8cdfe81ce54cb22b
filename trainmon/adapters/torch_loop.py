"""The plain PyTorch loop: ``with trainmon.attach(model, optimizer) as mon`` and a few calls.

Gives: train, step, micro-batch, data and optimizer events, gradients ``reduced`` (``grads_ready`` before clipping) and
``clipped`` (when the optimizer steps). Can't give: forward and backward times, pipeline stages, evaluations unless told.
Hooks only: one before and one after the optimizer's step, both gone after ``close``; nothing is patched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch

from trainmon.adapters.base import layout_from_environment, plain_name
from trainmon.backend import Backend
from trainmon.backend.host import HostBackend
from trainmon.events import (
    DataBegin,
    DataEnd,
    EvalBegin,
    EvalEnd,
    ExceptionRaised,
    GradsReady,
    MicroEnd,
    OptimizerBegin,
    OptimizerEnd,
    Phase,
    StepBegin,
    StepEnd,
    TensorView,
    TrainBegin,
    TrainEnd,
)
from trainmon.monitor import TrainMonitor
from trainmon.summary import Summary

__all__ = ["TorchLoop", "attach"]

#: The whole model is listed anew every so many steps, so that replaced modules are found too.
_RELIST_EVERY = 100


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Any = None,
    *,
    total_steps: int | None = None,
    resumed_step: int = 0,
    consumed_tokens: int = 0,
    consumed_samples: int = 0,
    backend: Literal["auto", "host", "torch"] = "auto",
    **overrides: Any,
) -> TorchLoop:
    """Starts watching a loop; use it as a context manager, or call ``close()`` at the end.

    Args:
        model: its trainable parameters give names and gradients.
        optimizer: gives learning rates and the moment of the update.
        config: path of a YAML or JSON file (a host's, with ``callbacks:``, or trainmon's own), a mapping, or None for
            the defaults.
        total_steps: last step, for progress and the time left.
        resumed_step: last step that an earlier life finished; the first step here is the next one.
        consumed_tokens, consumed_samples: what earlier lives consumed.
        backend: ``host`` reads with the C kernels, ``torch`` computes on the tensors' device; ``auto`` takes ``host``
            if all parameters are in host memory.
        **overrides: top-level configuration keys.

    Raises:
        ConfigError: the configuration is wrong; nothing has begun.
    """
    return TorchLoop(
        model,
        optimizer,
        TrainMonitor(config, **overrides),
        TrainBegin(
            layout=layout_from_environment(),
            resumed_step=resumed_step,
            total_steps=total_steps,
            consumed_tokens=consumed_tokens,
            consumed_samples=consumed_samples,
            host="torch",
        ),
        _choose_backend(model, backend),
    )


def _choose_backend(model: torch.nn.Module, wanted: str) -> Backend:
    if wanted not in ("auto", "host", "torch"):
        raise ValueError(f"backend must be 'auto', 'host' or 'torch', not {wanted!r}")
    devices = {parameter.device for parameter in model.parameters()}
    on_device = [device for device in devices if device.type not in ("cpu", "meta")]
    if wanted == "host" or (wanted == "auto" and not on_device):
        return HostBackend()
    from trainmon.backend.torch import TorchBackend

    return TorchBackend(on_device[0] if on_device else torch.device("cpu"))


class _OptimizerView:
    """Learning rates by group, read when asked."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def learning_rates(self) -> Mapping[str, float]:
        return {
            str(group.get("name", index)): group["lr"]
            for index, group in enumerate(self._optimizer.param_groups)
            if group.get("lr") is not None  # some optimizers find their own
        }


class _ParameterList:
    """The trainable parameters by name, cached; looked up anew when the optimizer's groups change."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._signature: tuple[int, ...] = ()
        self._age = 0
        self._relist()

    def _relist(self) -> None:
        named = {
            id(p): (plain_name(name), p) for name, p in self._model.named_parameters() if p.requires_grad
        }
        for index, group in enumerate(self._optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                named.setdefault(id(parameter), (f"optimizer.{index}.{position}", parameter))
        self.names = [name for name, _ in named.values()]
        self.parameters = [parameter for _, parameter in named.values()]

    def refresh(self) -> None:
        """Once a step; cheap unless something changed."""
        signature = tuple(
            value
            for group in self._optimizer.param_groups
            for value in (id(group["params"]), len(group["params"]))
        )
        self._age += 1
        if signature != self._signature or self._age >= _RELIST_EVERY:
            self._signature, self._age = signature, 0
            self._relist()

    def parameter_names(self) -> Sequence[str]:
        return self.names

    def gradients(self) -> TensorView:
        """Gradients that are there, as dense tensors. Meta tensors hold nothing and are left out."""
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        for name, parameter in zip(self.names, self.parameters, strict=True):
            gradient = parameter.grad
            if gradient is None or gradient.is_meta:
                continue
            if gradient.is_sparse:
                gradient = gradient.coalesce().values()
            names.append(name)
            tensors.append(gradient)
        return TensorView(names, tensors)


class TorchLoop:
    """A watched loop. Per step: ``micro_end`` after each backward, ``grads_ready`` before clipping, ``step_end`` last."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        monitor: TrainMonitor,
        begin: TrainBegin,
        backend: Backend,
    ) -> None:
        self.monitor = monitor
        self._optimizer = optimizer
        self._view = _OptimizerView(optimizer)
        self._list = _ParameterList(model, optimizer)
        self._step = begin.resumed_step + 1
        self._micro = 0
        self._stepped = False
        self._missed = 0
        self._handles: list[Any] = []
        monitor.begin(replace(begin, model=self._list, optimizer=self._view), backend)
        if monitor.listens(GradsReady):
            self._handles = [
                optimizer.register_step_pre_hook(self._before_update),
                optimizer.register_step_post_hook(self._after_update),
            ]
        self._begin_step()

    # -- what the loop calls ----------------------------------------------------------------------------------------

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Times the fetching of data."""
        self.monitor.handle(DataBegin(time.perf_counter()))
        try:
            yield
        finally:
            self.monitor.handle(DataEnd(time.perf_counter()))

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Marks an evaluation, so that its time does not pass for a step's."""
        self.monitor.handle(EvalBegin(time.perf_counter()))
        try:
            yield
        finally:
            self.monitor.handle(EvalEnd(time.perf_counter()))

    def micro_end(
        self, loss: Any = None, tokens: Any = None, *, reduction: Literal["mean", "sum"] = "mean"
    ) -> None:
        """A micro-batch is through its backward pass.

        Args:
            loss: mean over ``tokens`` counted tokens (``reduction="mean"``) or their sum; any scalar, on any device.
            tokens: counted tokens; None if unknown.
        """
        if isinstance(loss, torch.Tensor):
            loss = loss.detach()
        self.monitor.handle(MicroEnd(self._step, self._micro, loss, tokens, reduction))
        self._micro += 1

    def grads_ready(self, *, clip_norm: float | None = None, loss_scale: float | None = None) -> None:
        """Gradients are final and not yet clipped. ``loss_scale``: what still multiplies them."""
        self._gradients("reduced", clip_norm, loss_scale)

    def step_end(
        self,
        loss: Any = None,
        *,
        tokens: Any = None,
        samples: Any = None,
        grad_norm: Any = None,
        overflow: Any = None,
    ) -> None:
        """The step is over.

        Args:
            loss: the step's mean loss, if no micro-batch gave one.
            tokens: counted tokens, if no micro-batch gave them.
            samples: sequences in this step.
            grad_norm: the norm before clipping (``clip_grad_norm_`` returns it), if ``grads_ready`` is not called.
            overflow: whether a loss scaler skipped the update.
        """
        if isinstance(loss, torch.Tensor):
            loss = loss.detach()
        now, step = time.perf_counter(), self._step
        self.monitor.offer(
            StepEnd,
            lambda: StepEnd(
                step,
                now,
                loss=loss,
                tokens=tokens,
                samples=samples,
                grad_norm=grad_norm,
                learning_rates=None if self._stepped else self._view.learning_rates(),
                overflow=overflow,
            ),
        )
        self._watch_optimizer()
        self._step += 1
        self._begin_step()

    def summary(self) -> Summary:
        """What was seen so far."""
        return self.monitor.summary()

    def print_summary(self) -> None:
        """Prints the summary table."""
        self.monitor.print_summary()

    @property
    def overhead_ns(self) -> int:
        """Nanoseconds that this thread has spent inside trainmon."""
        return self.monitor.overhead_ns

    def close(self) -> None:
        """Ends the run: hooks are removed, files written. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.monitor.handle(TrainEnd(self._step - 1, "completed"))
        self.monitor.close()

    def __enter__(self) -> TorchLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.monitor.handle(ExceptionRaised(self._step, "step", error))
        self.monitor.close()

    # -- hooks ------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._micro, self._stepped = 0, False
        self.monitor.handle(StepBegin(self._step, time.perf_counter()))

    def _gradients(self, phase: Phase, clip_norm: float | None, loss_scale: float | None) -> None:
        def make() -> GradsReady:
            self._list.refresh()
            rates = self._view.learning_rates()
            return GradsReady(self._step, self._list.gradients(), phase, clip_norm, rates, loss_scale)

        self.monitor.offer(GradsReady, make)

    def _before_update(self, *_arguments: Any) -> None:
        self._stepped = True
        self.monitor.handle(OptimizerBegin(time.perf_counter()))
        self._gradients("clipped", None, None)

    def _after_update(self, *_arguments: Any) -> None:
        self.monitor.handle(OptimizerEnd(time.perf_counter()))

    def _watch_optimizer(self) -> None:
        """An optimizer that never steps was probably replaced: its successor has no hooks."""
        if not self._handles:
            return
        self._missed = 0 if self._stepped else self._missed + 1
        if self._missed == 3:
            self.monitor.say(
                "warning",
                "optimizer_silent",
                "the optimizer given to attach() has not stepped for 3 steps; if it was replaced, attach again with the "
                "new one (learning rate and gradients after clipping are of the old one)",
                step=self._step,
            )
