"""attention_logits against all scores at once in float64: masks, heads, dtypes, layouts, edge cases, merging."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.awkward import DTYPES, FLOATS
from tests.campaign import size
from tests.kernels.child import digests, output
from tests.twins.attention import Rows, allowed, rows_twin, sums_twin
from trainmon import (
    AttentionLogits,
    AttentionRows,
    attention_logit_mean,
    attention_logits,
    merge_key_splits,
    qk_clip,
)
from trainmon.ops.attention_records import SUMS

Array = np.ndarray[Any, Any]
COUNTS = ("rows", "norm_rows", "keys", "nonfinite_rows", "empty_rows", "all_rows")
PASS_ERROR = 1e-6  # of a sum of exponentials, given the scores


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


def agree_rows(rows: AttentionRows, twin: Rows, shape: tuple[int, ...]) -> None:
    assert rows.keys is not None
    assert rows.z is not None
    m, d, n, z = (np.asarray(a).reshape(shape) for a in (rows.max, rows.sum, rows.keys, rows.z))
    relative = 2 * twin.slack + PASS_ERROR
    assert np.array_equal(n, twin.n)
    for values, expected, tolerance in (
        (m, twin.m, twin.slack + 2.0**-23 * np.abs(np.where(np.isfinite(twin.m), twin.m, 0))),
        (d, twin.d, relative * np.nan_to_num(twin.d)),
        (z, twin.z, 2 * twin.slack * twin.n),
    ):
        same = (values == expected) | (np.isnan(values) & np.isnan(expected))
        with np.errstate(invalid="ignore"):
            assert bool((same | (np.abs(values - expected) <= tolerance)).all())
    counted = np.isfinite(twin.m)
    assert bool((d[counted] >= 1).all())
    assert bool((d[counted] <= n[counted]).all())


def agree(logits: AttentionLogits, twin: Rows) -> None:
    expected = sums_twin(twin)
    relative = 4 * twin.slack + 2 * PASS_ERROR
    for name in COUNTS:
        assert getattr(logits, name).dtype == np.int64
        assert np.array_equal(getattr(logits, name), expected[name]), name
    scale = {
        "max": np.abs(np.nan_to_num(twin.m, posinf=0, neginf=0)).max(initial=0) * 2.0**-23 + twin.slack,
        "sum_m": np.abs(np.nan_to_num(twin.m, posinf=0, neginf=0)).sum() * 2.0**-23
        + twin.slack * twin.m.size,
        "sum_z": 2 * twin.slack * twin.n.sum() + 1e-300,
    }
    for name in ("max", "sum_l", "sum_l2", "sum_m", "sum_inv_l", "sum_norm", "sum_z"):
        got, wanted = getattr(logits, name), expected[name]
        tolerance = scale.get(name, relative * (np.abs(wanted) + (name == "sum_norm") * twin.m.size))
        with np.errstate(invalid="ignore"):
            near = np.abs(got - wanted) <= tolerance
        assert bool((near | (got == wanted) | (np.isnan(got) & np.isnan(wanted))).all()), name


def check(q: Array, k: Array, scale: float | None = None, threads: int = 1, **mask: Any) -> AttentionLogits:
    """Both results against the twin; q and k have one batch axis."""
    softcap, sinks = mask.get("softcap"), mask.get("sinks")
    logits, rows = attention_logits(q, k, scale, per_row=True, threads=threads, **mask)
    positions = {name: value for name, value in mask.items() if name not in ("softcap", "sinks", "point")}
    lengths = {"q_mask": q.shape[2], "k_mask": k.shape[2]}
    for name, length in lengths.items():
        given_mask = positions.get(name)
        if given_mask is not None and given_mask.dtype != bool:
            positions[name] = np.arange(length) < given_mask[:, None]
    if "documents" in positions and not isinstance(positions["documents"], tuple):
        positions["documents"] = (positions["documents"],) * 2
    seen = allowed(q.shape[0], q.shape[2], k.shape[2], **positions)
    twin = rows_twin(q, k, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, seen, softcap, sinks)
    agree_rows(rows, twin, twin.m.shape)
    agree(logits, twin)
    agree(rows.logits(logits.point), twin)
    return logits


# ---- values that must hold ----


def test_check_value() -> None:
    q = np.array([[[0.0], [math.log(3)]]], np.float32)
    k = np.array([[[0.0], [1.0]]], np.float32)
    logits = attention_logits(q, k, scale=1, mask="full")
    assert logits.max == pytest.approx(1.098612, abs=1e-6)
    assert logits.sum_l == pytest.approx(10 / 3, rel=1e-7)
    assert logits.rows == 2
    assert logits.mean_sum == pytest.approx(1.666667, abs=1e-6)
    assert logits.mean_sum_norm == pytest.approx((1 + 1 / 3) / 2, rel=1e-7)
    assert logits.row_max_mean == pytest.approx(math.log(3) / 2)
    assert logits.attn_prob_max_mean == pytest.approx((1 / 2 + 3 / 4) / 2)
    assert logits.logit_mean == pytest.approx(math.log(3) / 4)
    assert logits.sampled == 1
    assert logits.mean_sum_error == 0

    second = [attention_logits(q[:, 1:], k[:, j : j + 1], 1, "full", per_row=True)[1] for j in (0, 1)]
    assert [float(part.sum[0, 0]) for part in second] == [1, 1]
    assert [float(part.max[0, 0]) for part in second] == pytest.approx([0, math.log(3)])
    merged = merge_key_splits(second)
    assert merged.sum[0, 0] == pytest.approx(4 / 3)
    assert merged.keys is not None
    assert merged.keys[0, 0] == 2


def test_one_key_has_a_denominator_of_one() -> None:
    rng = np.random.default_rng(0)
    q, k = 30 * normal(rng, 2, 3, 50, 16), normal(rng, 2, 3, 50, 16)
    logits, rows = attention_logits(q, k, window=1, per_row=True)
    assert bool((rows.sum == 1).all())
    assert bool((logits.sum_l == 100).all())
    assert bool((logits.norm_rows == 0).all())
    assert bool(np.isnan(logits.mean_sum_norm).all())


def test_negative_maxima_stay() -> None:
    q, k = np.ones((1, 1, 20, 4), np.float32), -np.ones((1, 1, 20, 4), np.float32)
    logits = check(q, k, scale=1.0)
    assert logits.max == -4
    assert logits.mean_sum == pytest.approx(10.5)
    assert logits.mean_sum_norm == pytest.approx(1)


# ---- masks ----

MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"mask": "full"},
    "window": {"window": 100},
    "full window": {"mask": "full", "window": 33},
    "context parallel": {"q_start": 500, "k_start": 0},
    "behind": {"q_start": 0, "k_start": 200},
    "all before": {"q_start": -1000},
    "lengths": {"q_mask": np.array([700, 313]), "k_mask": np.array([313, 0])},
    "left padding": {"k_mask": np.arange(800) >= np.array([[100], [790]])},
    "holes": {"k_mask": np.random.default_rng(1).random((2, 800)) < 0.3, "window": 50},
    "documents": {
        "documents": (
            np.repeat([3, 1, -1, 2], [100, 250, 50, 300]),
            np.repeat([3, 1, -1, 2], [90, 360, 50, 300]),
        )
    },
    "documents and holes": {
        "documents": (np.repeat([[0, 1], [1, 0]], 350, axis=1), np.repeat([[0, 1], [1, 0]], 400, axis=1)),
        "k_mask": np.random.default_rng(2).random((2, 800)) < 0.5,
        "mask": "full",
    },
    "softcap": {"point": "masked", "softcap": 2.0},
    "sinks": {"point": "masked", "sinks": np.array([0.5, -3.0, 10.0, 0.0]), "q_start": -100},
    "softcap and sinks": {"point": "masked", "softcap": 0.7, "sinks": np.array([0.5, -3.0, 10.0, 0.0])},
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    rng = np.random.default_rng(3)
    q, k = 3 * normal(rng, 2, 4, 700, 24), normal(rng, 2, 2, 800, 24) + np.float32(0.1)
    check(q, k, **MASKS[name])


def test_masked_keys_and_rows_are_not_looked_at() -> None:
    rng = np.random.default_rng(4)
    q, k = normal(rng, 2, 4, 300, 16), normal(rng, 2, 4, 300, 16)
    keys, rows = rng.random((2, 300)) < 0.7, rng.random((2, 300)) < 0.9
    clean = attention_logits(q, k, q_mask=rows, k_mask=keys)
    q[np.broadcast_to(~rows[:, None, :, None], q.shape)] = np.nan
    k[np.broadcast_to(~keys[:, None, :, None], k.shape)] = np.nan
    dirty = attention_logits(q, k, q_mask=rows, k_mask=keys)
    assert np.array_equal(clean.max, dirty.max)
    assert np.array_equal(clean.sums, dirty.sums)


positions = st.integers(-40, 40)


@pytest.mark.soak
@settings(deadline=None, derandomize=True, max_examples=size(120, 4000))
@given(
    st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9)),
    st.sampled_from(["causal", "full"]),
    st.one_of(st.none(), st.integers(1, 50)),
    st.one_of(st.none(), positions),
    positions,
    st.sampled_from([None, "bool", "lengths"]),
    st.sampled_from([None, "bool", "lengths"]),
    st.booleans(),
    st.sampled_from([None, 0.5, 3.0]),
    st.booleans(),
    st.floats(-4, 4).filter(lambda x: abs(x) > 1e-3),
    st.integers(0, 2**32 - 1),
)
def test_property_twin(
    heads: tuple[int, int, int],
    lengths: tuple[int, int, int],
    mask: str,
    window: int | None,
    q_start: int | None,
    k_start: int,
    q_kind: str | None,
    k_kind: str | None,
    documents: bool,
    softcap: float | None,
    sinks: bool,
    scale: float,
    seed: int,
) -> None:
    (batches, key_heads, group), (queries, keys, depth) = heads, lengths
    rng = np.random.default_rng(seed)
    q, k = (
        normal(rng, batches, key_heads * group, queries, depth),
        normal(rng, batches, key_heads, keys, depth),
    )
    for array in (q, k):
        for value in (np.nan, np.inf, -np.inf):
            if array.size and rng.random() < 0.2:
                array.reshape(-1)[rng.integers(array.size)] = value
    options: dict[str, Any] = {"mask": mask, "window": window, "q_start": q_start, "k_start": k_start}
    for name, kind, length in (("q_mask", q_kind, queries), ("k_mask", k_kind, keys)):
        if kind == "bool":
            options[name] = rng.random((batches, length)) < 0.7
        elif kind == "lengths":
            options[name] = rng.integers(0, length + 1, batches)
    if documents:
        order = rng.permutation(5)
        options["documents"] = tuple(
            order[np.sort(rng.integers(0, 5, (batches, length)), axis=1)] - 1 for length in (queries, keys)
        )
    if softcap is not None or sinks:
        options["point"] = "masked"
        options["softcap"] = softcap
        options["sinks"] = rng.standard_normal(key_heads * group) * 3 if sinks else None
    check(q, k, scale, **options)


# ---- heads, dtypes, layouts ----


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (6, 6), (6, 3), (8, 1), (40, 1), (36, 2)])
def test_grouped_heads(heads: int, key_heads: int) -> None:
    rng = np.random.default_rng(5)
    check(normal(rng, 2, heads, 130, 8), normal(rng, 2, key_heads, 290, 8))


@pytest.mark.parametrize("depth", [1, 3, 64, 128, 192, 576])
def test_depths(depth: int) -> None:
    rng = np.random.default_rng(6)
    check(normal(rng, 1, 2, 300, depth), normal(rng, 1, 1, 1100, depth))


def test_axes_before_the_heads() -> None:
    rng = np.random.default_rng(7)
    q, k = normal(rng, 2, 3, 4, 50, 8), normal(rng, 2, 3, 2, 50, 8)
    whole, rows = attention_logits(q, k, per_row=True)
    assert rows.max.shape == (2, 3, 4, 50)
    flat = attention_logits(q.reshape(6, 4, 50, 8), k.reshape(6, 2, 50, 8))
    assert np.array_equal(whole.sums, flat.sums)
    single = attention_logits(q[0, 0], k[0, 0], per_row=True)[1]
    assert np.array_equal(single.max, rows.max[0, 0])


@pytest.mark.parametrize("dtype", [name for name in FLOATS if name != "float8_e8m0fnu"])
def test_dtypes(dtype: str) -> None:
    rng = np.random.default_rng(8)
    q = normal(rng, 2, 4, 200, 24).astype(DTYPES[dtype])
    k = normal(rng, 2, 2, 600, 24).astype(DTYPES[dtype])
    narrow = attention_logits(q, k)
    wide = attention_logits(q.astype(np.float32), k.astype(np.float32))
    assert np.array_equal(narrow.max, wide.max)
    assert np.array_equal(narrow.sums, wide.sums)
    mixed = attention_logits(q, k.astype(np.float64))
    assert np.array_equal(mixed.sums, wide.sums)


VIEWS: dict[str, Callable[[Array], Array]] = {
    "sequence before heads": lambda a: np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2),
    "part of a fused projection": lambda a: np.concatenate([a, a, a], axis=-1)[
        ..., a.shape[-1] : 2 * a.shape[-1]
    ],
    "reversed": lambda a: a[:, ::-1, ::-1, ::-1].copy()[:, ::-1, ::-1, ::-1],
    "depth first": lambda a: np.ascontiguousarray(a.swapaxes(2, 3)).swapaxes(2, 3),
    "every other": lambda a: np.repeat(a, 2, axis=3)[..., ::2],
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "misaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str, dtype: str) -> None:
    rng = np.random.default_rng(9)
    q, k = (normal(rng, 2, 4, 300, 12).astype(DTYPES[dtype]) for _ in range(2))
    plain, plain_rows = attention_logits(q, k, per_row=True)
    viewed = [VIEWS[view](array) for array in (q, k)]
    assert all(np.array_equal(a, b) for a, b in zip(viewed, (q, k), strict=True))
    before = [array.tobytes() for array in viewed]
    logits, rows = attention_logits(*viewed, per_row=True)
    assert [array.tobytes() for array in viewed] == before
    # the products' last bits may depend on how OpenBLAS reads the rows
    np.testing.assert_allclose(rows.max, plain_rows.max, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rows.sum, plain_rows.sum, rtol=1e-5)
    np.testing.assert_allclose(logits.sums, plain.sums, rtol=1e-5, atol=1e-3)


def test_torch_tensors() -> None:
    """As a model has them: bfloat16 with gradients, sequence before heads, masks as tensors."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(2, 90, heads, 16, generator=generator) for heads in (4, 2)]
    q, k = (tensor.bfloat16().requires_grad_().transpose(1, 2) for tensor in made)
    lengths = torch.tensor([90, 41])
    logits = attention_logits(q, k, q_mask=lengths, k_mask=lengths)
    plain = [tensor.detach().float().contiguous().numpy() for tensor in (q, k)]
    expected = attention_logits(*plain, q_mask=lengths.numpy(), k_mask=lengths.numpy())
    np.testing.assert_allclose(logits.max, expected.max, rtol=1e-6)
    np.testing.assert_allclose(logits.sums, expected.sums, rtol=1e-5, atol=1e-3)


