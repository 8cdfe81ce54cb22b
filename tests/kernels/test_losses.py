"""LossAccumulator against fractions: exact for every dtype, layout, weight, order, split and sum of states."""

from __future__ import annotations

import gc
import math
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.awkward import FLOATS, LAYOUTS, arrays, make
from tests.campaign import size
from tests.kernels.child import digests
from tests.kernels.compare import same
from tests.twins.losses import LossTwin, nearest
from trainmon import LossAccumulator, loss_gap, position_buckets

Array = np.ndarray[Any, Any]
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
TOP = 2**63 - 1


def filled(losses: Any, weights: Any = None) -> LossAccumulator:
    accumulator = LossAccumulator()
    accumulator.add(losses, weights)
    return accumulator


def agree(accumulator: LossAccumulator, twin: LossTwin) -> None:
    for name in ("mean", "mean_of_means"):
        ours, expected = getattr(accumulator, name), getattr(twin, name)
        assert (ours is None) == (expected is None), name
        if ours is not None:
            assert same(ours, expected), (name, ours, expected)
    assert accumulator.tokens == twin.tokens
    assert accumulator.pairs == twin.pairs
    assert accumulator.masked == twin.masked
    assert accumulator.nonfinite == len(twin.bad)


# ---- values that must hold ----


def test_check_value() -> None:
    accumulator = LossAccumulator()
    accumulator.add_sum(6.0, 3)
    accumulator.add_sum(4.0, 1)
    assert (accumulator.mean, accumulator.mean_of_means, accumulator.gap) == (2.5, 3.0, 0.5)
    assert loss_gap([6.0, 4.0], [3, 1]) == 0.5


def test_micro_batch_without_a_counted_token() -> None:
    """pytorch/pytorch#116349, allenai/OLMo-core#657"""
    accumulator = LossAccumulator()
    for mean, n in ((2.0, 3), (math.nan, 0), (4.0, 1)):
        accumulator.add_mean(mean, n)
    assert (accumulator.mean, accumulator.gap) == (2.5, 0.5)
    assert filled(np.array([1, math.nan, 3]), np.array([1, 0, 1])).mean == 2.0
    nothing = LossAccumulator()
    nothing.add_mean(math.nan, 0)
    nothing.add(np.array([math.nan]), np.array([0]))
    assert nothing.mean is None
    assert nothing.gap is None
    assert nothing.mean_of_means is None
    nothing.add_mean(math.nan, 2)
    assert nothing.mean is not None
    assert math.isnan(nothing.mean)


# ---- against the twin ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_twin(dtype: str, layout: str) -> None:
    rng = np.random.default_rng(1)
    accumulator, twin = LossAccumulator(), LossTwin()
    for losses in arrays(dtype, layout):
        before = losses.tobytes()
        weights = rng.integers(0, 4, losses.shape)
        accumulator.add(losses, weights)
        accumulator.add(losses)
        twin.add(losses.ravel(), weights.ravel())
        twin.add(losses.ravel())
        assert losses.tobytes() == before
        agree(filled(losses, weights), _twin_of(losses, weights))
    agree(accumulator, twin)


def _twin_of(losses: Array, weights: Array | None) -> LossTwin:
    twin = LossTwin()
    twin.add(losses.ravel(), None if weights is None else weights.ravel())
    return twin


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_weights_of_every_dtype_and_layout(dtype: str, layout: str) -> None:
    weights = make(dtype, layout, "ordinary")
    if weights.dtype.kind == "i":
        weights = np.where(weights < 0, 0, weights).astype(weights.dtype)
    losses = np.random.default_rng(0).standard_normal(weights.shape)
    agree(filled(losses, weights), _twin_of(losses, weights))
    agree(filled(losses.astype(np.float32), weights), _twin_of(losses.astype(np.float32), weights))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("top", [1, 2, 255, 2**16 - 1, 2**16, 2**24, 2**32, 2**33 - 1, 2**48, TOP])
