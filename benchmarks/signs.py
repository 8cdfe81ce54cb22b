"""How fast the signs of two lists are compared, against a plain read of the same bytes.

    python benchmarks/signs.py [--quick]

Processor time, as the machine may be busy and all run in one thread. Peers are what people write today: a product of
signs and its mean, by torch (on one thread) and by NumPy.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _measure import Row, best_of, bfloat16_codes, main, ratio_row

from trainmon.ops import plain_read, sign_agreement

MIB = 2**20
PAIRS = (
    ("float64", "float64"),
    ("float32", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
)


def measure(quick: bool = False) -> list[Row]:
    """All rows of the report; `quick` takes smaller memory and fewer turns, for a look, not a record."""
    rows = []
    size = 8 if quick else 64  # of the smaller list, in millions of elements
    for one, other in PAIRS:
        rows += row_of(one, other, size * MIB, 4 if quick else 12, peers=one == other == "float32")
    for one, other in PAIRS:
        a, b = tensor(one, 16 * 1024), tensor(other, 16 * 1024, 1)
        best = best_of(
            {"signs": lambda a=a, b=b: sign_agreement(a, b)}, 20 if quick else 60, clock=time.process_time
        )
        speed = 16 * 1024 / best["signs"] / 1e9
        rows.append(
            Row(f"sign_agreement, {one} and {other}, 16,384 elements, in cache", f"{speed:.1f} G elements/s")
        )
    few = np.ones(16, np.float32)
    best = best_of({"call": lambda: sign_agreement(few, few)}, 20 if quick else 60, clock=time.process_time)
    rows.append(Row("sign_agreement of 16 elements, microseconds", f"{best['call'] * 1e6:.2f}"))
    return rows


def tensor(dtype: str, n: int, seed: int = 0) -> Any:
    values = np.random.default_rng(seed).standard_normal(min(n, MIB), dtype=np.float32)
    if dtype == "bfloat16":
        return np.resize(bfloat16_codes(values), n), "bf16"
    return np.resize(values.astype(dtype), n)


def row_of(one: str, other: str, n: int, rounds: int, *, peers: bool) -> list[Row]:
    a, b = tensor(one, n), tensor(other, n, 1)
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: plain_read([a, b]),
        "signs": lambda: sign_agreement(a, b),
    }
    if peers:
        calls["numpy"] = lambda: (np.mean(np.sign(a) * np.sign(b)) + 1) / 2
        if importlib.util.find_spec("torch") is not None:
            import torch

            torch.set_num_threads(1)

            x, y = torch.from_numpy(a), torch.from_numpy(b)
            calls["torch"] = lambda: ((torch.sign(x) * torch.sign(y)).mean() + 1) / 2
    best = best_of(calls, rounds, clock=time.process_time)
    nbytes = sum(
        array.nbytes
        for array in ((a[0] if isinstance(a, tuple) else a), (b[0] if isinstance(b, tuple) else b))
    )
    detail = f"{nbytes / best['signs'] / 1e9:.1f} GB/s"
    name = f"sign_agreement / plain read, {one} and {other}, {n >> 20} Mi elements"
    rows = [ratio_row(name, best["read"] / best["signs"], None, detail)]
    for peer in ("torch", "numpy"):
        if peer in best:
            rows.append(
                ratio_row(
                    f"{peer}'s sign, product and mean / sign_agreement, {one}", best[peer] / best["signs"]
                )
            )
    return rows


if __name__ == "__main__":
    sys.exit(main(__doc__, measure))
