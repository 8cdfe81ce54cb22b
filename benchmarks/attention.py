"""Attention logits: share of the bare matrix product's speed, ratios to all scores at once, working set.

    python benchmarks/attention.py [--quick]

The bare product is NumPy's (OpenBLAS, one thread), in tiles of the same size, of the scores that a causal mask
leaves and no others: floating-point operations a second are compared, the triangle's for us and the computed tiles'
for it. Peers compute maximum, exponentials and their sum of all scores of a head, in blocks of rows where that is
faster. Rows that need torch are left out without it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _measure import Row, best_of, main, ratio_row

from trainmon.ops import attention_logit_mean, attention_logits

MARKS = {64: 0.6, 128: 0.75}  # of the bare product's speed
MEMORY_MARK = 64  # MiB beside the inputs, 32,768 queries and keys
TILE = (256, 512)

MEMORY = """
import re
from pathlib import Path
import numpy as np
from trainmon.ops import attention_logits

def peak():  # KiB; unlike ru_maxrss it knows nothing of the process before exec
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

q, k = (np.ones((1, 1, 32768, 64), np.float32) for _ in range(2))
before = peak()
attention_logits(q, k, sample_rows={rows})
print(peak() - before)
"""


def one_thread() -> None:
    """Every OpenBLAS in the process, and torch, on one thread."""
    libraries = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line
    }
    for path in libraries:
        library = ctypes.CDLL(path)
        for name in (
            "scipy_openblas_set_num_threads64_",
            "scipy_openblas_set_num_threads",
            "openblas_set_num_threads",
        ):
            function = getattr(library, name, None)
            if function is not None:
                function(1)
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)


def bare_product(q: Any, k: Any, causal: bool) -> tuple[Callable[[], object], int]:
    """Tiles of scores into one buffer, and their number of multiplications and additions."""
    length, depth = q.shape
    out = np.empty(TILE, np.float32)
    tiles = [
        (i, j, min(TILE[1], (i + TILE[0] if causal else length) - j))
        for i in range(0, length, TILE[0])
        for j in range(0, i + TILE[0] if causal else length, TILE[1])
    ]

    def run() -> None:
        for i, j, width in tiles:
            np.matmul(q[i : i + TILE[0]], k[j : j + width].T, out=out[:, :width])

    return run, 2 * depth * sum(TILE[0] * width for _, _, width in tiles)


def numpy_peer(q: Any, k: Any) -> Callable[[], object]:
    length, depth = q.shape
    hidden = np.triu(np.ones((TILE[0], TILE[0]), bool), 1)

    def run() -> float:
        largest, total = -np.inf, 0.0
        for i in range(0, length, TILE[0]):
            z = q[i : i + TILE[0]] @ k[: i + TILE[0]].T
            z *= depth**-0.5
            z[:, i:][hidden] = -np.inf
            m = z.max(axis=1, keepdims=True)
            z -= m
            np.exp(z, out=z)
            largest, total = max(largest, float(m.max())), total + float(z.sum())
        return largest + total

    return run


def torch_peer(q: Any, k: Any) -> Callable[[], object]:
    import torch

    queries, keys = torch.from_numpy(q), torch.from_numpy(k)
    hidden = torch.triu(torch.ones(TILE[0], TILE[0], dtype=torch.bool), 1)

    def run() -> float:
        largest, total = -np.inf, 0.0
        for i in range(0, len(q), TILE[0]):
            z = queries[i : i + TILE[0]] @ keys[: i + TILE[0]].T
            z.mul_(q.shape[1] ** -0.5)
            z[:, i:].masked_fill_(hidden, -torch.inf)
            m = z.amax(1, keepdim=True)
            total += float(z.sub_(m).exp_().sum())
            largest = max(largest, float(m.max()))
        return largest + total

    return run


def measure(quick: bool = False) -> list[Row]:
    """All rows of the report; `quick` takes shorter sequences and fewer turns."""
    one_thread()
    length, rounds = (2048, 4) if quick else (8192, 8)
    rows = []
    for depth in (64, 128):
        rows += one_depth(length, depth, rounds)
    rows.append(memory(2048 if quick else 32768))
    return rows


def one_depth(length: int, depth: int, rounds: int) -> list[Row]:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, length, depth), dtype=np.float32) for _ in range(2))
    narrow = [array.astype(np.float16) for array in (q, k)]
    group = q.reshape(8, length // 8, depth), k[:, : length // 8]
    bare, bare_flops = bare_product(q[0], k[0], causal=True)
    bare_full, bare_full_flops = bare_product(q[0], k[0], causal=False)
    triangle, square = depth * length * (length + 1), 2 * depth * length**2
    calls: dict[str, Callable[[], object]] = {
        "causal": lambda: attention_logits(q, k),
        "full": lambda: attention_logits(q, k, mask="full"),
        "float16": lambda: attention_logits(*narrow),
        "window": lambda: attention_logits(q, k, window=512),
        "grouped": lambda: attention_logits(*group, mask="full"),
        "sampled": lambda: attention_logits(q, k, sample_rows=64),
        "mean": lambda: attention_logit_mean(q, k),
        "bare": bare,
        "bare full": bare_full,
        "numpy": numpy_peer(q[0], k[0]),
    }
    if importlib.util.find_spec("torch") is not None:
        calls["torch"] = torch_peer(q[0], k[0])
    best = best_of(calls, rounds)

    what = f"attention_logits, {length} x {length}, d {depth}"
    speed = bare_flops / best["bare"]
    rows = [
        Row(f"{what}, causal", f"{triangle / best['causal'] / 1e9:.1f} GFLOP/s"),
        Row(f"bare product of the same tiles, d {depth}", f"{speed / 1e9:.1f} GFLOP/s"),
        ratio_row(
            f"{what}, causal, share of the bare product", triangle / best["causal"] / speed, MARKS[depth]
        ),
        ratio_row(
            f"{what}, full, share of the bare product",
            square / best["full"] / (bare_full_flops / best["bare full"]),
            MARKS[depth],
        ),
        ratio_row(
            f"{what}, 8 query heads of {length // 8} on 1 key head, full, share",
            square / 8 / best["grouped"] / (bare_full_flops / best["bare full"]),
        ),
    ]
    for name, title in (("numpy", "NumPy"), ("torch", "torch")):
        if name in best:
            rows.append(
                ratio_row(f"{title}, causal, product, max, exp, sum / {what}", best[name] / best["causal"])
            )
    rows += [
        ratio_row(f"{what}, causal, float16 / float32, time", best["float16"] / best["causal"]),
        ratio_row(f"{what}, causal, window 512 / without, time", best["window"] / best["causal"]),
        ratio_row(f"{what}, causal, 64 rows of {length} / all, time", best["sampled"] / best["causal"]),
        ratio_row(f"attention_logit_mean / {what}, causal, time", best["mean"] / best["causal"]),
    ]
    return rows


def memory(rows: int) -> Row:
    """Growth of the process' peak over the inputs, OpenBLAS' own buffers included."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY.format(rows=rows)], capture_output=True, text=True, check=True
    )
    mib = int(done.stdout) / 1024
    return Row(
        "attention_logits, 32,768 keys, memory beside the inputs",
        f"{mib:.1f} MiB",
        f"< {MEMORY_MARK}",
        mib < MEMORY_MARK,
    )


if __name__ == "__main__":
    sys.exit(main(__doc__, measure))