def test_wide_weights_over_many_blocks(dtype: str, top: int) -> None:
    n = 3 * 2048 + 77
    losses = make(dtype, "contiguous", "bits", n=n)
    with np.errstate(invalid="ignore"):  # signaling NaN
        losses[~np.isfinite(losses.astype(np.float64))] = 1
    weights = np.random.default_rng(top % 1000).integers(0, top, n, endpoint=True)
    weights[::7] = top
    agree(filled(losses, weights), _twin_of(losses, weights))


def test_bins_are_emptied_before_they_overflow() -> None:
    """The largest factors with the largest weight of the plain path, all in one bin."""
    n = 40 * 2048
    for losses in (
        np.full(n, np.nextafter(np.inf, 0)),
        np.full(n, np.nextafter(np.float32(np.inf), np.float32(0))),
    ):
        for sign in (1, -1):
            for weight in (1, 2**16 - 1, 2**17 - 1, TOP):
                assert filled(sign * losses, np.full(n, weight)).mean == float(sign * losses[0])
                one = LossAccumulator(1)
                one.add(sign * losses, np.full(n, weight), np.zeros(n, np.int8))
                assert one.bucket_means == (float(sign * losses[0]),)


finite = st.floats(allow_nan=False, allow_infinity=False)
anything = st.floats()
weights_or_masks = st.one_of(st.integers(0, 3), st.integers(0, TOP), st.just(0), st.just(TOP))
tokens = st.lists(st.tuples(finite, weights_or_masks), max_size=30)


@pytest.mark.soak
@settings(deadline=None, derandomize=True, max_examples=size(150, 5000))
@given(st.lists(st.lists(st.tuples(anything, weights_or_masks), max_size=20), max_size=4))
def test_property_twin(calls: list[list[tuple[float, int]]]) -> None:
    accumulator, twin = LossAccumulator(), LossTwin()
    for call in calls:
        losses = np.array([loss for loss, _ in call], np.float64)
        weights = np.array([weight for _, weight in call], np.int64)
        accumulator.add(losses, weights)
        twin.add(losses, weights)
    agree(accumulator, twin)


@pytest.mark.soak
@settings(deadline=None, derandomize=True, max_examples=size(150, 5000))
@given(tokens, st.randoms(use_true_random=False), st.integers(1, 5))
def test_property_order_and_split(call: list[tuple[float, int]], random: Any, parts: int) -> None:
    """One pair, permuted, gives the same state; pieces of it differ in the pairs' sums only."""
    losses = np.array([loss for loss, _ in call], np.float64)
    weights = np.array([weight for _, weight in call], np.int64)
    whole = filled(losses, weights)
    order = np.array(random.sample(range(len(call)), len(call)), np.int64)
    assert np.array_equal(filled(losses[order], weights[order]).state, whole.state)

    pieces = [filled(losses[part::parts], weights[part::parts]) for part in range(parts)]
    random.shuffle(pieces)
    merged = LossAccumulator()
    for piece in pieces:
        merged.merge(piece)
    for name in ("mean", "tokens", "masked", "nonfinite"):
        assert getattr(merged, name) == getattr(whole, name)

    states = [piece.state for piece in pieces]
    for total in (sum(states), sum(state.astype(np.float64) for state in states)):
        assert np.array_equal(LossAccumulator.from_state(np.asarray(total)).state, merged.state)


@pytest.mark.soak
@settings(deadline=None, derandomize=True, max_examples=size(150, 5000))
@given(st.lists(st.tuples(anything, weights_or_masks), max_size=8))
def test_property_means(pairs: list[tuple[float, int]]) -> None:
    accumulator, twin = LossAccumulator(), LossTwin()
    for mean, n in pairs:
        accumulator.add_mean(mean, n)
        twin.add_mean(mean, n)
    agree(accumulator, twin)


