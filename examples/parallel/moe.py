"""A mixture of experts, watched: every rank has its own text and two of the four experts, whose tokens come to it.

torchrun --standalone --nproc-per-node 2 examples/parallel/moe.py
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as distributed
from text import STEPS, finish_step, make_data, make_model
from torch import Tensor, nn
from torch.nn import functional as F

import trainmon

EXPERTS, CHOSEN, HIDDEN = 4, 2, 64


class Exchange(torch.autograd.Function):
    """Forward all ranks' tokens, backward the sum of what the ranks' experts make of this rank's."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return _own_of_the_sum(gradient)


class Return(torch.autograd.Function):
    """Forward the sum of all ranks' experts for this rank's tokens; backward what the tokens of all ranks want."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return _own_of_the_sum(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return Exchange.forward(context, gradient)


def _own_of_the_sum(x: Tensor) -> Tensor:
    total = x.clone()
    distributed.all_reduce(total)
    return total.chunk(distributed.get_world_size())[distributed.get_rank()]


class Experts(nn.Module):
    """This rank's experts in two tensors, as grouped matrix products take them."""

    def __init__(self, width: int, held: range) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        wide = torch.randn(EXPERTS, width, HIDDEN, generator=generator) * 0.02
        back = torch.randn(EXPERTS, HIDDEN, width, generator=generator) * 0.02
        self.w1, self.w2 = (nn.Parameter(w[held.start : held.stop].clone()) for w in (wide, back))

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        """[tokens, width], [tokens, experts here] -> [tokens, width]"""
        out = torch.einsum("eth,ehw->etw", F.gelu(torch.einsum("tw,ewh->eth", x, self.w1)), self.w2)
        return torch.einsum("etw,te->tw", out, shares)


class Mixture(nn.Module):
    """In the place of a perceptron: each token goes to the two experts that its router likes best."""

    def __init__(self, width: int, held: range) -> None:
        super().__init__()
        self.held, self.top_k = held, CHOSEN
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.experts = Experts(width, held)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.top_k)
        shares = torch.zeros(len(tokens), EXPERTS).scatter(-1, chosen, weights)
        everything, wanted = Exchange.apply(tokens), Exchange.apply(shares)
        mixed = self.experts(everything, wanted[:, self.held.start : self.held.stop])
        return Return.apply(mixed).view_as(x)


def average_gradients(model: nn.Module) -> None:
    """Over the ranks; those of experts have come from all ranks' tokens already."""
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            distributed.all_reduce(parameter.grad)
        parameter.grad /= distributed.get_world_size()


def main(output: str) -> None:
    distributed.init_process_group("gloo")
    rank, share = distributed.get_rank(), EXPERTS // distributed.get_world_size()
    model = make_model()
    for block in model.blocks:
        block.mlp_in = Mixture(model.config.width, range(rank * share, (rank + 1) * share))
        block.mlp_out = nn.Linear(model.config.width, model.config.width)
        nn.init.normal_(block.mlp_out.weight, std=0.02, generator=torch.Generator().manual_seed(1))
        nn.init.zeros_(block.mlp_out.bias)
        nn.init.normal_(block.mlp_in.gate.weight, std=0.02, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = make_data(share=rank)
    # Plain tensors of one name and shape on both ranks, and not replicas: the loop must say so.
    with trainmon.attach(
        model,
        optimizer,
        total_steps=STEPS,
        output_dir=output,
        run_name="moe",
        moe={"per_expert": True, "ep_size": distributed.get_world_size()},
        attention={"every": 5},
        piece_of=lambda name, _: (rank * share, EXPERTS) if ".experts." in name else None,
    ) as mon:
        for _ in range(STEPS):
            with mon.data_wait():
                batch = data.next_batch()
            loss = model.loss(batch.inputs, batch.targets)
            loss.backward()
            average_gradients(model)
            finish_step(mon, model, optimizer, loss, batch.tokens, clip=None)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs")
