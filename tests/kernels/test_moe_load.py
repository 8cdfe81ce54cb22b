"""expert_load and assign_churn against their twins: every integer dtype and layout, ids outside the range."""

from __future__ import annotations

import math
import os
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.awkward import DTYPES, LAYOUTS, VALUES, make
from tests.kernels.child import digests, output
from tests.twins.moe import assign_churn_twin, load_twin
from trainmon.ops import assign_churn, expert_load

INTEGERS = [name for name, dtype in DTYPES.items() if dtype.kind in "iu"]
EXPERTS = (1, 2, 7, 8, 64, 256, 527, 528, 1024, 2063, 2064, 100_000)


def check(arrays: list[Any], experts: int, **options: Any) -> None:
    counts, invalid = expert_load(arrays, experts, **options)
    expected, outside = load_twin(arrays, experts)
    assert counts.dtype == np.int64
    assert counts.tolist() == expected
    assert invalid == outside


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_twin(dtype: str, layout: str) -> None:
    for values in VALUES:
        array = make(dtype, layout, values)
        before = array.copy()
        for experts in (1, 8, 100, 600, 3000):
            check([array], experts)
        assert np.array_equal(array, before)


@pytest.mark.parametrize("experts", EXPERTS)
def test_numbers_of_experts(experts: int) -> None:
    """Each shape of the tables, its first and last number of experts; the last expert and the one behind it."""
    rng = np.random.default_rng(experts)
    ids = rng.integers(-2, experts + 2, 5000)
    check([ids], experts)
    check([np.full(100, experts - 1), np.full(50, experts)], experts)


def test_ids_outside_the_range() -> None:
    """ROCm/aiter#4839, vllm-project/vllm#42034, numpy/numpy#28354"""
    counts, invalid = expert_load(np.array([0, 4, -1, 2, 2]), 4)
    assert (counts.tolist(), invalid) == ([1, 0, 2, 0], 2)
    counts, invalid = expert_load(np.array([0, 1, 2], np.uint64), 4)
    assert (counts.tolist(), invalid) == ([1, 1, 1, 0], 0)
    counts, invalid = expert_load(np.array([2**63], np.uint64), 4)
    assert (counts.tolist(), invalid) == ([0, 0, 0, 0], 1)
    counts, invalid = expert_load(np.array([-6, 5], np.int8), 256)
    assert (np.flatnonzero(counts).tolist(), counts[5], invalid) == ([5], 1, 1)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_extreme_ids(dtype: str) -> None:
    info = np.iinfo(dtype)
    for experts in EXPERTS:
        check([np.array([info.min, info.max, 0, info.max - 1, info.min + 1] * 9, dtype)], experts)


def test_lists_add_up() -> None:
    arrays = [make(dtype, layout, "ordinary") for dtype in INTEGERS for layout in LAYOUTS]
    check(arrays, 50)
    counts, invalid = expert_load(iter(arrays), 50, per_tensor=True)
    assert counts.shape == (len(arrays), 50)
    assert invalid.shape == (len(arrays),)
    for array, row, outside in zip(arrays, counts, invalid, strict=True):
        assert (row.tolist(), outside) == load_twin([array], 50)


@pytest.mark.parametrize("per_tensor", [False, True])
def test_nothing_to_count(per_tensor: bool) -> None:
    for arrays in ([], [np.zeros(0, np.int64)], [np.zeros((3, 0), np.uint8)] * 2):
        counts, invalid = expert_load(arrays, 3, per_tensor=per_tensor)
        assert not counts.any()
        assert not np.any(invalid)
        assert counts.shape == ((len(arrays), 3) if per_tensor else (3,))


def test_layers_of_a_stack() -> None:
    ids = np.random.default_rng(0).integers(0, 16, (5, 40, 2))
    counts, invalid = expert_load(list(ids), 16, per_tensor=True)
    assert counts.tolist() == [np.bincount(layer.ravel(), minlength=16).tolist() for layer in ids]
    assert not invalid.any()


