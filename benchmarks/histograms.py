"""How fast exponents are counted and casts judged: shares of a plain read, and ratios to the recipes that people use.

    python benchmarks/histograms.py [--quick]

Peers get the same array in the same run: `np.frexp` with `np.bincount`, the exponent bits with `np.bincount` (which
must be told about each dtype, and sees neither zeros nor subnormals), torch's `frexp` with `bincount`, and for the
casts four casts of ml_dtypes, counted. Peers take a smaller array; times are per byte. The mark for the share of the
read holds for the AVX-512 tier.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _measure import Row, best_of, bfloat16_codes, main, ratio_row

from trainmon.ops import cpu_info, exponent_histogram, plain_read, underflow_shares

MIB = 2**20
MARK = 0.6  # of a plain read, float32, AVX-512
FORMATS = ("bf16", "fp16", "e4m3fn", "e5m2")


def measure(quick: bool = False) -> list[Row]:
    """All rows of the report; `quick` takes smaller memory and fewer turns."""
    return beyond_caches(64 if quick else 256, 3 if quick else 12) + peers(2 if quick else 6) + small_calls(5)


def inputs(mebibytes: int) -> dict[str, Any]:
    """Gradients as they come: normal numbers times 1e-3; float16 of them has subnormals."""
    base = np.random.default_rng(0).standard_normal(MIB, dtype=np.float32) * np.float32(1e-3)
    made: dict[str, Any] = {name: base.astype(name) for name in ("float64", "float32", "float16")}
    made = {name: np.resize(values, mebibytes * MIB // values.itemsize) for name, values in made.items()}
    made["bfloat16"] = (np.resize(bfloat16_codes(base), mebibytes * MIB // 2), "bf16")
    made["float8_e5m2"] = (
        np.resize((base.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8), mebibytes * MIB),
        "e5m2",
    )
    return made


def beyond_caches(mebibytes: int, rounds: int) -> list[Row]:
    """Shares of a plain read on one array that no cache holds."""
    marked = cpu_info()["tier"] == "avx512"
    rows = []
    for dtype, array in inputs(mebibytes).items():
        nbytes = (array[0] if isinstance(array, tuple) else array).nbytes
        best = best_of(
            {
                "read": lambda array=array: plain_read(array),
                "exponent_histogram": lambda array=array: exponent_histogram(array),
                "underflow_shares": lambda array=array: underflow_shares(array, FORMATS),
            },
            rounds,
        )
        for name in ("exponent_histogram", "underflow_shares"):
            mark = MARK if marked and name == "exponent_histogram" and dtype == "float32" else None
            what = name if name == "exponent_histogram" else "underflow_shares of 4 formats"
            detail = f"{nbytes / best[name] / 1e9:.1f} GB/s"
            rows.append(ratio_row(f"{what} / plain read, {dtype}", best["read"] / best[name], mark, detail))
    return rows


def frexp_counts(array: np.ndarray[Any, Any]) -> object:
    """The exact recipe in NumPy: exponents of the finite elements other than zero, and four counts."""
    finite = np.isfinite(array)
    kept = array[finite & (array != 0)]
    bins = np.clip(np.frexp(kept)[1] + 126, 0, 255)
    tiny = np.abs(kept) < np.finfo(array.dtype).tiny
    return (
        np.bincount(bins, minlength=256),
        (array == 0).sum(),
        tiny.sum(),
        np.isinf(array).sum(),
        np.isnan(array).sum(),
    )


def bit_counts(array: np.ndarray[Any, Any]) -> object:
    """float32's exponent field alone."""
    return np.bincount((array.view(np.uint32) >> 23) & 255, minlength=256)


def histogram_of_logarithms(array: np.ndarray[Any, Any]) -> object:
    """`np.histogram` over log2 of the magnitudes, the way of notebooks."""
    with np.errstate(divide="ignore"):
        return np.histogram(np.log2(np.abs(array)), bins=256, range=(-127, 129))


def four_casts(array: np.ndarray[Any, Any]) -> object:
    """Each cast made and its losses counted."""
    import ml_dtypes

    found = []
    nonzero, finite = array != 0, np.isfinite(array)
    with np.errstate(all="ignore"):
        for dtype in (ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
            cast = array.astype(dtype)
            found.append(((cast == 0) & nonzero).sum())
            found.append((~np.isfinite(cast) & finite).sum())
    return found


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """torch on one thread, as all the others."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def peers(rounds: int) -> list[Row]:
    """float32, 1 MiB: what others need for the same counts."""
    array = np.random.default_rng(1).standard_normal(MIB // 4, dtype=np.float32) * np.float32(1e-3)
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: exponent_histogram(array),
        "frexp": lambda: frexp_counts(array),
        "bits": lambda: bit_counts(array),
        "logarithms": lambda: histogram_of_logarithms(array),
        "our casts": lambda: underflow_shares(array, FORMATS),
    }
    titles = {
        "frexp": "np.frexp + np.bincount",
        "bits": "np.bincount of the exponent bits",
        "logarithms": "np.histogram of log2",
    }
    if importlib.util.find_spec("torch") is not None:
        import torch

        tensor = torch.from_numpy(array)
        calls["torch bits"] = lambda: torch.bincount((tensor.view(torch.int32) >> 23) & 255, minlength=256)
        calls["torch histc"] = lambda: torch.histc(torch.log2(tensor.abs()), 256, -127, 129)
        titles["torch bits"] = "torch.bincount of the exponent bits"
        titles["torch histc"] = "torch.histc of log2"
    if importlib.util.find_spec("ml_dtypes") is not None:
        calls["casts"] = lambda: four_casts(array)
    with one_torch_thread():
        best = best_of(calls, rounds)
    rows = [
        ratio_row(f"{title} / exponent_histogram, float32, 1 MiB", best[name] / best["ours"])
        for name, title in titles.items()
    ]
    if "casts" in best:
        rows.append(
            ratio_row(
                "four casts of ml_dtypes, counted / underflow_shares, float32, 1 MiB",
                best["casts"] / best["our casts"],
            )
        )
    return rows


def small_calls(rounds: int) -> list[Row]:
    """Many small tensors in one call: the cost of a tensor."""
    tensors = [np.ones(64, np.float32) for _ in range(1000)]
    best = best_of(
        {
            "one": lambda: exponent_histogram(tensors[0]),
            "list": lambda: exponent_histogram(tensors),
            "shares": lambda: underflow_shares(tensors[0], FORMATS),
        },
        rounds,
    )
    return [
        Row("exponent_histogram of 64 floats, microseconds", f"{best['one'] * 1e6:.2f}"),
        Row(
            "exponent_histogram of 1,000 tensors of 64 floats, microseconds a tensor",
            f"{best['list'] * 1e3:.2f}",
        ),
        Row("underflow_shares of 64 floats, 4 formats, microseconds", f"{best['shares'] * 1e6:.2f}"),
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__, measure))
