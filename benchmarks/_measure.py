"""Timing of competitors side by side: all in one process, taking turns, the best time of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A line of the report. `holds` is None where no mark is set."""

    measure: str
    value: str
    mark: str = ""
    holds: bool | None = None


def ratio_row(
    measure: str, ratio: float, mark: float | None = None, detail: str = "", at_most: bool = False
) -> Row:
    """A ratio, and whether it keeps its mark: at least `mark`, or at most."""
    value = f"{ratio:.2f}" + (f" ({detail})" if detail else "")
    if mark is None:
        return Row(measure, value)
    return Row(
        measure, value, f"{'<=' if at_most else '>='} {mark:g}", ratio <= mark if at_most else ratio >= mark
    )


def best_of(
    competitors: Mapping[str, Callable[[], object]], rounds: int, target: float = 2e-3
) -> dict[str, float]:
    """Seconds a call of each competitor: the best of `rounds` turns.

    The competitors take turns within each round, so that a disturbance of the machine meets all of them. A
    turn repeats its call until it lasts about `target` seconds; the clock's own cost vanishes in it.
    """
    repeats = {}
    for name, call in competitors.items():
        call()  # warms caches and code
        start = time.perf_counter()
        call()
        once = time.perf_counter() - start
        repeats[name] = max(1, round(target / max(once, 1e-9)))
    best = dict.fromkeys(competitors, float("inf"))
    for _ in range(rounds):
        for name, call in competitors.items():
            count = range(repeats[name])
            start = time.perf_counter()
            for _repeat in count:
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / repeats[name])
    return best
