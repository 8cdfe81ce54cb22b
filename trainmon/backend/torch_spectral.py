"""Largest eigenvalue of W'W on a device: block power iteration, bounded from below by Rayleigh and Ritz.

A few products with a block of vectors a visit, begun from the block of the last one; nothing waits for the device. The
bound is certain up to rounding in float32, whatever the block: it is a Ritz value. How near it is grows with the visits.
"""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["block_power"]

_VECTORS, _FRESH, _PASSES = 8, 2, 3


def block_power(
    matrix: torch.Tensor, state: Any | None, seed: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], Any]:
    """One visit.

    Args:
        matrix: W [m, n]; of 16 bits it is widened, for the time of the call.
        state: what the last visit returned.
        seed: of the first draws.

    Returns:
        The Gram matrices V'V and (WV)'(WV) of the last block, and the state: the next block [n, 8] and its generator.
    """
    wide = matrix.detach() if matrix.dtype in (torch.float32, torch.float64) else matrix.detach().float()
    columns = wide.shape[1]
    width = min(_VECTORS, columns)
    if state is None or state[0].shape[0] != columns or state[0].device != wide.device:
        generator = torch.Generator(wide.device).manual_seed(seed % (1 << 63))
        block = torch.randn(columns, width, generator=generator, device=wide.device, dtype=wide.dtype)
    else:
        block, generator = state[0].to(wide.dtype), state[1]
        if width > _FRESH:  # what grew elsewhere gets a way in
            fresh = torch.randn(columns, _FRESH, generator=generator, device=wide.device, dtype=wide.dtype)
            block = torch.cat([block[:, : width - _FRESH], fresh / math.sqrt(columns)], dim=1)
    image = wide @ block
    for _ in range(_PASSES):
        block = _spread(wide.T @ image)
        image = wide @ block
    gram, power = block.T @ block, image.T @ image
    # The leading vectors come first, so that the fresh ones replace the least.
    order = torch.argsort(power.diagonal(), descending=True)
    return (gram, power), (block[:, order], generator)


def _spread(block: torch.Tensor) -> torch.Tensor:
    """Nearly orthonormal columns of the same span, without waiting for the device."""
    scaled = block / block.abs().amax().clamp_min(torch.finfo(block.dtype).tiny)
    for _ in (1, 2):
        gram = scaled.T @ scaled
        shift = 1e-6 * gram.diagonal().sum() + torch.finfo(block.dtype).tiny
        root, _info = torch.linalg.cholesky_ex(
            gram + shift * torch.eye(len(gram), device=gram.device, dtype=gram.dtype)
        )
        scaled = torch.linalg.solve_triangular(root, scaled.T, upper=False).T
    return scaled
