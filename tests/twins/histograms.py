"""Plain twins of exponent_histogram and underflow_shares: exact fractions, one element at a time."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np

# Bits of the mantissa, exponent of the least normal number, largest number: the formats' own definitions.
FORMATS: dict[str, tuple[int, int, Fraction]] = {
    "fp32": (23, -126, Fraction(2) ** 128 - Fraction(2) ** 104),
    "fp16": (10, -14, Fraction(65504)),
    "bf16": (7, -126, Fraction(2) ** 128 - Fraction(2) ** 120),
    "e4m3fn": (3, -6, Fraction(448)),
    "e5m2": (2, -14, Fraction(57344)),
    "e4m3": (3, -6, Fraction(240)),
    "e3m4": (4, -2, Fraction(31, 2)),
    "e4m3fnuz": (3, -7, Fraction(240)),
    "e4m3b11fnuz": (3, -10, Fraction(30)),
    "e5m2fnuz": (2, -15, Fraction(57344)),
    "e2m3fn": (3, 0, Fraction(15, 2)),
    "e3m2fn": (2, -2, Fraction(28)),
    "e2m1fn": (1, 0, Fraction(6)),
}


def values(array: Any) -> list[Any]:
    """All elements in C order as Python numbers, exactly."""
    flat = np.asarray(array).ravel(order="C")
    if flat.dtype.kind in "iub":
        return [int(x) for x in flat]
    with np.errstate(all="ignore"):
        return flat.astype(np.float64).tolist()  # type: ignore[no-any-return]


def floor_log2(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if x >= Fraction(2) ** exponent else exponent - 1


def subnormal_below(array: Any) -> Fraction:
    """The least normal magnitude of an array's own dtype; 0 where it has no subnormals."""
    dtype = np.asarray(array).dtype
    if dtype.kind in "iub" or dtype.name == "float8_e8m0fnu":
        return Fraction(0)
    if dtype.name == "float64":
        return Fraction(2) ** -1022
    names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    return Fraction(2) ** FORMATS[names.get(dtype.name, dtype.name.removeprefix("float8_"))][1]


def histogram_twin(arrays: list[Any]) -> list[int]:
    """256 bins, zero, subnormal, inf, nan."""
    seen: Counter[Any] = Counter()
    for array in arrays:
        least = subnormal_below(array)
        for x in values(array):
            if math.isnan(x):
                seen["nan"] += 1
            elif isinstance(x, float) and math.isinf(x):
                seen["inf"] += 1
            elif x == 0:
                seen["zero"] += 1
            else:
                magnitude = abs(Fraction(x))
                seen[min(max(floor_log2(magnitude) + 127, 0), 255)] += 1
                seen["subnormal"] += magnitude < least
    return [seen[key] for key in (*range(256), "zero", "subnormal", "inf", "nan")]


def rounded(y: Fraction, mantissa: int, least: int) -> Fraction:
    """To nearest, ties to even, as if the format had no largest number."""
    place = Fraction(2) ** (max(floor_log2(y), least) - mantissa)
    return round(y / place) * place


def losses_twin(arrays: list[Any], to: str, scale: float = 1.0) -> tuple[int, int, int, int, int]:
    """finite, nonzero, underflow, subnormal, overflow: by rounding each element to the format."""
    mantissa, least, largest = FORMATS[to]
    finite = nonzero = underflow = subnormal = overflow = 0
    for array in arrays:
        for x in values(array):
            if not math.isfinite(x):
                continue
            finite += 1
            y = abs(Fraction(x)) * Fraction(scale)
            if y == 0:
                continue
            nonzero += 1
            cast = rounded(y, mantissa, least)
            underflow += cast == 0
            subnormal += cast != 0 and y < Fraction(2) ** least
            overflow += cast > largest
    return finite, nonzero, underflow, subnormal, overflow
