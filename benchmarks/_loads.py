"""What is trained while the cost of a monitor is measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples" / "gpt")]

import train as demo  # noqa: E402  (the demo is a program, not a package)

__all__ = ["Gpt", "Load", "Mlp", "ManyParameters", "NoMonitor"]

NoMonitor = demo.NoMonitor


class Load(Protocol):
    """A model that is trained step by step."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, mon: Any) -> None:
        """One optimizer step; `mon` has the calls of a watched loop."""
        ...


class Gpt:
    """The GPT of `examples/gpt` as its demo trains it: real text, four micro-batches a step.

    Args:
        overrides: `train.batch=2` and the like.
    """

    def __init__(self, *overrides: str) -> None:
        config = demo.read_config(ROOT / "examples" / "gpt" / "train.yaml", overrides)
        self._training = demo.Training(
            demo.section_of(config, "model", demo.ModelConfig),
            demo.section_of(config, "data", demo.DataConfig),
            demo.section_of(config, "train", demo.TrainConfig),
        )
        self.model, self.optimizer = self._training.model, self._training.optimizer
        self.name = f"GPT of {self._training.parameters / 1e6:.1f} M parameters"

    def step(self, mon: Any) -> None:
        self._training.step(mon)


class Mlp:
    """Five square layers with GELU, 21 M parameters, on random inputs."""

    def __init__(self, batch: int = 4096, width: int = 2048) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(5):
            layers += [nn.Linear(width, width), nn.GELU()]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._inputs = torch.randn(batch, width)
        self.name = f"MLP of {sum(p.numel() for p in self.model.parameters()) / 1e6:.0f} M, batch {batch}"

    def step(self, mon: Any) -> None:
        loss = self.model(self._inputs).square().mean()
        loss.backward()
        mon.micro_end(loss=loss.detach(), tokens=len(self._inputs))
        mon.grads_ready()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mon.step_end(samples=len(self._inputs))


class ManyParameters:
    """10,000 parameters of 16 numbers with a gradient each: what the engine itself costs."""

    def __init__(self, count: int = 10_000) -> None:
        self.model = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(count))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        for parameter in self.model:
            parameter.grad = torch.full((16,), 1e-3)
        self.name = f"{count:,} parameters"

    def step(self, mon: Any) -> None:
        mon.micro_end(loss=1.0, tokens=1)
        mon.grads_ready()
        self.optimizer.step()
        mon.step_end()
