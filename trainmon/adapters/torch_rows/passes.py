"""Which pass a model is in: the micro-batch, evaluation, and whether the step before was thrown away.

A micro-batch begins with the first call of a chunk in training mode, and with the first after each backward pass. A step
is thrown away if a call begins when a backward pass has been there and no gradient is left: an overflow under a loss
scaler, of which the optimizer never hears.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainmon.adapters.rows_parts.names import Named
from trainmon.adapters.torch_parts.modules import is_repeated
from trainmon.adapters.torch_parts.shards import local
from trainmon.adapters.torch_rows.gradients import gradient_of
from trainmon.adapters.torch_rows.names import chunks_of
from trainmon.adapters.torch_rows.tensors import all_tensors

__all__ = ["Passes"]


@dataclass(slots=True)
class _Chunk:
    """A model, or a part of it that is called by itself."""

    depth: int = 0
    evaluating: bool = False
    micro: int = 0
    went_back: bool = False
    calls: dict[tuple[int, bool], int] = field(
        default_factory=dict
    )  # by module, and whether of repeated passes


class Passes:
    """Hooks on each chunk, which look at one flag outside the steps that are looked at.

    Args:
        parameters: whose gradients tell whether there are any left.
        dropped: called when a step turns out to have been thrown away.

    Attributes:
        on: whether this step is looked at.
    """

    def __init__(
        self,
        model: Any,
        parameters: Sequence[Named],
        failed: Callable[[Exception], None],
    ) -> None:
        self.on = False
        self.dropped: Callable[[], None] | None = None
        self._models = [(stage, chunk) for _, stage, chunk in chunks_of(model)]
        self._parameters, self._failed = parameters, failed
        self._chunks = {stage: _Chunk() for stage, _ in self._models}
        self._handles: list[Any] = []

    def install(self) -> None:
        for stage, model in self._models:
            chunk = self._chunks[stage]
            self._handles += [
                model.register_forward_pre_hook(self._before(chunk), prepend=True),
                model.register_forward_hook(self._after(chunk), always_call=True),
            ]

    def watched(self) -> str:
        """What is hooked, in words."""
        return f"{len(self._models)} models"

    def arm(self, on: bool) -> None:
        """A step begins."""
        self.on = on
        self._forget()

    def remove(self) -> None:
        """Idempotent."""
        self.arm(False)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def is_evaluation(self, stage: int, module: nn.Module) -> bool:
        """Of the running pass; of a module that is called by itself its own mode counts."""
        chunk = self._chunks[stage]
        return chunk.evaluating if chunk.depth else _evaluates(module)

    def count(self, stage: int, module: nn.Module, repeated: bool) -> tuple[int, int]:
        """The micro-batch, from 1, and which call of the module in it this is, from 0.

        Args:
            repeated: calls that checkpointing repeats are counted by themselves, so that each has its first one's
                number.
        """
        chunk = self._chunks[stage]
        key = id(module), repeated
        number = chunk.calls.get(key, 0)
        chunk.calls[key] = number + 1
        return max(chunk.micro, 1), number

    # -- hooks ------------------------------------------------------------------------------------------------------

    def _before(self, chunk: _Chunk) -> Callable[..., None]:
        def hook(module: nn.Module, _arguments: Any) -> None:
            if not self.on or torch.compiler.is_compiling():
                return
            try:
                chunk.depth += 1
                if chunk.depth == 1:
                    chunk.evaluating = _evaluates(module)
                    if not chunk.evaluating and not is_repeated():
                        self._begin(chunk)
            except Exception as error:
                self._failed(error)

        return hook

    def _begin(self, chunk: _Chunk) -> None:
        if chunk.went_back and not self._has_gradients():
            depth = chunk.depth
            self._forget()
            chunk.depth = depth
            if self.dropped is not None:
                self.dropped()
        if chunk.micro == 0 or chunk.went_back:
            chunk.micro += 1
            chunk.went_back = False
            chunk.calls.clear()

    def _after(self, chunk: _Chunk) -> Callable[..., None]:
        def went_back(_gradient: torch.Tensor) -> None:
            chunk.went_back = True

        def hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
            if not self.on or torch.compiler.is_compiling():
                return
            try:
                chunk.depth = max(chunk.depth - 1, 0)
                if chunk.depth == 0 and not chunk.evaluating:
                    for tensor in all_tensors(output):
                        if tensor.requires_grad:
                            tensor.register_hook(went_back)  # type: ignore[no-untyped-call]
            except Exception as error:
                self._failed(error)

        return hook

    def _has_gradients(self) -> bool:
        """Whether anything is left of what backward passes have added: `zero_grad` leaves nothing, or zeros. For those a
        device is not asked, which training would have to wait for."""
        gradients = (gradient_of(one.thing) for one in self._parameters if one.thing.requires_grad)
        pieces = [local(one) for one in gradients if one is not None]
        pieces.sort(key=torch.Tensor.numel)  # the first will mostly do
        return any(one.device.type != "cpu" or bool(one.any()) for one in pieces)

    def _forget(self) -> None:
        for chunk in self._chunks.values():
            chunk.depth, chunk.micro, chunk.went_back, chunk.evaluating = 0, 0, False, False
            chunk.calls.clear()


def _evaluates(module: nn.Module) -> bool:
    return not (module.training and torch.is_grad_enabled())