def test_broadcast() -> None:
    rng = np.random.default_rng(10)
    q, k = normal(rng, 1, 1, 100, 8), normal(rng, 1, 1, 100, 8)
    wide = attention_logits(np.broadcast_to(q, (3, 4, 100, 8)), np.broadcast_to(k, (3, 4, 100, 8)))
    one = attention_logits(q, k)
    assert np.array_equal(wide.max, np.repeat(one.max, 4))
    assert np.array_equal(wide.rows, np.repeat(3 * one.rows, 4))
    check(np.broadcast_to(q[:, :, :1], (1, 1, 100, 8)), np.broadcast_to(k[..., :1], (1, 1, 100, 8)))


def test_empty_axes() -> None:
    for shape_q, shape_k in (
        ((0, 2, 5, 4), (0, 1, 5, 4)),
        ((1, 2, 0, 4), (1, 2, 5, 4)),
        ((1, 2, 5, 4), (1, 2, 0, 4)),
    ):
        logits = check(np.ones(shape_q, np.float32), np.ones(shape_k, np.float32))
        assert bool((logits.max == -np.inf).all())
        for name in ("mean_sum", "mean_sum_norm", "row_max_mean", "attn_prob_max_mean", "logit_mean"):
            assert bool(np.isnan(getattr(logits, name)).all()), name
    assert attention_logits(np.ones((1, 0, 5, 4)), np.ones((1, 2, 5, 4))).max.shape == (0,)