def test_rounding_to_nearest_even_and_subnormals() -> None:
    smallest = 5e-324
    for losses, expected in (
        ([smallest, 0.0], 0.0),  # half of the smallest: to even
        ([smallest, smallest, smallest, 0.0], smallest),
        ([3 * smallest, 0.0], 2 * smallest),
        ([1.0, 1.0 + 2**-52], 1.0),
        ([1.0 + 2**-52, 1.0 + 2**-51], 1.0 + 2**-51),
        ([1e300, 1.0, -1e300], nearest(Fraction(1, 3))),
        ([-smallest, -smallest], -smallest),
    ):
        assert same(filled(np.array(losses)).mean or 0.0, expected), losses


def test_many_ranks_as_float64() -> None:
    """2^21 equal ranks, summed as an all-reduce sums them."""
    part = filled(np.array([0.1, -2.5e-310, 1.7e308]), np.array([3, TOP, 1]))
    total = part.state.astype(np.float64) * 2.0**21
    result = LossAccumulator.from_state(total)
    assert result.mean == part.mean
    assert result.tokens == part.tokens * 2**21
    assert result.pairs == 2**21
    for digit in part.state.ravel():
        assert -1 <= digit < 2**32


# ---- non-finite and masked losses ----


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_nonfinite_losses_are_counted_and_propagate(dtype: str) -> None:
    rng = np.random.default_rng(3)
    losses = make(dtype, "contiguous", "bits", n=5000)
    weights = rng.integers(0, 3, losses.size)
    agree(filled(losses, weights), _twin_of(losses, weights))
    for values, expected in (
        ([1, math.inf], math.inf),
        ([-math.inf, 1], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.inf, math.nan], math.nan),
    ):
        array = np.array(values, np.float32).astype(losses.dtype)
        accumulator = filled(array)
        assert same(accumulator.mean or 0.0, expected)
        assert accumulator.nonfinite == int((~np.isfinite(array.astype(np.float64))).sum())


def test_masked_losses_are_not_looked_at() -> None:
    for dtype in (np.float64, np.float32):
        losses = np.array([math.nan, math.inf, -math.inf, 2.0] * 1000, dtype)
        accumulator = filled(losses, np.tile([False, False, False, True], 1000))
        assert (accumulator.mean, accumulator.masked, accumulator.nonfinite) == (2.0, 3000, 0)


def test_negative_losses_and_signed_zero() -> None:
    assert filled(np.array([-1.0, -2.0])).mean == -1.5
    assert filled(np.array([-0.0, 0.0])).mean == 0.0


def test_nothing() -> None:
    empty = LossAccumulator()
    for array in (np.zeros(0), np.zeros((3, 0), np.float32)):
        empty.add(array)
        empty.add(array, np.zeros(array.shape, np.int64))
    assert (empty.mean, empty.gap, empty.tokens, empty.pairs) == (None, None, 0, 0)
    assert not empty.state.any()


# ---- buckets ----


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("ids_dtype", ["int8", "int64", "uint16", "uint64"])
def test_buckets_twin(dtype: str, ids_dtype: str) -> None:
    rng = np.random.default_rng(5)
    losses = make(dtype, "contiguous", "bits", n=4999)
    weights = rng.integers(0, 2**40, losses.size) * rng.integers(0, 2, losses.size)
    ids = rng.integers(0, 7, losses.size).astype(ids_dtype)
    ids[::11] = np.iinfo(ids_dtype).max  # as int64: beyond the buckets, and below 0 for uint64
    accumulator = LossAccumulator(5)
    accumulator.add(losses, weights, ids)
    agree(accumulator, _twin_of(losses, weights))
    for b in range(5):
        twin = _twin_of(losses[ids == b], weights[ids == b])
        agree(accumulator.bucket(b), twin)
        assert same(accumulator.bucket_means[b] or 0.0, twin.mean or 0.0)
    assert accumulator.invalid == int(((ids >= 5) & (weights > 0)).sum())
    twice = LossAccumulator.from_state(accumulator.state * 2)
    assert twice.tokens == 2 * accumulator.tokens
    assert twice.invalid == 2 * accumulator.invalid
    assert [
        same(a or 0.0, b or 0.0) for a, b in zip(twice.bucket_means, accumulator.bucket_means, strict=True)
    ] == [True] * 5


