"""The host backend: the C kernels on memory that the host can address. Results are there at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainmon.backend.base import Floats, Lazy
from trainmon.ops import LossAccumulator, fingerprint, multi_norm, tensor_stats

__all__ = ["HostBackend"]


class HostBackend:
    """Reads each tensor once, in C."""

    name = "host"
    deferred = False

    def __init__(self) -> None:
        self.reads = 0

    def summaries(self, tensors: Sequence[Any]) -> Lazy:
        stats = tensor_stats(tensors)
        table = np.empty((len(stats), 6))
        table[:, 0] = _propagating(stats, "sumsq")
        table[:, 1] = _propagating(stats, "absmax")
        for column, field in enumerate(("n_nan", "n_posinf", "n_neginf"), start=2):
            table[:, column] = stats[field]
        table[:, 5] = np.where(stats["first_bad"] >= 0, stats["first_bad"], np.nan)
        return _known(table)

    def squares(self, tensors: Sequence[Any], negatives: bool = False) -> Lazy:
        table = np.full((len(tensors), 2), np.nan)
        if negatives:
            stats = tensor_stats(tensors)
            table[:, 0] = _propagating(stats, "sumsq")
            lowest = zip(tensors, stats["min"].tolist(), strict=True)
            table[:, 1] = [float((tensor < 0).sum()) if low < 0 else 0.0 for tensor, low in lowest]
        else:
            table[:, 0] = np.square(multi_norm(tensors, per_tensor=True)[1])
        return _known(table)

    def square_sum(self, tensors: Sequence[Any]) -> Lazy:
        return _known(np.array([multi_norm(tensors) ** 2]))

    def bucket_sums(self, losses: Any, weights: Any, buckets: Any, count: int) -> Lazy:
        sums = LossAccumulator(buckets=count)
        sums.add(losses, weights, buckets)
        pairs = [(one.mean, one.tokens) for one in map(sums.bucket, range(count))]
        return _known(
            np.array([(0.0 if mean is None else mean * n, n) for mean, n in pairs]).reshape(count, 2)
        )

    def fingerprints(self, tensors: Sequence[Any]) -> Lazy:
        return _known(prints(tensors))

    def scalar(self, value: Any) -> Lazy:
        return _known(np.array([float(value)]))

    def read(self, lazies: Sequence[Lazy]) -> HostRead:
        return HostRead([lazy.finish() for lazy in lazies])


class HostRead:
    """Values that never were anywhere else."""

    def __init__(self, values: list[Floats]) -> None:
        self._values = values

    def wait(self) -> list[Floats]:
        return self._values


def prints(tensors: Sequence[Any]) -> Floats:
    """The halves of the 64-bit fingerprints of host tensors, shape ``[len(tensors), 2]``."""
    values = [one.value for one in fingerprint(tensors, bits=64)]
    return np.array([(value >> 32, value & 0xFFFFFFFF) for value in values], np.float64).reshape(-1, 2)


def _propagating(stats: Any, field: str) -> Floats:
    """A column of records of finite elements, as torch would have it: NaN and infinities win."""
    infinite = stats["n_posinf"] + stats["n_neginf"] > 0
    values = np.where(infinite, np.inf, stats[field])
    return np.where(stats["n_nan"] > 0, np.nan, values)


def _known(values: Floats) -> Lazy:
    return Lazy((), lambda: values)
