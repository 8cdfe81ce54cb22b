"""diff_norm against its twin; what the update writes; what it refuses to write."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.awkward import DTYPES, FLOATS, LAYOUTS, VALUES, make
from tests.kernels.child import digests
from tests.kernels.compare import close, same
from tests.twins.differences import difference_twin
from trainmon.ops import Difference, diff_norm, multi_norm

Array = np.ndarray[Any, Any]
CHUNK = 65536


def pair(dtype: str, layout: str, values: str, n: int = 120) -> tuple[Array, Array]:
    """A tensor and one of other values in the same layout, every fifth element the same."""
    now, before = make(dtype, layout, values, n), make(dtype, layout, values, n, seed=1)
    if before.flags.writeable and before.ndim == 1:
        before[::5] = now[::5]
    return now, before


def assert_twin(got: Difference, tensors: list[Any], previous: list[Any]) -> None:
    twin = difference_twin(tensors, previous)
    assert (got.n, got.n_nonfinite) == (twin.n, twin.n_nonfinite)
    assert same(float(got.unchanged), twin.unchanged)
    assert close(float(got.norm), twin.norm, twin.n)
    assert close(float(got.previous_norm), twin.previous_norm, twin.n)
    with np.errstate(all="ignore"):
        assert same(float(got.ratio), float(got.norm / got.previous_norm))
    if math.isfinite(twin.ratio) and twin.previous_norm > 1e-300:
        assert close(float(got.ratio), twin.ratio, 2 * twin.n)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_twin(dtype: str, layout: str) -> None:
    pairs = [pair(dtype, layout, values) for values in VALUES]
    tensors, previous = [list(side) for side in zip(*pairs, strict=True)]
    total = diff_norm(tensors, previous, per_tensor=True)
    assert_twin(total, tensors, previous)
    assert total.each is not None
    for i, (now, before) in enumerate(pairs):
        one = diff_norm(now, before)
        assert_twin(one, [now], [before])
        for name in ("norm", "previous_norm", "ratio", "unchanged", "n", "n_nonfinite"):
            assert same(float(getattr(total.each, name)[i]), float(getattr(one, name))), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_twin_over_chunks(dtype: str) -> None:
    for values in ("ordinary", "bits"):
        now, before = pair(dtype, "contiguous", values, n=3 * CHUNK + 77)
        assert_twin(diff_norm(now, before), [now], [before])


@pytest.mark.parametrize("dtype", FLOATS)
def test_previous_norm_is_multi_norm(dtype: str) -> None:
    """The very bits, but for float8, whose norm is counted by code there."""
    now, before = pair(dtype, "contiguous", "ordinary", n=2 * CHUNK + 5)
    got, norm = float(diff_norm(now, before).previous_norm), float(multi_norm(before))
    assert got == norm if DTYPES[dtype].itemsize > 1 else close(got, norm, before.size)
    zero = np.zeros_like(before)
    assert float(diff_norm(zero, before).norm) == got


def test_check_values() -> None:
    """formulas.md: update/norm, update/ratio, update/zero_share on numbers that one can do by hand."""
    before = [np.array([3.0, 0.0]), np.array([[4.0]])]
    now = [np.array([3.0, 3.0]), np.array([[0.0]])]
    got = diff_norm(now, before, per_tensor=True)
    assert (got.norm, got.previous_norm, got.ratio, got.unchanged) == (5, 5, 1, 1 / 3)
    assert got.each is not None
    assert got.each.norm.tolist() == [3, 4]
    assert got.each.ratio.tolist() == [1, 1]
    assert got.each.unchanged.tolist() == [0.5, 0]
    assert got.each.n.tolist() == [2, 1]


def test_ratio_of_nothing() -> None:
    zero, one = np.zeros(3, np.float32), np.ones(3, np.float32)
    assert diff_norm(one, zero).ratio == math.inf
    assert math.isnan(diff_norm(zero, zero).ratio)
    nothing = diff_norm([], [], per_tensor=True)
    assert (nothing.norm, nothing.previous_norm, nothing.n) == (0, 0, 0)
    assert math.isnan(nothing.ratio)
    assert math.isnan(nothing.unchanged)
    assert nothing.each is not None
    assert nothing.each.norm.shape == (0,)


def test_a_micro_batch_is_not_a_difference_of_norms() -> None:
    """norm(acc_2) - norm(acc_1) is 0 here; the second micro-batch's own gradient has norm 2."""
    first, both = np.array([1.0, 0.0], np.float32), np.array([-1.0, 0.0], np.float32)
    assert multi_norm(both) - multi_norm(first) == 0
    assert diff_norm(both, first).norm == 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_unchanged_means_the_bits(dtype: str) -> None:
    if dtype in ("float8_e8m0fnu",) or "fnuz" in dtype:
        pytest.skip("has no -0")
    zeros = np.zeros(4, DTYPES[dtype])
    negative = make(dtype, "contiguous", "zeros", n=4)  # -0 at even places
    assert diff_norm(negative, zeros).norm == 0
    assert diff_norm(negative, zeros).unchanged == 0.5
    nan = np.full(40, np.nan, np.float32).astype(DTYPES[dtype])
    got = diff_norm(nan, nan.copy())
    assert (got.unchanged, got.n_nonfinite) == (1, 40)
    assert math.isnan(got.norm)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_nonfinite_differences_are_counted_at_any_place(dtype: str) -> None:
    for n in (1, 31, 32, 33, 5000, CHUNK + 3):
        clean = np.ones(n, DTYPES[dtype])
        for place in {0, n // 2, n - 1}:
            bad = clean.copy()
            bad[place] = np.float32(np.inf)
            for update in (False, True):
                one = diff_norm(bad, clean.copy(), update)
                assert (one.n_nonfinite, one.norm, one.ratio) == (1, math.inf, math.inf)
                other = diff_norm(clean, bad.copy(), update)
                assert (other.n_nonfinite, other.norm, other.previous_norm) == (1, math.inf, math.inf)
                assert math.isnan(other.ratio)
                both = diff_norm(bad, bad.copy(), update)
                assert both.n_nonfinite == 1
                assert math.isnan(both.norm)
                assert both.unchanged == 1


def test_nan_wins_over_infinity() -> None:
    ones = [np.ones(2), np.ones(1)]
    assert math.isnan(diff_norm([np.array([np.inf, 1]), np.array([np.nan])], ones).norm)
    assert diff_norm([np.array([-np.inf, 1]), np.array([2.0])], ones).norm == math.inf


@pytest.mark.parametrize("update", [False, True])
def test_range_of_float64(update: bool) -> None:
    for scale in (1e300, 1e-300, 5e-324):
        now, before = np.full(7, 4 * scale), np.full(7, 1 * scale)
        got = diff_norm(now, before, update)
        assert got.norm == pytest.approx(3 * scale * math.sqrt(7), rel=1e-14)
        assert got.previous_norm == pytest.approx(scale * math.sqrt(7), rel=1e-14, abs=5e-324)
    far = diff_norm(np.array([1.7e308]), np.array([-1.7e308]))
    assert (far.norm, far.n_nonfinite, far.previous_norm) == (math.inf, 1, 1.7e308)
    mixed = diff_norm(
        [np.array([3e300]), np.array([3.0])], [np.array([0.0]), np.array([5e-300])], per_tensor=True
    )
    assert mixed.each is not None
    assert mixed.each.norm.tolist() == [3e300, 3.0]
    assert mixed.each.previous_norm.tolist() == [0.0, 5e-300]


# ---- update ----


@pytest.mark.parametrize("values", ["ordinary", "bits", "huge", "tiny"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_update_copies_every_bit_between_any_layouts(dtype: str, values: str) -> None:
    shapes = [name for name in LAYOUTS if not name.startswith("broadcast") and name != "read-only"]
    sources = {name: make(dtype, name, values) for name in LAYOUTS}
    for source in sources.values():
        for layout in shapes:
            target = make(dtype, layout, values, seed=3)
            if target.shape != source.shape:
                continue
            before, kept = target.copy(), source.tobytes()
            expected = diff_norm(source, before, per_tensor=True)
            got = diff_norm(source, target, update=True, per_tensor=True)
            assert repr(got) == repr(expected)
            assert target.tobytes() == source.tobytes() == kept


def test_update_writes_nothing_beside_the_view() -> None:
    for dtype in ("float64", "float32", "bfloat16", "int8"):
        now = make(dtype, "contiguous", "bits", n=300)
        base = make(dtype, "contiguous", "bits", n=3 * 300, seed=5)
        expected = base.copy()
        expected[1::3] = now
        diff_norm(now, base[1::3], update=True)
        assert base.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int32"])
def test_update_over_chunks_and_threads(dtype: str) -> None:
    n = 20 * 2**20 // DTYPES[dtype].itemsize + 12345  # enough for two workers in two tensors
    base = make(dtype, "contiguous", "ordinary", n=CHUNK + 7)
    now = [np.resize(base, n), np.resize(base, n)[::-1], base]
    old = [np.resize(make(dtype, "contiguous", "ordinary", n=CHUNK + 9, seed=1), array.size) for array in now]
    expected = diff_norm(now, old, per_tensor=True)
    for threads in (1, 2, 4):
        previous = [array.copy() for array in old]
        assert repr(diff_norm(now, previous, True, per_tensor=True, threads=threads)) == repr(expected)
        assert all(
            np.array_equal(a.view(np.uint8), b.copy().view(np.uint8))
            for a, b in zip(previous, now, strict=True)
        )
        assert repr(diff_norm(now, old, per_tensor=True, threads=threads)) == repr(expected)


def test_the_same_array_in_both_lists() -> None:
    array = make("float32", "permuted", "ordinary")
    kept = array.tobytes()
    got = diff_norm(array, array, update=True)
    assert (got.norm, got.unchanged) == (0, 1)
    assert array.tobytes() == kept
    assert diff_norm([array, array], [array, array]).norm == 0  # nothing is written


def _overlaps() -> dict[str, tuple[list[Array], list[Array], str]]:
    a, b = np.arange(12.0), np.arange(12.0) + 1
    square = np.arange(9.0).reshape(3, 3)
    return {
        "shifted": ([a[:-1]], [a[1:]], r"previous\[0\]: its memory overlaps that of tensors\[0\]"),
        "reversed": ([a], [a[::-1]], r"previous\[0\]: its memory overlaps that of tensors\[0\]"),
        "transposed": ([square], [square.T], r"previous\[0\]: its memory overlaps that of tensors\[0\]"),
        "twice": ([a, a], [b, b], r"previous\[\d\]: its memory overlaps that of previous\[\d\]"),
        "crosswise": ([a, b], [b, a], r"previous\[\d\]: its memory overlaps that of tensors\[\d\]"),
        "behind": ([b, a[6:]], [a, b[:6].copy()], r"previous\[0\]: its memory overlaps that of tensors\[1\]"),
    }


@pytest.mark.parametrize("case", _overlaps())
def test_overlapping_memory_is_refused_before_anything_is_written(case: str) -> None:
    tensors, previous, message = _overlaps()[case]
    first = np.zeros(5), np.ones(5)
    kept = [array.tobytes() for array in [*tensors, *previous, *first]]
    with pytest.raises(ValueError, match=message):
        diff_norm([*tensors, first[0]], [*previous, first[1]], update=True)
    assert [array.tobytes() for array in [*tensors, *previous, *first]] == kept
    diff_norm(tensors, previous)  # reading is fine


def test_neighbours_do_not_overlap() -> None:
    flat = np.zeros(100, np.float32)
    now = [np.full(25, i + 1, np.float32) for i in range(4)]
    diff_norm(now, [flat[75:], flat[50:75], flat[25:50], flat[:25]], update=True)
    assert flat[::25].tolist() == [4, 3, 2, 1]
    both = np.arange(20, dtype=np.float32)
    diff_norm(both[:10], both[10:], update=True)
    assert both.tolist() == [*range(10)] * 2


@pytest.mark.parametrize(
    "make_bad",
    [
        lambda: np.broadcast_to(np.float32(1), 4),
        lambda: np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (4,), (2,)),
        lambda: memoryview(bytes(16)).cast("f"),
    ],
)
def test_what_cannot_be_written(make_bad: Any) -> None:
    bad, good = make_bad(), np.zeros(4, np.float32)
    ones = np.ones(4, np.float32)
    diff_norm([ones, ones], [good, bad])
    with pytest.raises(ValueError, match=r"previous\[1\]: (is read-only|has elements that share memory)"):
        diff_norm([ones, ones], [good, bad], update=True)
    assert not good.any()


def test_lists_that_do_not_match() -> None:
    a = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"previous has 1 arrays for 2 tensors"):
        diff_norm([a, a], [a])
    with pytest.raises(ValueError, match=r"previous\[1\]: has shape \(3, 2\), its tensor has \(2, 3\)"):
        diff_norm([a, a], [a, a.T])
    with pytest.raises(ValueError, match=r"previous\[0\]: has shape \(6,\), its tensor has \(2, 3\)"):
        diff_norm(a, a.reshape(-1))
    with pytest.raises(ValueError, match=r"previous\[0\]: has shape \(\), its tensor has \(1,\)"):
        diff_norm(np.ones(1), np.array(1.0))
    with pytest.raises(TypeError, match=r"previous\[0\]: has dtype float64, its tensor has float32"):
        diff_norm(a, a.astype(np.float64))
    with pytest.raises(TypeError, match=r"previous\[1\]: None is not an array"):
        diff_norm([a, a], [a, None])
    with pytest.raises(ValueError, match="threads must be from 1"):
        diff_norm(a, a, threads=0)
    with pytest.raises(TypeError):
        diff_norm(a)  # type: ignore[call-arg]


def test_empty_and_zero_dimensional() -> None:
    assert diff_norm([np.zeros((0, 3)), np.array(2.0)], [np.ones((0, 3)), np.array(5.0)]).norm == 3
    with pytest.raises(ValueError, match=r"has shape \(0, 3\), its tensor has \(3, 0\)"):
        diff_norm(np.zeros((3, 0)), np.zeros((0, 3)))


def test_tagged_memory() -> None:
    now, before = np.array([0x3F80, 0x4000], np.uint16), np.array([0x3F80, 0], np.uint16)  # 1, 2 and 1, 0
    got = diff_norm((now, "bf16"), (before, "bf16"), update=True)
    assert (got.norm, got.previous_norm, got.unchanged) == (2, 1, 0.5)
    assert before.tolist() == now.tolist()
    held = bytearray(4)
    diff_norm((bytes([0, 0, 0x80, 0x3F]), "f32"), (held, "f32"), update=True)
    assert held == bytes([0, 0, 0x80, 0x3F])
    with pytest.raises(ValueError, match=r"previous\[0\]: is read-only"):
        diff_norm((bytes(4), "f32"), (bytes(4), "f32"), update=True)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.arange(6, dtype=torch.bfloat16).reshape(2, 3))
    copy = torch.zeros(3, 2, dtype=torch.bfloat16).T
    got = diff_norm([weight], [copy], update=True)
    assert got.norm == math.sqrt(55)
    assert torch.equal(copy, weight.detach())
    shared = torch.zeros(4).expand(3, 4)
    with pytest.raises(ValueError, match=r"share memory"):
        diff_norm(torch.ones(3, 4), shared, update=True)


