"""The tiny model as pipeline stages and virtual chunks: the path on which G1 and G2 send no micro-batch events.

No recorded trace has a pipeline: order and normalisation follow the contract's "inferred" lines.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as distributed
import torch.nn.functional as F
from torch import nn

from tests.hosts.hyperparallel.model import IGNORE, VOCAB, WIDTH, TinyMoeLM

PARTS = ("embed", "mlp", "moe", "head")
CHILDREN = {"embed": ("embed",), "mlp": ("up", "down"), "moe": ("moe",), "head": ("head",)}


class Stage(nn.Module):
    """Some consecutive parts of the model, under the names that they have in it."""

    def __init__(self, model: TinyMoeLM, parts: tuple[str, ...]) -> None:
        super().__init__()
        self.parts = parts
        for child in (child for part in parts for child in CHILDREN[part]):
            setattr(self, child, getattr(model, child))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            if part == "mlp":
                x = x + self.down(torch.tanh(self.up(x)))
            else:
                x = getattr(self, part)(x)
        return x


def stages(model: TinyMoeLM, pp: int, chunks: int, rank: int) -> list[Stage]:
    """This rank's chunks: number k of all pp * chunks is rank k % pp's."""
    total = pp * chunks
    if total not in (1, 2, 4):
        raise ValueError(f"the tiny model splits into 1, 2 or 4 stages, not {pp} x {chunks}")
    size = len(PARTS) // total
    return [Stage(model, PARTS[k * size : (k + 1) * size]) for k in range(total) if k % pp == rank]


class Schedule:
    """One micro-batch after the other through all stages, then back; adds raw loss * tokens up in the gradients."""

    def __init__(self, mine: list[Stage], pp: int, rank: int) -> None:
        self.mine, self.pp, self.rank = mine, pp, rank
        self.total = pp * len(mine)

    def step(self, batches: list[dict[str, Any]], tokens: list[int]) -> list[float]:
        """The micro-batches' mean losses, the same on every rank."""
        losses = []
        for batch, count in zip(batches, tokens, strict=True):
            loss = self._forward_backward(batch, count)
            if self.pp > 1:
                distributed.broadcast(loss, src=(self.total - 1) % self.pp)
            losses.append(float(loss))
        return losses

    def _forward_backward(self, batch: dict[str, Any], count: int) -> torch.Tensor:
        shape = (*batch["input_ids"].shape, WIDTH)
        ends: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        passed: Any = batch["input_ids"]
        loss = torch.zeros(())
        for k in range(self.total):
            if k % self.pp != self.rank:
                passed = None
                continue
            if passed is None:
                passed = torch.empty(shape)
                distributed.recv(passed, src=(k - 1) % self.pp)
            start = passed.detach()
            if k:
                start.requires_grad_()
            end = self.mine[k // self.pp](start)
            if k == self.total - 1:
                logits, labels = end[:, :-1].reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1)
                loss = F.cross_entropy(logits, labels, ignore_index=IGNORE) * batch.get("loss_factor", 1.0)
                end = loss * count
            elif (k + 1) % self.pp != self.rank:
                distributed.send(end.detach(), dst=(k + 1) % self.pp)
            ends.append((k, start, end))
            passed = end
        gradient: torch.Tensor | None = None
        for k, start, end in reversed(ends):
            if k < self.total - 1 and (k + 1) % self.pp != self.rank:
                gradient = torch.empty(shape)
                distributed.recv(gradient, src=(k + 1) % self.pp)
            end.backward(gradient)
            gradient = start.grad
            if k and (k - 1) % self.pp != self.rank:
                distributed.send(gradient, dst=(k - 1) % self.pp)
        return loss.detach()
