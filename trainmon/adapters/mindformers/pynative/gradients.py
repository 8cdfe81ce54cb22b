"""Gradients of single micro-batches and what they add up to, by hooks on parameters.

A hook is called in every backward pass, before the gradient is added to what is there: ``main_grad`` or ``grad``. On a
CPU both are read where they are, as they are; on a device the backend adds up squares there, which are read together when
the step ends. Never divided by a replica factor: the norms are those of this rank's own gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trainmon.adapters.mindspore_parts.parameters import ParameterList, host_view, own_piece
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
        self._on = self.installed and any(
            self._monitor.wants(kind) for kind in (MicroGradient, GradientAccumulated)
        )

    def step_ends(self) -> bool:
        """It is over. False: somebody looks at this step's, and no hook was called."""
        came, self._on = self.seen or not self._on, False
        return came

    def _hook(self, name: str, parameter: Any) -> Callable[[Any], None]:
        monitor = self._monitor

        def see(gradient: Any) -> None:
            if not self._on:
                return
            self.seen, micro = True, self._number(name)
            here = self._addressable
            monitor.offer(MicroGradient, lambda: _own(name, micro, parameter, gradient, here))
            monitor.offer(GradientAccumulated, lambda: _sum(name, micro, parameter, gradient, here))

        return see

    def _number(self, name: str) -> int:
        if self._micro is not None:
            return max(0, self._micro())
        self._calls[name] = self._calls.get(name, -1) + 1
        return self._calls[name]


def _view(tensor: Any, addressable: bool) -> Any:
    return host_view(tensor) if addressable else own_piece(tensor)


def _own(name: str, micro: int, parameter: Any, gradient: Any, addressable: bool) -> MicroGradient:
    before = accumulated(parameter)
    there = None if before is None else _view(before, addressable)
    return MicroGradient(micro, name, _view(gradient, addressable), there)


def _sum(name: str, micro: int, parameter: Any, gradient: Any, addressable: bool) -> GradientAccumulated:
    """The sum as the host makes it: in float32, whatever comes in."""
    own, before = own_piece(gradient), accumulated(parameter)
    if before is None:
        return GradientAccumulated(micro, name, _view(own, addressable))
    if not addressable:
        return GradientAccumulated(micro, name, own_piece(before).float() + own.float())
    wide = [
        np.asarray(one.float().asnumpy() if is_low_precision(one) else one.asnumpy(), np.float32)
        for one in (own_piece(before), own)
    ]
    return GradientAccumulated(micro, name, np.add(*wide))
