"""Operators that MindSpore 2.10 has no CPU kernel for, or whose CPU kernel writes nothing, by those that work."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Tensor, mint, ops

__all__ = ["install"]


def install() -> None:
    """For this process. ``Tensor.mul_`` returns the product and leaves the tensor: the trainer would clip nothing."""

    def addcmul(x: Any, a: Any, b: Any, *, value: float = 1) -> Any:
        return x + a * b * value

    def stack(tensors: Any, dim: int = 0) -> Any:
        return ops.stack(tensors, dim)

    def write(make: Any) -> Any:
        return lambda self, *arguments, **keywords: self.copy_(make(self, *arguments, **keywords))

    mint.stack, mint.addcmul = stack, addcmul
    Tensor.mul_ = write(lambda self, other: self * other)
    Tensor.fill_ = write(lambda self, value: ops.full(self.shape, value, dtype=self.dtype))
    Tensor.zero_ = write(lambda self: ops.zeros(self.shape, dtype=self.dtype))
    Tensor.normal_ = write(
        lambda self, mean=0.0, std=1.0, **_: (ops.standard_normal(self.shape) * std + mean).astype(self.dtype)
    )
    mindspore.set_device("CPU")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
