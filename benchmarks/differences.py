"""How fast two lists are compared and the second one brought up to date, against reading and writing the same bytes.

    python benchmarks/differences.py [--quick]

`plain_read` of both arrays is what `diff_norm` is measured by. With `update` it also writes one of them: that is
measured by `np.bitwise_xor(a, b, out=b)`, which reads both and writes one, as an update must. Each works on a copy
of its own, and updates go to and fro between two states: what is compared has always changed. The marks hold for the
AVX-512 tier. Peers are what people write with torch today: a temporary difference, two norms, a count of equal
elements, a copy.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _measure import Row, best_of, bfloat16_codes, main, ratio_row

from trainmon.ops import cpu_info, diff_norm, plain_read

MIB = 2**20
SHARE = {"float64": 0.9, "float32": 0.9, "float16": 0.75, "bfloat16": 0.75}


def measure(quick: bool = False) -> list[Row]:
    """All rows of the report; `quick` takes smaller memory and fewer turns, for a look, not a record."""
    rows = beyond_caches(64 if quick else 256, 4 if quick else 12)
    rows += in_cache(20 if quick else 60)
    if importlib.util.find_spec("torch") is not None:
        rows += many_tensors(4 if quick else 20)
    return rows


def arrays(dtype: str, nbytes: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """An array and an earlier state of it: seven of eight elements have moved a little."""
    rng = np.random.default_rng(0)
    before = rng.standard_normal(MIB, dtype=np.float32)
    now = before + 1e-3 * rng.standard_normal(MIB, dtype=np.float32)
    now[::8] = before[::8]
    pair = [bfloat16_codes(x) if dtype == "bfloat16" else x.astype(dtype) for x in (now, before)]
    a, b = (np.resize(x, nbytes // x.itemsize) for x in pair)
    return a, b


def tagged(array: np.ndarray[Any, Any], dtype: str) -> Any:
    return (array, "bf16") if dtype == "bfloat16" else array


def beyond_caches(mebibytes: int, rounds: int) -> list[Row]:
    """Shares of a plain read, and of reading both and writing one."""
    marked = cpu_info()["tier"] == "avx512"
    rows = []
    for dtype, mark in SHARE.items():
        a, b = arrays(dtype, mebibytes * MIB)
        now, before, kept = tagged(a, dtype), tagged(b, dtype), tagged(b.copy(), dtype)
        words, states = (a.view(np.uint64), b.copy().view(np.uint64)), cycle((now, before))
        calls: dict[str, Callable[[], object]] = {
            "read": lambda now=now, before=before: plain_read([now, before]),
            "diff": lambda now=now, before=before: diff_norm(now, before),
            "xor": lambda words=words: np.bitwise_xor(words[0], words[1], out=words[1]),
            "update": lambda states=states, kept=kept: diff_norm(next(states), kept, update=True),
        }
        if dtype == "float32" and importlib.util.find_spec("torch") is not None:
            calls["torch"] = torch_way(a, b.copy())
        best = best_of(calls, rounds)
        limit = mark if marked else None
        read = 2 * a.nbytes / best["read"] / 1e9
        rows.append(Row(f"plain read of both, {dtype}, 2 x {mebibytes} MiB", f"{read:.1f} GB/s"))
        for name, ours, theirs in (
            ("diff_norm / plain read of both", "diff", "read"),
            ("diff_norm(update=True) / reading both and writing one", "update", "xor"),
        ):
            detail = f"{2 * a.nbytes / best[ours] / 1e9:.1f} GB/s read"
            rows.append(ratio_row(f"{name}, {dtype}", best[theirs] / best[ours], limit, detail))
        if "torch" in best:
            ratio = best["torch"] / best["update"]
            rows.append(
                ratio_row(f"the same numbers and the copy by torch / diff_norm(update=True), {dtype}", ratio)
            )
    return rows


def torch_way(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> Callable[[], object]:
    import torch

    now, before = torch.from_numpy(a), torch.from_numpy(b)

    def call() -> object:
        norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in (now - before, before)]
        same = (now == before).sum()
        before.copy_(now)
        return norms, same

    return call


def in_cache(rounds: int) -> list[Row]:
    """Without memory: the arithmetic."""
    rows = []
    for dtype in SHARE:
        a, b = arrays(dtype, 64 * 1024)
        now, before = tagged(a, dtype), tagged(b, dtype)
        best = best_of({"diff": lambda now=now, before=before: diff_norm(now, before)}, rounds)
        speed = 2 * a.nbytes / best["diff"] / 1e9
        rows.append(Row(f"diff_norm, {dtype}, 2 x 64 KiB, in cache", f"{speed:.1f} GB/s read"))
    few = np.ones(16, np.float32)
    best = best_of({"call": lambda: diff_norm(few, few)}, rounds)
    rows.append(Row("diff_norm of 16 elements, microseconds", f"{best['call'] * 1e6:.2f}"))
    return rows


def many_tensors(rounds: int) -> list[Row]:
    """A model's worth of tensors in one call."""
    import torch

    now = [torch.randn(4096) for _ in range(2000)]
    before = [tensor + 1e-3 for tensor in now]
    best = best_of(
        {
            "diff": lambda: diff_norm(now, before),
            "read": lambda: plain_read([*now, *before]),
            "torch": lambda: torch.nn.utils.get_total_norm(torch._foreach_sub(now, before)),
        },
        rounds,
    )
    what = "2,000 pairs of torch tensors of 4,096 floats"
    detail = f"{best['diff'] * 1e3:.2f} ms against {best['read'] * 1e3:.2f} ms"
    return [
        ratio_row(f"diff_norm / plain read, {what}", best["read"] / best["diff"], None, detail),
        ratio_row(
            f"torch foreach difference and total norm / diff_norm, {what}", best["torch"] / best["diff"]
        ),
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__, measure))
