"""All that is looked at inside the model: which modules, told before the first step, and their hooks' life."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.distributed as distributed
from torch import nn

from trainmon.adapters.torch_parts.attention import AttentionHooks, TrackedLogits, attention_layers
from trainmon.adapters.torch_parts.modules import ModuleHooks, hookable
from trainmon.adapters.torch_parts.routers import ExpertHooks, moe_layers
from trainmon.config import Selection
from trainmon.events import AttentionSeen, ExpertsSeen, ModuleSeen, Observed
from trainmon.monitor import TrainMonitor

__all__ = ["Inside", "one_of_many"]


Modules = Mapping[str, nn.Module]


def one_of_many() -> bool:
    """Whether other ranks may have what this one lacks (the stages of a pipeline)."""
    return bool(
        distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    )


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
        self._left_out: dict[str, Sequence[str]] = {}
        self._found: dict[str, int] = {}
        self._modules: ModuleHooks | None = None
        self._attention: AttentionHooks | None = None
        self._tracked: TrackedLogits | None = None
        self._experts: ExpertHooks | None = None
        self._failed: dict[str, Exception] = {}
        config = monitor.config
        wanted = {
            section: watch
            for section, watch in (
                ("activations", self._watch_modules),
                ("attention", self._watch_attention),
                ("moe", self._watch_experts),
            )
            if getattr(config, section) is not None
        }
        for section, watch in wanted.items():
            try:  # models are of many kinds, and none may keep a run from beginning
                watch(*hookable(model, name_of), config.selection(section))
            except Exception as error:
                self._failed[section] = error
        self.observed = self._observed()

    def _observed(self) -> Observed:
        return Observed(
            modules=[] if self._modules is None else self._modules.names,
            attention=[] if self._attention is None else self._attention.known(),
            experts=[] if self._experts is None else self._experts.known(),
        )

    def _watch_modules(self, modules: Modules, compiled: Modules, selection: Selection) -> None:
        config = self._monitor.config.activations
        if config is None:
            return
        chosen = {name: module for name, module in modules.items() if name in selection}
        self._found["activations"] = len(chosen)
        self._left_out["activations"] = [name for name in compiled if name in selection]
        self._modules = ModuleHooks(chosen, config.flows, self._monitor, self._micro)

    def _watch_attention(self, modules: Modules, compiled: Modules, selection: Selection) -> None:
        config = self._monitor.config.attention
        if config is None:
            return
        chosen = {name: module for name, module in modules.items() if name in selection}
        found = attention_layers(chosen, config.layers) if config.hooks else {}
        self._found["attention"] = len(found) if config.hooks else len(chosen)
        if not found and config.hooks:
            self._left_out["attention"] = [name for name in compiled if name in selection]
        self._attention = AttentionHooks(found, self._monitor, self._micro)
        self._tracked = TrackedLogits(chosen, config.tracked, self._monitor)

    def _watch_experts(self, modules: Modules, compiled: Modules, selection: Selection) -> None:
        config = self._monitor.config.moe
        if config is None:
            return
        every = moe_layers(
            modules, compiled, routers=config.routers or (), counters=config.counters, biases=config.biases
        )
        layers = [layer for layer in every if layer.name in selection]
        self._found["moe"] = len(layers)
        self._left_out["moe"] = [layer.name for layer in layers if not (layer.hookable or layer.counters)]
        self._experts = ExpertHooks(layers, self._monitor, self._micro, hooks=config.hooks)

    def install(self, step: int) -> None:
        """The run has begun; says what can't be looked at."""
        for section, found in self._found.items():
            part = getattr(self._monitor.config, section)
            if part.target is not None and not found and not one_of_many():
                targets = ", ".join(repr(pattern.pattern) for pattern in part.target)
                text = f"{section}.target ({targets}) selects nothing of this model that {section} looks at"
                self._monitor.say("warning", "nothing_selected", text, step=step)
        hooks = (("activations", self._modules, ModuleSeen), ("attention", self._attention, AttentionSeen))
        for section, watcher, kind in (*hooks, ("moe", self._experts, ExpertsSeen)):
            if watcher is not None and self._monitor.listens(kind):
                try:
                    watcher.install()
                except Exception as error:
                    watcher.remove()
                    self._failed[section] = error
        for section, failure in self._failed.items():
            text = f"{section}: this model can't be looked into: {type(failure).__name__}: {failure}"
            self._monitor.say("warning", "model_not_readable", text, step=step)
        for section, names in self._left_out.items():
            if names:
                shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                self._monitor.say(
                    "warning",
                    "modules_compiled",
                    f"{section}: {len(names)} selected modules lie inside torch.compile or TorchScript, where no hook is "
                    f"called: {shown}; the compiled module as a whole can be looked at, or compile later",
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
