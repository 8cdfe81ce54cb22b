"""What a training step returns (``net_outputs``), whatever its shape.

Known are: the loss alone; a mapping with ``loss``; ``(loss, overflow)``, ``(loss, overflow, loss scale)`` of
MindSpore's own cell, and with ``learning rate``, ``global norm`` and two tables behind them MindFormers' of 4, 5 and
7. A tuple counts as one of these if its second entry is a flag: a bool, or one bool or integer in a tensor. Of any
other sequence the first entry is the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Outputs", "number", "read_outputs"]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Of one step; None: not there.

    Attributes:
        loss: the mean, where a loss has several elements.
        overflow: 1 or 0.
        loss_scale: as returned: cells that adapt it may return the next step's.
        learning_rate, grad_norm: as returned; the norm is before clipping.
        parts: named numbers beside ``loss`` in a mapping.
        unread: how many entries were not understood.
    """

    loss: float | None = None
    overflow: float | None = None
    loss_scale: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    unread: int = 0


def number(value: Any) -> float | None:
    """A number of anything that holds one, the mean of several; None where there is none."""
    if value is None or isinstance(value, str | bytes):
        return None
    try:
        array = value.asnumpy() if hasattr(value, "asnumpy") else np.asarray(value)
        if array.size == 0:
            return None
        if array.dtype.kind not in "biuf":  # bfloat16, as MindSpore's NumPy type
            array = value.float().asnumpy() if hasattr(value, "float") else array
        return float(array.reshape(-1)[0]) if array.size == 1 else float(np.mean(array, dtype=np.float64))
    except (TypeError, ValueError, AttributeError):
        return None


def read_outputs(outputs: Any) -> Outputs:
    """Nothing raises: what is not understood is counted and left out."""
    if isinstance(outputs, Mapping):
        parts = {
            str(key): number(value) for key, value in outputs.items() if key != "loss" and _is_one(value)
        }
        named = {key: value for key, value in parts.items() if value is not None}
        unread = len(outputs) - len(named) - ("loss" in outputs)
        return Outputs(number(outputs.get("loss")), parts=named, unread=unread)
    if not isinstance(outputs, tuple | list):
        return Outputs(number(outputs))
    if not outputs:
        return Outputs()
    if len(outputs) not in (2, 3, 4, 5, 7) or not _is_flag(outputs[1]):
        return Outputs(number(outputs[0]), unread=len(outputs) - 1)
    loss, overflow, scale, rate, norm = [*outputs[:5], None, None, None][:5]
    overflowed = number(overflow)
    return Outputs(
        number(loss),
        None if overflowed is None else float(overflowed != 0),
        number(scale),
        number(rate),
        number(norm),
    )


def _is_one(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    return hasattr(value, "asnumpy") and int(np.prod(value.shape)) == 1


def _is_flag(value: Any) -> bool:
    if isinstance(value, bool | np.bool_ | int):
        return True
    if not _is_one(value):
        return False
    name = str(getattr(value, "dtype", ""))
    return name.startswith(("Bool", "Int", "UInt", "bool", "int", "uint"))
