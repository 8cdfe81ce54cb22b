"""Values of any scalar type as plain JSON values, the same for every file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["plain"]


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: NumPy and framework scalars as numbers, non-finite ones as their
    strings.

    Mappings and sequences are converted throughout; sets and arrays become lists; what is none of these, its
    ``str``.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        if math.isnan(number):
            return "NaN"
        return number if math.isfinite(number) else ("Infinity" if number > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    # NumPy scalars and arrays and tensors all answer to tolist().
    convert = getattr(value, "tolist", None)
    if callable(convert):
        converted = convert()
        if type(converted) is not type(value):
            return plain(converted)
    # Scalars of extension types (bfloat16, float8) know only float().
    return plain(float(value)) if hasattr(value, "__float__") else str(value)
