"""The search for the first element that is not a finite number."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from trainmon.ops._extension import Tensors, _core, names_tuple


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Where the first non-finite element stands.

    Attributes:
        name: the tensor's name, or its position in the list as text when no names were given.
        index: the element's index in C order, from 0.
        kind: "nan", "+inf" or "-inf".
        value: the element itself.
    """

    name: str
    index: int
    kind: Literal["nan", "+inf", "-inf"]
    value: float


def scan_nonfinite(
    tensors: Tensors, names: Iterable[str] | str | None = None, threads: int = 1
) -> NonFinite | None:
    """The first NaN or infinity in list order, then C order; stops there.

    Args:
        tensors: one array or an iterable of arrays, any shapes and dtypes. Integers and bool are always
        finite.
        names: one name a tensor, for the result and for error messages.
        threads: workers for large inputs; the answer is the same.

    Returns:
        None when everything is finite (an empty list too), else a `NonFinite`.

    Raises:
        ValueError: as many names as tensors are needed; `threads` below 1.
        TypeError: an element that can't be read; the message names its position and name.

    Formula: the exponent bits are all ones (for float8 types, the encodings their format gives to NaN and
    infinity); docs/numerics.md, "Non-finite elements".
    """
    labels = names_tuple(names)
    found = _core.scan_nonfinite(tensors, labels, threads)
    if found is None:
        return None
    position, index, value = found
    return NonFinite(
        name=labels[position] if labels is not None else str(position),
        index=index,
        kind="nan" if math.isnan(value) else "+inf" if value > 0 else "-inf",
        value=value,
    )
