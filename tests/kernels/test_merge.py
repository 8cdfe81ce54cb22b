"""merge_stats: pieces give what the whole would have given."""

from __future__ import annotations

import numpy as np
import pytest

from tests.awkward import FLOATS, make
from tests.kernels.compare import assert_record
from trainmon.ops import STATS_DTYPE, merge_stats, tensor_stats

CHUNK = 65536


@pytest.mark.parametrize("values", ["bits", "huge", "seeded"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float8_e5m2", "int32"])
def test_pieces_that_are_nodes_of_the_tree_have_the_bits_of_the_whole(dtype: str, values: str) -> None:
    """2^k chunks from a multiple of 2^k chunks; what stands last may be short."""
    array = make(dtype, "contiguous", values, n=7 * CHUNK + 123)
    whole = tensor_stats(array)[0]
    for borders in ([4], [2, 4], [4, 6, 7], [1, 2, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]):
        starts = [0, *(CHUNK * border for border in borders)]
        pieces = [array[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
        records = tensor_stats(pieces)
        for merged in (merge_stats(records), merge_stats(records[::-1], offsets=starts[::-1])):
            assert merged.tobytes() == whole.tobytes(), borders


@pytest.mark.parametrize("dtype", FLOATS)
def test_any_pieces_are_exact_but_for_rounding(dtype: str) -> None:
    array = make(dtype, "contiguous", "bits", n=1000)
    merged = merge_stats(tensor_stats([array[:1], array[1:1], array[1:500], array[500:]]))
    assert merged.shape == ()
    assert_record(merged, array)


def test_first_bad_counts_from_the_offset() -> None:
    good, bad = np.zeros(10), np.array([0, np.nan])
    assert merge_stats(tensor_stats([good, bad]))["first_bad"] == 11
    assert merge_stats(tensor_stats([good, bad]), offsets=[2, 0])["first_bad"] == 1
    assert merge_stats(tensor_stats([good, good]))["first_bad"] == -1


def test_nothing_merges_to_the_record_of_an_empty_tensor() -> None:
    assert merge_stats(np.empty(0, STATS_DTYPE)).tobytes() == tensor_stats(np.empty(0))[0].tobytes()


def test_one_record_merges_to_itself() -> None:
    record = tensor_stats(make("float64", "contiguous", "huge"))
    assert merge_stats(record).tobytes() == record.tobytes()
    assert merge_stats(merge_stats(record)).tobytes() == record.tobytes()


def test_bad_arguments() -> None:
    records = tensor_stats([np.ones(2), np.ones(3)])
    with pytest.raises(ValueError, match="1 entries for 2 records"):
        merge_stats(records, offsets=[0])
    with pytest.raises(TypeError, match="what tensor_stats returns"):
        merge_stats(np.ones(3))
    with pytest.raises(TypeError, match="offsets must be integers"):
        merge_stats(records, offsets=[0.0, 1.5])
    with pytest.raises(ValueError, match="offset"):
        merge_stats(records, offsets=[-1, 2])
    with pytest.raises(ValueError, match="offset"):
        merge_stats(records, offsets=[0, 1])


def test_empty_pieces_may_stand_anywhere() -> None:
    full, empty = np.arange(4.0), np.empty(0)
    for tensors, offsets in (
        ([full, empty], [0, 0]),
        ([empty, full, empty], [0, 0, 4]),
        ([full, empty], [0, 4]),
    ):
        assert (
            merge_stats(tensor_stats(tensors), offsets=offsets).tobytes() == tensor_stats(full)[0].tobytes()
        )
