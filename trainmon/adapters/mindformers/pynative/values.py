"""What is read of the host's tensors: the local piece of distributed ones, sums made on a device, numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import ops

from trainmon.backend.mindspore import CompiledSums

__all__ = ["DeviceSums", "cells_of", "local", "read_together"]


def local(tensor: Any) -> Any:
    """This rank's own piece of a distributed tensor; any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def cells_of(model: Any) -> list[Any]:
    """The cells of a model: a list of a pipeline's chunks since 2.0.0, one cell in 1.9.0."""
    return [cell for cell in model if cell is not None] if isinstance(model, list | tuple) else [model]


class DeviceSums:
    """Sums of squares of tensors, and how many elements are not finite: made where they are, read together once."""

    def __init__(self) -> None:
        self._sums: list[Any] = []
        self._read: list[CompiledSums] = []

    def add(self, tensor: Any) -> int:
        """The number under which the tensor's sums will be."""
        wide = tensor.astype(mindspore.float32)
        bad = ops.logical_not(ops.isfinite(wide)).astype(mindspore.float32)
        self._sums += [ops.square(wide).sum(), bad.sum()]
        return len(self._sums) // 2 - 1

    def fetch(self) -> None:
        """One read of all; the tensors on the device are let go."""
        flat = ops.stack(self._sums).asnumpy().astype(np.float64).reshape(-1, 2) if self._sums else []
        self._sums = []
        self._read = [CompiledSums(float(square), round(bad)) for square, bad in flat]

    def __getitem__(self, number: int) -> CompiledSums:
        return self._read[number]

    def all(self) -> list[CompiledSums]:
        """In the order in which they were added."""
        return self._read


def read_together(tensors: Sequence[Any], addressable: bool) -> list[Any]:
    """Small tensors as arrays, in one read where they are on a device."""
    if addressable or len(tensors) < 2:
        return [np.array(local(tensor).asnumpy()) for tensor in tensors]
    pieces = [local(tensor).astype(mindspore.float32).reshape(-1) for tensor in tensors]
    flat, found, at = ops.concat(pieces).asnumpy(), [], 0
    for tensor, piece in zip(tensors, pieces, strict=True):
        found.append(flat[at : at + int(piece.size)].reshape(local(tensor).shape))
        at += int(piece.size)
    return found