# ---- values that are not ordinary ----


def test_nonfinite_rows() -> None:
    """A NaN in a key meets every row that sees it; an infinite one gives +inf, -inf or NaN by the query's sign."""
    rng = np.random.default_rng(11)
    for value, place in itertools.product(
        (np.nan, np.inf, -np.inf), ((0, 0, 200, 3), (1, 1, 0, 0), (0, 1, 299, 7))
    ):
        q, k = normal(rng, 2, 2, 300, 8), normal(rng, 2, 2, 300, 8)
        k[place] = value
        check(q, k)
        check(k, q)
        check(k, q, mask="full")
    q[0, 0, 5, 0], q[0, 0, 6, 0] = np.nan, np.inf
    logits = check(q, k)
    assert math.isnan(logits.max[0])
    assert logits.nonfinite_rows[0] >= 1
    q = np.ones((1, 1, 4, 1), np.float32)
    k = np.array([1, np.inf, 1, np.nan], np.float32).reshape(1, 1, 4, 1)
    assert attention_logits(q[:, :, :3], k[:, :, :3]).max == np.inf
    assert attention_logits(q, k, q_start=0).nonfinite_rows == 3
    assert math.isnan(attention_logits(q, k).max[0])


def test_rows_of_minus_infinity_are_empty() -> None:
    q = np.ones((1, 1, 3, 1), np.float32)
    k = np.array([-np.inf, -np.inf, 2.0], np.float32).reshape(1, 1, 3, 1)
    logits, rows = attention_logits(q, k, scale=1, per_row=True)
    assert (logits.empty_rows, logits.rows, logits.nonfinite_rows) == (2, 1, 0)
    assert rows.max.ravel().tolist() == [-np.inf, -np.inf, 2]
    assert rows.sum.ravel().tolist() == [0, 0, 1]
    assert logits.sum_z == -np.inf  # the last row has scores of -inf too
    pieces = [
        attention_logits(q, k[:, :, a:b], scale=1, k_start=a, q_start=0, per_row=True)[1]
        for a, b in ((0, 2), (2, 3))
    ]
    merged = merge_key_splits(pieces)
    assert rows.z is not None
    assert merged.z is not None
    assert merged.z.ravel().tolist() == rows.z.ravel().tolist() == [-np.inf] * 3
    with_sink = attention_logits(q, k, scale=1, point="masked", sinks=[3.0])
    assert (with_sink.empty_rows, with_sink.rows) == (0, 3)


