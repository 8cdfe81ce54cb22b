"""Millions of tokens a second of the exact loss sum, and ratios to the sums that people use now.

    python benchmarks/losses.py [--quick]

Peers work on the same arrays in the same run: `np.average` with weights, torch's `sum(loss * mask) / sum(mask)`
(in float32, the usual way, and in float64) and `math.fsum`, the correctly rounded sum of Python. Rows that need torch
are left out without it.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _measure import Row, best_of, main, ratio_row

from trainmon.ops import LossAccumulator, plain_read

MARK = 200  # million tokens a second, float32 with and without int64 weights


def measure(quick: bool = False) -> list[Row]:
    """All rows of the report; `quick` takes fewer turns and fewer sizes."""
    rounds = 3 if quick else 12
    rows = []
    for title, n in (("4 Mi tokens", 2**22), ("8 Ki tokens, in cache", 2**13)):
        rows += one_size(title, n, rounds)
    return rows + small_calls(rounds)


def one_size(title: str, n: int, rounds: int) -> list[Row]:
    rng = np.random.default_rng(0)
    losses = rng.exponential(3.0, n).astype(np.float32)
    weights = (rng.random(n) < 0.8).astype(np.int64)
    wide = rng.integers(0, 2**40, n)
    ids = (np.arange(n) % 16).astype(np.int32)
    ours: dict[str, tuple[Any, Any]] = {
        "float32": (losses, None),
        "float32, int64 weights 0 or 1": (losses, weights),
        "float32, bool mask": (losses, weights.astype(bool)),
        "float32, int64 weights to 2^40": (losses, wide),
        "float64, int64 weights 0 or 1": (losses.astype(np.float64), weights),
        "float16, int64 weights 0 or 1": (losses.astype(np.float16), weights),
    }
    calls: dict[str, Callable[[], object]] = {}
    for name, arguments in ours.items():
        accumulator = LossAccumulator()
        calls[name] = lambda accumulator=accumulator, arguments=arguments: accumulator.add(*arguments)
    buckets = LossAccumulator(16)
    calls["float32, int64 weights, 16 buckets"] = lambda: buckets.add(losses, weights, ids)
    calls["read"] = lambda: plain_read([losses, weights])
    calls["average"] = lambda: np.average(losses, weights=weights)
    calls["fsum"] = lambda: math.fsum(losses)
    if importlib.util.find_spec("torch") is not None:
        import torch

        loss, mask = torch.from_numpy(losses), torch.from_numpy(weights)
        calls["torch"] = lambda: float((loss * mask).sum() / mask.sum())
        calls["torch64"] = lambda: float((loss.double() * mask).sum() / mask.sum())
    best = best_of(calls, rounds)

    rows = []
    for name in (*ours, "float32, int64 weights, 16 buckets"):
        speed = n / best[name] / 1e6
        marked = name in ("float32", "float32, int64 weights 0 or 1")
        rows.append(
            Row(
                f"LossAccumulator.add, {name}, {title}",
                f"{speed:.0f} M tokens/s",
                f">= {MARK}" if marked else "",
                speed >= MARK if marked else None,
            )
        )
    masked = best["float32, int64 weights 0 or 1"]
    rows.append(
        ratio_row(f"LossAccumulator.add / plain read, with int64 weights, {title}", masked / best["read"])
    )
    peers = {
        "average": "np.average(weights) / LossAccumulator.add",
        "torch": "torch sum(loss * mask) / sum(mask) in float32 / LossAccumulator.add",
        "torch64": "torch sum(loss * mask) / sum(mask) in float64 / LossAccumulator.add",
    }
    rows += [
        ratio_row(f"{what}, {title}", best[name] / masked) for name, what in peers.items() if name in best
    ]
    rows.append(
        ratio_row(f"math.fsum / LossAccumulator.add, no weights, {title}", best["fsum"] / best["float32"])
    )
    return rows


def small_calls(rounds: int) -> list[Row]:
    """One pair of a few tokens: the cost of the call and of closing a pair."""
    accumulator = LossAccumulator()
    losses = np.ones(16, np.float32)
    best = best_of(
        {
            "add": lambda: accumulator.add(losses),
            "mean": lambda: accumulator.mean,
            "numpy": losses.mean,
        },
        rounds,
    )
    return [
        Row(f"{what}, microseconds", f"{best[name] * 1e6:.2f}")
        for name, what in {
            "add": "LossAccumulator.add of 16 tokens",
            "mean": "LossAccumulator.mean",
            "numpy": "ndarray.mean of 16 floats",
        }.items()
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__, measure))
