"""The one generator of awkward arrays: every dtype, every way memory can lie, every kind of value.

All kernel tests draw from here, so that a new dtype or a new layout is tested everywhere at once. Arrays are
small unless a test asks for size; the seed fixes every value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

_REGISTERED = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e4m3b11fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e4m3",
    "float8_e3m4",
    "float8_e8m0fnu",
)
_NATIVE = (
    "float64",
    "float32",
    "float16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
)

# Older ml_dtypes lack some float8 types.
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in _NATIVE} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _REGISTERED if hasattr(ml_dtypes, name)
}
FLOATS = tuple(name for name in DTYPES if name.startswith(("float", "bfloat")))

# ---- values: n elements of a dtype ----


def _ordinary(dtype: np.dtype[Any], n: int, rng: np.random.Generator) -> Array:
    if dtype.kind == "b":
        return rng.integers(0, 2, n).astype(bool)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(max(info.min, -100), 100, n).astype(dtype)
    values = (rng.standard_normal(n) * 3).astype(np.float32)
    if dtype.name == "float8_e8m0fnu":  # has no sign
        values = np.abs(values)
    return values.astype(dtype)


def _bits(dtype: np.dtype[Any], n: int, rng: np.random.Generator) -> Array:
    """Any bits at all: NaN payloads, infinities, subnormals, both zeros, extreme integers."""
    if dtype.kind == "b":
        return _ordinary(dtype, n, rng)
    return np.frombuffer(rng.bytes(n * dtype.itemsize), np.uint8).view(dtype).copy()


def _zeros(dtype: np.dtype[Any], n: int, rng: np.random.Generator) -> Array:
    values = np.zeros(n, dtype)
    if dtype.name in FLOATS and dtype.name != "float8_e8m0fnu":
        values[::2] = np.float32(-0.0).astype(dtype)
    return values


def _tiny(dtype: np.dtype[Any], n: int, rng: np.random.Generator) -> Array:
    """Subnormals: small codes without their sign, which are the smallest magnitudes."""
    if dtype.name not in FLOATS:
        return _ordinary(dtype, n, rng)
    codes = rng.integers(1, 4, n).astype(f"u{dtype.itemsize}")
    return codes.view(dtype)


def _huge(dtype: np.dtype[Any], n: int, rng: np.random.Generator) -> Array:
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.choice(np.array([info.min, info.max], dtype), n)
    if dtype.name == "float64":
        return rng.choice(np.array([1.5e300, -1.5e300, 3e-200, 1e154]), n)
    return _ordinary(dtype, n, rng)


def _seeded(dtype: np.dtype[Any], n: int, rng: np.random.Generator) -> Array:
    """Ordinary values with a few non-finite ones, where the dtype has any."""
    values = _ordinary(dtype, n, rng)
    if dtype.name in FLOATS and n:
        for special in (np.nan, np.inf, -np.inf):
            with np.errstate(all="ignore"):
                values[rng.integers(0, n)] = np.float32(special).astype(dtype)
    return values


VALUES: dict[str, Callable[[np.dtype[Any], int, np.random.Generator], Array]] = {
    "ordinary": _ordinary,
    "bits": _bits,
    "zeros": _zeros,
    "tiny": _tiny,
    "huge": _huge,
    "seeded": _seeded,
}

# ---- layouts: an array over the given 1-D, contiguous, aligned values ----


def _misaligned(values: Array) -> Array:
    raw = np.empty(values.nbytes + 1, np.uint8)
    shifted = raw[1:].view(values.dtype)
    shifted[...] = values
    return shifted


def _field(values: Array) -> Array:
    record = np.zeros(values.shape, [("pad", "u1"), ("x", values.dtype), ("tail", "u1")])
    record["x"] = values
    return record["x"]


def _read_only(values: Array) -> Array:
    values = values.copy()
    values.flags.writeable = False
    return values


def _odd_strides(values: Array) -> Array:
    """Axes of length 1 whose strides mean nothing."""
    size = values.itemsize
    return np.ndarray((1, values.size, 1), values.dtype, values, 0, (12345, size, -7 * size))


def _cube(values: Array) -> Array:
    n = values.size // 6
    return values[: 6 * n].reshape(2, n, 3)


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "contiguous": lambda values: values,
    "cube": _cube,
    "fortran": lambda values: np.asfortranarray(_cube(values)),
    "permuted": lambda values: _cube(values).transpose(1, 2, 0),
    "reversed": lambda values: values[::-1],
    "reversed rows": lambda values: _cube(values)[:, ::-1, :],
    "every third": lambda values: values[1::3],
    "columns": lambda values: _cube(values)[:, :, 1:],
    "broadcast rows": lambda values: np.broadcast_to(values, (3, values.size)),
    "broadcast inside": lambda values: np.broadcast_to(values[:, None], (values.size, 4)),
    "broadcast all": lambda values: np.broadcast_to(values[:1], (5, 7)),
    "misaligned": _misaligned,
    "field": _field,
    "read-only": _read_only,
    "odd strides": _odd_strides,
    "0-d": lambda values: values[:1].reshape(()),
    "empty": lambda values: values[:0],
    "empty cube": lambda values: values[:0].reshape(3, 0, 2),
}


def make(dtype: str, layout: str, values: str, n: int = 120, seed: int = 0) -> Array:
    """One array; the same arguments give the same bits."""
    rng = np.random.default_rng([seed, *f"{dtype}/{values}".encode()])
    return LAYOUTS[layout](VALUES[values](DTYPES[dtype], n, rng))


def arrays(dtype: str, layout: str, n: int = 120, seed: int = 0) -> Iterator[Array]:
    """All kinds of values in one dtype and layout."""
    for values in VALUES:
        yield make(dtype, layout, values, n, seed)
