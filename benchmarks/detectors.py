"""Nanoseconds a series and step of each detector over 4,096 series, and ratios to NumPy over the same series.

    python benchmarks/detectors.py [--quick]

Peers judge all series at once, as array code does, in the same run: the mean and deviation of a window [window, series],
its median and median deviation, an exponential average. The read is a plain read of the detector's state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _measure import Row, best_of, main, ratio_row

from trainmon.ops import RULES, Detector, DetectorBank, plain_read

SERIES = 4096
O1_MARK, SORTED_MARK = 50.0, 1000.0  # nanoseconds
SORTED = ("mad", "cusum", "linearity")
PARAMETERS: dict[str, dict[str, float | None]] = {"threshold": {"above": 9.0}}


def measure(quick: bool = False) -> list[Row]:
    """All rows of the report; `quick` takes fewer turns."""
    rounds = 3 if quick else 12
    rng = np.random.default_rng(0)
    history = rng.lognormal(0.0, 0.02, (300, SERIES))  # more than the windows; nearly nothing to report
    banks = {rule: bank_of([Detector(rule, PARAMETERS.get(rule, {}))]) for rule in RULES}
    banks["all of them"] = bank_of([Detector(rule, PARAMETERS.get(rule, {})) for rule in RULES])
    for bank in banks.values():
        bank.update(history)

    calls: dict[str, Callable[[], object]] = {}
    for name, bank in banks.items():
        calls[name] = stepping(bank, history)
    window = history[:128]
    calls["numpy mean and deviation"] = lambda: history[200] > window.mean(axis=0) + 6 * window.std(axis=0)
    calls["numpy median and MAD"] = lambda: robust(window, history[200])
    calls["read"] = lambda: plain_read([banks["mad"]._words])
    best = best_of(calls, rounds)

    rows = []
    for name in banks:
        cost = best[name] / SERIES * 1e9
        mark = None if name == "all of them" else SORTED_MARK if name in SORTED else O1_MARK
        rows.append(
            Row(
                f"{name}, {SERIES} series",
                f"{cost:.1f} ns a series",
                f"<= {mark:g}" if mark else "",
                cost <= mark if mark else None,
            )
        )
    rows += [
        ratio_row(
            "NumPy mean and deviation / skip_step_sigma",
            ratio(best, "numpy mean and deviation", "skip_step_sigma"),
        ),
        ratio_row("NumPy median and MAD / mad", ratio(best, "numpy median and MAD", "mad")),
        ratio_row("mad / plain read of its state", ratio(best, "mad", "read")),
    ]
    few = DetectorBank(["mad", "cusum", "ewma"], 8)
    few.update(history[:, :8].copy())
    small = best_of({"few": stepping(few, history[:, :8].copy())}, rounds)
    rows.append(Row("a step of mad, cusum and ewma on 8 series, microseconds", f"{small['few'] * 1e6:.2f}"))
    return rows


def bank_of(detectors: list[Detector]) -> DetectorBank:
    if any(detector.rule == "nonfinite" for detector in detectors):
        return DetectorBank(detectors, SERIES)
    return DetectorBank([Detector("nonfinite", series=()), *detectors], SERIES)


def stepping(bank: DetectorBank, history: Any) -> Callable[[], object]:
    """A call that shows the next step of the history."""
    step = 0

    def call() -> object:
        nonlocal step
        step = (step + 1) % len(history)
        return bank.update(history[step])

    return call


def robust(window: Any, values: Any) -> Any:
    middle = np.median(window, axis=0)
    return 0.6745 * (values - middle) > 6 * np.median(np.abs(window - middle), axis=0)


def ratio(best: dict[str, float], slow: str, fast: str) -> float:
    return best[slow] / best[fast]


if __name__ == "__main__":
    sys.exit(main(__doc__, measure))