@pytest.mark.parametrize("threads", [2, 3, 4])
@pytest.mark.parametrize("experts", [8, 600, 5000])
def test_threads_and_splits(threads: int, experts: int) -> None:
    ids = np.random.default_rng(1).integers(-1, experts + 1, 9 * 2**20 + 123).astype(np.int64)
    whole = expert_load(ids, experts)
    assert whole[0].tolist() == np.bincount(ids[(ids >= 0) & (ids < experts)], minlength=experts).tolist()
    for arrays in ([ids], [ids[:1000], ids[1000:]], [ids[::2], ids[1::2]], [ids[::-1]]):
        counts, invalid = expert_load(arrays, experts, threads=threads)
        assert counts.tolist() == whole[0].tolist()
        assert invalid == whole[1]
        each, outside = expert_load(arrays, experts, per_tensor=True, threads=threads)
        assert each.sum(axis=0).tolist() == whole[0].tolist()
        assert outside.sum() == whole[1]
        assert each[-1].tolist() == expert_load(arrays[-1], experts)[0].tolist()


DIGEST = """
import hashlib
import numpy as np
from tests.awkward import DTYPES, LAYOUTS, VALUES, make
from trainmon.ops import cpu_info, expert_load, expert_metrics

digest = hashlib.sha256()
rng = np.random.default_rng(0)
for name, dtype in DTYPES.items():
    if dtype.kind not in "iu":
        continue
    arrays = [make(name, layout, values, n=300) for layout in LAYOUTS for values in VALUES]
    for experts in (1, 8, 256, 1024, 3000):
        counts, invalid = expert_load(arrays, experts, per_tensor=True)
        digest.update(counts.tobytes() + invalid.tobytes())
        metrics, state = expert_metrics(counts, 1.25, 1)
        digest.update(metrics.load_entropy.tobytes() + metrics.load_gini.tobytes())
print(cpu_info()["tier"], digest.hexdigest())
"""


def test_tiers_give_the_same_counts() -> None:
    results = digests(DIGEST)
    assert len(set(results.values())) == 1, results


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 40), max_size=200),
    experts=st.integers(1, 40),
    cut=st.integers(0, 200),
)
def test_splits_add_up(ids: list[int], experts: int, cut: int) -> None:
    array = np.array(ids, np.int64)
    counts, invalid = expert_load(array, experts)
    left, right = expert_load(array[:cut], experts), expert_load(array[cut:], experts)
    assert counts.tolist() == (left[0] + right[0]).tolist() == load_twin([array], experts)[0]
    assert invalid == left[1] + right[1] == array.size - counts.sum()


# ---- errors ----


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name not in INTEGERS])
def test_other_dtypes_are_refused(dtype: str) -> None:
    for call in (
        lambda array: expert_load([np.zeros(1, np.int32), array], 4),
        lambda array: assign_churn(array, array, 4),
    ):
        with pytest.raises(TypeError, match=rf"\[[01]\]: expert ids must be integers, not {dtype}: "):
            call(np.zeros(3, DTYPES[dtype]))


@pytest.mark.parametrize("experts", [0, -1, 2**24 + 1, 10**30])
def test_numbers_of_experts_out_of_range(experts: int) -> None:
    with pytest.raises(ValueError, match="num_experts must be from 1 to 16777216"):
        expert_load(np.zeros(1, np.int64), experts)


def test_most_experts() -> None:
    counts, invalid = expert_load(np.array([2**24 - 1, 2**24, 0]), 2**24)
    assert (counts[-1], counts[0], counts.sum(), invalid) == (1, 1, 2, 1)


def test_other_arguments() -> None:
    with pytest.raises(ValueError, match="threads must be from 1 to"):
        expert_load(np.zeros(1, np.int64), 4, threads=0)
    with pytest.raises(TypeError, match="float"):
        expert_load(np.zeros(1, np.int64), 4.5)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"indices\[0\]"):
        expert_load([None], 4)


def test_references_are_given_back() -> None:
    good, bad = np.zeros(5, np.int64), np.zeros(5, np.float32)
    before = [sys.getrefcount(array) for array in (good, bad)]
    for _ in range(10):
        expert_load([good, good[::2]], 4)
        expert_load([good], 4, per_tensor=True)
        assign_churn(good, good, 4)
        for call in (lambda: expert_load([good, bad], 4), lambda: assign_churn(good, bad, 4)):
            with pytest.raises(TypeError):
                call()
        with pytest.raises(ValueError, match="threads"):
            expert_load(good, 4, threads=0)
    assert [sys.getrefcount(array) for array in (good, bad)] == before


