"""Timing of competitors side by side: all in one process, taking turns, the best time of each."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


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
    competitors: Mapping[str, Callable[[], object]],
    rounds: int,
    target: float = 2e-3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds a call of each competitor: the best of `rounds` turns.

    The competitors take turns within each round, so that a disturbance of the machine meets all of them. A
    turn repeats its call until it lasts about `target` seconds; the clock's own cost vanishes in it.
    time.process_time as `clock` leaves out what others take of a busy machine, where all run in one thread.
    """
    repeats = {}
    for name, call in competitors.items():
        call()  # warms caches and code
        start = clock()
        call()
        once = clock() - start
        repeats[name] = max(1, round(target / max(once, 1e-9)))
    best = dict.fromkeys(competitors, float("inf"))
    for _ in range(rounds):
        for name, call in competitors.items():
            count = range(repeats[name])
            start = clock()
            for _repeat in count:
                call()
            best[name] = min(best[name], (clock() - start) / repeats[name])
    return best


def bfloat16_codes(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The codes of float32 values cut to bfloat16, without a package for the type."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def main(description: str | None, measure: Callable[[bool], list[Row]]) -> int:
    """The command line of one family's benchmark: prints its rows, whatever they say; returns 0."""
    from trainmon.ops import cpu_info

    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller memory and fewer turns")
    rows = measure(parser.parse_args().quick)
    print(f"tier {cpu_info()['tier']}")
    width = max(len(row.measure) for row in rows)
    for row in rows:
        verdict = "" if row.holds is None else "ok" if row.holds else "MISSED"
        print(f"{row.measure:<{width}}  {row.value:<36}  {row.mark:<7}  {verdict}".rstrip())
    return 0
