"""What the model's forward tells of a step's data, where the host has no event: that they are there, how many rows.

Between the event that begins a step and the first forward the first two generations read all data of the step and count
their tokens over the ranks. A pipeline's stages wait for each other there, and see no whole batch: nothing is told.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainmon.adapters.hyperparallel.reading import read
from trainmon.adapters.torch_parts.modules import is_repeated
from trainmon.events import DataBegin, DataEnd
from trainmon.monitor import TrainMonitor

__all__ = ["Batches"]


class Batches:
    """The data of the running step.

    Attributes:
        samples: rows so far; None: not told.
    """

    def __init__(self, monitor: TrainMonitor) -> None:
        self._monitor = monitor
        self._handle: Any = None
        self._waits = False
        self.samples: int | None = None

    def install(self, trainer: Any) -> None:
        """Hooks the model, if somebody wants to know and it can tell."""
        config, model = self._monitor.config, read(trainer, "model")
        wanted = config.timing is not None or config.throughput
        whole = read(trainer, "pp_schedule") is None and not isinstance(model, torch.nn.ModuleList)
        if wanted and whole and isinstance(model, torch.nn.Module):
            self._handle = model.register_forward_pre_hook(self._forward, with_kwargs=True)

    def remove(self) -> None:
        """Idempotent."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def step_begins(self) -> None:
        """From now on the host reads data."""
        self.samples = None
        if self._handle is not None:
            self._waits = True
            self._monitor.handle(DataBegin(time.perf_counter()))

    def step_ends(self) -> None:
        """What is called from now on is not training."""
        self._waits = False
        self.samples = None

    def _forward(self, model: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()) or is_repeated():
            return
        if self._waits:
            self._waits = False
            self._monitor.handle(DataEnd(time.perf_counter()))
        rows = _rows(arguments, keywords)
        if rows is not None:
            self.samples = (self.samples or 0) + rows


def _rows(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> int | None:
    """Of labels, else of token ids, else of the first argument that may be ids."""
    for one in (keywords.get("labels"), keywords.get("input_ids"), *arguments[:1]):
        if isinstance(one, torch.Tensor) and one.ndim >= 2 and not one.is_floating_point():
            return int(one.shape[0])
    return None
