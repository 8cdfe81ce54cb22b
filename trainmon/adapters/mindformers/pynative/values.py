"""What is read of the host's tensors: the cells of a model, and small tensors together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import ops

from trainmon.adapters.mindspore_parts.parameters import own_piece

__all__ = ["cells_of", "read_together"]


def cells_of(model: Any) -> list[Any]:
    """The cells of a model: a list of a pipeline's chunks since 2.0.0, one cell in 1.9.0."""
    return [cell for cell in model if cell is not None] if isinstance(model, list | tuple) else [model]


def read_together(tensors: Sequence[Any], addressable: bool) -> list[Any]:
    """Small tensors as arrays, in one read where they are on a device."""
    if addressable or len(tensors) < 2:
        return [np.array(own_piece(tensor).asnumpy()) for tensor in tensors]
    pieces = [own_piece(tensor).astype(mindspore.float32).reshape(-1) for tensor in tensors]
    flat, found, at = ops.concat(pieces).asnumpy(), [], 0
    for tensor, piece in zip(tensors, pieces, strict=True):
        found.append(flat[at : at + int(piece.size)].reshape(own_piece(tensor).shape))
        at += int(piece.size)
    return found
