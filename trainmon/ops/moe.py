"""Expert ids of mixture-of-experts routers: how many per expert, and how many changed."""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from trainmon.ops._doubles import doubles
from trainmon.ops._extension import Array, Tensors, _core


@overload
def expert_load(
    indices: Tensors, num_experts: int, per_tensor: Literal[False] = ..., threads: int = ...
) -> tuple[npt.NDArray[np.int64], int]: ...
@overload
def expert_load(
    indices: Tensors, num_experts: int, per_tensor: Literal[True], threads: int = ...
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...


def expert_load(
    indices: Tensors, num_experts: int, per_tensor: bool = False, threads: int = 1
) -> tuple[npt.NDArray[np.int64], int | npt.NDArray[np.int64]]:
    """How often each expert was chosen.

    Args:
        indices: expert ids as the router's top-k gives them, of any integer dtype, shape and layout; one
            array or an iterable of arrays.
        num_experts: E, from 1 to 2^24. An id outside [0, E) is counted as invalid and otherwise ignored.
        per_tensor: counts of each array for itself, one layer an array for example, instead of their sum.
        threads: workers for large inputs; they end with the call and don't change the result.

    Returns:
        (counts, invalid): int64 counts of shape [E] and the number of invalid ids; with `per_tensor` counts
        of shape [number of arrays, E] and an int64 array [number of arrays].

    Raises:
        TypeError: ids that are no integers (bool too), or an element that can't be read; the message names
            its position.
        ValueError: `num_experts` or `threads` out of range.
        MemoryError: no memory for the counts of very many experts.

    Formula: c_i = number of ids equal to i; docs/kernels/moe.md.
    """
    return _core.expert_load(indices, num_experts, per_tensor, threads)


def assign_churn(before: Array, after: Array, num_experts: int) -> float:
    """The share of assignments that changed between two routings of the same tokens.

    Args:
        before, after: expert ids of the same tokens, shape [..., k] both, of any integer dtype.
        num_experts: E; an id outside [0, E) has nothing in common with any other.

    Returns:
        1 - (mean over tokens of the number of experts that both rows have) / k, in [0, 1]; the order within
        a row doesn't matter. NaN without tokens. Means of several calls weigh by their numbers of tokens.

    Raises:
        TypeError: ids that are no integers or can't be read.
        ValueError: shapes that differ or have no last axis; `num_experts` out of range.

    Formula: docs/kernels/moe.md.
    """
    shape, other = _shape(before, "before"), _shape(after, "after")
    if shape != other:
        raise ValueError(f"before has shape {shape} and after {other}: they must be of the same tokens")
    if not shape or shape[-1] == 0:
        raise ValueError(f"the last axis must hold a token's experts, shape {shape} has none")
    count = int(np.prod(shape, dtype=np.int64))
    common = _core.common_assignments(before, after, shape[-1], num_experts)
    return 1 - common / count if count else float("nan")


def _shape(array: Array, name: str) -> tuple[int, ...]:
    """The shape as arrays of all kinds state it."""
    shape = getattr(array, "shape", None)
    if shape is None:
        raise TypeError(f"{name} must be one array with a shape, not {type(array).__name__}")
    return tuple(int(length) for length in shape)


def expert_migration(old_map: npt.ArrayLike, new_map: npt.ArrayLike) -> Any:
    """The number of experts whose rank changed between two placements.

    Args:
        old_map, new_map: the rank of each expert, integers of shape [E] or [layers, E]; with replicas
            [layers, E, copies], -1 where there is no copy. The order of an expert's copies doesn't matter.

    Returns:
        An int64 number, or an array of shape [layers].

    Raises:
        ValueError: shapes that differ or have no axis.
        TypeError: ranks that are no integers.
    """
    old, new = np.asarray(old_map), np.asarray(new_map)
    for name, ranks in (("old_map", old), ("new_map", new)):
        if ranks.dtype.kind not in "iu":
            raise TypeError(f"{name} must hold integer ranks, not {ranks.dtype}")
    if old.shape != new.shape or old.ndim not in (1, 2, 3):
        raise ValueError(
            f"old_map has shape {old.shape} and new_map {new.shape}: both must be [E], [layers, E] or "
            "[layers, E, copies]"
        )
    moved = (np.sort(old) != np.sort(new)).any(axis=-1) if old.ndim == 3 else old != new
    return np.int64(0) + np.count_nonzero(moved, axis=-1)


def bias_span(bias: npt.ArrayLike) -> Any:
    """max b - min b of router biases [E] or [layers, E], as float64; NaN if one of them is.

    Raises:
        ValueError: no experts.
    """
    values = _biases(bias)
    return values.max(axis=-1) - values.min(axis=-1)


def bias_saturated(bias: npt.ArrayLike, cap: float) -> Any:
    """The share of router biases [E] or [layers, E] that stand at the cap, abs(b) >= `cap`, as float64.

    Compares in float64: biases kept in float32 need a `cap` that float32 holds, such as `np.float32(0.1)`.
    NaN if one of the layer's biases is NaN.

    Raises:
        ValueError: no experts, or a `cap` that is not positive.
    """
    values = np.abs(_biases(bias))
    if not cap > 0:
        raise ValueError(f"cap must be positive, not {cap!r}")
    share = np.mean(values >= np.float64(cap), axis=-1)
    return np.where(np.isnan(values).any(axis=-1), np.nan, share)[()]


def _biases(bias: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = doubles(bias, "bias")
    if values.ndim == 0 or values.shape[-1] == 0:
        raise ValueError(f"bias must have shape [..., E], not {values.shape}")
    return values
