"""The largest attention logits that the model keeps itself, which it does for Muon's QK-clip and for the host's
``MaxLogitsMonitor``.

They are read before the update, when all micro-batches are through: callbacks before ours may have put them back to zero
at the end of the step. Where nobody does that, it is done here, and the lines of the host's monitor are printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainmon.adapters.mindformers.pynative.values import read_together
from trainmon.adapters.mindspore_parts.parameters import own_piece
from trainmon.events import AttentionLayer, AttentionSeen, MaxLogits
from trainmon.monitor import TrainMonitor

__all__ = ["TrackedLogits"]

_SUFFIX = ".max_logits_val"


class TrackedLogits:
    """Makes :class:`AttentionSeen` of what the chunks of a model have kept.

    Attributes:
        values: of this step, by the host's name; empty: not read.
    """

    def __init__(self, cells: Sequence[Any], monitor: TrainMonitor, addressable: bool) -> None:
        self._cells = [_unwrapped(cell) for cell in cells]
        self._monitor, self._addressable = monitor, addressable
        self.values: dict[str, Any] = {}

    def known(self) -> list[AttentionLayer]:
        """The layers that keep logits, with the number of their heads here."""
        return [
            AttentionLayer(name.removesuffix(_SUFFIX), int(tensor.size))
            for name, tensor in self._tensors().items()
        ]

    @property
    def tracked(self) -> bool:
        """Whether the model keeps any."""
        return bool(self._tensors())

    def arm(self) -> None:
        """A step begins."""
        self.values = {}

    def look(self) -> None:
        """All micro-batches are through; the values are kept as arrays."""
        if self.values or not self._monitor.wants(AttentionSeen):
            return

        def read() -> None:
            tensors = self._tensors()
            arrays = read_together(list(tensors.values()), self._addressable)
            self.values = {
                name: array.reshape(-1) for name, array in zip(tensors, arrays, strict=True) if array.size
            }

        self._monitor.guard(read)
        for name, array in self.values.items():
            # A layer of which nothing was kept stands at zero.
            if np.any(array):
                layer = name.removesuffix(_SUFFIX)
                self._monitor.handle(AttentionSeen(layer, MaxLogits(array.astype(np.float64))))

    def reset_left_over(self) -> bool:
        """Puts what the last step has left back to zero, if nobody has; whether that was needed."""
        if not self.values:
            return False
        left = any(np.any(own_piece(tensor).asnumpy()) for tensor in self._tensors().values())
        if left:
            for cell in self._cells:
                if hasattr(cell, "reset_max_attention_logit"):
                    cell.reset_max_attention_logit()
        return left

    def _tensors(self) -> dict[str, Any]:
        """By name. What of several chunks has the same name gets the chunk's number in front."""
        found: dict[str, Any] = {}
        for number, cell in enumerate(self._cells):
            kept = cell.get_max_attention_logit() if hasattr(cell, "get_max_attention_logit") else None
            for name, tensor in (kept or {}).items():
                found[name if name not in found else f"{number}.{name}"] = tensor
        return found


def _unwrapped(cell: Any) -> Any:
    """The model in a wrapper, or in a task's model."""
    while not hasattr(cell, "get_max_attention_logit"):
        inner = getattr(cell, "network", None) or getattr(cell, "model", None)
        if inner is None or inner is cell:
            return cell
        cell = inner
    return cell
