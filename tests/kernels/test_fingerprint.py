"""fingerprint against polynomial division in Python integers: every awkward array, any partition, files."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.awkward import DTYPES, LAYOUTS, arrays, make
from tests.campaign import size
from tests.kernels.child import digests, output
from tests.twins.fingerprints import (
    POLYNOMIALS,
    fingerprint_twin,
    long_remainder,
    piece_twin,
    product,
    remainder,
)
from trainmon.ops import Fingerprint, file_digest, fingerprint

BITS = (64, 128)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_twin(dtype: str, layout: str) -> None:
    tensors = list(arrays(dtype, layout))
    for bits in BITS:
        for print_, array in zip(fingerprint(tensors, bits=bits), tensors, strict=True):
            assert print_ == Fingerprint(fingerprint_twin(array, bits), dtype, array.shape, bits)


@pytest.mark.parametrize(
    "n", [*range(70), 127, 128, 129, 511, 512, 513, 1023, 1025, 4095, 4096, 4097, 8191, 8192, 8193]
)
def test_every_length(n: int) -> None:
    array = make("uint8", "contiguous", "bits", n=n)
    shifted = np.append(np.uint8(0), array)[1:]
    for bits in BITS:
        assert [p.value for p in fingerprint([array, shifted], bits=bits)] == [
            fingerprint_twin(array, bits)
        ] * 2


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int8"])
def test_twin_over_chunks(dtype: str) -> None:
    for layout in ("contiguous", "every third", "misaligned", "reversed"):
        array = make(dtype, layout, "bits", n=2 * 65536 + 77)
        for bits in BITS:
            assert fingerprint(array, bits=bits)[0].value == fingerprint_twin(array, bits)


@pytest.mark.parametrize("bits", BITS)
def test_the_polynomial_is_irreducible(bits: int) -> None:
    """Rabin's test for a degree 2^k: z^(2^bits) = z, and z^(2^(bits/2)) - z has no factor in common."""
    modulus = POLYNOMIALS[bits]
    powers = [2]
    for _ in range(bits):
        powers.append(remainder(product(powers[-1], powers[-1]), modulus))
    assert powers[bits] == 2
    a, b = modulus, powers[bits // 2] ^ 2
    while b:
        a, b = b, remainder(a, b)
    assert a == 1


@pytest.mark.parametrize("bits", BITS)
def test_the_twin_is_long_division(bits: int) -> None:
    for n in (0, 1, 15, 16, 17, 100, 1000):
        number = int.from_bytes(make("uint8", "contiguous", "bits", n=n).tobytes(), "little")
        assert long_remainder(number, bits) == remainder(number, POLYNOMIALS[bits])


@pytest.mark.parametrize("bits", BITS)
def test_known_values(bits: int) -> None:
    """One bit at byte p is z^(8p + bit)."""
    assert fingerprint(np.zeros(1000), bits=bits)[0].value == 0
    assert fingerprint(np.array([5], np.int32), bits=bits)[0].value == 5
    bytes_ = np.zeros(bits // 8 + 1, np.uint8)
    bytes_[-1] = 1  # z^bits is what the polynomial says
    assert fingerprint(bytes_, bits=bits)[0].value == POLYNOMIALS[bits] - (1 << bits)
    assert fingerprint(np.array([1.0], np.float32), bits=bits)[0].hex == f"{0x3F800000:0{bits // 4}x}"


def partitions(shape: tuple[int, ...], cuts: list[list[int]]) -> Iterator[tuple[tuple[int, int], ...]]:
    """The boxes that cuts on each axis make: (start, stop) per axis."""
    edges = [[0, *sorted({cut % (n + 1) for cut in axis}), n] for n, axis in zip(shape, cuts, strict=True)]
    spans = [list(pairwise(edge)) for edge in edges]
    for index in np.ndindex(*[len(span) for span in spans]):
        yield tuple(span[i] for span, i in zip(spans, index, strict=True))


@pytest.mark.soak
@settings(max_examples=size(60, 2000), deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=4, max_size=4),
    st.sampled_from(["uint8", "bfloat16", "float32", "int64"]),
    st.sampled_from(BITS),
    st.randoms(use_true_random=False),
)
def test_any_partition_adds_up(
    lengths: list[int], cuts: list[list[int]], dtype: str, bits: Any, random: Any
) -> None:
    shape = tuple(lengths)
    whole = np.resize(make(dtype, "contiguous", "bits", n=300), shape)
    boxes = list(partitions(shape, cuts[: len(shape)]))
    random.shuffle(boxes)
    starts = [tuple(start for start, _ in box) for box in boxes]
    pieces = [whole[tuple(slice(*span) for span in box)] for box in boxes]
    pieces = [piece.copy() if i % 2 else piece for i, piece in enumerate(pieces)]
    prints = fingerprint(pieces, pieces=[(shape, start) for start in starts], bits=bits)
    for print_, piece, start in zip(prints, pieces, starts, strict=True):
        assert print_.value == piece_twin(piece, shape, start, bits)
    total = prints[0]
    for print_ in prints[1:]:
        total ^= print_
    assert [total] == fingerprint(whole, bits=bits)


@pytest.mark.parametrize("axis", [0, 1])
def test_shards_of_a_matrix(axis: int) -> None:
    """Row and column shards over several chunks, packed as a rank holds them."""
    whole = np.resize(make("bfloat16", "contiguous", "bits", n=5000), (1000, 768))
    shards = [np.ascontiguousarray(shard) for shard in np.array_split(whole, 3, axis)]
    at, prints = 0, []
    for shard in shards:
        start = (at, 0) if axis == 0 else (0, at)
        prints += fingerprint(shard, [(whole.shape, start)])
        at += shard.shape[axis]
    expected = fingerprint(whole)[0]
    assert prints[2] ^ prints[0] ^ prints[1] == expected
    assert prints[0] ^ prints[1] != expected
    assert expected.value == fingerprint_twin(whole)


def test_a_piece_may_be_none_or_all() -> None:
    array = make("float32", "cube", "bits")
    whole = fingerprint(array)[0]
    assert fingerprint([array, array], [None, (array.shape, (0, 0, 0))]) == [whole, whole]
    scalar = np.float64(3)
    assert fingerprint([scalar], [((), ())]) == fingerprint([scalar])
    empty = fingerprint(array[:0], [(array.shape, (2, 0, 0))])[0]
    assert empty.value == 0
    assert empty ^ whole == whole


def test_layout_dtype_and_shape() -> None:
    """C order decides; dtype and shape belong to equality."""
    array = make("float32", "cube", "bits")
    assert (
        fingerprint(array) == fingerprint(np.asfortranarray(array)) == fingerprint(array[::-1].copy()[::-1])
    )
    assert fingerprint(array) != fingerprint(array.reshape(-1))
    assert fingerprint(array) != fingerprint(array.view(np.int32))
    assert fingerprint(array)[0].value == fingerprint(array.view(np.int32))[0].value
    assert fingerprint(np.array([0.0])) != fingerprint(np.array([-0.0]))
    assert fingerprint(array) != fingerprint(array, bits=64)


def test_a_changed_bit_shows() -> None:
    array = make("uint8", "contiguous", "bits", n=20000)
    before = fingerprint(array, bits=64)
    for position in range(0, array.size, 1237):
        array[position] ^= 16
        assert fingerprint(array, bits=64) != before
        array[position] ^= 16
    swapped = array.copy()
    swapped[[5, 9000]] = swapped[[9000, 5]]
    assert array[5] != array[9000]
    assert fingerprint(swapped, bits=64) != before


def test_value_type() -> None:
    a = Fingerprint(0xAB, "float32", (2, 3), 64)
    assert a.hex == "00000000000000ab"
    assert str(a) == "gf64:float32[2,3]:00000000000000ab"
    assert a ^ Fingerprint(0xA0, "float32", (2, 3), 64) == Fingerprint(0x0B, "float32", (2, 3), 64)
    assert len({a, Fingerprint(0xAB, "float32", (2, 3), 64)}) == 1
    for other in (
        Fingerprint(1, "float64", (2, 3), 64),
        Fingerprint(1, "float32", (3, 2), 64),
        Fingerprint(1, "float32", (2, 3), 128),
    ):
        with pytest.raises(ValueError, match="pieces of one tensor"):
            a ^ other
    with pytest.raises(TypeError):
        a ^ 3  # type: ignore[operator]


def test_inputs_as_they_come() -> None:
    array = make("bfloat16", "contiguous", "bits")
    value = fingerprint(array)[0].value
    tagged = fingerprint((array.tobytes(), "bf16"))[0]
    assert (tagged.value, tagged.dtype, tagged.shape) == (value, "bfloat16", array.shape)
    assert fingerprint((array.view(np.int16).reshape(2, -1), "bf16"))[0].shape == (2, array.size // 2)
    assert fingerprint(memoryview(bytearray(b"ab")))[0].value == int.from_bytes(b"ab", "little")
    assert fingerprint([]) == []
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(array.view(np.int16).reshape(-1, 8).copy()).view(torch.bfloat16)
    for view in (tensor, tensor.T, tensor[::2, 1:]):
        copy = view.contiguous().view(torch.int16).numpy()
        assert fingerprint(view)[0] == Fingerprint(fingerprint_twin(copy), "bfloat16", tuple(view.shape))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([((3, 4), (2, 0))], r"axis 0 of its piece, 2 elements from 2, is not inside the whole's 3"),
        ([((3, 4), (0, -1))], r"an axis of the start must be from 0"),
        ([((3,), (0,))], r"the global shape has 1 axes, the tensor 2"),
        ([((3, 4), (0,))], r"the start has 1 axes, the tensor 2"),
        ([((2**40, 2**40), (0, 0))], r"more than 2\^60 bytes"),
        ([((3, 4), (0, 0)), None], r"one entry for each of the 1 tensors"),
        ([3], r"a piece is None or \(global shape, start\), not 3"),
        ([((3, "x"), (0, 0))], r"a piece is None or"),
    ],
)
def test_pieces_that_cannot_be(pieces: Any, message: str) -> None:
    array = np.ones((2, 3), np.float32)
    before = sys.getrefcount(array)
    with pytest.raises(ValueError, match=message):
        fingerprint(array, pieces)
    assert sys.getrefcount(array) == before