def test_position_buckets() -> None:
    assert position_buckets(6, 3).tolist() == [0, 0, 1, 1, 2, 2]
    assert position_buckets(5, 2).tolist() == [0, 0, 0, 1, 1]
    assert position_buckets(2, 4).tolist() == [0, 2]
    assert position_buckets(0, 4).tolist() == []
    losses = np.arange(12, dtype=np.float32).reshape(2, 6)
    accumulator = LossAccumulator(3)
    accumulator.add(losses, buckets=position_buckets(6, 3))
    assert accumulator.bucket_means == (3.5, 5.5, 7.5)
    assert accumulator.mean == 5.5
    empty = LossAccumulator(2)
    empty.add(losses, buckets=np.zeros(losses.shape, np.int8))
    assert empty.bucket_means == (5.5, None)


# ---- errors leave everything as it was ----


@pytest.mark.parametrize(
    ("add", "error", "message"),
    [
        (lambda a: a.add(np.ones(5000), _ones(5000, 4000, -3)), ValueError, r"weights: element 4000 is -3"),
        (
            lambda a: a.add(np.ones(2), np.array([1, 2**63], np.uint64)),
            ValueError,
            r"element 1 is 9223372036854775808",
        ),
        (
            lambda a: a.add(np.ones(3), np.ones(2, np.int64)),
            ValueError,
            r"weights has the shape \[2\], losses \[3\]",
        ),
        (lambda a: a.add(np.ones((2, 3)), np.ones((3, 2), np.int64)), ValueError, "shape"),
        (
            lambda a: a.add((b"abcdefgh", "f32"), (b"abc", "u8")),
            ValueError,
            "weights has 3 elements for 2 losses",
        ),
        (lambda a: a.add(np.ones(2), np.ones(2)), TypeError, "weights must be integers or bool, not float64"),
        (lambda a: a.add(np.ones(2, np.int64)), TypeError, "losses must be floats, not int64"),
        (lambda a: a.add("text"), TypeError, "losses"),
        (lambda a: a.add(np.ones(2), "text"), TypeError, "weights"),
        (lambda a: a.add(np.ones(2), None, np.zeros(2, np.int64)), ValueError, r"LossAccumulator\(buckets="),
        (lambda a: a.add_mean(1.0, -1), ValueError, "n must be from 0"),
        (lambda a: a.add_mean(1.0, 2**63), ValueError, "n must be from 0"),
        (lambda a: a.add_mean("x", 1), TypeError, "real number"),
        (lambda a: a.add_mean(1.0, 1.5), TypeError, "integer"),
        (lambda a: a.merge(LossAccumulator(3)), ValueError, "3 buckets, this one 0"),
        (lambda a: a.merge(np.zeros(3)), TypeError, "LossAccumulator, not ndarray"),
    ],
)
def test_errors(add: Callable[[LossAccumulator], None], error: type[Exception], message: str) -> None:
    accumulator = filled(np.array([1.0, 2.0]))
    before = accumulator.state
    with pytest.raises(error, match=message):
        add(accumulator)
    assert np.array_equal(accumulator.state, before)


def _ones(n: int, at: int, value: int) -> Array:
    weights = np.ones(n, np.int32)
    weights[at] = value
    return weights


