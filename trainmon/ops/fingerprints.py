"""Fingerprints: what a tensor, a shard or a file holds, in 64 or 128 bits that shards' prints add up to."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from trainmon.ops._extension import Tensors, _core

# (global shape, index of the first element in it), or None for a whole tensor.
Piece: TypeAlias = tuple[Sequence[int], Sequence[int]]
Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

_FILE_BLOCK = 1 << 18  # stays in the second cache between being read and being folded


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The fingerprint of a tensor, or of pieces of one; equal for equal bytes, dtype and shape.

    Prints of pieces of one tensor are combined with `a ^ b`, in any order. Once the pieces partition the
    tensor (each element in exactly one) the result is the tensor's own print. The operator can't know which
    pieces went in: a piece that is missing gives another print, and one that comes twice cancels itself.

    Not cryptographic: anyone can make another tensor with a wanted print.

    Attributes:
        value: the digest, below 2**bits; bit k is the coefficient of z^k.
        dtype: name of the element type.
        shape: shape of the whole tensor.
        bits: 64 or 128.
    """

    value: int
    dtype: str
    shape: tuple[int, ...]
    bits: int = 128

    @property
    def hex(self) -> str:
        """The value, most significant digit first, bits / 4 digits."""
        return f"{self.value:0{self.bits // 4}x}"

    def __xor__(self, other: Fingerprint) -> Fingerprint:
        if not isinstance(other, Fingerprint):
            return NotImplemented
        mine, theirs = (self.dtype, self.shape, self.bits), (other.dtype, other.shape, other.bits)
        if mine != theirs:
            raise ValueError(
                "only fingerprints of pieces of one tensor can be combined: one is of"
                f" {_kind(self)}, the other of {_kind(other)}"
            )
        return Fingerprint(self.value ^ other.value, *mine)

    def __str__(self) -> str:
        return f"{_kind(self)}:{self.hex}"


def _kind(fingerprint: Fingerprint) -> str:
    shape = ",".join(map(str, fingerprint.shape))
    return f"gf{fingerprint.bits}:{fingerprint.dtype}[{shape}]"


def fingerprint(
    tensors: Tensors,
    pieces: Iterable[Piece | None] | None = None,
    bits: Literal[64, 128] = 128,
    threads: int = 1,
) -> list[Fingerprint]:
    """The fingerprint of each tensor, from one read.

    Args:
        tensors: one array or an iterable of arrays, any shapes, any mix of dtypes.
        pieces: one entry a tensor: None for a whole tensor, or `(global shape, start)` when the array is a
            piece (any hyper-rectangle) of a larger tensor and its element [0, ..., 0] is the larger tensor's
            element [start]. None: all are whole.
        bits: 128 or 64.
        threads: workers for large inputs; they don't change the result.

    Returns:
        One `Fingerprint` a tensor. It depends on the bytes in C order (little-endian on every machine), dtype
        and shape, not on how the elements lie in memory: -0.0 and 0.0 differ, and so do NaNs with different
        payloads. For a piece, `shape` is the global one, and prints of pieces combine with `^`.

    Raises:
        ValueError: other `bits`; a piece that doesn't lie inside its tensor, or with another number of axes;
            another number of pieces than tensors; `threads` below 1.
        TypeError: an element that can't be read; the message names its position.

    Formula: docs/kernels/fingerprints.md.
    """
    if bits not in (64, 128):
        raise ValueError(f"bits must be 64 or 128, not {bits!r}")
    places = None if pieces is None else tuple(map(_place, pieces))
    words, kinds = _core.fingerprint(tensors, places, bits, threads)
    return make_fingerprints(words, kinds, bits, places)


def make_fingerprints(
    words: npt.NDArray[np.uint64],
    kinds: list[tuple[str, tuple[int, ...]]],
    bits: int,
    places: tuple[Place | None, ...] | None = None,
) -> list[Fingerprint]:
    """Words and (dtype, shape) pairs as the extension returns them."""
    prints = [
        Fingerprint(low | high << 64, dtype, shape, bits)
        for (low, high), (dtype, shape) in zip(words.tolist(), kinds, strict=True)
    ]
    for i, place in enumerate(places or ()):
        if place is not None:
            prints[i] = Fingerprint(prints[i].value, prints[i].dtype, place[0], bits)
    return prints


def _place(piece: Piece | None) -> Place | None:
    if piece is None:
        return None
    try:
        whole, start = piece
        return tuple(map(int, whole)), tuple(map(int, start))
    except (TypeError, ValueError):
        raise ValueError(f"a piece is None or (global shape, start), not {piece!r}") from None


def file_digest(path: str | os.PathLike[str], algorithm: Literal["gf128", "sha256"] = "gf128") -> str:
    """The digest of a file's bytes, in one read: "algorithm:length:hex digits".

    Args:
        path: a file that can be opened for reading.
        algorithm: "gf128", the 128-bit fingerprint (finds damage, at the speed of reading; not
            cryptographic), or "sha256".

    Returns:
        A text to be compared as a whole. The length belongs to it: the fingerprint alone doesn't see zero
        bytes at the end.

    Raises:
        TypeError: no path.
        ValueError: another algorithm.
        OSError: the file can't be opened or read; it names the path.

    Formula: docs/kernels/fingerprints.md, "Files".
    """
    if algorithm not in ("gf128", "sha256"):
        raise ValueError(f"algorithm must be 'gf128' or 'sha256', not {algorithm!r}")
    path = os.fspath(path)  # open() would take a number for a file that is open already
    value, length, sha256 = 0, 0, hashlib.sha256()
    block = memoryview(bytearray(_FILE_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := _read_into(file, block, path):
            part = block[:count]
            if algorithm == "sha256":
                sha256.update(part)
            else:
                words, _ = _core.fingerprint(part, (((length + count,), (length,)),), 128, 1)
                value ^= int(words[0, 0]) | int(words[0, 1]) << 64
            length += count
    return f"{algorithm}:{length}:{sha256.hexdigest() if algorithm == 'sha256' else f'{value:032x}'}"


def _read_into(file: Any, block: memoryview, path: str | os.PathLike[str]) -> int:
    try:
        return file.readinto(block) or 0
    except OSError as error:  # what read(2) reports has no name
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
