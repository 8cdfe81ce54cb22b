"""The auxiliary loss of a model's expert layers, which each keeps of its last call (``last_aux_loss``)."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["AuxiliaryLoss"]


class AuxiliaryLoss:
    """Finds the layers when it is first asked: they have the attribute then, if ever."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model: torch.nn.Module | None = model
        self._layers: list[Any] = []

    @property
    def known(self) -> bool:
        """Whether there are layers that tell."""
        return bool(self._layers)

    def of_micro_batch(self) -> torch.Tensor | None:
        """Mean over the layers of what they keep, as the host means it; None where no layer tells."""
        if self._model is not None:
            self._layers = [module for module in self._model.modules() if hasattr(module, "last_aux_loss")]
            self._model = None
        kept = [layer.last_aux_loss for layer in self._layers]
        losses = [loss for loss in kept if loss is not None]
        if not losses:
            return None
        with torch.no_grad():
            first = losses[0]
            alike = all(isinstance(loss, torch.Tensor) and loss.shape == first.shape for loss in losses)
            if alike and len({loss.device for loss in losses}) == 1:  # two operations, however many layers
                return torch.stack(losses).float().mean()
            numbers = [torch.as_tensor(loss).float().reshape(()) for loss in losses]
            return torch.stack([number.to(numbers[0].device) for number in numbers]).mean()