def test_errors_with_buckets() -> None:
    accumulator = LossAccumulator(2)
    with pytest.raises(ValueError, match="buckets are needed"):
        accumulator.add(np.ones(2))
    with pytest.raises(ValueError, match="buckets are needed"):
        accumulator.add_mean(1.0, 2)
    with pytest.raises(TypeError, match="buckets must be integers or bool, not float32"):
        accumulator.add(np.ones(2), buckets=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="element 1 is -1"):
        accumulator.add(np.ones(2), np.array([1, -1]), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="broadcast"):
        accumulator.add(np.ones(2), buckets=np.zeros(3, np.int64))
    assert not accumulator.state.any()
    with pytest.raises(ValueError, match="buckets must be from 0"):
        LossAccumulator(-1)
    with pytest.raises(IndexError):
        accumulator.bucket(2)


@pytest.mark.parametrize(
    "state",
    [
        np.zeros((1, 3), np.int64),
        np.zeros(156, np.int64),
        np.zeros((0, 156), np.int64),
        np.full((1, 156), 0.5),
        np.full((1, 156), np.nan),
        np.full((1, 156), 2.0**60),
        np.full((1, 156), -(2**63)),
        np.full((1, 156), -1),
        np.full((1, 156), "x"),
    ],
)
def test_states_that_are_none(state: Array) -> None:
    with pytest.raises(ValueError, match="a state"):
        LossAccumulator.from_state(state)


# ---- doors, memory, processes, threads ----


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    losses = torch.tensor([[1.0, 2.0], [3.0, float("nan")]], requires_grad=True)
    accumulator = filled(losses, torch.tensor([[1, 1], [2, 0]]))
    assert (accumulator.mean, accumulator.tokens) == (2.25, 4)
    assert filled(losses.to(torch.bfloat16), losses > 0).mean == 2.0
    with pytest.raises(ValueError, match="shape"):
        accumulator.add(losses, torch.ones(3, dtype=torch.int64))


def test_reference_counts() -> None:
    losses, weights, ids = np.ones(100), np.ones(100, np.int64), np.zeros(100, np.int64)
    bad = _ones(100, 5, -1)
    accumulator = LossAccumulator(1)
    accumulator.add(losses, weights, ids)
    before = [sys.getrefcount(array) for array in (losses, weights, ids, bad, accumulator._state)]
    for _ in range(50):
        accumulator.add(losses, weights, ids)
        for wrong in (bad, "text", np.ones(100)):
            with pytest.raises((ValueError, TypeError)):
                accumulator.add(losses, wrong, ids)
        with pytest.raises(TypeError):
            accumulator.add(losses, weights, losses)
    gc.collect()
    assert [sys.getrefcount(array) for array in (losses, weights, ids, bad, accumulator._state)] == before


@pytest.mark.soak
def test_more_than_two_billion_losses() -> None:
    """By strides: one float32, 2^31 + 5 times over, at a fraction of the usual speed."""
    n = size(2**26, 2**31) + 5
    accumulator = filled(np.broadcast_to(np.float32(0.1), (n,)))
    assert (accumulator.mean, accumulator.tokens) == (float(np.float32(0.1)), n)


def test_threads_at_once() -> None:
    """Sums of one accumulator from many threads: no pair is lost."""
    losses = np.random.default_rng(0).standard_normal(50_000)
    accumulator, expected = LossAccumulator(), LossAccumulator()
    workers = [
        threading.Thread(target=lambda: [accumulator.add(losses) for _ in range(10)]) for _ in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for _ in range(80):
        expected.add(losses)
    assert np.array_equal(accumulator.state, expected.state)


def test_same_bits_in_every_tier() -> None:
    code = """
import hashlib
import numpy as np
from tests.awkward import FLOATS, LAYOUTS, VALUES, make
from trainmon import LossAccumulator, cpu_info
digest = hashlib.sha256()
for dtype in FLOATS:
    for values in VALUES:
        for layout in LAYOUTS:
            accumulator = LossAccumulator()
            accumulator.add(make(dtype, layout, values, n=3000))
            digest.update(accumulator.state.tobytes())
print(cpu_info()["tier"], digest.hexdigest())
"""
    results = digests(code)
    assert len(set(results.values())) == 1, results
