"""Stable rank with its certified interval: time against the Gram recipe and against singular values, cost of a read.

    python benchmarks/spectral.py [--quick]

The Gram recipe is what trainers do today: form W'W in float32, then 5 steps of power iteration; restated in NumPy,
whose product of a matrix with its own transpose takes half the operations of a general one. Everything runs in a child
process with one BLAS thread, in turns on the same matrices, and is timed by the processor time it takes. A trained-like
matrix is a random bulk with 64 singular values above it that fall as 1/i; warm calls see it after a change of .2 % of
its norm.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _measure import Row, best_of, main, ratio_row

from trainmon.ops import Spectral, plain_read, stable_rank

Array = np.ndarray[Any, Any]
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
MARKED = 4096  # the size that the marks are about: beyond the caches, and the Gram recipe grows with its cube


def measure(quick: bool = False) -> list[Row]:
    """All rows of the report, measured in a child process with one BLAS thread."""
    child = subprocess.run(
        [sys.executable, __file__, "--child", *(["--quick"] if quick else [])],
        env={**os.environ, **ONE_THREAD},
        check=True,
        stdout=subprocess.PIPE,
    )
    return [Row(**row) for row in json.loads(child.stdout)]


def rows(quick: bool) -> list[Row]:
    n, rounds = (2048, 2) if quick else (MARKED, 7)
    rng = np.random.default_rng(0)
    gaussian = rng.standard_normal((n, n), dtype=np.float32)
    return [
        *memory(gaussian),
        *against_gram("Gaussian", gaussian, rng, rounds),
        *against_gram("trained-like", trained_like(n, rng), rng, rounds),
        *reads(gaussian, rounds),
        *against_singular_values(rng, 3),
    ]


def trained_like(n: int, rng: np.random.Generator) -> Array:
    bulk = rng.standard_normal((n, n), dtype=np.float32) / np.float32(2 * np.sqrt(n))
    left, right = (np.linalg.qr(rng.standard_normal((n, 64)))[0] for _ in range(2))
    spikes: Array = (left * (10 / np.arange(1, 65))) @ right.T
    return bulk + spikes.astype(np.float32)


def gram_recipe(w: Array) -> float:
    gram = w.T @ w
    v = np.ones(len(gram), np.float32) / np.float32(np.sqrt(len(gram)))
    for _ in range(5):
        v = gram @ v
        v /= np.linalg.norm(v)
    return float(np.vdot(w, w)) / float(v @ (gram @ v))


def half_width(result: Spectral) -> float:
    return (result.high / result.low - 1) / 2


def memory(w: Array) -> list[Row]:
    """Peak of the process before and after: the first large work of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stable_rank(w)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    name = f"peak memory of a cold call on {w.shape[0]} x {w.shape[1]} / one n x n float32 buffer"
    return [ratio_row(name, grown / w.nbytes, 0.25, f"{grown / 2**20:.1f} MiB", at_most=True)]


def against_gram(kind: str, w: Array, rng: np.random.Generator, rounds: int) -> list[Row]:
    n = len(w)
    _, state = stable_rank(w)
    noise = rng.standard_normal(w.shape, dtype=np.float32)
    moved = w + noise * np.float32(0.002 * np.linalg.norm(w) / np.linalg.norm(noise))
    best = best_of(
        {
            "gram": lambda: gram_recipe(moved),
            "cold": lambda: stable_rank(moved),
            "warm": lambda: stable_rank(moved, state),
        },
        rounds,
        clock=time.process_time,
    )
    cold, warm = stable_rank(moved)[0][0], stable_rank(moved, state)[0][0]
    gram = gram_recipe(moved)
    off = max(gram / cold.high, cold.low / gram) - 1
    out = []
    for name, result in (("cold", cold), ("warm", warm)):
        mark = (
            {("Gaussian", "cold"): 5.0, ("trained-like", "warm"): 20.0}.get((kind, name))
            if n == MARKED
            else None
        )
        detail = f"{best[name] * 1e3:.0f} ms, {result.passes} reads"
        out.append(
            ratio_row(
                f"Gram recipe / stable_rank, {kind} {n}², {name}", best["gram"] / best[name], mark, detail
            )
        )
        out.append(
            ratio_row(
                f"certified half width, %, {kind} {n}², {name}", 100 * half_width(result), 1, at_most=True
            )
        )
    out.append(
        Row(f"Gram recipe outside the certified interval by, %, {kind} {n}²", f"{100 * max(off, 0):.1f}")
    )
    return out


def reads(gaussian: Array, rounds: int) -> list[Row]:
    """A read within the iteration: a longer call less a call of one read, by the reads between. After a few reads the
    algebra beside them is small; a call to 1 % has all of it.
    """
    kinds: dict[str, tuple[Array, float | None]] = {
        "float32": (gaussian, 2.5),
        "float64": (gaussian.astype(np.float64), None),
    }
    if importlib.util.find_spec("ml_dtypes") is not None:
        import ml_dtypes

        kinds["bfloat16"] = (gaussian.astype(ml_dtypes.bfloat16), 4)
    out = []
    for name, (w, mark) in kinds.items():
        best = best_of(
            {
                "read": lambda w=w: plain_read(w),
                "one": lambda w=w: stable_rank(w, tolerance=1e9),
                "few": lambda w=w: stable_rank(w, tolerance=1.0),
                "all": lambda w=w: stable_rank(w),
            },
            rounds,
            clock=time.process_time,
        )
        for call, tolerance, what in (("few", 1.0, ""), ("all", 0.01, " and its algebra")):
            passes = stable_rank(w, tolerance=tolerance)[0][0].passes
            one = (best[call] - best["one"]) / (passes - 1)
            out.append(
                ratio_row(
                    f"a read that serves 8 vectors{what} / plain read, {name}",
                    one / best["read"],
                    mark if len(w) == MARKED and call == "few" else None,
                    f"{one * 1e3:.1f} ms",
                    at_most=True,
                )
            )
    return out


def against_singular_values(rng: np.random.Generator, rounds: int) -> list[Row]:
    out = []
    for m, n in ((1024, 1024), (4096, 256), (256, 256)):
        w = rng.standard_normal((m, n), dtype=np.float32)
        calls: dict[str, Callable[[], object]] = {
            "ours": lambda w=w: stable_rank(w),
            "numpy.linalg.norm(ord=2)": lambda w=w: np.linalg.norm(w, 2),
        }
        if importlib.util.find_spec("torch") is not None:
            import torch

            tensor = torch.from_numpy(w)
            calls["torch.linalg.matrix_norm(ord=2)"] = lambda tensor=tensor: torch.linalg.matrix_norm(
                tensor, 2
            )
        if importlib.util.find_spec("scipy") is not None:
            from scipy.sparse.linalg import svds

            calls["scipy svds(k=1)"] = lambda w=w: svds(w, k=1, return_singular_vectors=False)
        best = best_of(calls, rounds, clock=time.process_time)
        result = stable_rank(w)[0][0]
        ours = best.pop("ours")
        detail = f"{ours * 1e3:.1f} ms, {result.stopped_by}"
        out += [
            ratio_row(f"{name} / stable_rank, {m} x {n}", time / ours, None, detail)
            for name, time in best.items()
        ]
    return out


if __name__ == "__main__":
    if "--child" in sys.argv:
        print(json.dumps([asdict(row) for row in rows("--quick" in sys.argv)]))
    else:
        sys.exit(main(__doc__, measure))
