"""Twins of fingerprint and stage: polynomials over GF(2) as Python integers, bit k being the coefficient of z^k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# x^128 + x^7 + x^2 + x + 1 and x^64 + x^4 + x^3 + x + 1
POLYNOMIALS = {128: (1 << 128) | 0b10000111, 64: (1 << 64) | 0b11011}


def remainder(a: int, b: int) -> int:
    """a modulo b."""
    while a.bit_length() >= b.bit_length():
        a ^= b << (a.bit_length() - b.bit_length())
    return a


def long_remainder(a: int, bits: int) -> int:
    """The same for numbers of any length, in few steps: squaring the polynomial doubles its exponents, so that
    z^(bits * 2^k) is a sum of few powers of z too."""
    low = POLYNOMIALS[bits] ^ (1 << bits)
    while a.bit_length() > bits:
        k = ((a.bit_length() - 1) // bits).bit_length() - 1
        high = a >> (bits << k)
        a ^= high << (bits << k)
        for power in range(bits):
            a ^= high << (power << k) if low >> power & 1 else 0
    return a


def product(a: int, b: int) -> int:
    """a times b, without carries."""
    total = 0
    while b:
        total ^= a if b & 1 else 0
        a <<= 1
        b >>= 1
    return total


def little_endian(array: Any) -> bytes:
    """The elements in C order, each with its lowest byte first."""
    values = np.ascontiguousarray(array)
    codes = values.reshape(-1).view(f"u{values.dtype.itemsize}")
    return codes.astype(codes.dtype.newbyteorder("<")).tobytes()


def fingerprint_twin(array: Any, bits: int = 128) -> int:
    """The whole tensor as one number, modulo the polynomial."""
    return long_remainder(int.from_bytes(little_endian(array), "little"), bits)


def piece_twin(piece: Any, shape: Sequence[int], start: Sequence[int], bits: int = 128) -> int:
    """The piece among zeros, at its place in the whole."""
    piece = np.asarray(piece)
    whole = np.zeros(tuple(shape), f"u{piece.dtype.itemsize}")
    place = tuple(slice(at, at + length) for at, length in zip(start, piece.shape, strict=True))
    whole[place] = np.ascontiguousarray(piece).view(whole.dtype)
    return fingerprint_twin(whole, bits)


def stage_twin(arrays: Sequence[Any]) -> tuple[bytes, list[int]]:
    """The bytes of the arena and where each array starts in it."""
    arena, offsets = b"", []
    for array in arrays:
        arena += bytes(-len(arena) % 64)
        offsets.append(len(arena))
        arena += np.asarray(array).tobytes()
    return arena, offsets