# ---- the same bits ----

DIGEST = """
import hashlib
import numpy as np
from tests.awkward import DTYPES, LAYOUTS, VALUES, make
from trainmon.ops import cpu_info, diff_norm

digest = hashlib.sha256()
for dtype in DTYPES:
    for values in VALUES:
        now = [make(dtype, layout, values) for layout in LAYOUTS]
        now.append(make(dtype, "contiguous", values, n=2 * 65536 + 77))
        now.append(make(dtype, "every third", values, n=3 * 65536 + 5))
        before = [(array[..., ::-1] if array.ndim else array).copy() for array in now]
        digest.update(repr(diff_norm(now, before, per_tensor=True)).encode())
        digest.update(repr(diff_norm(now, before, update=True)).encode())
        digest.update(b"".join(array.tobytes() for array in before))
print(cpu_info()["tier"], digest.hexdigest())
"""


def test_tiers_give_the_same_bits() -> None:
    results = digests(DIGEST)
    assert len(set(results.values())) == 1, results


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_does_not_change_bits(dtype: str) -> None:
    now, before = pair(dtype, "contiguous", "ordinary", n=CHUNK + 600)
    wide = np.zeros((now.size, 3), DTYPES[dtype])
    wide[:, 1] = before
    backwards = now[::-1].copy()[::-1]
    expected = repr(diff_norm(now, before))
    assert repr(diff_norm(backwards, wide[:, 1])) == expected
    assert repr(diff_norm(backwards, wide[:, 1], update=True)) == expected


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "int16"])
def test_single_chunks_have_the_bits_of_the_whole(dtype: str) -> None:
    now, before = pair(dtype, "contiguous", "ordinary", n=9 * CHUNK + 5)
    cuts = range(0, now.size, CHUNK)
    pieces = diff_norm([now[i : i + CHUNK] for i in cuts], [before[i : i + CHUNK] for i in cuts])
    assert repr(pieces) == repr(diff_norm(now, before))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(["float32", "float16", "bfloat16", "float64"]),
    st.lists(st.tuples(st.floats(width=16), st.floats(width=16)), max_size=80),
    st.booleans(),
)
def test_any_numbers(dtype: str, numbers: list[tuple[float, float]], update: bool) -> None:
    with np.errstate(all="ignore"):
        both = np.array(numbers, np.float64).reshape(-1, 2).astype(DTYPES[dtype])
    now, before = both[:, 0], both[:, 1].copy()
    expected = [now], [before.copy()]
    assert_twin(diff_norm(now, before, update), *expected)
    assert before.tobytes() == (now if update else expected[1][0]).tobytes()


def test_more_elements_than_32_bits_count() -> None:
    """2^31 elements and more, all rows being one; one column differs."""
    row = make("bfloat16", "contiguous", "ordinary", n=CHUNK)
    other = row.copy()
    row[7], other[7] = 3, 1
    rows = 2**15 + 1
    got = diff_norm(np.broadcast_to(row, (rows, CHUNK)), np.broadcast_to(other, (rows, CHUNK)))
    assert got.n == rows * CHUNK > 2**31
    assert got.unchanged == (CHUNK - 1) * rows / got.n
    assert got.norm == pytest.approx(2 * math.sqrt(rows), rel=1e-12)
