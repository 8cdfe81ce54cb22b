"""What the examples of this folder have in common: the small GPT of `examples/gpt` and its text, and how a step ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "gpt"))

from data import ByteText, DataConfig
from model import GPT, ModelConfig

STEPS, BATCH, CONTEXT = 20, 8, 64


def make_model() -> GPT:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return GPT(ModelConfig(width=64, layers=2, heads=4, context=CONTEXT))


def make_data(share: int) -> ByteText:
    """The windows of one share of the data: ranks of one share are fed alike."""
    return ByteText(DataConfig(seed=share), CONTEXT, BATCH)


def finish_step(
    mon: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Any,
    tokens: int,
    clip: float | None = 1.0,
) -> None:
    """Everything after the backward pass."""
    mon.micro_end(loss, tokens)
    mon.grads_ready(clip_norm=clip)
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    mon.step_end(samples=BATCH)
