"""All that is looked at inside the model: which modules, told before the first step, and their hooks' life."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from trainmon.adapters.torch_loop.attention import AttentionHooks, TrackedLogits, attention_layers
from trainmon.adapters.torch_loop.modules import ModuleHooks, hookable
from trainmon.adapters.torch_loop.routers import ExpertHooks, moe_layers
from trainmon.events import AttentionSeen, ExpertsSeen, ModuleSeen, Observed
from trainmon.monitor import TrainMonitor

__all__ = ["Inside"]


class Inside:
    """Hooks for the sections that look inside the model; none for a section that is off.

    Args:
        micro: the number of the running micro-batch.
        name_of: the name over all ranks that belongs to a module's name on this one.
    """

    def __init__(
        self,
        model: nn.Module,
        monitor: TrainMonitor,
        micro: Callable[[], int],
        name_of: Callable[[str], str] | None = None,
    ) -> None:
        self._monitor, self._micro = monitor, micro
        self._paused = False
        self._left_out: list[tuple[str, Sequence[str]]] = []
        self._found: dict[str, int] = {}
        self._modules: ModuleHooks | None = None
        self._attention: AttentionHooks | None = None
        self._tracked: TrackedLogits | None = None
        self._experts: ExpertHooks | None = None
        config = monitor.config
        if config.activations is None and config.attention is None and config.moe is None:
            self.observed = Observed()
            return
        modules, compiled = hookable(model, name_of)
        chosen: dict[str, nn.Module] = {}
        if config.activations is not None:
            selection = config.selection("activations")
            chosen = {name: module for name, module in modules.items() if name in selection}
            self._found["activations"] = len(chosen)
            self._modules = ModuleHooks(chosen, config.activations.flows, monitor, micro)
            self._left_out.append(("activations", [name for name in compiled if name in selection]))
        if config.attention is not None:
            selection = config.selection("attention")
            wanted = {name: module for name, module in modules.items() if name in selection}
            found = attention_layers(wanted, config.attention.layers) if config.attention.hooks else {}
            self._found["attention"] = len(found) if config.attention.hooks else len(wanted)
            self._attention = AttentionHooks(found, monitor, micro)
            self._tracked = TrackedLogits(wanted, config.attention.tracked, monitor)
            if not found and config.attention.hooks:
                self._left_out.append(("attention", [name for name in compiled if name in selection]))
        if config.moe is not None:
            selection, moe = config.selection("moe"), config.moe
            mixtures = moe_layers(
                modules, compiled, routers=moe.routers or (), counters=moe.counters, biases=moe.biases
            )
            mixtures = [layer for layer in mixtures if layer.name in selection]
            self._found["moe"] = len(mixtures)
            self._experts = ExpertHooks(mixtures, monitor, micro, hooks=moe.hooks)
            self._left_out.append(("moe", [x.name for x in mixtures if not (x.hookable or x.counters)]))
        self.observed = Observed(
            modules=list(chosen),
            attention=[] if self._attention is None else self._attention.known(),
            experts=[] if self._experts is None else self._experts.known(),
        )

    def install(self, step: int) -> None:
        """The run has begun; says what can't be looked at."""
        for section, found in self._found.items():
            part = getattr(self._monitor.config, section)
            if part.target is not None and not found:
                targets = ", ".join(repr(pattern.pattern) for pattern in part.target)
                text = f"{section}.target ({targets}) selects nothing of this model that {section} looks at"
                self._monitor.say("warning", "nothing_selected", text, step=step)
        if self._modules is not None and self._monitor.listens(ModuleSeen):
            self._modules.install()
        if self._attention is not None and self._monitor.listens(AttentionSeen):
            self._attention.install()
        if self._experts is not None and self._monitor.listens(ExpertsSeen):
            self._experts.install()
        for section, names in self._left_out:
            if names:
                shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                self._monitor.say(
                    "warning",
                    "modules_compiled",
                    f"{section}: {len(names)} selected modules lie inside torch.compile, where no hook is called: "
                    f"{shown}; the compiled module as a whole can be looked at, or compile later",
                    step=step,
                )

    def arm(self) -> None:
        """A step begins."""
        looks = not self._paused
        if self._modules is not None:
            self._modules.arm(looks and self._monitor.wants(ModuleSeen))
        if self._attention is not None:
            self._attention.on = looks and self._monitor.wants(AttentionSeen)
        if self._experts is not None:
            experts = self._experts
            self._monitor.guard(lambda: experts.arm(looks and self._monitor.wants(ExpertsSeen)))

    def pause(self, paused: bool) -> None:
        """An evaluation begins or ends: what flows then is not training's."""
        self.counters_change()
        self._paused = paused
        if self._modules is not None:
            self._modules.on = not paused and self._monitor.wants(ModuleSeen)
        if self._attention is not None:
            self._attention.on = not paused and self._monitor.wants(AttentionSeen)
        if self._experts is not None:
            experts = self._experts
            self._monitor.guard(lambda: experts.arm(not paused and self._monitor.wants(ExpertsSeen)))

    def counters_change(self) -> None:
        """Somebody may empty the counters that layers keep: a micro-batch is over, or weights are to be updated."""
        if self._experts is not None:
            self._experts.poll()

    def step_ends(self) -> None:
        """Reads what the model keeps itself."""
        if self._tracked is not None and self._monitor.wants(AttentionSeen):
            tracked = self._tracked
            self._monitor.guard(lambda: tracked.poll(self._micro()))
        if self._experts is not None:
            self._experts.step_ends()

    def remove(self) -> None:
        """Idempotent, and in any order with other hooks."""
        if self._modules is not None:
            self._modules.remove()
        if self._attention is not None:
            self._attention.remove()
        if self._experts is not None:
            self._experts.remove()