def test_arguments_out_of_range() -> None:
    array = np.ones(3)
    before = sys.getrefcount(array)
    with pytest.raises(ValueError, match="bits must be 64 or 128, not 32"):
        fingerprint(array, bits=32)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threads must be from 1"):
        fingerprint(array, threads=0)
    with pytest.raises(TypeError, match=r"tensors\[1\]"):
        fingerprint([array, None])
    with pytest.raises(TypeError, match="byte order"):
        fingerprint(np.ones(2, ">f4"))
    fingerprint([array, array], [None, ((5,), (1,))])
    assert sys.getrefcount(array) == before


def test_inputs_stay_unchanged() -> None:
    for layout in LAYOUTS:
        array = make("float32", layout, "bits")
        before = array.tobytes()
        fingerprint(array)
        assert array.tobytes() == before


DIGEST = """
import hashlib, numpy as np
from tests.awkward import DTYPES, LAYOUTS, make
from trainmon.ops import cpu_info, fingerprint
tensors = [make(dtype, layout, "bits", n=n) for dtype in DTYPES for layout in LAYOUTS for n in (120, 6000)]
tensors.append(make("float32", "every third", "bits", n=3 * 65536 + 5))
wide = np.resize(make("float32", "contiguous", "bits", n=5000), (700, 300))
shards = [(wide[:, :100], ((700, 300), (0, 0))), (wide[5:, 100:], ((700, 300), (5, 100)))]
text = "".join(str(p) for bits in (64, 128) for p in fingerprint(tensors, bits=bits))
text += "".join(str(fingerprint(shard, [piece])[0]) for shard, piece in shards)
print(cpu_info()["tier"], hashlib.sha256(text.encode()).hexdigest())
"""


