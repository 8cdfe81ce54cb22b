"""Hooks on parameters: each micro-batch's own gradient, and what it is added to.

Torch calls a parameter's hook with the gradient of one backward pass before it is added, and its post-accumulate hook
once it is: both before DistributedDataParallel reduces it. Under FSDP2 the first is never called, because the gradient
goes through the gathered parameter, and the second comes after the reduction: then there is nothing to show, and nothing
is. FSDP1's flat parameters have no hooks of single parameters either.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from trainmon.adapters.torch_parts.parameters import ParameterList, dense, gradient_of
from trainmon.adapters.torch_parts.shards import detached
from trainmon.events import GradientAccumulated, MicroGradient
from trainmon.monitor import TrainMonitor

__all__ = ["AccumulationHooks"]


class AccumulationHooks:
    """On every trainable parameter, while a probe wants the events; they look at one flag outside its steps.

    Args:
        parameters: the model's, looked up anew at each step.
        micro: the number of the running micro-batch.
    """

    def __init__(self, parameters: ParameterList, monitor: TrainMonitor, micro: Callable[[], int]) -> None:
        self._parameters, self._monitor, self._micro = parameters, monitor, micro
        self._handles: dict[int, tuple[Any, ...]] = {}
        self._listed: list[torch.nn.Parameter] = []
        self._own_wanted = self._sum_wanted = False
        self._arrived: set[str] = set()  # whose own gradient was seen and not yet added

    def install(self) -> None:
        """On all parameters that have none yet, if anybody listens; else all are taken away."""
        if not (self._monitor.listens(MicroGradient) or self._monitor.listens(GradientAccumulated)):
            self.remove()
            return
        self._listed = self._parameters.parameters
        held = {id(parameter) for parameter in self._listed}
        for key in [key for key in self._handles if key not in held]:
            self._remove(key)
        for name, parameter in zip(self._parameters.names, self._listed, strict=True):
            if id(parameter) not in self._handles and parameter.requires_grad and parameter.is_leaf:
                self._handles[id(parameter)] = (
                    parameter.register_hook(self._own(name, weakref.ref(parameter))),  # type: ignore[no-untyped-call]
                    _first(parameter, self._added(name)),
                )

    def arm(self) -> None:
        """A step begins."""
        if not self._handles:
            return
        self._arrived.clear()
        self._own_wanted = self._monitor.wants(MicroGradient)
        self._sum_wanted = self._monitor.wants(GradientAccumulated)
        if self._own_wanted or self._sum_wanted:
            self._monitor.guard(self._parameters.refresh)
            if self._listed is not self._parameters.parameters:
                self._monitor.guard(self.install)

    def remove(self) -> None:
        """Idempotent."""
        self._own_wanted = self._sum_wanted = False
        for key in list(self._handles):
            self._remove(key)

    def _remove(self, key: int) -> None:
        for handle in self._handles.pop(key):
            handle.remove()

    def _own(self, name: str, own: weakref.ref[torch.nn.Parameter]) -> Callable[[torch.Tensor], None]:
        def make(gradient: torch.Tensor) -> MicroGradient:
            parameter = own()
            there = None if parameter is None else gradient_of(parameter)
            before = None if there is None else dense(detached(there))
            return MicroGradient(self._micro(), name, dense(detached(gradient)), before)

        def hook(gradient: torch.Tensor) -> None:
            if self._sum_wanted:
                self._arrived.add(name)
            if self._own_wanted:
                self._monitor.offer(MicroGradient, lambda: make(gradient))

        return hook

    def _added(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if not self._sum_wanted or name not in self._arrived or parameter.grad is None:
                return
            self._arrived.discard(name)
            gradient, sums = detached(parameter.grad), getattr(parameter, "main_grad", None)
            self._monitor.offer(
                GradientAccumulated,
                lambda: GradientAccumulated(self._micro(), name, dense(_together(gradient, sums))),
            )

        return hook


def _together(gradient: torch.Tensor, sums: torch.Tensor | None) -> torch.Tensor:
    """A gradient that a host is about to add to what it has summed elsewhere."""
    return gradient if sums is None or sums is gradient else detached(sums) + gradient


def _first(parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """Called before all others: one that reduces the gradient, or takes it away, may have been there sooner."""
    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    if isinstance(hooks, dict) and next(iter(hooks)) != handle.id:
        before = [(key, one) for key, one in hooks.items() if key != handle.id]
        own = hooks[handle.id]
        hooks.clear()  # torch goes by the order of insertion
        hooks[handle.id] = own
        hooks.update(before)
    return handle
