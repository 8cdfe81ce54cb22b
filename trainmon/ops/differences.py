"""How far tensors have moved: norms of differences between two lists, in one read of both."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainmon.ops._extension import Tensors, _core

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TensorDifferences:
    """The numbers of `Difference` for each tensor: arrays of shape [number of tensors]."""

    norm: Floats
    previous_norm: Floats
    ratio: Floats
    unchanged: Floats
    n: Counts
    n_nonfinite: Counts


@dataclass(frozen=True, slots=True)
class Difference:
    """How a list of tensors differs from an earlier one, all tensors taken as one vector.

    Attributes:
        norm: of tensors - previous, in the unit of the elements.
        previous_norm: of previous.
        ratio: norm / previous_norm: inf when only previous_norm is 0, NaN ("undefined") when both are.
        unchanged: share of elements whose bits are the same in both lists, from 0 to 1; NaN for no elements.
        n: number of elements.
        n_nonfinite: number of differences that are NaN or infinite.
        each: the same numbers a tensor, with `per_tensor`; else None.
    """

    norm: np.float64
    previous_norm: np.float64
    ratio: np.float64
    unchanged: np.float64
    n: int
    n_nonfinite: int
    each: TensorDifferences | None


def diff_norm(
    tensors: Tensors, previous: Tensors, update: bool = False, per_tensor: bool = False, threads: int = 1
) -> Difference:
    """Norms of `tensors - previous` and of `previous`, and the share of unchanged elements, in one read of both.

    The gradient of one micro-batch is the difference between the accumulated gradient and a copy of it from
    before; an optimizer's update is the difference between weights and their copy. With `update` the copy is
    brought up to date in the same pass.

    Args:
        tensors: one array or an iterable of arrays, any shapes, any mix of dtypes.
        previous: as many arrays, each with the dtype and the shape of its tensor; strides may differ.
        update: copy each tensor into its previous, bit for bit. `previous` must then be writable, and its
            memory must overlap nothing else in the call; an array that stands in both lists is left as it is.
            Whatever is wrong is found before anything is written.
        per_tensor: also return the numbers of each tensor.
        threads: workers for large inputs; they don't change a bit of the results.

    Returns:
        A `Difference`. Elements are widened to float64 and subtracted there; squares are summed in float64.
        Norms are NaN if any difference is NaN (infinity minus infinity too), else inf if any is infinite.
        float64 differences whose squares leave the range of float64 are read once more, scaled. No tensors:
        norms 0, `ratio` and `unchanged` NaN.

    Raises:
        ValueError: another number of arrays or another shape in `previous`; with `update`, memory that is
            read-only or overlaps; `threads` below 1.
        TypeError: an element that can't be read, or another dtype in `previous`; messages name the position.

    Formula: docs/kernels/differences.md.
    """
    norm, previous_norm, n, n_same, n_nonfinite, columns = _core.diff_norm(
        tensors, previous, update, per_tensor, threads
    )
    each = None
    if columns is not None:
        (norms, previous_norms), (ns, same, nonfinite) = columns
        each = TensorDifferences(
            norms, previous_norms, _quotients(norms, previous_norms), _quotients(same, ns), ns, nonfinite
        )
    # by position: with keywords the call takes a tenth longer
    return Difference(
        np.float64(norm),
        np.float64(previous_norm),
        np.float64(_quotient(norm, previous_norm)),
        np.float64(_quotient(n_same, n)),
        n,
        n_nonfinite,
        each,
    )


def _quotient(above: float, below: float) -> float:
    """above / below with x/0 = inf and 0/0 = NaN, for what is not negative."""
    if below == 0:
        return math.inf if above > 0 else math.nan
    return above / below


def _quotients(above: Floats | Counts, below: Floats | Counts) -> Floats:
    """The same for arrays, without warnings."""
    with np.errstate(all="ignore"):
        return np.asarray(np.divide(above, below), np.float64)
