"""Router ids a second of expert_load, microseconds of expert_metrics, and ratios to what people use now.

    python benchmarks/moe.py [--quick]

Peers work on the same arrays in the same run: `np.bincount` and `torch.bincount` with their `minlength`, the one-hot
and sum of the routers of MindFormers, restated in NumPy, and the same numbers of a layer written in NumPy. None of
the peers looks for ids outside the range. torch runs with one thread, as the others do; its rows are left out
without it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _measure import Row, best_of, main, ratio_row

from trainmon.ops import assign_churn, expert_load, expert_metrics, plain_read

NUMPY_MARK = 1.8
TORCH_MARK = 1.5
METRICS_MARK = 100  # microseconds for 61 layers of 256 experts
ONE_HOT_IDS = 2**14  # a one-hot of all ids would be gigabytes


def measure(quick: bool = False) -> list[Row]:
    """All rows of the report; `quick` takes fewer turns."""
    rounds = 6 if quick else 15
    rows = []
    for title, n in (("4 Mi ids", 2**22), ("32 Ki ids, in cache", 2**15)):
        for experts in (8, 64, 256):
            for kind in ("even", "skewed"):
                rows += counting(
                    f"{experts} experts, {kind}, {title}", ids_of(experts, kind, n), experts, rounds
                )
    rows += other_ids(rounds)
    rows += one_hot(rounds)
    return rows + metrics(rounds) + churn(rounds)


def ids_of(experts: int, kind: str, n: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Random ids; skewed: expert i as often as 1/(i + 1), so that few take most."""
    rng = np.random.default_rng(0)
    if kind == "even":
        return rng.integers(0, experts, n)
    weight = 1 / np.arange(1, experts + 1)
    return rng.choice(experts, n, p=weight / weight.sum())


def counting(title: str, ids: np.ndarray[Any, Any], experts: int, rounds: int) -> list[Row]:
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: expert_load(ids, experts),
        "numpy": lambda: np.bincount(ids, minlength=experts),
        "read": lambda: plain_read([ids]),
    }
    with one_torch_thread() as torch:
        if torch is not None:
            tensor = torch.from_numpy(ids)
            calls["torch"] = lambda: torch.bincount(tensor, minlength=experts)
        best = best_of(calls, rounds)
    speed = ids.size / best["ours"] / 1e6
    rows = [
        Row(f"expert_load, {title}", f"{speed:.0f} M ids/s"),
        ratio_row(f"expert_load / plain read, {title}", best["ours"] / best["read"]),
        ratio_row(f"np.bincount / expert_load, {title}", best["numpy"] / best["ours"], NUMPY_MARK),
    ]
    if "torch" in best:
        rows.append(
            ratio_row(f"torch.bincount / expert_load, {title}", best["torch"] / best["ours"], TORCH_MARK)
        )
    return rows


class one_torch_thread:
    """torch with one thread while the block runs, or None where it is not installed."""

    def __enter__(self) -> Any:
        if importlib.util.find_spec("torch") is None:
            return None
        import torch

        self.torch, self.threads = torch, torch.get_num_threads()
        torch.set_num_threads(1)
        return torch

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "torch"):
            self.torch.set_num_threads(self.threads)


def other_ids(rounds: int) -> list[Row]:
    """Ids that are narrower, all the same, partly outside the range, or of more experts."""
    n = 2**22
    even = ids_of(256, "even", n)
    padded = even.copy()
    padded[::50] = -1
    cases: dict[str, tuple[Any, int]] = {
        "int32": (even.astype(np.int32), 256),
        "int16": (even.astype(np.int16), 256),
        "uint8": (even.astype(np.uint8), 256),
        "int64, all of one expert": (np.full(n, 3), 256),
        "int64, 2 % of them -1": (padded, 256),
        "int64, 1,024 experts": (ids_of(1024, "even", n), 1024),
        "int64, 4,096 experts": (ids_of(4096, "even", n), 4096),
    }
    calls = {name: (lambda case=case: expert_load(*case)) for name, case in cases.items()}
    best = best_of(calls, rounds)
    return [Row(f"expert_load, {name}, 4 Mi ids", f"{n / best[name] / 1e6:.0f} M ids/s") for name in cases]


def one_hot(rounds: int) -> list[Row]:
    """A router's own count: a one-hot row an id, summed."""
    ids = ids_of(256, "even", ONE_HOT_IDS)
    numbers = np.arange(256)
    best = best_of(
        {
            "ours": lambda: expert_load(ids, 256),
            "one-hot": lambda: (ids[:, None] == numbers).astype(np.float32).sum(axis=0),
        },
        rounds,
    )
    return [
        ratio_row("one-hot and sum / expert_load, 256 experts, 16 Ki ids", best["one-hot"] / best["ours"])
    ]


def plain_metrics(counts: np.ndarray[Any, Any], last: np.ndarray[Any, Any]) -> object:
    """What expert_metrics says of one step without a capacity, in NumPy; windows and ages left out."""
    total = counts.sum(axis=1, keepdims=True)
    experts = counts.shape[1]
    p = counts / total
    mean = total / experts
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(p > 0, p * np.log(p), 0).sum(axis=1)
    ranks = np.arange(1, experts + 1)
    return (
        counts.max(axis=1) / mean[:, 0] - 1,
        1 - counts.min(axis=1) / mean[:, 0],
        entropy,
        entropy / np.log(experts),
        np.exp(entropy),
        counts.std(axis=1) / mean[:, 0],
        total[:, 0] ** 2 / (experts * (counts**2).sum(axis=1)),
        2 * (ranks * np.sort(counts, axis=1)).sum(axis=1) / (experts * total[:, 0]) - (experts + 1) / experts,
        np.abs(p - last).sum(axis=1) / 2,
    )


def metrics(rounds: int) -> list[Row]:
    rows = []
    for layers, experts in ((61, 256), (32, 8)):
        rng = np.random.default_rng(0)
        counts = rng.poisson(4096 * 8 / experts, (layers, experts)).astype(np.float64)
        last = counts[::-1] / counts[::-1].sum(axis=1, keepdims=True)
        _, state = expert_metrics(counts)
        best = best_of(
            {
                "ours": lambda counts=counts, state=state: expert_metrics(counts, 1.25, 8, state),
                "numpy": lambda counts=counts, last=last: plain_metrics(counts, last),
            },
            rounds,
        )
        took = best["ours"] * 1e6
        title = f"{layers} layers of {experts} experts"
        marked = experts == 256
        rows += [
            Row(
                f"expert_metrics, {title}, microseconds",
                f"{took:.1f}",
                f"<= {METRICS_MARK}" if marked else "",
                took <= METRICS_MARK if marked else None,
            ),
            ratio_row(
                f"nine of the metrics in NumPy / expert_metrics, {title}", best["numpy"] / best["ours"]
            ),
        ]
    return rows


def churn(rounds: int) -> list[Row]:
    """Top-8 of 256, compared by assign_churn and, row against row, by NumPy."""
    rng = np.random.default_rng(0)
    before, after = (np.argsort(rng.random((2**13, 256)))[:, :8] for _ in range(2))
    best = best_of(
        {
            "ours": lambda: assign_churn(before, after, 256),
            "numpy": lambda: 1 - (before[:, :, None] == after[:, None, :]).sum() / before.size,
        },
        rounds,
    )
    return [
        Row("assign_churn, top 8 of 256, 8 Ki tokens", f"{2**13 / best['ours'] / 1e6:.0f} M tokens/s"),
        ratio_row("all pairs in NumPy / assign_churn", best["numpy"] / best["ours"]),
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__, measure))
