"""What is said of a run, once: what of the host's sections is followed, what can't be had, what the host does wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from trainmon.adapters.mindformers.pynative.settings import HostSettings
from trainmon.monitor import TrainMonitor

__all__ = ["Sayings"]


class Sayings:
    """Says each thing once a run."""

    def __init__(self, monitor: TrainMonitor) -> None:
        self._monitor = monitor
        self._said: set[str] = set()

    def once(self, level: Literal["info", "warning", "error"], kind: str, text: str, **data: Any) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._monitor.say(level, kind, text, step=self._monitor.step, data=data)

    def settings(self, settings: HostSettings) -> None:
        """What is followed of the host's own sections, and what isn't."""
        if settings.taken:
            text = f"the host's own settings are followed: {', '.join(settings.taken)}"
            self.once("info", "host_settings", text, config=settings.config)
        for problem in settings.problems:
            self._monitor.say("warning", "host_settings", f"not followed: {problem}", step=self._monitor.step)
        if settings.max_norm == 0:
            self.once(
                "warning",
                "max_norm_zero",
                "training.max_norm: 0 does not switch clipping off, it multiplies every gradient by 0: nothing "
                "is learnt, and norms of single gradients are null",
            )

    def no_expert_layers(self, layers: Sequence[int]) -> None:
        for layer in layers:
            text = f"decoder.layers.{layer} is not a MoE layer: there are no tokens of experts to record"
            self._monitor.say("warning", "no_expert_layer", text, step=self._monitor.step)

    def ranks(self) -> None:
        self.once(
            "info",
            "ranks_apart",
            "norms of gradients, weights and moments are those of this rank's own pieces; loss and grad/norm are the "
            "host's, of all ranks",
        )

    def attention(self, tracked: bool) -> None:
        text = (
            "attention/mean_sum is null: the model keeps a head's largest logit, not the sums of its softmax"
            if tracked
            else "the model keeps no largest logits: it does where MaxLogitsMonitor is among the callbacks, or the "
            "optimizer is Muon with qk_clip_enabled; attention/max_logit and mean_sum are null"
        )
        self.once("info", "attention_logits", text)

    def resets(self) -> None:
        self.once(
            "info",
            "logits_reset",
            "nobody puts the model's largest logits back to zero: that is done here, and their lines are printed",
        )

    def unseen(self) -> None:
        self.once(
            "warning",
            "gradients_unseen",
            "no hook on a parameter was called: sharded parameters (FSDP) are reduced inside the backward pass; norms of "
            "micro-batches and before reduction are null",
        )

    def misaligned(self, without: Sequence[str]) -> None:
        """Parameters without a gradient, in front of others that have one."""
        named = ", ".join(without[:3]) + (" ..." if len(without) > 3 else "")
        self.once(
            "error",
            "gradients_misaligned",
            f"{len(without)} parameters have no gradient ({named}), and the host's optimizer takes gradients by "
            "position: parameters behind them are updated with the gradients of others; freeze those that take no part "
            "(requires_grad=False)",
        )

    def skipped(self) -> None:
        text = "the host left out the update: its gradients are not finite"
        self._monitor.say("warning", "step_skipped", text, step=self._monitor.step)
