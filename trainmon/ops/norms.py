"""Norms of many tensors in one call, and the plain read that their speed is measured against."""

from __future__ import annotations

import math
from typing import Literal, overload

import numpy as np
import numpy.typing as npt

from trainmon.ops._extension import Tensors, _core

# The codes of tm_norm_order (csrc/core/tm_reduce.h).
_ORDER_CODES = {2.0: 0, 1.0: 1, math.inf: 2}


@overload
def multi_norm(
    tensors: Tensors, ord: float = ..., per_tensor: Literal[False] = ..., threads: int = ...
) -> np.float64: ...
@overload
def multi_norm(
    tensors: Tensors, ord: float = ..., *, per_tensor: Literal[True], threads: int = ...
) -> tuple[np.float64, npt.NDArray[np.float64]]: ...
@overload
def multi_norm(
    tensors: Tensors, ord: float, per_tensor: Literal[True], threads: int = ...
) -> tuple[np.float64, npt.NDArray[np.float64]]: ...


def multi_norm(
    tensors: Tensors, ord: float = 2, per_tensor: bool = False, threads: int = 1
) -> np.float64 | tuple[np.float64, npt.NDArray[np.float64]]:
    """The norm of all tensors taken as one vector, accumulated in float64.

    Args:
        tensors: one array or an iterable of arrays, any shapes, any mix of dtypes.
        ord: 2 (root of the sum of squares), 1 (sum of magnitudes) or `math.inf` (largest magnitude).
        per_tensor: also return the norm of each tensor.
        threads: workers for large inputs; they end with the call and don't change a bit of the result.

    Returns:
        The norm, or with `per_tensor` the pair (norm, float64 array of shape [number of tensors]), in the
        unit of the elements. NaN if any element is NaN, else inf if any is infinite, as torch has it. No
        tensors, or only empty ones: 0. float64 input whose squares leave the range of float64 is read once
        more, scaled.

    Raises:
        ValueError: another `ord`, or `threads` below 1.
        TypeError: an element that can't be read; the message names its position.

    Formula: docs/numerics.md, "Norms".
    """
    try:
        code = _ORDER_CODES[ord]
    except (KeyError, TypeError):
        raise ValueError(f"ord must be 2, 1 or math.inf, not {ord!r}") from None
    if per_tensor:
        total, each = _core.multi_norm(tensors, code, True, threads)
        return np.float64(total), each
    return np.float64(_core.multi_norm(tensors, code, False, threads))


def plain_read(tensors: Tensors) -> int:
    """Reads every byte of all tensors once, as fast as this machine reads memory, on one thread.

    The reference of the benchmarks: it prefetches as the kernels do and computes next to nothing. Takes what
    `multi_norm` takes, through the same doors. Returns a checksum without meaning, so that no compiler can
    leave the read out.

    Raises:
        TypeError: an element that can't be read.
    """
    return _core.plain_read(tensors)
