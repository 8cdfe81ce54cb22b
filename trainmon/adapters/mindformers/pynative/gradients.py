"""Gradients of single micro-batches and what they add up to, by hooks on parameters.

A hook is called in every backward pass, before the gradient is added to what is there: ``main_grad`` or ``grad``. On a
CPU both are read where they are, as they are; on a device their sums of squares stay there until the step ends, are
made in float32 and read together. Never divided by a replica factor: the norms are those of this rank's own gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trainmon.adapters.mindformers.pynative.values import DeviceSums, local
from trainmon.adapters.mindspore_parts.parameters import ParameterList, host_view
from trainmon.events import GradientAccumulated, MicroGradient
from trainmon.monitor import TrainMonitor

__all__ = ["GradientHooks", "accumulated", "is_low_precision"]


def accumulated(parameter: Any) -> Any:
    """The gradient that a parameter's optimizer will get, as far as it is there; None: nothing."""
    main = getattr(parameter, "main_grad", None)
    return getattr(parameter, "grad", None) if main is None else main


def is_low_precision(tensor: Any) -> bool:
    """Whether a tensor's elements are floats of 16 bits."""
    return str(tensor.dtype) in ("BFloat16", "Float16")


class GradientHooks:
    """Makes :class:`MicroGradient` and :class:`GradientAccumulated`.

    Args:
        micro: the running micro-batch, 0-based; None: a pipeline runs several at a time, and each parameter's own calls
            are counted.
        addressable: whether the host can read gradients where they are.

    Attributes:
        seen: whether a hook was called in this step.
        installed: whether there are hooks.
    """

    def __init__(
        self,
        parameters: ParameterList,
        monitor: TrainMonitor,
        micro: Callable[[], int] | None,
        addressable: bool,
    ) -> None:
        self._parameters, self._monitor, self._micro = parameters, monitor, micro
        self._addressable = addressable
        self._handles: list[Any] = []
        self._on = self.seen = False
        self._calls: dict[str, int] = {}
        self._sums = DeviceSums()
        self._waiting: list[Callable[[], None]] = []

    @property
    def installed(self) -> bool:
        return bool(self._handles)

    def install(self) -> None:
        """Hooks where somebody listens, none where nobody does."""
        wanted = any(self._monitor.listens(kind) for kind in (MicroGradient, GradientAccumulated))
        if not wanted:
            self.remove()
        elif not self._handles:
            for name, parameter in zip(self._parameters.names, self._parameters.parameters, strict=True):
                self._handles.append(parameter.register_hook(self._hook(name, parameter)))

    def remove(self) -> None:
        """Idempotent."""
        self._on = False
        while self._handles:
            self._handles.pop().remove()

    def arm(self) -> None:
        """A step begins."""
        self.seen, self._calls = False, {}
        self._sums, self._waiting = DeviceSums(), []
        self._on = self.installed and any(
            self._monitor.wants(kind) for kind in (MicroGradient, GradientAccumulated)
        )

    def step_ends(self) -> bool:
        """What a device has added up is handed over. False: somebody looks at this step's, and no hook was called."""
        came, self._on = self.seen or not self._on, False
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._monitor.guard(self._sums.fetch)
            for hand_over in waiting:
                hand_over()
        return came

    def _hook(self, name: str, parameter: Any) -> Callable[[Any], None]:
        monitor = self._monitor

        def see(gradient: Any) -> None:
            if not self._on:
                return
            self.seen, micro = True, self._number(name)
            if self._addressable:
                monitor.offer(MicroGradient, lambda: _own(name, micro, parameter, gradient))
                monitor.offer(GradientAccumulated, lambda: _sum(name, micro, parameter, gradient))
            else:
                monitor.guard(lambda: self._keep(name, micro, parameter, gradient))

        return see

    def _number(self, name: str) -> int:
        if self._micro is not None:
            return max(0, self._micro())
        self._calls[name] = self._calls.get(name, -1) + 1
        return self._calls[name]

    def _keep(self, name: str, micro: int, parameter: Any, gradient: Any) -> None:
        """On a device: two sums of each, until the step ends."""
        monitor, sums = self._monitor, self._sums
        own, before = local(gradient), accumulated(parameter)
        if monitor.wants(MicroGradient):
            at = sums.add(own)
            self._waiting.append(lambda: monitor.handle(MicroGradient(micro, name, sums[at])))
        if monitor.wants(GradientAccumulated):
            total = sums.add(own if before is None else local(before).float() + own.float())
            self._waiting.append(lambda: monitor.handle(GradientAccumulated(micro, name, sums[total])))


def _own(name: str, micro: int, parameter: Any, gradient: Any) -> MicroGradient:
    before = accumulated(parameter)
    there = None if before is None else host_view(local(before))
    return MicroGradient(micro, name, host_view(local(gradient)), there)


def _sum(name: str, micro: int, parameter: Any, gradient: Any) -> GradientAccumulated:
    """The sum as the host makes it: in float32, whatever comes in."""
    own, before = local(gradient), accumulated(parameter)
    if before is None:
        return GradientAccumulated(micro, name, host_view(own))
    wide = [
        np.asarray(one.float().asnumpy() if is_low_precision(one) else one.asnumpy(), np.float32)
        for one in (local(before), own)
    ]
    return GradientAccumulated(micro, name, np.add(*wide))
