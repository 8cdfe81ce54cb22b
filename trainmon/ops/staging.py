"""Staging: many tensors copied into one arena, their statistics and fingerprints taken in the same read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainmon.ops._extension import Tensors, _core, names_tuple
from trainmon.ops.fingerprints import Fingerprint, make_fingerprints
from trainmon.ops.stats import Records


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """Tensors that were copied one behind the other.

    Attributes:
        arena: the bytes as a uint8 array over the caller's memory (or over memory of its own): tensors in list
            order, each in C order from a multiple of 64, zeros in the gaps; what lies behind the last is left
            alone.
        views: one writable array a tensor over the arena, with the tensor's shape and dtype. A dtype that neither
            NumPy nor an installed ml_dtypes has is shown as uint8 or uint16.
        dtypes: the name of each tensor's dtype.
        offsets: where each tensor starts in the arena, bytes, int64 [number of tensors].
        stats: as `tensor_stats` returns them, bit for bit.
        fingerprints: as `fingerprint` returns them.
        names: the names that were given, or None.
    """

    arena: npt.NDArray[np.uint8]
    views: list[npt.NDArray[Any]]
    dtypes: tuple[str, ...]
    offsets: npt.NDArray[np.int64]
    stats: Records
    fingerprints: list[Fingerprint]
    names: tuple[str, ...] | None = None


def stage_size(tensors: Tensors) -> int:
    """The bytes that `stage` needs in an arena for these tensors.

    Each tensor starts at a multiple of 64 bytes; nothing is added behind the last one.

    Raises:
        TypeError: an element that can't be read; the message names its position.
    """
    return _core.stage_size(tensors)


def stage(
    tensors: Tensors,
    arena: Any = None,
    names: Iterable[str] | str | None = None,
    bits: Literal[64, 128] = 128,
    threads: int = 1,
) -> Staged:
    """Copies tensors into one arena and describes them, reading each byte once.

    Args:
        tensors: one array or an iterable of arrays, any shapes, any mix of dtypes.
        arena: one writable array or buffer in C order (uint8 array, mmap, memfd, shared memory) of at least
            `stage_size(tensors)` bytes. None: a new one.
        names: one name a tensor, for error messages and the result.
        bits: of the fingerprints, 128 or 64.
        threads: workers for large inputs; they don't change the result.

    Returns:
        A `Staged`. The same tensors give the same bytes, records and fingerprints on every run. From 4 MiB on an
        arena that starts at a multiple of 64 is written past the caches.

    Raises:
        ValueError: an arena that is too small (need and have are named), read-only, or strided, or that a tensor
            lies in: all before anything is written; another number of names than tensors; other `bits`; `threads`
            below 1.
        TypeError: an element that can't be read, an arena that is no memory; the message names the position.

    Formula: docs/kernels/staging.md.
    """
    if bits not in (64, 128):
        raise ValueError(f"bits must be 64 or 128, not {bits!r}")
    labels = names_tuple(names)
    memory, skip, size, offsets, stats, words, kinds = _core.stage(tensors, labels, arena, bits, threads)
    flat = memory[skip : skip + size] if arena is None else _as_bytes(memory)
    views = [
        np.ndarray(shape, _dtype(name), flat, offset)
        for (name, shape), offset in zip(kinds, offsets.tolist(), strict=True)
    ]
    return Staged(
        arena=flat,
        views=views,
        dtypes=tuple(name for name, _ in kinds),
        offsets=offsets,
        stats=stats,
        fingerprints=make_fingerprints(words, kinds, bits),
        names=labels,
    )


def _as_bytes(arena: Any) -> npt.NDArray[np.uint8]:
    array = arena if isinstance(arena, np.ndarray) else np.frombuffer(arena, np.uint8)
    return array.reshape(-1).view(np.uint8)


@lru_cache
def _dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of this name, ml_dtypes', or unsigned integers of its size."""
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes

        registered: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError):
        registered = np.dtype(np.uint16 if name == "bfloat16" else np.uint8)
    return registered
