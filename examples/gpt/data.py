"""Bytes of real English text: the language reference that every CPython carries as `pydoc_data.topics`.

A topic is a document. A window is cut from one document and may be shorter than the context at its end;
the rest of the row is filled up and not counted in the loss. So token counts differ from one micro-batch
to the next, as they do with real data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from model import NOT_COUNTED
from torch import Tensor


@dataclass(frozen=True)
class DataConfig:
    """`held_out`: share of the bytes kept for evaluation, in whole documents. `seed`: order of windows."""

    held_out: float = 0.1
    seed: int = 1


@dataclass(frozen=True)
class Batch:
    """`inputs` and `targets` [batch, context] int64; `tokens`: how many targets are counted in the loss."""

    inputs: Tensor
    targets: Tensor
    tokens: int


def documents() -> list[bytes]:
    """All topics, each paragraph once: they quote one another, and evaluation must not see training text."""
    seen: set[str] = set()
    texts = []
    for topic in topics.values():
        fresh = [paragraph for paragraph in topic.split("\n\n") if paragraph not in seen]
        seen.update(fresh)
        if fresh:
            texts.append("\n\n".join(fresh).encode())
    return texts


class ByteText:
    """Training windows in a seeded random order, and the held-out text as one pass of windows.

    Args:
        context: window length in bytes.
        batch: windows in a micro-batch.
    """

    def __init__(self, config: DataConfig, context: int, batch: int) -> None:
        if not 0 < config.held_out < 1:
            raise ValueError(f"data.held_out: expected a share between 0 and 1, not {config.held_out}")
        texts = documents()
        # The split is the same whatever the seed, so that runs with different seeds can be compared.
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
        wanted = config.held_out * sum(map(len, texts))
        held: list[bytes] = []
        while sum(map(len, held)) < wanted and len(order) > 1:
            held.append(texts[order.pop()])
        self.training = [torch.frombuffer(bytearray(texts[i]), dtype=torch.uint8) for i in sorted(order)]
        self.held_out = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in held]
        self.context = context
        self.batch = batch
        self._generator = torch.Generator().manual_seed(config.seed)
        self._ends = torch.tensor([len(text) - 1 for text in self.training]).cumsum(0)

    def sizes(self) -> tuple[int, int]:
        """Bytes to train on, bytes held out."""
        return sum(map(len, self.training)), sum(map(len, self.held_out))

    def next_batch(self) -> Batch:
        """Windows that begin at random bytes, every byte of the training text equally likely."""
        starts = torch.randint(int(self._ends[-1]), (self.batch,), generator=self._generator)
        which = torch.searchsorted(self._ends, starts, right=True)
        windows = []
        for start, index in zip(starts.tolist(), which.tolist(), strict=True):
            text = self.training[index]
            begin = start - int(self._ends[index]) + len(text) - 1
            windows.append(text[begin : begin + self.context + 1])
        return self._stack(windows)

    def held_out_batches(self) -> Iterator[Batch]:
        """Every held-out byte but the first of a document is a target once."""
        windows = [
            text[begin : begin + self.context + 1]
            for text in self.held_out
            for begin in range(0, len(text) - 1, self.context)
        ]
        for first in range(0, len(windows), self.batch):
            yield self._stack(windows[first : first + self.batch])

    def _stack(self, windows: list[Tensor]) -> Batch:
        inputs = torch.zeros(len(windows), self.context, dtype=torch.int64)
        targets = torch.full_like(inputs, NOT_COUNTED)
        for row, window in enumerate(windows):
            inputs[row, : len(window) - 1] = window[:-1]
            targets[row, : len(window) - 1] = window[1:]
        return Batch(inputs, targets, sum(len(window) - 1 for window in windows))
