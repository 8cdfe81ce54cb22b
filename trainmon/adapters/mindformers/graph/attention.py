"""Attention layers of a trainer in PyNative context, where cells may be looked into: queries and keys on their way.

Recognised are layers that turn queries and keys by their own ``apply_rotary_emb`` (Llama and its kin), after which they
are multiplied as they are, and a fused ``core_attention`` with inputs [batch, heads, sequence, width]. Logits are those
under the causal mask.
"""

from __future__ import annotations

import math
from typing import Any

from trainmon.adapters.mindspore_parts.parameters import host_view
from trainmon.events import AttentionLayer, AttentionSeen, QueryKey
from trainmon.monitor import TrainMonitor

__all__ = ["AttentionHooks"]


class AttentionHooks:
    """Hooks on the attention layers of a model.

    Args:
        model: below the cells that train it.
    """

    def __init__(self, model: Any, monitor: TrainMonitor) -> None:
        self._monitor = monitor
        self._cells: dict[str, tuple[Any, bool]] = {}  # by layer: the cell, and whether its outputs are meant
        self._handles: list[Any] = []
        self._calls: dict[str, int] = {}
        walk = getattr(model, "cells_and_names", None)
        for path, cell in () if walk is None else walk():
            rotary = getattr(cell, "apply_rotary_emb", None)
            if hasattr(rotary, "register_forward_hook") and getattr(cell, "softmax", None) is not None:
                self._cells[path] = rotary, True
            elif path.endswith("core_attention") and getattr(cell, "input_layout", "") == "BNSD":
                self._cells[path] = cell, False

    def layers(self) -> list[AttentionLayer]:
        """Those that were found."""
        return [AttentionLayer(name) for name in self._cells]

    def begin(self) -> None:
        """A step begins."""
        self._calls.clear()

    def install(self) -> None:
        """Puts the hooks where somebody listens, and takes them away where nobody does. Idempotent."""
        if not (self._monitor.listens(AttentionSeen) and self._monitor.config.attention is not None):
            self.remove()
        elif self._monitor.config.attention.hooks and not self._handles:
            selection = self._monitor.config.selection("attention")
            self._handles = [
                cell.register_forward_hook(self._hook(layer, meant))
                for layer, (cell, meant) in self._cells.items()
                if layer in selection
            ]

    def remove(self) -> None:
        """Idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, layer: str, outputs_meant: bool) -> Any:
        def look(cell: Any, inputs: Any, outputs: Any) -> None:
            if getattr(cell, "training", True):
                self._monitor.offer(
                    AttentionSeen, lambda: self._seen(layer, outputs if outputs_meant else inputs)
                )

        return look

    def _seen(self, layer: str, tensors: Any) -> AttentionSeen | None:
        if not isinstance(tensors, tuple | list) or len(tensors) < 2 or len(tensors[0].shape) != 4:
            return None
        micro = self._calls.get(layer, 0)
        self._calls[layer] = micro + 1
        query, key = host_view(tensors[0]), host_view(tensors[1])
        scale = 1 / math.sqrt(query.shape[-1])
        return AttentionSeen(layer, QueryKey(query, key, scale), micro)