def test_extreme_scores() -> None:
    rng = np.random.default_rng(12)
    for factor in (1e-30, 1e-3, 1e3, 1e15):
        q, k = np.float32(factor) * normal(rng, 1, 1, 600, 4), normal(rng, 1, 1, 600, 4)
        logits, rows = attention_logits(q, k, per_row=True)
        twin = rows_twin(q, k, 0.5, allowed(1, 600, 600))
        np.testing.assert_allclose(rows.max, twin.m, rtol=1e-5, atol=10 * twin.slack)
        if factor < 1:
            np.testing.assert_allclose(rows.sum, twin.d, rtol=1e-5)
        assert logits.nonfinite_rows == 0
    q, k = np.full((1, 1, 3, 2), 3e38, np.float32), np.full((1, 1, 3, 2), 3e38, np.float32)
    assert attention_logits(q, k).max == np.inf  # beyond float32, as in the model
    assert attention_logits(q, -k).empty_rows == 3


@pytest.mark.parametrize("order", ["rising", "falling", "far apart"])
def test_the_maximum_moves_through_the_blocks(order: str) -> None:
    keys = 5000
    ramp = np.linspace(-60, 60, keys, dtype=np.float32)
    values = {
        "rising": ramp,
        "falling": ramp[::-1],
        "far apart": np.where(np.arange(keys) % 700 == 699, 500, -500),
    }
    k = values[order].astype(np.float32).reshape(1, 1, keys, 1)
    q = np.array([1, -1, 0.01, 3], np.float32).reshape(1, 1, 4, 1)
    check(q, k, scale=1.0, mask="full")


