"""Largest eigenvalue of W'W on a device: block power iteration by MindSpore's operators, bounded from below by Ritz.

As ``torch_spectral``, but for the columns of a block, which are only scaled between products: they come nearer to each
other, and what matters is the leading one.
"""

from __future__ import annotations

import math
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops

__all__ = ["block_power"]

_VECTORS, _FRESH, _PASSES = 8, 2, 3


def block_power(matrix: Any, state: Any | None, seed: int) -> tuple[tuple[Any, Any], Any]:
    """One visit.

    Args:
        matrix: W [m, n]; of 16 bits it is widened, for the time of the call.
        state: what the last visit returned.
        seed: of the first draws.

    Returns:
        The Gram matrices V'V and (WV)'(WV) of the last block, flat, and the state: the block [n, 8] and its generator.
    """
    wide = matrix.astype(mindspore.float32)
    columns = int(wide.shape[1])
    width = min(_VECTORS, columns)
    if state is None or state[0].shape[0] != columns:
        random = np.random.default_rng(seed % (1 << 63))
        block = Tensor(random.standard_normal((columns, width)).astype(np.float32))
    else:
        block, random = state
        if width > _FRESH:  # what grew elsewhere gets a way in
            fresh = random.standard_normal((columns, _FRESH)) / math.sqrt(columns)
            block = ops.concat([block[:, : width - _FRESH], Tensor(fresh.astype(np.float32))], 1)
    turned = wide.T
    image = ops.matmul(wide, block)
    for _ in range(_PASSES):
        block = ops.matmul(turned, image)
        norms = ops.sqrt(ops.square(block).sum(0, keepdims=True))
        block = block / ops.maximum(norms, ops.full_like(norms, 1e-30))
        image = ops.matmul(wide, block)
    gram, power = ops.matmul(block.T, block), ops.matmul(image.T, image)
    return (gram.reshape(-1), power.reshape(-1)), (block, random)