def test_tiers_give_the_same_prints() -> None:
    results = digests(DIGEST)
    assert len(set(results.values())) == 1, results


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_give_the_same_prints(threads: int) -> None:
    array = np.resize(make("float32", "contiguous", "bits", n=65537), 13 * 2**20 + 5)
    square = array[: 3500 * 3500].reshape(3500, 3500)
    tensors, pieces = [array, square[:, 7:], array[:0]], [None, ((3500, 3500), (0, 7)), None]
    assert fingerprint(tensors, pieces, threads=threads) == fingerprint(tensors, pieces)


def test_beyond_two_to_the_31() -> None:
    """Elements by strides: 2^31 + 9 ones are (z^(8n) - 1) / (z^8 - 1)."""
    n = 2**31 + 9
    value = fingerprint(np.broadcast_to(np.uint8(1), n), bits=64)[0].value
    modulus, power, square, exponent = POLYNOMIALS[64], 1, 2, 8 * n
    while exponent:
        power = remainder(product(power, square), modulus) if exponent & 1 else power
        square = remainder(product(square, square), modulus)
        exponent >>= 1
    assert remainder(product(value, 0x101), modulus) == power ^ 1


def test_position_beyond_two_to_the_32() -> None:
    """A piece far out costs nothing: one byte at 2^40 is z^(2^43)."""
    square = 2
    for _ in range(43):
        square = remainder(product(square, square), POLYNOMIALS[128])
    value = fingerprint(np.ones(1, np.uint8), [((2**50,), (2**40,))])[0].value
    assert value == square