def test_softcap_is_exact_for_small_and_large_scores() -> None:
    values = np.concatenate([np.geomspace(1e-6, 1e6, 999), -np.geomspace(1e-6, 1e6, 999), [np.inf, -np.inf]])
    k = values.astype(np.float32).reshape(1, 1, -1, 1)
    q = np.ones((1, 1, 1, 1), np.float32)
    for cap in (0.5, 30.0):
        for j in range(0, k.shape[2], 37):
            one = attention_logits(q, k[:, :, j : j + 1], 1.0, "full", point="masked", softcap=cap)
            expected = cap * math.tanh(float(k[0, 0, j, 0]) / cap)
            assert one.max[0] == pytest.approx(expected, rel=5e-7)
            assert one.sum_z[0] == one.max[0]


# ---- sums without scores ----


@pytest.mark.parametrize("name", [name for name in MASKS if MASKS[name].get("point") != "masked"])
def test_logit_mean_without_scores(name: str) -> None:
    rng = np.random.default_rng(13)
    q, k = normal(rng, 2, 4, 700, 24), normal(rng, 2, 2, 800, 24) + np.float32(0.1)
    logits = attention_logits(q, k, **MASKS[name])
    sum_z, keys = attention_logit_mean(q, k, **MASKS[name])
    assert np.array_equal(sum_z, logits.sum_z)
    assert np.array_equal(keys, logits.keys)
    q[0, 0, 650, 0] = np.nan
    k[1, 0, 3, 0] = np.inf
    sum_z, keys = attention_logit_mean(q, k, **MASKS[name])
    assert bool(np.isfinite(sum_z).all())
    assert bool((keys <= logits.keys).all())


# ---- merging ----


def test_pieces_of_the_queries_merge() -> None:
    """Micro-batches, data-parallel ranks and context-parallel pieces."""
    rng = np.random.default_rng(14)
    q, k = 2 * normal(rng, 3, 4, 500, 16), normal(rng, 3, 2, 500, 16)
    whole = attention_logits(q, k)
    pieces = [
        attention_logits(q[b : b + 1, :, i : i + 125], k[b : b + 1], q_start=i)
        for b, i in itertools.product(range(3), range(0, 500, 125))
    ]
    for merged in (pieces[0].merge(*pieces[1:]), pieces[-1].merge(*reversed(pieces[:-1]))):
        assert merged.point == "scaled"
        np.testing.assert_allclose(merged.max, whole.max, rtol=1e-6)
        np.testing.assert_allclose(merged.sums, whole.sums, rtol=1e-5, atol=1e-2)
        for name in COUNTS:
            assert np.array_equal(getattr(merged, name), getattr(whole, name)), name


