"""Comparing two arrays: share of a plain read of both, and ratios to the recipes and tools that people use now.

    python benchmarks/compare.py [--quick]

Peers work on the same arrays in the same run. The NumPy recipe gives the largest absolute and relative error, mean and
root mean square, norms and cosine in float64; `np.allclose` and torch give one bit. msProbe's compare is restated in
NumPy: cosine, Euclidean distance, largest absolute and relative error (zeros of the reference moved by epsilon), and
the shares of relative errors below 1/1000 and 5/1000. The mark holds for the AVX-512 tier. Rows that need torch are left
out without it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _measure import Row, best_of, bfloat16_codes, main, ratio_row

from trainmon.ops import compare, plain_read

MIB = 2**20

Array = np.ndarray[Any, Any]


def numpy_recipe(a: Array, b: Array) -> tuple[float, ...]:
    """What one writes by hand: everything but distances, counts and places."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    error = np.abs(x - y)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.nanmax(error / np.abs(y))
    norms = np.linalg.norm(x), np.linalg.norm(y)
    return (
        float(error.max()),
        float(relative),
        float(error.mean()),
        float(np.sqrt(np.mean(np.square(error)))),
        *map(float, norms),
        float(np.dot(x, y) / (norms[0] * norms[1])),
    )


def msprobe_compare(a: Array, b: Array) -> tuple[float, ...]:
    """The columns of msProbe's comparison of two dumped tensors."""
    cosine = np.dot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b))
    distance = np.linalg.norm(a - b)
    largest = np.abs(a - b).max()
    epsilon = np.finfo(b.dtype).eps
    reference, value = b.copy(), a.copy()
    zero = reference == 0
    reference[zero] += epsilon
    value[zero] += epsilon
    relative = np.abs((value - reference) / reference)
    return (
        float(cosine),
        float(distance),
        float(largest),
        float(relative.max()),
        float(np.mean(relative < 0.001)),
        float(np.mean(relative < 0.005)),
    )


def measure(quick: bool = False) -> list[Row]:
    """All rows of the report; `quick` takes smaller memory and fewer turns."""
    rounds = 3 if quick else 12
    return shares(32 if quick else 256, rounds) + peers(8 if quick else 64, rounds) + small_calls(rounds)


def close_pair(n: int) -> tuple[Array, Array]:
    """Float32 that differ in the last few bits nearly everywhere."""
    rng = np.random.default_rng(0)
    a = np.resize(rng.standard_normal(min(n, MIB), dtype=np.float32), n)
    b = a * np.resize(1 + 1e-6 * rng.standard_normal(min(n, MIB), dtype=np.float32), n)
    return a, b


def shares(mebibytes: int, rounds: int) -> list[Row]:
    """Of the plain read of both arrays, which no cache holds."""
    rows = []
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        size = 2 if dtype in ("bfloat16", "float16") else 8 if dtype == "float64" else 4
        a, b = close_pair(mebibytes * MIB // size)
        if size == 2:
            b += 0.01 * np.abs(b)  # else almost all would be equal
        x: Any = bfloat16_codes(a) if dtype == "bfloat16" else a.astype(dtype)
        y: Any = bfloat16_codes(b) if dtype == "bfloat16" else b.astype(dtype)
        nbytes, twin = 2 * x.nbytes, x.copy()
        if dtype == "bfloat16":
            x, y, twin = (x, "bf16"), (y, "bf16"), (twin, "bf16")
        calls: dict[str, Callable[[], object]] = {
            "read": lambda x=x, y=y: plain_read([x, y]),
            "different": lambda x=x, y=y: compare(x, y),
            "equal": lambda x=x, twin=twin: compare(x, twin),
        }
        best = best_of(calls, rounds)
        for name in ("different", "equal"):
            detail = f"{nbytes / best[name] / 1e9:.1f} GB/s"
            title = f"compare / plain read of both, {dtype}, {name}, 2 x {mebibytes} MiB"
            rows.append(ratio_row(title, best["read"] / best[name], detail=detail))
    return rows


def peers(mebibytes: int, rounds: int) -> list[Row]:
    a, b = close_pair(mebibytes * MIB // 4)
    calls: dict[str, Callable[[], object]] = {
        "compare": lambda: compare(a, b),
        "NumPy recipe in float64": lambda: numpy_recipe(a, b),
        "msProbe's compare in NumPy": lambda: msprobe_compare(a, b),
        "np.allclose": lambda: np.allclose(a, b, rtol=1e-3),
        "np.array_equal": lambda: np.array_equal(a, a.copy()),
    }
    if importlib.util.find_spec("torch") is not None:
        import torch

        x, y = torch.from_numpy(a), torch.from_numpy(b)
        calls["torch.allclose"] = lambda: torch.allclose(x, y, rtol=1e-3)
        calls["torch.testing.assert_close"] = lambda: torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
    best = best_of(calls, max(2, rounds // 3))
    return [
        ratio_row(f"{name} / compare, float32, 2 x {mebibytes} MiB", best[name] / best["compare"])
        for name in calls
        if name != "compare"
    ]


def small_calls(rounds: int) -> list[Row]:
    """The cost of a call."""
    a, b = close_pair(64)
    best = best_of({"compare": lambda: compare(a, b), "allclose": lambda: np.allclose(a, b)}, rounds)
    return [
        Row("compare of 64 floats, microseconds", f"{best['compare'] * 1e6:.1f}"),
        Row("np.allclose of 64 floats, microseconds", f"{best['allclose'] * 1e6:.1f}"),
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__, measure))
