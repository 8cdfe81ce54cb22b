"""The same bits for every tier, every thread count and every split of the work."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from tests.awkward import DTYPES, make
from tests.kernels.child import digests
from trainmon.ops import merge_stats, multi_norm, scan_nonfinite, tensor_stats

DIGEST = """
import hashlib, math
import numpy as np
from tests.awkward import DTYPES, LAYOUTS, VALUES, make
from trainmon.ops import cpu_info, multi_norm, scan_nonfinite, tensor_stats

digest = hashlib.sha256()
for dtype in DTYPES:
    for values in VALUES:
        tensors = [make(dtype, layout, values) for layout in LAYOUTS]
        tensors.append(make(dtype, "contiguous", values, n=2 * 65536 + 77))
        tensors.append(make(dtype, "every third", values, n=3 * 65536 + 5))
        records = tensor_stats(tensors)
        digest.update(records.tobytes())
        for ord in (1, 2, math.inf):
            total, each = multi_norm(tensors, ord, per_tensor=True)
            digest.update(np.float64(total).tobytes() + each.tobytes())
        digest.update(repr([scan_nonfinite(tensor) for tensor in tensors]).encode())
print(cpu_info()["tier"], digest.hexdigest())
"""


def test_tiers_give_the_same_bits() -> None:
    results = digests(DIGEST)
    assert len(set(results.values())) == 1, results


@pytest.mark.parametrize("threads", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "int16"])
def test_threads_give_the_same_bits(dtype: str, threads: int) -> None:
    n = 48 * 2**20 // DTYPES[dtype].itemsize + 12345  # enough for three workers
    base = make(dtype, "contiguous", "ordinary", n=65536 + 7)
    array = np.resize(base, n)
    for tensors in ([array], [array[: n // 3], array[n // 3 :], base], [array[::-1], base]):
        assert tensor_stats(tensors, threads=threads).tobytes() == tensor_stats(tensors).tobytes()
        for ord in (1, 2, math.inf):
            one, many = multi_norm(tensors, ord, per_tensor=True), multi_norm(tensors, ord, True, threads)
            assert one[0].tobytes() == many[0].tobytes()
            assert one[1].tobytes() == many[1].tobytes()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_find_the_first_bad_element(threads: int) -> None:
    array = np.zeros(12 * 2**20, np.float32)
    for position in (0, 65536, 5_000_000, array.size - 1):
        array[position] = np.nan
        array[-1] = np.inf
        found = scan_nonfinite([array[:0], array], threads=threads)
        assert found is not None
        assert (found.name, found.index) == ("1", position)
        assert tensor_stats(array, threads=threads)[0]["first_bad"] == position
        array[position] = 0


def test_layout_does_not_change_bits() -> None:
    """C order of the elements decides, not how they lie."""
    for dtype in DTYPES:
        values = make(dtype, "contiguous", "ordinary", n=65536 + 600)
        wide = np.zeros((values.size, 3), DTYPES[dtype])
        wide[:, 1] = values
        backwards = values[::-1].copy()[::-1]
        for array in (wide[:, 1], backwards):
            assert tensor_stats(array).tobytes() == tensor_stats(values).tobytes()
            assert multi_norm(array).tobytes() == multi_norm(values).tobytes()


def test_repeated_calls_give_the_same_bits() -> None:
    tensors = [make(dtype, "contiguous", "bits", n=1000) for dtype in DTYPES]
    digests = {hashlib.sha256(tensor_stats(tensors).tobytes()).hexdigest() for _ in range(5)}
    assert len(digests) == 1


def test_single_chunks_merge_to_the_whole_under_threads() -> None:
    array = make("bfloat16", "contiguous", "ordinary", n=9 * 65536 + 5)
    pieces = [array[start : start + 65536] for start in range(0, array.size, 65536)]
    assert merge_stats(tensor_stats(pieces, threads=3)).tobytes() == tensor_stats(array)[0].tobytes()