def test_shards_of_the_heads_are_put_together() -> None:
    rng = np.random.default_rng(15)
    q, k = normal(rng, 1, 6, 100, 8), normal(rng, 1, 3, 100, 8)
    whole = attention_logits(q, k)
    shards = AttentionLogits.cat(attention_logits(q[:, 2 * r : 2 * r + 2], k[:, r : r + 1]) for r in range(3))
    np.testing.assert_allclose(shards.max, whole.max, rtol=1e-6)
    np.testing.assert_allclose(shards.sums, whole.sums, rtol=1e-5, atol=1e-3)


@pytest.mark.soak
@settings(deadline=None, derandomize=True, max_examples=size(60, 2000))
@given(st.lists(st.integers(0, 90), max_size=4), st.booleans(), st.integers(0, 2**32 - 1))
def test_property_splits_of_the_keys_merge(cuts: list[int], bad: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, k = 3 * normal(rng, 2, 2, 70, 6), normal(rng, 2, 1, 90, 6)
    if bad:
        k[0, 0, rng.integers(90), 0] = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32))
    start = int(rng.integers(-30, 30))  # below 0: rows without a key
    whole = rows_twin(q, k, 1 / math.sqrt(6), allowed(2, 70, 90, q_start=start))
    edges = [0, *sorted(cuts), 90]
    parts = [
        attention_logits(q, k[:, :, a:b], q_start=start, k_start=a, per_row=True)[1]
        for a, b in itertools.pairwise(edges)
    ]
    merged = merge_key_splits(parts)
    agree_rows(merged, whole, whole.m.shape)
    agree(merged.logits(), whole)


def test_rows_of_a_fused_kernel() -> None:
    """Row max and row sum alone, as FlashAttention kernels return them."""
    rng = np.random.default_rng(16)
    q, k = normal(rng, 2, 3, 60, 8), normal(rng, 2, 3, 60, 8)
    logits, rows = attention_logits(q, k, per_row=True)
    fused = AttentionRows(rows.max.astype(np.float32), rows.sum.astype(np.float32)).logits("masked")
    assert fused.point == "masked"
    assert np.array_equal(fused.max, logits.max)
    assert np.array_equal(fused.rows, logits.rows)
    np.testing.assert_allclose(fused.mean_sum, logits.mean_sum, rtol=1e-6)
    np.testing.assert_allclose(fused.attn_prob_max_mean, logits.attn_prob_max_mean, rtol=1e-6)
    assert bool(np.isnan(fused.logit_mean).all())
    assert bool(np.isnan(fused.mean_sum_norm).all())
    merged = merge_key_splits([AttentionRows(rows.max, rows.sum)] * 2)
    assert merged.keys is None
    np.testing.assert_allclose(merged.sum, 2 * rows.sum)


def test_sums_for_collectives() -> None:
    rng = np.random.default_rng(17)
    parts = [attention_logits(normal(rng, 1, 2, 40, 8), normal(rng, 1, 2, 40, 8)) for _ in range(3)]
    assert parts[0].sums.shape == (len(SUMS), 2)
    reduced = AttentionLogits.from_sums(
        np.max([part.max for part in parts], axis=0), np.sum([part.sums for part in parts], axis=0)
    )
    merged = parts[0].merge(*parts[1:])
    assert np.array_equal(reduced.sums, merged.sums)
    assert np.array_equal(reduced.max, merged.max)
    with pytest.raises(ValueError, match=r"sums \[12, heads\]"):
        AttentionLogits.from_sums(np.zeros(2), np.zeros((12, 3)))


def test_a_nan_wins_in_any_order() -> None:
    good = attention_logits(np.ones((1, 1, 2, 1)), np.ones((1, 1, 2, 1)))
    bad = attention_logits(np.full((1, 1, 2, 1), np.nan), np.ones((1, 1, 2, 1)))
    for merged in (good.merge(bad), bad.merge(good)):
        assert math.isnan(merged.max[0])
        assert merged.nonfinite_rows == 2
        assert merged.mean_sum == good.mean_sum


# ---- sampling ----


def test_sampled_rows_are_rows_of_the_whole() -> None:
    rng = np.random.default_rng(18)
    q, k = 2 * normal(rng, 2, 2, 301, 8), normal(rng, 2, 2, 301, 8)
    whole, all_rows = attention_logits(q, k, per_row=True)
    for wanted in (1, 7, 100, 301, 1000):
        logits, rows = attention_logits(q, k, sample_rows=wanted, seed=wanted, per_row=True)
        assert rows.max.shape == (2, 2, min(wanted, 301))
        for value in rows.max.ravel():
            assert np.abs(all_rows.max - value).min() < 1e-5
        assert bool((logits.max <= whole.max + 1e-5).all())
        assert logits.sampled == pytest.approx(min(wanted, 301) / 301)
        assert bool((logits.mean_sum_error[:] == 0).all()) == (wanted >= 301)
        assert bool(np.isnan(logits.mean_sum_error).all()) == (wanted == 1 and logits.rows[0] < 2)