def test_eight_threads_at_once_and_fork() -> None:
    tensors = [make("float32", layout, "bits", n=70000) for layout in ("contiguous", "reversed")]
    expected = fingerprint(tensors)
    problems: list[object] = []

    def work() -> None:
        for _ in range(20):
            got = fingerprint(tensors, threads=2)
            if got != expected:
                problems.append(got)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert problems == []
    code = """
import os, numpy as np
from trainmon.ops import fingerprint
array = np.ones(10_000_000, np.float32)
first = fingerprint(array, threads=2)
child = os.fork()
if child == 0:
    os._exit(0 if fingerprint(array, threads=2) == first else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), fingerprint(array) == first)
"""
    assert output(code, timeout=60).split() == ["0", "True"]


# ---- files ----


@pytest.mark.parametrize("n", [0, 1, 63, 4096, 2**18 - 1, 2**18, 2**18 + 1, 700_001])
def test_file(tmp_path: Path, n: int) -> None:
    data = np.random.default_rng(0).bytes(n)
    path = tmp_path / "file"
    path.write_bytes(data)
    value = fingerprint_twin(np.frombuffer(data, np.uint8))
    assert file_digest(path) == f"gf128:{n}:{value:032x}"
    assert file_digest(str(path), "sha256") == f"sha256:{n}:{hashlib.sha256(data).hexdigest()}"


def test_file_with_zeros_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"abc\0")
    assert file_digest(tmp_path / "a") != file_digest(tmp_path / "b")


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        file_digest(tmp_path / "missing")
    with pytest.raises(IsADirectoryError, match="folder"):
        (tmp_path / "folder").mkdir()
        file_digest(tmp_path / "folder")
    with pytest.raises(ValueError, match="'gf128' or 'sha256', not 'md5'"):
        file_digest(tmp_path / "missing", "md5")  # type: ignore[arg-type]


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file whose read fails")
def test_a_failing_read_names_the_file() -> None:
    with pytest.raises(OSError, match="/proc/self/mem"):
        file_digest("/proc/self/mem")
