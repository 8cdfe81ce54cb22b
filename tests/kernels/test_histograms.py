"""exponent_histogram and underflow_shares against exact fractions and against casts that other people wrote."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.awkward import DTYPES, FLOATS, LAYOUTS, arrays, make
from tests.kernels.child import SANITIZED, digests
from tests.twins.histograms import FORMATS, histogram_twin, losses_twin
from trainmon.ops import CastLosses, ExponentHistogram, exponent_histogram, underflow_shares

# Formats with a cast in NumPy or ml_dtypes; those below 8 bits saturate there, and so hide their overflow.
CASTS = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    **{
        name.removeprefix("float8_"): dtype
        for name, dtype in DTYPES.items()
        if name.startswith("float8_") and name != "float8_e8m0fnu"
    },
    "bf16": DTYPES["bfloat16"],
}
LEAST_NORMAL = {name: 2.0 ** FORMATS[name][1] for name in FORMATS}


def row(histogram: ExponentHistogram) -> list[int]:
    return histogram.state.tolist()


def counts(losses: CastLosses) -> tuple[int, ...]:
    return dataclasses.astuple(losses)


# ---- twins ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_histogram_twin(dtype: str, layout: str) -> None:
    tensors = list(arrays(dtype, layout))
    each = exponent_histogram(tensors, per_tensor=True)
    assert [row(histogram) for histogram in each] == [histogram_twin([tensor]) for tensor in tensors]
    assert row(exponent_histogram(tensors)) == histogram_twin(tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_twin(dtype: str, layout: str) -> None:
    tensors = list(arrays(dtype, layout, n=24))
    for scale, formats in (
        (1.0, list(FORMATS)[:5]),
        (3.0, list(FORMATS)[5:10]),
        (2.0**-20, list(FORMATS)[10:]),
    ):
        every = underflow_shares(tensors, formats, scale)
        assert {name: counts(losses) for name, losses in every.items()} == {
            name: losses_twin(tensors, name, scale) for name in formats
        }


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    data=st.lists(
        st.floats(width=64) | st.floats(-1e-3, 1e-3) | st.sampled_from([2.0**-25, 65520.0, -464.0, 61440.0]),
        max_size=40,
    ),
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    scale=st.floats(2.0**-40, 2.0**40),
    to=st.sampled_from(list(FORMATS)),
)
def test_property_twins(data: list[float], dtype: str, scale: float, to: str) -> None:
    with np.errstate(all="ignore"):
        array = np.array(data, np.float64).astype(DTYPES[dtype])
    assert row(exponent_histogram(array)) == histogram_twin([array])
    assert counts(underflow_shares(array, to, scale)[to]) == losses_twin([array], to, scale)


@settings(max_examples=80, derandomize=True, deadline=None)
@given(
    data=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-70000, 70000), max_size=40),
    scale=st.floats(2.0**-60, 2.0**60),
    to=st.sampled_from(list(FORMATS)),
)
def test_property_integers(data: list[int], scale: float, to: str) -> None:
    """Beyond 2^53 a float64 is not enough to tell them apart."""
    signed = np.array(data, np.int64)
    for array in (signed, signed.view(np.uint64), signed.astype(np.int32)):
        assert row(exponent_histogram(array)) == histogram_twin([array])
        assert counts(underflow_shares(array, to, scale)[to]) == losses_twin([array], to, scale)


# ---- every bit pattern ----


@pytest.mark.parametrize("dtype", [name for name in FLOATS if DTYPES[name].itemsize <= 2])
def test_every_pattern(dtype: str) -> None:
    size = DTYPES[dtype].itemsize
    every = np.arange(256**size).astype(f"u{size}").view(DTYPES[dtype])
    assert row(exponent_histogram(every)) == histogram_twin([every])


@pytest.mark.parametrize("to", CASTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_pattern_against_its_cast(dtype: str, to: str) -> None:
    """What the cast of NumPy or ml_dtypes makes of each element. float32: the neighbours of all bfloat16."""
    codes = np.arange(65536, dtype=np.uint16)
    if dtype == "float32":
        near = (codes.astype(np.uint32) << 16)[:, None] + np.array([0, 1, 0x8000, 0xFFFF], np.uint32)
        every: Any = near.ravel().view(np.float32)
    else:
        every = codes.view(DTYPES[dtype])
    with np.errstate(all="ignore"):
        wide = every.astype(np.float64)
        wide = wide[np.isfinite(wide)]
        cast = wide.astype(np.float32).astype(CASTS[to]).astype(np.float64)
    losses = underflow_shares(every, to)[to]
    nonzero = wide != 0
    assert (losses.finite, losses.nonzero) == (wide.size, nonzero.sum())
    assert losses.n_underflow == (nonzero & (cast == 0)).sum()
    assert losses.n_overflow == (~np.isfinite(cast)).sum()
    assert losses.n_subnormal == ((cast != 0) & (np.abs(wide) < LEAST_NORMAL[to])).sum()


# ---- borders ----


@pytest.mark.parametrize(
    ("to", "flush", "limit", "tie"),
    [
        ("fp16", 2.0**-25, 65520.0, True),
        ("bf16", 2.0**-134, (2 - 2.0**-8) * 2.0**127, True),
        ("e4m3fn", 2.0**-10, 464.0, False),
        ("e5m2", 2.0**-17, 61440.0, True),
        ("fp32", 2.0**-150, (2 - 2.0**-24) * 2.0**127, True),
    ],
)
def test_borders(to: str, flush: float, limit: float, tie: bool) -> None:
    """The table of the formula, both sides of each border."""

    def around(border: float) -> np.ndarray[Any, Any]:
        return np.array([np.nextafter(border, 0), border, -border, np.nextafter(border, np.inf)])

    normal = LEAST_NORMAL[to]
    small = underflow_shares(around(flush), to)[to]
    assert (small.n_underflow, small.n_subnormal, small.n_overflow) == (3, 1, 0)
    middle = underflow_shares(around(normal), to)[to]
    assert (middle.n_underflow, middle.n_subnormal, middle.n_overflow) == (0, 1, 0)
    large = underflow_shares(around(limit), to)[to]
    assert (large.n_underflow, large.n_subnormal, large.n_overflow) == (0, 0, 3 if tie else 1)
    assert large.overflow == (0.75 if tie else 0.25)
    assert small.underflow == 0.75


def test_scale_is_exact() -> None:
    """0.1 * x is compared without rounding: x = 10 * 2^-25 is above the border, one place below it is not."""
    border = 10 * 2.0**-25
    losses = underflow_shares(np.array([np.nextafter(border, 0), border]), "fp16", scale=0.1)["fp16"]
    assert losses.n_underflow == 1  # float64's 0.1 is a little above a tenth
    assert underflow_shares(np.array([2**62 + 1, 2**62]), "fp16", scale=65520 / 2**62)["fp16"].n_overflow == 2
    assert underflow_shares(np.array([2**62, 2**62 - 1]), "fp16", scale=65520 / 2**62)["fp16"].n_overflow == 1


def test_bins_of_known_values() -> None:
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        histogram = exponent_histogram(np.array([1, -1.5, 2, 0.25, 0, -0.0, np.inf, np.nan], DTYPES[dtype]))
        assert {int(b): int(histogram.counts[b]) for b in np.flatnonzero(histogram.counts)} == {
            125: 1,
            127: 2,
            128: 1,
        }
        assert (histogram.zero, histogram.subnormal, histogram.inf, histogram.nan) == (2, 0, 1, 1)
        assert (histogram.n, histogram.finite, histogram.nonzero) == (8, 6, 4)


def test_float64_beyond_the_axis() -> None:
    array = np.array([5e-324, 2.0**-1022, 2.0**-128, 2.0**-127, 2.0**-126, 2.0**127, 2.0**128, 1e308, -1e308])
    histogram = exponent_histogram(array)
    assert [int(histogram.counts[b]) for b in (0, 1, 254, 255)] == [4, 1, 1, 3]
    assert (histogram.subnormal, histogram.inf, histogram.zero) == (1, 0, 0)


# ---- results ----


def test_nothing() -> None:
    for nothing in ([], [np.empty(0, np.float32)]):
        histogram = exponent_histogram(nothing)
        assert not histogram.state.any()
        losses = underflow_shares(nothing)
        assert list(losses) == ["bf16", "fp16", "e4m3fn", "e5m2"]
        for entry in losses.values():
            assert counts(entry) == (0, 0, 0, 0, 0)
            assert math.isnan(entry.underflow) and math.isnan(entry.subnormal) and math.isnan(entry.overflow)
    zeros = underflow_shares(np.zeros(3), "bf16")["bf16"]
    assert math.isnan(zeros.underflow)
    assert zeros.overflow == 0
    assert exponent_histogram([], per_tensor=True) == []
    assert underflow_shares([], per_tensor=True) == []
    assert underflow_shares(np.ones(3), ()) == {}


@settings(max_examples=40, derandomize=True, deadline=None)
@given(cuts=st.lists(st.integers(0, 300), max_size=4), dtype=st.sampled_from(FLOATS), seed=st.integers(0, 99))
def test_pieces_add_up(cuts: list[int], dtype: str, seed: int) -> None:
    array = make(dtype, "contiguous", "bits", n=300, seed=seed)
    pieces = np.split(array, sorted(cuts))
    whole = exponent_histogram(array)
    total, *rest = exponent_histogram(pieces, per_tensor=True)
    states = total.state.astype(np.float64)
    for part in rest:
        total = total + part
        states += part.state
    assert row(total) == row(whole) == row(ExponentHistogram.from_state(states))
    losses, *more = underflow_shares(pieces, "e4m3fn", per_tensor=True)
    summed = losses["e4m3fn"]
    for entry in more:
        summed = summed + entry["e4m3fn"]
    assert summed == underflow_shares(array, "e4m3fn")["e4m3fn"]


@pytest.mark.parametrize(
    "state",
    [np.zeros(259, int), np.zeros((1, 260)), np.full(260, -1), np.full(260, 0.5), np.full(260, np.nan)],
)
def test_bad_states(state: Any) -> None:
    with pytest.raises(ValueError, match="a state"):
        ExponentHistogram.from_state(state)


def test_one_tensor_a_row() -> None:
    tensors = [make(dtype, "reversed", "seeded", n=500) for dtype in DTYPES]
    assert [row(h) for h in exponent_histogram(tensors, per_tensor=True)] == [
        row(exponent_histogram(tensor)) for tensor in tensors
    ]
    assert underflow_shares(tensors, per_tensor=True) == [underflow_shares(tensor) for tensor in tensors]


def test_names_of_formats() -> None:
    array = np.array([1e-9, 1e9], np.float32)
    for names in (
        ("fp16", "f16", "half", "float16"),
        ("bf16", "bfloat16"),
        ("fp32", "f32", "float32"),
        ("e4m3fn", "float8_e4m3fn", "fp8_e4m3fn", "f8e4m3fn"),
        ("e2m1fn", "float4_e2m1fn", "fp4_e2m1fn", "f4_e2m1fn"),
        ("e3m2fn", "float6_e3m2fn", "fp6_e3m2fn"),
    ):
        losses = underflow_shares(array, names)
        assert list(losses) == list(names)
        assert len(set(losses.values())) == 1


def test_errors() -> None:
    array = np.ones(3)
    with pytest.raises(ValueError, match=r"to\[1\]: 'fp7' is no format; there are fp32, fp16"):
        underflow_shares(array, ["bf16", "fp7"])
    for name in ("float64", "int8", "float8_e8m0fnu", ""):
        with pytest.raises(ValueError, match=r"is no format"):
            underflow_shares(array, name)
    with pytest.raises(TypeError, match=r"to\[0\] must be a str, not int"):
        underflow_shares(array, [8])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="17 formats, at most 16"):
        underflow_shares(array, ["bf16"] * 17)
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="scale must be a finite number above 0"):
            underflow_shares(array, scale=scale)
    with pytest.raises(TypeError, match="number"):
        underflow_shares(array, scale="1")  # type: ignore[arg-type]
    for call in (exponent_histogram, underflow_shares):
        with pytest.raises(ValueError, match="threads must be from 1 to"):
            call(array, threads=0)
        with pytest.raises(TypeError, match=r"tensors\[1\]"):
            call([array, object()])
        with pytest.raises(TypeError, match="byte order"):
            call([array.astype(">f4")])


def test_results_are_frozen() -> None:
    histogram, losses = exponent_histogram(np.ones(3)), underflow_shares(np.ones(3), "bf16")["bf16"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        histogram.zero = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        losses.finite = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        histogram + 1  # type: ignore[operator]
    with pytest.raises(TypeError):
        losses + 1  # type: ignore[operator]


# ---- the same counts ----

DIGEST = """
import hashlib
import numpy as np
from tests.awkward import DTYPES, LAYOUTS, VALUES, make
from trainmon.ops import cpu_info, exponent_histogram, underflow_shares

