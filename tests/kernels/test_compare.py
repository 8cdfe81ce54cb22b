"""compare against its twin: every dtype with every other, awkward memory, ranges, merging, the same bits."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.awkward import DTYPES, FLOATS, LAYOUTS, VALUES, make
from tests.kernels.child import digests
from tests.kernels.compare import close, same
from tests.twins.comparison import comparison_twin, is_float
from tests.twins.stats import EPSILON, norm2
from trainmon.ops import Comparison, Place, compare, multi_norm

Array = np.ndarray[Any, Any]
CHUNK = 65536
COUNTS = (
    "n",
    "n_identical",
    "n_finite",
    "n_zero_sign",
    "n_zero_reference",
    "n_nan_both",
    "n_nan_a",
    "n_nan_b",
)
COUNTS += ("n_inf_same", "n_inf_opposite", "n_inf_a", "n_inf_b", "max_ulp")
PLACES = ("first_difference", "max_abs_at", "max_rel_at")


def pair(dtype: str, layout: str, values: str, n: int = 120) -> tuple[Array, Array]:
    """A tensor and one of other values in the same layout, every fifth element the same."""
    a, b = make(dtype, layout, values, n), make(dtype, layout, values, n, seed=1)
    if b.flags.writeable and b.ndim == 1:
        b[::5] = a[::5]
    return a, b


def assert_twin(record: Any, a: Any, b: Any, tensor: int = 0) -> None:
    twin = comparison_twin(a, b)
    for name in COUNTS:
        assert int(record[name]) == twin[name], name
    assert record["ulp"].tolist() == twin["ulp"]
    for name in ("max_abs", "max_rel"):
        assert same(float(record[name]), twin[name]), name
    for name in PLACES:
        place, expected = record[name].item(), twin[name]
        if expected is None:
            assert place[:2] == (-1, -1), name
        else:
            assert place[:2] == (tensor, expected[0]), name
            assert all(map(same, place[2:], expected[1:])), name
    assert_sums(record, twin["finite_a"], twin["finite_b"])


def assert_sums(record: Any, p: Array, q: Array) -> None:
    """Sums within the rounding of n additions."""
    n = p.size
    with np.errstate(all="ignore"):
        error = np.abs(p - q)
        mean = np.sum(error) / n
        if np.isfinite(error).all():
            assert close(float(record["norm_error"]), norm2(error), n)
            assert math.isinf(mean) or close(float(record["mean_abs"]), float(mean), 2 * n)
    for of, values in (("a", p), ("b", q)):
        assert close(float(record[f"norm_{of}"]), norm2(values), n)
    for of, name in (("norm_a", "rms_a"), ("norm_b", "rms_b"), ("norm_error", "rms_error")):
        root = float(record[of]) / math.sqrt(n) if n else math.nan
        assert close(float(record[name]), root, n) or abs(root - record[name]) < 1e-320, name
    if norm2(p) == 0 or norm2(q) == 0:
        assert math.isnan(record["cosine"])
        return
    x, y = np.ldexp(p, -_exponent(p)), np.ldexp(q, -_exponent(q))
    with np.errstate(all="ignore"):
        cosine = math.fsum(x * y) / (norm2(x) * norm2(y))
    assert abs(float(record["cosine"]) - cosine) <= 4 * (n + 8) * EPSILON
    assert abs(float(record["cosine"])) <= 1


def _exponent(x: Array) -> int:
    return math.frexp(float(np.abs(x).max()))[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_twin(dtype: str, layout: str) -> None:
    pairs = [pair(dtype, layout, values) for values in VALUES]
    pairs += [(a, a.copy()) for a, _ in pairs]
    got = compare([a for a, _ in pairs], [b for _, b in pairs])
    assert got.records.shape == (len(pairs),)
    for i, (a, b) in enumerate(pairs):
        assert_twin(got.records[i], a, b, i)
        assert_twin(compare(a, b).records[0], a, b)


@pytest.mark.parametrize("other", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_twin_of_two_dtypes(dtype: str, other: str) -> None:
    for values in ("ordinary", "bits", "seeded", "tiny", "zeros"):
        a, b = make(dtype, "contiguous", values), make(other, "reversed", values, seed=1)
        assert_twin(compare(a, b).records[0], a, b)
        with np.errstate(all="ignore"):
            rounded = a.astype(np.float64).astype(b.dtype)
        assert_twin(compare(a, rounded).records[0], a, rounded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_twin_over_chunks(dtype: str) -> None:
    for values in ("ordinary", "bits"):
        a, b = pair(dtype, "contiguous", values, n=CHUNK + 1077)
        b[3000:50000] = a[3000:50000]
        assert_twin(compare(a, b).records[0], a, b)


def test_check_values() -> None:
    """Numbers that one can do by hand: |a - b| = 1, 0, 2; |b| = 2, 4, 8."""
    a, b = np.array([3.0, 4.0], np.float32), np.array([2.0, 4.0], np.float32)
    got = compare([a, np.array([[-6.0]])], [b, np.array([[-8.0]])])
    assert (got.n, got.n_identical, got.n_finite) == (3, 1, 3)
    assert (got.max_abs, got.max_rel, got.mean_abs) == (2, 0.5, 1)
    assert (got.norm_error, got.norm_a, got.norm_b) == (math.sqrt(5), math.sqrt(61), math.sqrt(84))
    assert (got.rms_error, got.rms_a) == (math.sqrt(5 / 3), math.sqrt(61 / 3))
    assert got.cosine == pytest.approx(70 / math.sqrt(61 * 84), rel=1e-15)
    assert got.first_difference == Place(0, 0, 3, 2)
    assert got.max_rel_at == Place(0, 0, 3, 2)
    assert got.max_abs_at == Place(1, 0, -6, -8)
    assert got.max_ulp == 2**51  # from 6 to 8: half of a binade of float64
    assert got.ulp[[0, 23, 52]].tolist() == [1, 1, 1]  # 2 to 3: 2^22 steps of float32
    assert not got.identical
    assert got.nonfinite_agree


def test_distances_of_one_dtype() -> None:
    one = np.float32(1)
    around = np.array(
        [
            one,
            np.nextafter(one, np.float32(2)),
            np.nextafter(one, np.float32(0)),
            0.0,
            -0.0,
            1e-45,
            -1e-45,
            3.4028235e38,
        ]
    )
    a = around.astype(np.float32)
    b = np.array([1, 1, 1, -0.0, 0.0, -1e-45, 0, -3.4028235e38], np.float32)
    got = compare(a, b)
    assert (got.ulp[0], got.ulp[1], got.ulp[2]) == (3, 3, 1)
    assert got.max_ulp == 2 * 0x7F7FFFFF
    assert got.ulp[32] == 1
    assert got.n_zero_sign == 2
    assert got.n_identical == 1
    assert got.first_difference == Place(0, 1, float(a[1]), 1.0)
    wide = compare(np.array([-(2**63), 2**62]), np.array([2**63 - 1, 2**62 + 1]))
    assert (wide.max_ulp, wide.ulp[64], wide.ulp[1], wide.n_identical) == (2**64 - 1, 1, 1, 0)


def test_distance_of_two_dtypes_is_in_the_coarser_one() -> None:
    step = 2.0**-7  # of bfloat16 from 1 to 2
    a = np.array([1, 1 + step, 1 + 0.5 * step, 1 + 1.5 * step, 1 + 0.51 * step, 3e38, 1e39], np.float64)
    b = np.array([1, 1, 1, 1, 1, 3e38, 1e38]).astype(ml_dtypes.bfloat16)
    got = compare(a, b)
    assert got.records["ulp"][0, :3].tolist() == [3, 2, 1]  # half a step rounds to even, 1.5 steps to 2
    assert got.n_identical == 1
    swapped = compare(b, a)
    assert swapped.ulp.tolist() == got.ulp.tolist()
    counts = compare(np.array([1, 2, 300]), np.array([1.0, 2.0, 301.0], np.float16))
    assert (counts.n_identical, counts.max_ulp) == (2, 4)  # a step of 300 in float16 is 1/4
    assert compare(np.array([True, False]), np.array([1, 3], np.int8)).max_ulp == 3


def test_zero_reference_has_no_relative_error() -> None:
    a, b = np.array([1.0, 0.0, 3.0]), np.array([0.0, 0.0, 2.0])
    got = compare(a, b)
    assert (got.max_rel, got.n_zero_reference, got.max_rel_at) == (0.5, 1, Place(0, 2, 3, 2))
    nothing = compare(np.ones(2), np.zeros(2))
    assert math.isnan(nothing.max_rel)
    assert (nothing.max_rel_at, nothing.n_zero_reference) == (None, 2)
    assert math.isnan(nothing.cosine)
    assert compare(np.zeros(2), np.zeros(2)).max_rel == 0


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2"])
def test_agreement_of_nonfinite(dtype: str) -> None:
    kinds = (math.nan, math.inf, -math.inf, 1.0)
    for n in (16, 1000, CHUNK + 16):
        a, b = np.ones(n, DTYPES[dtype]), np.ones(n, DTYPES[dtype])
        a[-16:] = np.repeat(np.array(kinds), 4).astype(DTYPES[dtype])
        b[-16:] = np.tile(np.array(kinds), 4).astype(DTYPES[dtype])
        got = compare(a, b)
        assert (got.n_nan_both, got.n_nan_a, got.n_nan_b) == (1, 3, 3)
        assert (got.n_inf_same, got.n_inf_opposite, got.n_inf_a, got.n_inf_b) == (2, 2, 2, 2)
        assert (got.n_finite, got.n_identical, got.max_abs, got.cosine) == (n - 15, n - 12, 0, 1)
        assert not got.nonfinite_agree
        assert got.first_difference is not None
        assert got.first_difference.index == n - 15
        assert compare(a, a).nonfinite_agree
        assert compare(a, a.copy()).identical


def test_nan_payloads_differ_in_bits_only() -> None:
    a = np.array([0x7FC00000, 0x3F800000], np.uint32).view(np.float32)
    b = np.array([0x7FC00001, 0x3F800000], np.uint32).view(np.float32)
    got = compare(a, b)
    assert (got.n_identical, got.n_nan_both, got.nonfinite_agree, got.max_abs) == (1, 1, True, 0)
    assert got.first_difference is not None
    assert compare(a, b.astype(np.float64)).identical  # of two dtypes NaN is NaN


@pytest.mark.parametrize("n", [1, 7, 32, 1024, CHUNK + 9])
@pytest.mark.parametrize(
    "scales", [(1e300, 1e300), (1e-300, 1e-300), (1e300, 1e-300), (5e-324, 1.0), (1.0, 1e200)]
)
def test_range_of_float64(scales: tuple[float, float], n: int) -> None:
    a, b = np.full(n, 3 * scales[0]), np.full(n, 2 * scales[1])
    a[1::2] *= -1
    b[1::2] *= -1
    got = compare(a, b)
    assert got.norm_a == pytest.approx(abs(a[0]) * math.sqrt(n), rel=1e-12, abs=5e-324)
    assert got.norm_b == pytest.approx(b[0] * math.sqrt(n), rel=1e-12)
    assert got.rms_error == pytest.approx(abs(a[0] - b[0]), rel=1e-12, abs=5e-324)
    assert got.cosine == pytest.approx(1, rel=1e-12)
    assert compare(a, -b).cosine == pytest.approx(-1, rel=1e-12)
    assert compare(a, a.copy()).cosine == 1
    both = compare([a, a], [b, np.full(n, 1e-200)])
    assert both.norm_a == pytest.approx(abs(a[0]) * math.sqrt(2 * n), rel=1e-12, abs=5e-324)


def test_an_error_beyond_float64_is_infinite() -> None:
    got = compare(np.array([1.7e308, 1.0]), np.array([-1.7e308, 1.0]))
    assert (got.max_abs, got.max_rel, got.rms_error, got.n_finite) == (math.inf, math.inf, math.inf, 2)
    assert got.norm_a == 1.7e308


def test_the_first_of_equal_errors_is_reported() -> None:
    a, b = np.zeros(3 * CHUNK), np.ones(3 * CHUNK)
    for start in (0, 5, 1500, CHUNK + 3, 2 * CHUNK + 1025):
        a[:] = 1
        a[start:] = [0, 2] * ((a.size - start) // 2) + [0] * ((a.size - start) % 2)
        got = compare([np.ones(4), a, a], [np.ones(4), b, b])
        where = Place(1, start, 0, 1)
        assert (got.first_difference, got.max_abs_at, got.max_rel_at) == (where, where, where)


def test_growing_errors_are_all_seen() -> None:
    """Each block has a new largest error, the relative one at another place."""
    n = 3 * CHUNK
    a, b = np.arange(1.0, n + 1), np.zeros(n)
    b[: n // 2] = np.linspace(2, 1, n // 2)
    assert_twin(compare(a, b).records[0], a, b)


# ---- lists, records, merging ----


def test_total_is_the_records_merged() -> None:
    rng = np.random.default_rng(0)
    a = [rng.standard_normal(n).astype(np.float32) for n in (0, 5, CHUNK + 1, 1, 3000)]
    b = [(x * (1 + 1e-6 * rng.standard_normal(x.size))).astype(np.float32) for x in a]
    b[1][2] = np.nan
    got = compare(a, b)
    assert repr(Comparison.merge(got.records)) == repr(got)
    whole = compare(np.concatenate(a), np.concatenate(b))
    for name in (*COUNTS, "max_abs", "max_rel"):
        assert getattr(whole, name) == getattr(got, name), name
    assert whole.ulp.tolist() == got.ulp.tolist()
    assert whole.rms_error == pytest.approx(got.rms_error, rel=1e-13)
    assert got.first_difference is not None
    assert got.first_difference.tensor == 1
    part = Comparison.merge(got.records[2:])
    assert part.first_difference is not None
    assert part.first_difference.tensor == 0
    assert part.n == CHUNK + 3002
    ranks = Comparison.merge(np.stack([got.records, got.records]))
    assert (ranks.n, ranks.max_abs) == (2 * got.n, got.max_abs)
    assert Comparison.merge(got.records[::-1]).n_identical == got.n_identical


def test_single_chunks_have_the_bits_of_the_whole() -> None:
    for dtype in ("float64", "float32", "bfloat16", "int16"):
        a, b = pair(dtype, "contiguous", "ordinary", n=9 * CHUNK + 5)
        cuts = range(0, a.size, CHUNK)
        pieces = compare([a[i : i + CHUNK] for i in cuts], [b[i : i + CHUNK] for i in cuts])
        whole = compare(a, b)
        for name in ("mean_abs", "rms_error", "norm_a", "norm_b", "cosine"):
            assert getattr(pieces, name) == getattr(whole, name), (dtype, name)


def test_nothing() -> None:
    for got in (
        compare([], []),
        compare(np.zeros((0, 3)), np.zeros((0, 3))),
        Comparison.merge(compare([], []).records),
    ):
        assert (got.n, got.norm_a, got.norm_error, got.max_ulp, got.first_difference) == (0, 0, 0, 0, None)
        assert all(
            math.isnan(value) for value in (got.max_abs, got.max_rel, got.mean_abs, got.rms_b, got.cosine)
        )
        assert str(got) == "nothing to compare"


def test_text_for_people() -> None:
    a = np.array([1.0, 2.0, 3.0], np.float32)
    assert str(compare(a, a)) == "identical: all 3 elements have equal bits"
    b = np.array([1.0, 2.5, 3.0], np.float32)
    lines = str(compare([a, a], [a, b])).splitlines()
    assert lines[0] == "1 of 6 elements differ (16.7 %), first at [1][1]: 2 against 2.5"
    assert lines[1].startswith("max error 0.5 at [1][1]: 2 against 2.5, relative 0.2, ")
    assert len(lines) == 2
    b[0] = np.nan
    assert "1 with NaN or infinity on one side only" in str(compare(a, b))
    assert "first at [0][0]: 1 against nan" in str(compare(a, b))


def test_errors() -> None:
    a = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"b has 1 arrays for 2 in a"):
        compare([a, a], [a])
    with pytest.raises(ValueError, match=r"b\[1\]: has shape \(3, 2\), its partner in a has \(2, 3\)"):
        compare([a, a], [a, a.T])
    with pytest.raises(ValueError, match=r"b\[0\]: has shape \(6,\), its partner in a has \(2, 3\)"):
        compare(a, a.reshape(-1))
    with pytest.raises(TypeError, match=r"b\[1\]: None is not an array"):
        compare([a, a], [a, None])
    with pytest.raises(TypeError, match=r"a\[0\]: dtype complex64 can't be read"):
        compare(a.astype(np.complex64), a)
    with pytest.raises(ValueError, match="threads must be from 1"):
        compare(a, a, threads=0)
    with pytest.raises(TypeError, match="records must be those of compare"):
        Comparison.merge(np.zeros(3))


def test_doors() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.arange(6, dtype=torch.bfloat16).reshape(2, 3))
    got = compare([weight], [np.arange(6.0).reshape(2, 3)])
    assert got.n_identical == 6
    assert compare((b"\x80\x3f\x00\x40", "bf16"), torch.tensor([1.0, 2.0])).identical


def test_norms_are_those_of_multi_norm() -> None:
    for dtype in FLOATS:
        if DTYPES[dtype].itemsize > 1:
            a, b = pair(dtype, "contiguous", "ordinary", n=2 * CHUNK + 5)
            got = compare(a, b)
            assert (got.norm_a, got.norm_b) == (float(multi_norm(a)), float(multi_norm(b)))
            assert is_float(a.dtype)


# ---- the same bits ----

DIGEST = """
import hashlib
import numpy as np
from tests.awkward import DTYPES, LAYOUTS, VALUES, make
from trainmon.ops import compare, cpu_info

