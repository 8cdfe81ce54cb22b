"""What became of a spike: recovered, lingers, or the run diverges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from trainmon.ops._doubles import doubles

HORIZON = 100  # steps within which a spike must recover
CALM = 5  # steps in a row below the bound
TREND = 20  # steps of the running median


@dataclass(frozen=True, slots=True)
class SpikeClass:
    """How a spike ended.

    Attributes:
        kind: "recovering", "lingering", "divergent", or "open" while fewer than 100 steps decide nothing.
        time_to_recover: steps from the spike to the first of five in a row within the bound; None if it didn't.
        bound: b + 2 s, b the median and s = 1.4826 MAD of the values before.
    """

    kind: Literal["recovering", "lingering", "divergent", "open"]
    time_to_recover: int | None
    bound: float


def classify_spike(before: npt.ArrayLike, after: npt.ArrayLike) -> SpikeClass:
    """The class of a spike, from the values of its series.

    Args:
        before: the finite history before the spike, shape [n], n >= 1; others than finite values are left out.
        after: the spike's own value and those that follow, shape [m], m >= 1; the first 101 count.

    Returns:
        *recovering* if five steps in a row lie at or below `bound` within 100 steps after the spike; else, with a
        value that isn't finite, *divergent*; else, once 100 steps are there, *lingering* if the running median
        over 20 steps does not rise (least-squares slope over those steps <= 0), *divergent* if it rises.

    Raises:
        TypeError: complex numbers or a masked array.
        ValueError: nothing finite before, nothing after, or more than one axis.
    """
    history = doubles(before, "before")
    follows = doubles(after, "after")
    if history.ndim != 1 or follows.ndim != 1:
        raise ValueError(f"before and after must have one axis, not {history.ndim} and {follows.ndim}")
    history, follows = history[np.isfinite(history)], follows[: HORIZON + 1]
    if history.size == 0 or follows.size == 0:
        raise ValueError("a spike needs a finite value before it and its own value")
    middle = float(np.median(history))
    bound = middle + 2 * 1.4826 * float(np.median(np.abs(history - middle)))
    calm = follows[1:] <= bound
    if calm.size >= CALM:
        runs = np.lib.stride_tricks.sliding_window_view(calm, CALM).all(axis=1)
        if runs.any():
            return SpikeClass("recovering", int(runs.argmax()) + 1, bound)
    if not np.isfinite(follows).all():
        return SpikeClass("divergent", None, bound)
    if follows.size <= HORIZON:
        return SpikeClass("open", None, bound)
    medians = np.median(np.lib.stride_tricks.sliding_window_view(follows[1:], TREND), axis=1)
    slope = np.polyfit(np.arange(medians.size), medians, 1)[0]
    return SpikeClass("lingering" if slope <= 0 else "divergent", None, bound)
