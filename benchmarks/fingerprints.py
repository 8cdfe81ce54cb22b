"""GB/s of fingerprints, and of the digests that people use now on the same bytes in the same run.

    python benchmarks/fingerprints.py [--quick]

Peers: zlib.crc32 (32 bits, composable), hashlib's SHA-256 and BLAKE2b (cryptographic) and, where it is installed (the
extra `bench`), xxhash's XXH3 of 128 bits (fast, can't be composed).
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _measure import Row, best_of, main, ratio_row

from trainmon.ops import fingerprint, plain_read

MIB = 2**20
MARK = 8.0  # GB/s a thread


def measure(quick: bool = False) -> list[Row]:
    """All rows of the report; `quick` takes smaller memory and fewer turns."""
    rounds = 4 if quick else 15
    rows = []
    for title, nbytes in (
        (f"{64 if quick else 256} MiB", (64 if quick else 256) * MIB),
        ("64 KiB", 64 * 1024),
    ):
        rows += whole_tensors(title, nbytes, rounds)
    return rows + shards(16 * MIB, rounds) + small_calls(rounds)


def whole_tensors(title: str, nbytes: int, rounds: int) -> list[Row]:
    data = np.resize(np.random.default_rng(0).integers(0, 256, MIB, np.uint8), nbytes)
    peer = data[: 4 * MIB]  # slow ones needn't read it all
    calls: dict[str, Callable[[], object]] = {
        "128 bits": lambda: fingerprint(data),
        "64 bits": lambda: fingerprint(data, bits=64),
        "read": lambda: plain_read(data),
        "zlib.crc32": lambda: zlib.crc32(peer),
        "hashlib.sha256": lambda: hashlib.sha256(peer).digest(),
        "hashlib.blake2b": lambda: hashlib.blake2b(peer).digest(),
    }
    if importlib.util.find_spec("xxhash") is not None:
        import xxhash

        calls["xxhash.xxh3_128"] = lambda: xxhash.xxh3_128_digest(data)
    best = best_of(calls, rounds)
    sizes = {name: peer.nbytes if name.startswith(("zlib", "hashlib")) else nbytes for name in calls}
    speed = {name: sizes[name] / seconds / 1e9 for name, seconds in best.items()}
    rows = [
        Row(f"fingerprint, {bits}, {title}", f"{speed[bits]:.1f} GB/s", f">= {MARK:g}", speed[bits] >= MARK)
        for bits in ("128 bits", "64 bits")
    ]
    rows.append(ratio_row(f"fingerprint / plain read, {title}", speed["128 bits"] / speed["read"]))
    for name in calls:
        if name.startswith(("zlib", "hashlib", "xxhash")):
            ratio = speed["128 bits"] / speed[name]
            rows.append(
                ratio_row(f"fingerprint against {name}, {title}", ratio, None, f"{speed[name]:.1f} GB/s")
            )
    return rows


def shards(nbytes: int, rounds: int) -> list[Row]:
    """Column shards, whose rows lie apart in the whole, against the whole."""
    whole = np.random.default_rng(0).standard_normal((nbytes // 4096, 1024), dtype=np.float32)
    columns = [np.ascontiguousarray(part) for part in np.split(whole, 8, axis=1)]
    pieces = [(whole.shape, (0, 128 * i)) for i in range(8)]
    best = best_of(
        {"whole": lambda: fingerprint(whole), "columns": lambda: fingerprint(columns, pieces)}, rounds
    )
    speed = nbytes / best["columns"] / 1e9
    return [
        ratio_row(
            "the whole / its 8 column shards, rows of 512 bytes, 16 MiB",
            best["whole"] / best["columns"],
            None,
            f"{speed:.1f} GB/s",
        )
    ]


def small_calls(rounds: int) -> list[Row]:
    few = np.ones(16, np.float32)
    best = best_of({"call": lambda: fingerprint(few)}, rounds)
    return [Row("fingerprint of 16 floats, microseconds", f"{best['call'] * 1e6:.2f}")]


if __name__ == "__main__":
    sys.exit(main(__doc__, measure))
