"""The optimizers that G3's builders return (contract 5.3, 7): chains, and fp32 copies beside 16-bit parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ChainedOptimizer:
    """No torch Optimizer, no `state`, no step hooks; `optimizer` is a trap with several leaves."""

    def __init__(self, leaves: dict[str, torch.optim.Optimizer]) -> None:
        self.optimizers_dict = leaves
        self.chained_optimizers = list(leaves.values())

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        if len(self.chained_optimizers) != 1:
            raise ValueError("several optimizers are chained: there is no single one")
        return self.chained_optimizers[0]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for leaf in self.chained_optimizers for group in leaf.param_groups]

    def step(self) -> None:
        for leaf in self.chained_optimizers:
            leaf.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for leaf in self.chained_optimizers:
            leaf.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {name: leaf.state_dict() for name, leaf in self.optimizers_dict.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, leaf in self.optimizers_dict.items():
            leaf.load_state_dict(state[name])


class FP32MainParamsOptimizer:
    """Its step first moves every gradient to `param.main_param.grad`, in float32, and sets the parameter's to None."""

    def __init__(
        self, parameters: list[nn.Parameter], build: Callable[[list[Any]], ChainedOptimizer]
    ) -> None:
        self._parameters = parameters
        for parameter in parameters:
            parameter.main_param = nn.Parameter(parameter.detach().float().clone())
        self.optimizer = build([parameter.main_param for parameter in parameters])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.main_param.grad = parameter.grad.float()
                parameter.grad = None
        self.optimizer.step()
        for parameter in self._parameters:
            parameter.copy_(parameter.main_param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        for parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "main": [parameter.main_param.detach().clone() for parameter in self._parameters],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        for parameter, main in zip(self._parameters, state["main"], strict=True):
            parameter.main_param.copy_(main)


class LRSchedulersContainer:
    """One schedule a leaf; `get_last_lr` is all of them, flat."""

    def __init__(self, schedulers: list[Any]) -> None:
        self.schedulers = schedulers

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def get_last_lr(self) -> list[float]:
        return [lr for scheduler in self.schedulers for lr in scheduler.get_last_lr()]

    def state_dict(self) -> list[dict[str, Any]]:
        return [scheduler.state_dict() for scheduler in self.schedulers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for scheduler, state in zip(self.schedulers, states, strict=True):
            scheduler.load_state_dict(state)
