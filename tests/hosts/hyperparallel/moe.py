"""The MoE balance update of HyperParallel's core (contract 11): who reads the counters after it finds zeros."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as distributed
from torch import nn


def moe_layers(model: nn.Module) -> list[Any]:
    """Only layers with a truthy `enable_expert_bias`: earlier layers are invisible to the monitor."""
    return [module for module in model.modules() if getattr(module, "enable_expert_bias", False)]


def sync_and_update_expert_bias(
    moe: Any, lr: float, tp_group: Any, cp_group: Any, dp_group: Any, num_recomputations: int
) -> None:
    """Sums the counters over TP, CP and DP in place, moves the bias by them, zeroes them."""
    for group in (tp_group, cp_group, dp_group):
        if group is not None and group.rank_size > 1:
            distributed.all_reduce(moe.tokens_per_expert, group=group.group)
    moe.update_expert_bias(lr, num_recomputations)


def earlier(moe: Any) -> None:
    """Takes from the layer what the earlier one lacks: the monitor doesn't see it, and nobody zeroes its counters."""
    moe.enable_expert_bias = False
    moe.register_forward_hook(lambda layer, *_: setattr(layer, "last_aux_loss", None))


class MoEMonitorCallback:
    """The core class, whose `on_step_end` takes no arguments; the trainers' own callbacks delegate to it."""

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        tp_group: Any = None,
        cp_group: Any = None,
        dp_group: Any = None,
        num_recomputations: int = 1,
    ) -> None:
        self.model, self.lr = model, lr
        self._groups = (tp_group, cp_group, dp_group)
        self._recomputations = num_recomputations
        self._handle: Any = None
        self.last_mean_aux_loss: float | None = None

    def on_step_end(self) -> None:
        layers = moe_layers(self.model)
        losses = [float(layer.last_aux_loss) for layer in layers if layer.last_aux_loss is not None]
        self.last_mean_aux_loss = sum(losses) / len(losses) if losses else None
        for layer in layers:
            with torch.no_grad():
                sync_and_update_expert_bias(layer, self.lr, *self._groups, self._recomputations)

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        self._handle = optimizer.register_step_post_hook(lambda *_: self.on_step_end())

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
