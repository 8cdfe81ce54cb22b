"""A small training loop under the drop-in, and what it writes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from torch import nn

MODES = ["v2", "default", "extended"]


def config(directory: Path, *monitors: str, mode: str = "default", **keys: Any) -> dict[str, Any]:
    chosen = {"v2": {"compat": "msprobe-v2"}, "default": {}, "extended": {"extended": True}}[mode]
    return {
        "output_dir": str(directory),
        "monitors": {one: {"enabled": True} for one in monitors},
        **chosen,
        **keys,
    }


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def backward(net: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = net(torch.ones(2, 3)).square().sum()
    loss.backward()
    return loss


def train(net: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(net)
        optimizer.step()


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.1)


def rows(directory: Path, monitor: str, rank: int = 0) -> list[dict[str, str]]:
    found = []
    for path in sorted((directory / f"rank_{rank}").glob(f"{monitor}_step*.csv")):
        with path.open(newline="") as stream:
            found += list(csv.DictReader(stream))
    return found


FOUR = ("module", "weight_grad", "optimizer", "param")


def clean(net: nn.Module, optimizer: Any) -> bool:
    """Whether nothing of a monitor is left."""
    hooks: list[Any] = []
    for module in net.modules():
        hooks += [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks]
    hooks += [one._post_accumulate_grad_hooks for one in net.parameters()]
    hooks += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    return not any(hooks) and "step" not in vars(optimizer)