digest = hashlib.sha256()
names = list(DTYPES)
for i, dtype in enumerate(names):
    for values in VALUES:
        a = [make(dtype, layout, values) for layout in LAYOUTS]
        a.append(make(dtype, "contiguous", values, n=2 * 65536 + 77))
        b = [(array[..., ::-1] if array.ndim else array).copy() for array in a]
        b[-1][500:9000] = a[-1][500:9000]
        digest.update(compare(a, b).records.tobytes())
        other = [make(names[i - 1], layout, values, seed=1) for layout in LAYOUTS]
        digest.update(compare(a[:-1], other).records.tobytes())
print(cpu_info()["tier"], digest.hexdigest())
"""


def test_tiers_give_the_same_bits() -> None:
    results = digests(DIGEST)
    assert len(set(results.values())) == 1, results


def content(comparison: Comparison) -> tuple[bytes, str]:
    return comparison.records.tobytes(), repr(comparison)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float8_e4m3fn", "int32"])
def test_threads_give_the_same_bits(dtype: str) -> None:
    n = 40 * 2**20 // DTYPES[dtype].itemsize + 12345  # enough for two workers
    base, other = pair(dtype, "contiguous", "seeded", n=CHUNK + 7)
    a, b = np.resize(base, n), np.resize(other, n)
    expected = content(compare([a, base], [b, other]))
    for threads in (2, 3):
        assert content(compare([a, base], [b, other], threads=threads)) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_does_not_change_bits(dtype: str) -> None:
    a, b = pair(dtype, "contiguous", "ordinary", n=CHUNK + 600)
    wide = np.zeros((a.size, 3), DTYPES[dtype])
    wide[:, 1] = b
    assert content(compare(a[::-1].copy()[::-1], wide[:, 1])) == content(compare(a, b))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(["float32", "float16", "bfloat16", "float64"]),
    st.sampled_from(["float32", "float16", "bfloat16", "float64", "int8"]),
    st.lists(st.tuples(st.floats(), st.floats()), max_size=80),
)
def test_any_numbers(dtype: str, other: str, numbers: list[tuple[float, float]]) -> None:
    with np.errstate(all="ignore"):
        both = np.array(numbers, np.float64).reshape(-1, 2)
        a, b = both[:, 0].astype(DTYPES[dtype]), both[:, 1].astype(DTYPES[other])
    assert_twin(compare(a, b).records[0], a, b)
    assert_twin(compare(a, both[:, 0]).records[0], a, both[:, 0])
