"""How fast tensors are staged, against a plain copy and against copy, statistics and fingerprint one after the other.

    python benchmarks/staging.py [--quick]

The copy is `np.copyto` between the same arrays: memcpy, which for memory of this size reads one byte and writes one,
as staging does. The marks are for the AVX-512 tier.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _measure import Row, best_of, bfloat16_codes, main, ratio_row

from trainmon.ops import cpu_info, fingerprint, stage, stage_size, tensor_stats

MIB = 2**20
SHARE_OF_COPY = {"float64": 0.9, "float32": 0.9, "float16": 0.75, "bfloat16": 0.75}


def measure(quick: bool = False) -> list[Row]:
    """All rows of the report; `quick` takes smaller memory and fewer turns."""
    mebibytes, rounds = (64, 4) if quick else (256, 12)
    marked = cpu_info()["tier"] == "avx512"
    rows = []
    base = np.random.default_rng(0).standard_normal(MIB, dtype=np.float32)
    for dtype, mark in SHARE_OF_COPY.items():
        values = bfloat16_codes(base) if dtype == "bfloat16" else base.astype(dtype)
        array = np.resize(values, mebibytes * MIB // values.itemsize)
        best = best_of(calls(array, dtype), rounds)
        copied = f"{array.nbytes / best['copy'] / 1e9:.1f} GB/s"
        detail = f"{array.nbytes / best['stage'] / 1e9:.1f} GB/s against {copied}"
        ratio = best["copy"] / best["stage"]
        rows.append(
            ratio_row(f"stage / copy, {dtype}, {mebibytes} MiB", ratio, mark if marked else None, detail)
        )
        rows.append(
            ratio_row(
                f"copy, statistics, fingerprint one by one / stage, {dtype}", best["apart"] / best["stage"]
            )
        )
    return rows + many_tensors(rounds)


def calls(array: np.ndarray[Any, Any], dtype: str) -> dict[str, Callable[[], object]]:
    tensor: Any = (array, "bf16") if dtype == "bfloat16" else array
    memory = np.zeros(array.nbytes + 64, np.uint8)
    arena = memory[-memory.ctypes.data % 64 :][: array.nbytes]
    target = arena.view(array.dtype)

    def apart() -> None:
        np.copyto(target, array)
        tensor_stats(tensor)
        fingerprint(tensor)

    return {"stage": lambda: stage(tensor, arena), "copy": lambda: np.copyto(target, array), "apart": apart}


def many_tensors(rounds: int) -> list[Row]:
    """A model's worth of small tensors: the cost of a tensor counts."""
    tensors = [np.ones(4096, np.float32) for _ in range(2000)]
    arena = np.zeros(stage_size(tensors) + 64, np.uint8)
    arena = arena[-arena.ctypes.data % 64 :]
    best = best_of({"stage": lambda: stage(tensors, arena)}, rounds)
    return [Row("stage of 2,000 arrays of 4,096 floats", f"{best['stage'] * 1e3:.2f} ms")]


if __name__ == "__main__":
    sys.exit(main(__doc__, measure))
