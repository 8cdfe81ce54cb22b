"""All that is looked at inside the model: which modules, told before the first step, and their hooks' life."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from trainmon.adapters.torch_loop.modules import ModuleHooks, hookable
from trainmon.events import ModuleSeen, Observed
from trainmon.monitor import TrainMonitor

__all__ = ["Inside"]


class Inside:
    """Hooks for the sections that look inside the model; none for a section that is off.

    Args:
        micro: the number of the running micro-batch.
    """

    def __init__(self, model: nn.Module, monitor: TrainMonitor, micro: Callable[[], int]) -> None:
        self._monitor = monitor
        self._compiled: list[str] = []
        self._paused = False
        config = monitor.config
        self._modules: ModuleHooks | None = None
        names: list[str] = []
        if config.activations is not None:
            modules, compiled = hookable(model)
            selection = config.selection("activations")
            chosen = {name: module for name, module in modules.items() if name in selection}
            names = list(chosen)
            self._compiled = [name for name in compiled if name in selection]
            self._modules = ModuleHooks(chosen, config.activations.flows, monitor, micro)
        self.observed = Observed(modules=names)

    def install(self, step: int) -> None:
        """The run has begun; says what can't be looked at."""
        if self._modules is not None and self._monitor.listens(ModuleSeen):
            self._modules.install()
        if self._compiled:
            shown = ", ".join(self._compiled[:3]) + (", ..." if len(self._compiled) > 3 else "")
            self._monitor.say(
                "warning",
                "modules_compiled",
                f"{len(self._compiled)} selected modules lie inside torch.compile, where no hook is called: {shown}; the "
                "compiled module as a whole can be looked at, or compile later",
                step=step,
            )

    def arm(self) -> None:
        """A step begins."""
        if self._modules is not None:
            self._modules.arm(self._monitor.wants(ModuleSeen) and not self._paused)

    def pause(self, paused: bool) -> None:
        """An evaluation begins or ends: what flows then is not training's."""
        self._paused = paused
        if self._modules is not None:
            self._modules.on = self._monitor.wants(ModuleSeen) and not paused

    def remove(self) -> None:
        """Idempotent, and in any order with other hooks."""
        if self._modules is not None:
            self._modules.remove()