def test_sampled_mean_sum_is_unbiased_and_knows_its_error() -> None:
    rng = np.random.default_rng(19)
    q, k = normal(rng, 1, 2, 403, 8), normal(rng, 1, 2, 403, 8)
    whole = attention_logits(q, k, mask="full")
    calls = [attention_logits(q, k, mask="full", sample_rows=31, seed=seed) for seed in range(400)]
    means = np.array([call.mean_sum for call in calls])
    errors = np.array([call.mean_sum_error for call in calls])
    spread = means.std(axis=0) / math.sqrt(len(calls))
    assert bool((np.abs(means.mean(axis=0) - whole.mean_sum) < 4 * spread + 1e-6).all())
    ratio = means.std(axis=0) / errors.mean(axis=0)
    assert bool(((ratio > 0.6) & (ratio < 1.4)).all()), ratio


def test_sampled_heads_merge_to_all() -> None:
    rng = np.random.default_rng(20)
    q, k = normal(rng, 1, 12, 50, 8), normal(rng, 1, 4, 50, 8)
    whole = attention_logits(q, k)
    seen = np.zeros(12, bool)
    for seed in range(60):
        logits = attention_logits(q, k, sample_heads=5, seed=seed)
        read = logits.rows > 0
        assert np.count_nonzero(read) == 5
        np.testing.assert_allclose(logits.max[read], whole.max[read], rtol=1e-6)
        assert bool((logits.max[~read] == -np.inf).all())
        assert logits.sampled.tolist() == read.astype(float).tolist()
        assert bool(np.isnan(logits.mean_sum[~read]).all())
        seen |= read
    assert bool(seen.all())


# ---- QK-clip ----


def test_qk_clip() -> None:
    clip = qk_clip([50.0, 100.0, 200.0, -3.0, 0.0, -np.inf, np.nan, np.inf])
    assert clip.gamma[:6].tolist() == [1, 1, 0.5, 1, 1, 1]
    assert bool(np.isnan(clip.gamma[6:]).all())
    assert clip.alarm.tolist() == [False] * 6 + [True] * 2
    assert clip.share == pytest.approx(1 / 6)
    assert qk_clip(np.array([[40.0]]), tau=10).gamma.tolist() == [[0.25]]
    assert math.isnan(qk_clip([]).share)
    logits = attention_logits(np.full((2, 3, 1), 10.0), np.full((2, 3, 1), 20.0))
    assert qk_clip(logits).gamma.tolist() == [0.5, 0.5]
    for tau in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="tau must be positive"):
            qk_clip([1.0], tau)
    masked = attention_logits(np.ones((1, 3, 1)), np.ones((1, 3, 1)), point="masked")
    with pytest.raises(ValueError, match="before softcap"):
        qk_clip(masked)


# ---- the same bits, and memory ----


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_give_the_same_bits(threads: int) -> None:
    rng = np.random.default_rng(21)
    q, k = normal(rng, 2, 4, 900, 32), normal(rng, 2, 2, 900, 32)
    for options in (
        {},
        {"k_mask": rng.random((2, 900)) < 0.8, "window": 300},
        {"point": "masked", "softcap": 3.0},
    ):
        one, many = (attention_logits(q, k, per_row=True, threads=n, **options) for n in (1, threads))
        assert one[0].max.tobytes() == many[0].max.tobytes()
        assert one[0].sums.tobytes() == many[0].sums.tobytes()
        assert one[1].sum.tobytes() == many[1].sum.tobytes()


def test_tiers_give_the_same_bits() -> None:
    code = """
import hashlib
import numpy as np
from trainmon.ops import attention_logits, cpu_info
rng = np.random.default_rng(0)
digest = hashlib.sha256()
for factor in (0.1, 1, 30):
    q, k = (factor * rng.standard_normal((2, 3, 700, 16), dtype=np.float32) for _ in range(2))
    for options in ({}, {"mask": "full"}, {"point": "masked", "softcap": 2.0, "sinks": [1.0, 2.0, -1.0]}):
        logits, rows = attention_logits(q, k, per_row=True, **options)
        digest.update(logits.max.tobytes() + logits.sums.tobytes() + rows.sum.tobytes() + rows.max.tobytes())
print(cpu_info()["tier"], digest.hexdigest())
"""
    results = digests(code)
    assert len(set(results.values())) == 1, results


