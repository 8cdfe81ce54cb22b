"""How fast the kernels are: GB/s, and ratios to a plain read and to the functions that people use now.

    python benchmarks/reductions.py [--quick]

Every ratio compares calls on the same memory in the same run, taking turns. Beyond the caches the reference
is `plain_read`, which reads every byte once and prefetches. The marks for the share of the read hold for the
AVX-512 tier; other tiers are printed without a mark (run with TRAINMON_CPU=avx2 or baseline). Rows that need
torch are left out without it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _measure import Row, best_of, bfloat16_codes, main, ratio_row

from trainmon.ops import cpu_info, multi_norm, plain_read, scan_nonfinite, tensor_stats

MIB = 2**20
SHARE_OF_READ = {"float64": 0.9, "float32": 0.9, "float16": 0.75, "bfloat16": 0.75}
IN_CACHE = (16 * 1024, 64 * 1024)


def measure(quick: bool = False) -> list[Row]:
    """All rows of the report; `quick` takes smaller memory and fewer turns, for a look, not a record."""
    rows = beyond_caches(128 if quick else 512, 3 if quick else 12)
    if importlib.util.find_spec("torch") is not None:
        rows += in_cache(5 if quick else 30)
        rows += many_tensors(3 if quick else 20)
    return rows


def beyond_caches(mebibytes: int, rounds: int) -> list[Row]:
    """Shares of a plain read on one array that no cache holds."""
    marked = cpu_info()["tier"] == "avx512"
    rows = []
    base = np.random.default_rng(0).standard_normal(MIB, dtype=np.float32)
    for dtype, mark in SHARE_OF_READ.items():
        values = bfloat16_codes(base) if dtype == "bfloat16" else base.astype(dtype)
        array: Any = np.resize(values, mebibytes * MIB // values.itemsize)
        nbytes = array.nbytes
        if dtype == "bfloat16":
            array = (array, "bf16")
        best = best_of(
            {
                "read": lambda array=array: plain_read(array),
                "tensor_stats": lambda array=array: tensor_stats(array),
                "multi_norm": lambda array=array: multi_norm(array),
                "scan_nonfinite": lambda array=array: scan_nonfinite(array),
            },
            rounds,
        )
        rows.append(Row(f"plain read, {dtype}, {mebibytes} MiB", f"{nbytes / best['read'] / 1e9:.1f} GB/s"))
        for name in ("tensor_stats", "multi_norm", "scan_nonfinite"):
            limit = mark if marked and name != "scan_nonfinite" else None
            detail = f"{nbytes / best[name] / 1e9:.1f} GB/s"
            rows.append(ratio_row(f"{name} / plain read, {dtype}", best["read"] / best[name], limit, detail))
    return rows


def in_cache(rounds: int) -> list[Row]:
    """Against torch and NumPy on small float32 tensors, where the cost of a call counts too."""
    import torch

    rows = []
    for nbytes in IN_CACHE:
        tensor = torch.from_numpy(np.random.default_rng(0).standard_normal(nbytes // 4, dtype=np.float32))
        array = tensor.numpy()
        best = best_of(
            {
                "norm": lambda tensor=tensor: multi_norm(tensor),
                "torch norm": lambda tensor=tensor: torch.linalg.vector_norm(tensor, dtype=torch.float64),
                "norm of array": lambda array=array: multi_norm(array),
                "numpy norm": lambda array=array: np.linalg.norm(array),
                "stats": lambda tensor=tensor: tensor_stats(tensor),
                "torch stats": lambda tensor=tensor: _five_reductions(tensor),
            },
            rounds,
        )
        size = f"float32, {nbytes // 1024} KiB"
        for title, theirs, ours, mark in (
            ("torch.linalg.vector_norm(dtype=float64) / multi_norm", "torch norm", "norm", 3),
            ("np.linalg.norm / multi_norm", "numpy norm", "norm of array", 1),
            ("five torch reductions / tensor_stats", "torch stats", "stats", 20),
        ):
            detail = f"{best[theirs] * 1e6:.2f} us against {best[ours] * 1e6:.2f} us"
            rows.append(ratio_row(f"{title}, {size}", best[theirs] / best[ours], mark, detail))
    return rows


def many_tensors(rounds: int) -> list[Row]:
    """A model's worth of tensors in one call: the door's cost, the read's, and torch's own way."""
    import torch

    tensors = [torch.randn(4096) for _ in range(2000)]
    nothing = [torch.empty(0) for _ in range(2000)]
    best = best_of(
        {
            "norm": lambda: multi_norm(tensors),
            "read": lambda: plain_read(tensors),
            "torch": lambda: torch.nn.utils.get_total_norm(tensors),
            "door": lambda: multi_norm(nothing),
        },
        rounds,
    )
    door = best["door"] / len(nothing) * 1e6
    what = "2,000 torch tensors of 4,096 floats"
    milliseconds = {name: f"{seconds * 1e3:.2f} ms" for name, seconds in best.items()}
    return [
        ratio_row(
            f"multi_norm / plain read, {what}",
            best["norm"] / best["read"],
            1.2,
            f"{milliseconds['norm']} against {milliseconds['read']}",
            at_most=True,
        ),
        ratio_row(
            f"torch.nn.utils.get_total_norm / multi_norm, {what}",
            best["torch"] / best["norm"],
            3,
            f"{milliseconds['torch']} against {milliseconds['norm']}",
        ),
        Row("one torch tensor through the door, microseconds", f"{door:.3f}", "< 0.2", door < 0.2),
    ]


def _five_reductions(tensor: Any) -> tuple[Any, ...]:
    """The statistics that msProbe's monitor takes of a tensor, each by a reduction of its own."""
    import torch

    return (
        torch.min(tensor),
        torch.max(tensor),
        torch.mean(tensor, dtype=torch.float64),
        torch.linalg.vector_norm(tensor, dtype=torch.float64),
        torch.isnan(tensor).sum(),
    )


if __name__ == "__main__":
    sys.exit(main(__doc__, measure))