digest = hashlib.sha256()
for dtype in DTYPES:
    for values in VALUES:
        tensors = [make(dtype, layout, values) for layout in LAYOUTS]
        tensors.append(make(dtype, "contiguous", values, n=2 * 65536 + 77))
        digest.update(np.array([h.state for h in exponent_histogram(tensors, per_tensor=True)]).tobytes())
        digest.update(repr(underflow_shares(tensors, scale=0.3, per_tensor=True)).encode())
print(cpu_info()["tier"], digest.hexdigest())
"""


def test_tiers_give_the_same_counts() -> None:
    results = digests(DIGEST)
    assert len(set(results.values())) == 1, results


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "int16"])
def test_threads_give_the_same_counts(dtype: str, threads: int) -> None:
    n = 48 * 2**20 // DTYPES[dtype].itemsize + 12345  # enough for three workers
    base = make(dtype, "contiguous", "bits", n=65536 + 7)
    array = np.resize(base, n)
    for tensors in ([array], [array[: n // 3], array[n // 3 :], base, array[::-1]]):
        assert row(exponent_histogram(tensors, threads=threads)) == row(exponent_histogram(tensors))
        one, many = (exponent_histogram(tensors, per_tensor=True, threads=t) for t in (1, threads))
        assert [row(h) for h in one] == [row(h) for h in many]
        assert underflow_shares(tensors, per_tensor=True, threads=threads) == underflow_shares(
            tensors, per_tensor=True
        )


@pytest.mark.skipif(
    SANITIZED, reason="takes most of a minute with the sanitizer, which has nothing to find in it"
)
def test_more_elements_than_32_bits_count() -> None:
    base = np.full(2**26, 0x38, np.uint8)  # 1.0 in float8_e4m3fn
    base[-1] = 0x7F
    ones = np.broadcast_to(base.view(ml_dtypes.float8_e4m3fn), (65, base.size))
    histogram = exponent_histogram(ones)
    assert (int(histogram.counts[127]), histogram.nan) == (65 * (2**26 - 1), 65)


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([1.0, 0.0, 1e-6, -3.0])
    assert row(exponent_histogram(tensor)) == histogram_twin([tensor.numpy()])
    half = tensor.to(torch.bfloat16)
    assert exponent_histogram([half, half]).zero == 2
    assert underflow_shares(tensor, "e5m2")["e5m2"].n_underflow == 1
