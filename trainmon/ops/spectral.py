"""Stable rank of weight matrices with a certified interval, a few reads a matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from trainmon.ops._extension import Tensors, _core

StoppedBy = Literal["tol", "kmax", "exact", "zero", "nonfinite", "blocks"]
SpectralState = dict[str, Any]

# The codes of tm_spectral_stop (csrc/core/tm_spectral.h).
_STOPS: tuple[StoppedBy, ...] = ("tol", "kmax", "exact", "zero", "nonfinite")
# Matrices with a side up to this get the eigenvalues of their Gram matrix.
_EXACT_SIDE = 256
_SEED = 0x747261696E6D6F6E


@dataclass(frozen=True)
class Spectral:
    """The stable rank of one matrix W: the sum of its squares over its largest squared singular value.

    Attributes:
        stable_rank: the upper end of the interval, `high`. NaN without a value.
        low: lower end; right with probability 1 - epsilon or better.
        high: upper end; certain up to rounding.
        sigma: a lower bound of the largest singular value, in the units of W, as near as `high`.
        norm: the Frobenius norm, in the units of W. The bounds of the largest eigenvalue of W'W are sigma^2 and
            norm^2 / low.
        passes: reads of the matrix.
        stopped_by: `tol` (the interval is as narrow as asked), `kmax` (24 passes were not enough; the interval is
            right all the same), `exact` (low = high), `zero` (no element that is not 0, or none at all; all
            numbers NaN), `nonfinite` (a NaN or infinite element; all numbers NaN), `blocks` (merged from blocks).
    """

    stable_rank: float
    low: float
    high: float
    sigma: float
    norm: float
    passes: int
    stopped_by: StoppedBy


def stable_rank(
    matrices: Tensors,
    state: SpectralState | None = None,
    tolerance: float = 0.01,
    epsilon: float = 1e-6,
    seed: int = _SEED,
    threads: int = 1,
) -> tuple[list[Spectral], SpectralState]:
    """Stable ranks ||W||_F^2 / sigma_1^2, each with an interval that holds it.

    Block Krylov iteration on W'W, 8 vectors a read: formula, proof and costs in docs/kernels/spectral.md. An
    array [m, n] is one matrix; [E, m, n] gives E results, in order, each with its own interval; other shapes are
    read as first axis times the rest, a vector or a scalar as one row (stable rank 1). Elements are read in
    their own dtype and layout, never copied as a whole; a transposed view costs what its base costs. No memory
    grows with m * n.

    Args:
        matrices: one array or an iterable of arrays: float64, float32, float16, bfloat16, float8.
        state: what the last call on the same list returned, so that the iteration starts from the singular
            vectors of then and with fresh draws. A matrix whose shape has changed starts anew. The state is
            plain: a dict of ints, tuples and float32 arrays, fit for any checkpoint.
        tolerance: stop when the interval's half width is below this share of the value.
        epsilon: allowed probability, a matrix and call, that `low` lies above the stable rank; at most 0.5.
        seed: of the draws (64 bits), which come from a generator of their own: the promise of `low` is that
            they have nothing to do with the matrices.
        threads: worker threads at most; results don't depend on it.

    Returns:
        A list of `Spectral`, and the state for the next call.

    Raises:
        TypeError: integer or bool elements, or something that can't be read.
        ValueError: tolerance, epsilon, seed or threads out of range; a state of another list.
    """
    step, carried = 0, None
    if state is not None:
        try:
            step, carried = state["step"], tuple(state["carried"])
        except (TypeError, KeyError) as error:
            raise TypeError("state must be what an earlier call of stable_rank returned, or None") from error
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be from 0 to 2**64 - 1, not {seed}")
    found, after = _core.stable_rank(matrices, carried, tolerance, epsilon, seed, step, _EXACT_SIDE, threads)
    results = [
        Spectral(rank, low, high, sigma, norm, passes, _STOPS[stop])
        for rank, low, high, sigma, norm, passes, stop in found
    ]
    return results, {"step": (step + 1) % 2**32, "carried": list(after)}


def merge_spectral(blocks: Iterable[Spectral]) -> Spectral:
    """The interval of a matrix that is split by rows or by columns, from its blocks' results alone.

    With F_r = norm_r^2 of block r and its eigenvalue between sigma_r^2 and F_r / low_r, the whole has F = sum F_r
    and max sigma_r^2 <= lambda <= sum F_r / low_r. So the interval is right, but can be as wide as the number of
    blocks: a hint where ranks hold shards and nothing is exchanged but these numbers.

    Args:
        blocks: results of `stable_rank`, one a block.

    Returns:
        A `Spectral` with `stopped_by` "blocks" and the largest number of `passes`; "nonfinite" if a block is,
        "zero" if all are. `low` is right with probability 1 - epsilon times the number of blocks or better.

    Raises:
        TypeError: a block is something else.
    """
    blocks = tuple(blocks)
    for position, block in enumerate(blocks):
        if not isinstance(block, Spectral):
            raise TypeError(f"blocks[{position}] must be a Spectral, not {type(block).__name__}")
    passes = max((block.passes for block in blocks), default=0)
    parts = [block for block in blocks if block.stopped_by != "zero"]
    if not parts or any(block.stopped_by == "nonfinite" for block in parts):
        return Spectral(*(math.nan,) * 5, passes, "nonfinite" if parts else "zero")
    unit = max(block.norm for block in parts)  # no square leaves the range
    sumsq = math.fsum((block.norm / unit) ** 2 for block in parts)
    below = max(block.sigma / unit for block in parts) ** 2
    above = math.fsum((block.norm / unit) ** 2 / block.low for block in parts)
    high, low = max(1.0, sumsq / below), max(1.0, sumsq / above)
    return Spectral(high, low, high, math.sqrt(below) * unit, math.sqrt(sumsq) * unit, passes, "blocks")
