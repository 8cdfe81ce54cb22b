"""Readings of MindSpore tensors: the C kernels where the host can address them, MindSpore's operators elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mindspore
import numpy as np

from trainmon.adapters.mindspore_parts.parameters import host_view
from trainmon.backend import Backend
from trainmon.backend.base import Lazy
from trainmon.backend.mindspore import MindSporeDevice
from trainmon.backend.statistics import Facts, Reading, host_readings, with_zeros

__all__ = ["Meter"]


class Meter:
    """Reads tensors.

    Args:
        as_msprobe: of complex numbers the real parts alone count.
        modulus: complex numbers are read as their absolute values.

    Attributes:
        backend: what reads tensors of a device; None: all are on the host.
        distances: readings say what the tensor is, and which share of it is nearer to zero than each of these; None: they
            don't.
    """

    def __init__(self, *, as_msprobe: bool = False, modulus: bool = False) -> None:
        self._as_msprobe, self._modulus = as_msprobe, modulus
        on_host = mindspore.get_context("device_target") == "CPU"
        self.backend: Backend | None = None if on_host else MindSporeDevice()

        self.distances: frozenset[float] | None = None

    def read(self, tensors: Sequence[Any]) -> list[Reading]:
        """One reading a tensor, of what it holds now."""
        readings = self._readings(tensors)
        if self.distances is None:
            return readings
        return [
            replace(reading, facts=self._facts(tensor, self.distances))
            for tensor, reading in zip(tensors, readings, strict=True)
        ]

    def _facts(self, tensor: Any, distances: frozenset[float]) -> Facts:
        if _is_rows(tensor):
            shape, values = tuple(tensor.dense_shape), tensor.values
        else:
            shape, values = tuple(tensor.shape), tensor
        zeros: dict[float, float | Lazy] = {}
        for distance in distances:
            size = int(np.prod(shape))
            near = int((values.abs() < distance).sum()) if size else 0
            absent = size - int(values.size) if distance > 0 else 0
            zeros[distance] = (near + absent) / size if size else float("nan")
        return Facts(shape, str(values.dtype), id(tensor), zeros)

    def _readings(self, tensors: Sequence[Any]) -> list[Reading]:
        if not tensors:
            return []
        if any(_is_rows(one) or "Complex" in str(one.dtype) for one in tensors):
            return [self._special(one) for one in tensors]
        return self._read(tensors)

    def _read(self, tensors: Sequence[Any]) -> list[Reading]:
        if self.backend is None:
            return host_readings([host_view(one) for one in tensors])
        lazy = self.backend.statistics(tensors)
        return [Reading(lazy, row) for row in range(len(tensors))]

    def _special(self, tensor: Any) -> Reading:
        if _is_rows(tensor):
            stored = self.read([tensor.values])[0]
            size = int(np.prod(tensor.dense_shape))
            return with_zeros(stored, size - int(tensor.values.size))
        if "Complex" not in str(tensor.dtype):
            return self._read([tensor])[0]
        array = tensor.asnumpy()  # no operator of a device takes them
        if self._modulus:
            return host_readings([np.abs(array)])[0]
        real = replace(host_readings([np.ascontiguousarray(array.real)])[0], undefined=("min", "max"))
        if self._as_msprobe:
            return real
        parts = np.ascontiguousarray(array).reshape(-1).view(array.real.dtype)
        flags = np.where(np.isnan(array), np.nan, 0.0)
        norm, nans = host_readings([parts, flags])
        return replace(real, others=(("norm", norm), ("nans", nans)))


def _is_rows(tensor: Any) -> bool:
    """Whether it holds only the rows of a gradient that are not zero."""
    return hasattr(tensor, "dense_shape") and hasattr(tensor, "values") and not hasattr(tensor, "asnumpy")