def test_no_memory_grows_with_queries_times_keys() -> None:
    code = """
import numpy as np
from tests.memory import peak
from trainmon.ops import attention_logits

q, k = (np.ones((1, 2, 32768, 4), np.float16) for _ in range(2))
before = peak()
attention_logits(q, k, threads=2)
print(peak() - before)
"""
    grown = int(output(code))  # KiB; all scores of one head are 4 GiB
    assert 512 < grown < 64 * 1024  # a tile at least, or the measure is wrong


# ---- errors ----

GOOD = np.ones((2, 4, 5, 3), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: attention_logits([1.0], GOOD), TypeError, "q must be one array with a shape, not list"),
        (
            lambda: attention_logits(GOOD, GOOD[0, 0]),
            ValueError,
            r"k must be \[..., heads, sequence, depth\]",
        ),
        (lambda: attention_logits(GOOD, GOOD[:1]), ValueError, "must agree in the axes before the heads"),
        (lambda: attention_logits(GOOD, GOOD[..., :2]), ValueError, "and in the last one"),
        (lambda: attention_logits(GOOD, GOOD[:, :3]), ValueError, "4 heads of q can't share 3 heads of k"),
        (lambda: attention_logits(GOOD, GOOD[:, :0]), ValueError, "4 heads of q can't share 0 heads"),
        (lambda: attention_logits(GOOD[..., :0], GOOD[..., :0]), ValueError, "length 1 or more"),
        (lambda: attention_logits(GOOD.astype(int), GOOD), TypeError, "q must be floats, not int64"),
        (lambda: attention_logits(GOOD, GOOD.astype(bool)), TypeError, "k must be floats, not bool"),
        (lambda: attention_logits(GOOD, GOOD.astype(">f4")), TypeError, "k"),
        (lambda: attention_logits(GOOD, GOOD, mask="alibi"), ValueError, "mask must be 'causal' or 'full'"),
        (lambda: attention_logits(GOOD, GOOD, scale=0), ValueError, "scale must be finite and not 0"),
        (lambda: attention_logits(GOOD, GOOD, scale=math.nan), ValueError, "scale must be finite"),
        (lambda: attention_logits(GOOD, GOOD, window=0), ValueError, "window must be at least 1"),
        (
            lambda: attention_logits(GOOD, GOOD, q_mask=np.ones((2, 4), bool)),
            ValueError,
            "q_mask must be bool",
        ),
        (lambda: attention_logits(GOOD, GOOD, k_mask=np.ones((2, 5))), ValueError, "not float64 of shape"),
        (
            lambda: attention_logits(GOOD, GOOD, k_mask=np.array([1, 6])),
            ValueError,
            "lengths must be from 0 to 5",
        ),
        (
            lambda: attention_logits(GOOD, GOOD, documents=np.zeros(4, int)),
            ValueError,
            "documents of queries",
        ),
        (
            lambda: attention_logits(GOOD, GOOD, documents=(np.zeros(5, int), np.zeros(3, int))),
            ValueError,
            "documents of keys",
        ),
        (
            lambda: attention_logits(GOOD, GOOD, documents=np.array([0, 1, 0, 1, 1])),
            ValueError,
            "must stand side by side",
        ),
        (lambda: attention_logits(GOOD, GOOD, point="raw"), ValueError, "point must be"),
        (lambda: attention_logits(GOOD, GOOD, softcap=3.0), ValueError, "belong to point='masked'"),
        (lambda: attention_logits(GOOD, GOOD, point="masked", softcap=-1.0), ValueError, "softcap must be"),
        (lambda: attention_logits(GOOD, GOOD, point="masked", sinks=[1.0]), ValueError, "sinks must have"),
        (lambda: attention_logits(GOOD, GOOD, sample_rows=0), ValueError, "sample_rows must be at least 1"),
        (lambda: attention_logits(GOOD, GOOD, sample_heads=0), ValueError, "sample_heads must be"),
        (lambda: attention_logits(GOOD, GOOD, threads=0), ValueError, "threads must be from 1"),
        (lambda: attention_logit_mean(GOOD, GOOD, mask="x"), ValueError, "mask must be"),
        (lambda: merge_key_splits([]), ValueError, "the same rows"),
        (lambda: AttentionLogits.cat([]), ValueError, "at least one part"),
        (
            lambda: AttentionRows(np.ones(3), np.ones(3)).logits(),
            ValueError,
            r"one shape \[..., heads, rows\]",
        ),
        (
            lambda: attention_logits(GOOD, GOOD).merge(attention_logits(GOOD, GOOD, point="masked")),
            ValueError,
            "at 'masked' don't merge",
        ),
        (
            lambda: attention_logits(GOOD, GOOD).merge(attention_logits(GOOD[:, :2], GOOD[:, :2])),
            ValueError,
            "2 heads don't merge with 4",
        ),
    ],
)
def test_errors(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