# ---- doors, sizes, processes ----


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    ids = torch.tensor([[0, 3], [3, 9]])
    counts, invalid = expert_load(ids, 4)
    assert (counts.tolist(), invalid) == ([1, 0, 0, 2], 1)
    counts, invalid = expert_load(ids.unbind(), 4, per_tensor=True)
    assert (counts.tolist(), invalid.tolist()) == ([[1, 0, 0, 1], [0, 0, 0, 1]], [0, 1])
    assert assign_churn(ids, ids.flip(1), 16) == 0
    with pytest.raises(TypeError, match="expert ids must be integers, not float32"):
        expert_load(torch.zeros(3), 4)


def test_very_many_ids() -> None:
    """More than 2^31 ids in one array, and together so many of one expert that a uint32 would overflow."""
    base = np.zeros(2**26, np.uint8)
    base[-1] = 7
    ids = np.broadcast_to(base, (33, base.size))
    counts, invalid = expert_load([ids, ids], 3)
    assert (counts.tolist(), invalid) == ([66 * (2**26 - 1), 0, 0], 66)


def test_many_threads_at_once() -> None:
    ids = np.random.default_rng(2).integers(0, 64, 200_000)
    expected = np.bincount(ids, minlength=64).tolist()
    results: list[Any] = [None] * 8

    def work(place: int) -> None:
        results[place] = [expert_load(ids, 64)[0].tolist() for _ in range(5)]

    workers = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [[expected] * 5] * 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork() -> None:
    code = """
import os
import numpy as np
from trainmon.ops import expert_load
ids = np.arange(5_000_000) % 8
before = expert_load(ids, 8, threads=2)[0].tolist()
child = os.fork()
same = expert_load(ids, 8, threads=2)[0].tolist() == before
if child == 0:
    os._exit(0 if same else 1)
print(same, os.waitpid(child, 0)[1])
"""
    assert output(code).split() == ["True", "0"]


# ---- assign_churn ----


@settings(max_examples=80, derandomize=True, deadline=None)
@given(data=st.data(), k=st.integers(1, 5), tokens=st.integers(0, 12), experts=st.integers(1, 6))
def test_assign_churn_twin(data: st.DataObject, k: int, tokens: int, experts: int) -> None:
    ids = st.lists(st.integers(-1, experts), min_size=k * tokens, max_size=k * tokens)
    before, after = (np.array(data.draw(ids), np.int16).reshape(tokens, k) for _ in range(2))
    value = assign_churn(before, after, experts)
    assert value == assign_churn_twin(before, after, experts) or (tokens == 0 and math.isnan(value))
    backwards = assign_churn(after, before, experts)
    assert value == backwards or tokens == 0


def test_assign_churn_values() -> None:
    before = np.array([[0, 1], [2, 3], [4, 5], [6, 7]])
    assert assign_churn(before, before[:, ::-1], 8) == 0
    assert assign_churn(before, before + 8, 16) == 1
    assert assign_churn(before, np.array([[1, 9], [2, 3], [5, 4], [0, 1]]), 10) == 1 - 5 / 8
    assert assign_churn(np.array([3, 4]), np.array([3, 9], np.uint8), 10) == 0.5  # one token


def test_assign_churn_over_many_blocks() -> None:
    """More rows than are compared at a time, in two layouts and dtypes; rows longer than a block."""
    rng = np.random.default_rng(3)
    before = rng.integers(0, 64, (3, 5000, 8))
    after = np.where(rng.random(before.shape) < 0.3, rng.integers(0, 64, before.shape), before)
    expected = assign_churn_twin(before, after, 64)
    assert assign_churn(before, np.asfortranarray(after).astype(np.int8), 64) == expected
    long = rng.integers(0, 30_000, (2, 9000))
    assert assign_churn(long, long[:, ::-1], 30_000) == 0
    assert assign_churn(long, long[::-1], 30_000) == assign_churn_twin(long, long[::-1], 30_000)


def test_assign_churn_shapes() -> None:
    ids = np.zeros((4, 2), np.int64)
    with pytest.raises(ValueError, match="same tokens"):
        assign_churn(ids, ids[:3], 4)
    for empty in (np.int64(0), np.zeros((3, 0), np.int64)):
        with pytest.raises(ValueError, match="last axis"):
            assign_churn(empty, empty, 4)
    with pytest.raises(TypeError, match="one array with a shape"):
        assign_churn([[1]], [[1]], 4)
