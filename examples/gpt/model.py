"""A small GPT over bytes: pre-norm blocks, causal attention, output head tied to the token embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: One token per byte value.
VOCABULARY = 256

#: Target value that is not counted in the loss: nothing follows here.
NOT_COUNTED = -100


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model; `context` is the longest sequence in bytes."""

    width: int = 256
    layers: int = 4
    heads: int = 8
    context: int = 128


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the stream that it read through a norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.mlp_in = nn.Linear(config.width, 4 * config.width)
        self.mlp_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same shape."""
        batch, time, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.norm_2(x))))
        return out


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ValueError(f"model.width: {config.width} is no multiple of model.heads, {config.heads}")
        self.config = config
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        """Normal(0, 0.02) weights, so that the first loss is close to ln 256: every byte equally likely."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, time] int64 -> [batch, time, 256] logits."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = F.linear(self.norm(x), self.token.weight)
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nat per byte: the mean over the targets that are not `NOT_COUNTED`."""
        logits = self(tokens).float()
        loss: Tensor = F.cross_entropy(
            logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=NOT_COUNTED
        )
        return loss

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
        """`prompt` and `length` further bytes, drawn from the softmax of logits / temperature."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor(list(prompt))[None]
        for _ in range(length):
            logits = self(tokens[:, -self.config.context :])[:, -1].float()
            following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, following], dim=1)
        return bytes(tokens[0].tolist())
