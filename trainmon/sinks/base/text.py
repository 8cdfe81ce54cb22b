"""Numbers as a person likes to read them: significant digits, units, ``NaN`` and ``Inf`` as themselves."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["whole_number", "long_time", "percent", "scientific", "short_time", "short_number", "significant"]


def _special(format_finite: Callable[[float], str]) -> Callable[[float], str]:
    """``format_finite`` for finite values; the others by name."""

    def format_any(value: float) -> str:
        if math.isnan(value):
            return "NaN"
        if math.isinf(value):
            return "Inf" if value > 0 else "-Inf"
        return format_finite(value)

    format_any.__doc__ = format_finite.__doc__
    return format_any


@_special
def significant(value: float) -> str:
    """Five significant digits: ``2.3456``, ``10.832``, ``1.2346e-05``; 0 is ``0``."""
    return "0" if value == 0 else f"{value:#.5g}".rstrip(".")


@_special
def scientific(value: float) -> str:
    """Four digits and an exponent: ``3.000e-04``; 0 is ``0``."""
    return "0" if value == 0 else f"{value:.3e}"


@_special
def short_number(value: float) -> str:
    """Three digits with a decimal prefix: ``987``, ``12.3k``, ``1.23M``."""
    size = abs(value)
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999.6k would round to 1000k.
        if size >= limit * 0.9995:
            return _three(value / limit) + suffix
    return _three(value)


def _three(value: float) -> str:
    size = abs(value)
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:.0f}"


@_special
def whole_number(value: float) -> str:
    """A whole number; with decimals only if it has any."""
    return f"{value:.0f}" if value == int(value) else f"{value:g}"


@_special
def percent(value: float) -> str:
    """A ratio in percent: ``0.12%``, ``45.7%``."""
    return f"{_three(100 * value)}%"


@_special
def short_time(value: float) -> str:
    """A short time: ``850 us``, ``12.3 ms``, ``1.23 s``, from ten minutes on ``10:05``."""
    if value >= 600:
        return long_time(value)
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if abs(value) < limit * 0.9995:
            return f"{_three(value * factor)} {unit}"
    return f"{_three(value)} s"


@_special
def long_time(value: float) -> str:
    """A long time: ``0:42``, ``12:05``, ``3:07:00``, ``2d 03:07:00``."""
    rest = max(0, round(value))
    minutes, second = divmod(rest, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"
