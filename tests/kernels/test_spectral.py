"""stable_rank against NumPy's singular values: both paths, dtypes, layouts, edges, state."""

from __future__ import annotations

import math
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.awkward import DTYPES, LAYOUTS, VALUES, make
from tests.kernels.child import digests
from tests.kernels.spectra import iterate, orthonormal, planted
from tests.twins.spectral import covers, spectral_twin
from trainmon.ops import Spectral, stable_rank

NULL = ("zero", "nonfinite")
FLOATS = [name for name in DTYPES if name.startswith(("float", "bfloat"))]


def one(matrix: Any, **options: Any) -> Spectral:
    (result,), _ = stable_rank(matrix, **options)
    return result


def check(result: Spectral, matrix: Any, slack: float = 1e-12) -> None:
    """Everything that one result promises."""
    twin = spectral_twin(matrix)
    if twin is None:
        values = np.asarray(matrix).astype(np.float64)
        assert result.stopped_by == ("zero" if not np.any(values) else "nonfinite")
        assert all(map(math.isnan, (result.stable_rank, result.low, result.high, result.sigma)))
        return
    assert covers(result, twin, slack), (result, twin)
    assert 1 <= result.low <= result.high == result.stable_rank
    assert result.sigma <= twin.sigma * (1 + slack)
    if result.stopped_by != "kmax":
        assert result.sigma >= twin.sigma * 0.985
        assert result.high <= result.low * 1.0201
    assert result.stopped_by in ("tol", "kmax", "exact")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_twin(dtype: str, layout: str) -> None:
    for values in VALUES:
        array = make(dtype, layout, values)
        with np.errstate(all="ignore"):
            results, _ = stable_rank(array)
            matrices = array if array.ndim == 3 else [array]
            assert len(results) == len(matrices)
            for result, matrix in zip(results, matrices, strict=True):
                check(result, matrix, 1e-10)
                if matrix.ndim and matrix.size:
                    check(iterate(np.asarray(matrix).reshape(len(matrix), -1))[0], matrix, 1e-10)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name not in FLOATS])
def test_integers_are_refused(dtype: str) -> None:
    with pytest.raises(TypeError, match=f"matrix 1: {dtype}.*floating-point"):
        stable_rank([np.ones((2, 2)), make(dtype, "cube", "ordinary")[0]])


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(["float32", "bfloat16", "float64", "float16"]),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_property_both_paths(m: int, n: int, dtype: str, seed: int, transposed: bool) -> None:
    matrix = np.random.default_rng(seed).standard_normal((m, n)).astype(DTYPES[dtype])
    matrix = matrix.T if transposed else matrix
    exact, iterated = one(matrix), iterate(matrix)[0]
    assert exact.stopped_by == "exact"
    check(exact, matrix)
    check(iterated, matrix)


@pytest.mark.parametrize("shape", [(257, 300), (600, 270), (270, 2051)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_iteration_in_every_layout(shape: tuple[int, int], dtype: Any) -> None:
    base = planted(*shape, "gap .9", np.random.default_rng(3)).astype(dtype)
    expected = one(base)
    check(expected, base)
    assert expected.stopped_by == "tol"
    wide = np.zeros((shape[0], 2 * shape[1]), dtype)
    wide[:, ::2] = base
    padded = np.zeros((shape[0], shape[1] + 3), dtype)
    padded[:, 1:-2] = base
    raw = np.empty(base.nbytes + 1, np.uint8)
    shifted = np.ndarray(shape, dtype, raw, 1)
    shifted[...] = base
    for view in (wide[:, ::2], padded[:, 1:-2], shifted, base[::-1][::-1], base.reshape(shape[0], 1, 1, -1)):
        assert one(view) == expected  # the same elements in C order: the same bits
    flipped = one(np.asfortranarray(base))  # as rows of the transpose
    check(flipped, base)
    assert flipped == one(np.ascontiguousarray(base.T))


def test_experts_each_have_a_result() -> None:
    rng = np.random.default_rng(0)
    stack = np.stack([planted(280, 300, kind, rng) for kind in ("flat", "gap .5", "power law")])
    stack = stack.astype(np.float32)
    results, state = stable_rank(stack)
    assert [result.stopped_by for result in results] == ["tol"] * 3
    for result, matrix in zip(results, stack, strict=True):
        check(result, matrix)
    assert stable_rank(list(stack))[0] == results  # draws go by the matrix' number in the list
    again, _ = stable_rank(stack, state)
    for result, matrix in zip(again, stack, strict=True):
        check(result, matrix)
    assert stable_rank(np.zeros((0, 3, 3)))[0] == []
    small, state = stable_rank(np.ones((2, 3, 4)))
    assert [result.stable_rank for result in small] == pytest.approx([1, 1], rel=1e-12)
    assert state["carried"] == [None]


def test_check_value() -> None:
    result = one(np.diag([2.0, 1.0]))
    assert (result.stable_rank, result.low, result.high, result.sigma) == (1.25, 1.25, 1.25, 2.0)
    assert result.stopped_by == "exact"


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_shapes_at_the_edge(dtype: Any) -> None:
    rng = np.random.default_rng(5)
    for n in (1, 2, 7, 1000, 300_000):
        vector = rng.standard_normal(n).astype(dtype)
        for matrix in (vector, vector[None], vector[:, None]):
            assert one(matrix).stable_rank == 1.0
    assert one(np.array(3.0, dtype)).stable_rank == 1.0
    for size in (2, 5, 300):
        orthogonal = orthonormal(size, size, rng).astype(dtype)
        check(one(orthogonal), orthogonal)
        check(iterate(orthogonal)[0], orthogonal)
    rank_one = np.outer(rng.standard_normal(400), rng.standard_normal(500)).astype(np.float32)
    result = one(rank_one)
    check(result, rank_one)
    assert result.stable_rank == pytest.approx(1, abs=1e-4)
    assert result.passes <= 2
    for empty in (np.zeros((0, 5), dtype), np.zeros((5, 0), dtype), np.zeros(0, dtype)):
        assert one(empty).stopped_by == "zero"
    long = rng.standard_normal((16, 100_000)).astype(dtype)
    check(one(long), long)
    check(iterate(long)[0], long)


def test_zero_and_nonfinite() -> None:
    for shape in ((3, 4), (300, 400)):
        for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
            matrix = np.zeros(shape, dtype)
            check(one(matrix), matrix)
            for bad in (np.nan, np.inf, -np.inf):
                for value in (0.0, 1.0, np.inf):
                    matrix[...] = value
                    matrix[shape[0] // 2, shape[1] - 1] = bad
                    result = one(matrix)
                    assert result.stopped_by == "nonfinite"
                    assert math.isnan(result.stable_rank)
                    assert iterate(matrix)[0].stopped_by == "nonfinite"


@pytest.mark.parametrize(
    ("dtype", "exponents"),
    [(np.float32, (-140, -120, -93, -60, 60, 90, 93, 120)), (np.float64, (-1000, -531, -100, 100, 531, 990))],
)
def test_scales(dtype: Any, exponents: tuple[int, ...]) -> None:
    """W * 2^k has sigma * 2^k and the same stable rank, exactly while its products stay normal."""
    base = planted(300, 280, "gap .9", np.random.default_rng(1)).astype(dtype)
    base[np.abs(base) < 2.0**-20] = 0
    result = one(base)
    for k in exponents:
        scaled = np.ldexp(base, k).astype(dtype)
        moved = one(scaled)
        check(moved, scaled)
        if np.array_equal(np.ldexp(scaled.astype(np.float64), -k), base):
            assert moved.stable_rank == pytest.approx(result.stable_rank, rel=1e-6)
            if -60 <= k <= 60:
                assert (moved.stable_rank, moved.low) == (result.stable_rank, result.low)
                assert moved.sigma == math.ldexp(result.sigma, k)
        small = np.ldexp(base[:10, :20], k).astype(dtype)
        check(one(small), small, 1e-10)


def test_state_is_plain_and_bound_to_shapes() -> None:
    rng = np.random.default_rng(2)
    matrices = [
        rng.standard_normal((300, 400), dtype=np.float32),
        np.ones((4, 4)),
        planted(270, 300, "decay", rng),
    ]
    first, state = stable_rank(matrices)
    again, later = stable_rank(matrices, pickle.loads(pickle.dumps(state)))
    assert (state["step"], later["step"]) == (1, 2)
    assert again != first  # fresh draws
    assert stable_rank(matrices, state)[0] == again
    assert sum(result.passes for result in again) < sum(result.passes for result in first)
    changed = [matrices[0][:290], matrices[1], matrices[2]]
    cold, _ = stable_rank(changed, {"step": 1, "carried": [None, None, state["carried"][2]]})
    assert stable_rank(changed, state)[0] == cold
    with pytest.raises(ValueError, match="state is that of another list"):
        stable_rank(matrices[:2], state)
    for bad in (3, {"step": 1}, [None], {"step": 0, "carried": [3]}, {"step": 0, "carried": [(300, None)]}):
        with pytest.raises(TypeError, match="state"):
            stable_rank(matrices[0], bad)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tolerance": 0.0}, "tolerance must be above 0"),
        ({"tolerance": math.nan}, "tolerance must be above 0"),
        ({"epsilon": 0.0}, "epsilon must be above 0"),
        ({"epsilon": 0.6}, "epsilon must be above 0"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seed": 2**64}, "seed must be from 0"),
        ({"threads": 0}, "threads must be from 1"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stable_rank(np.ones((2, 2)), **options)


def test_draws_follow_seed_step_and_number() -> None:
    matrix = np.random.default_rng(0).standard_normal((300, 300), dtype=np.float32)
    results = {iterate(matrix, seed=seed, step=step)[0].low for seed in (0, 1) for step in (0, 1)}
    pair, _ = stable_rank([matrix, matrix])
    assert len(results) == 4
    assert pair[0] != pair[1]
    assert one(matrix, seed=3) == one(matrix, seed=3)


IDENTITY = """
import hashlib
import ml_dtypes, numpy as np
from tests.kernels.spectra import planted
from trainmon.ops import cpu_info, stable_rank

digest = hashlib.sha256()
rng = np.random.default_rng(0)
for shape in ((300, 1000), (1100, 259), (4097, 270)):
    base = planted(*shape, "gap .9", rng)
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        results, state = stable_rank([base.astype(dtype), base.astype(dtype)[:, ::-1]])
        digest.update(repr(results).encode() + state["carried"][0][1].tobytes())
print(cpu_info()["tier"], digest.hexdigest())
"""


def test_tiers_give_the_same_bits() -> None:
    results = digests(IDENTITY)
    assert len(set(results.values())) == 1, results


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_give_the_same_bits(threads: int) -> None:
    rng = np.random.default_rng(4)
    large = rng.standard_normal((2500, 6001), dtype=np.float32)  # worth three workers
    few = [large[:300, :400], large[:500, 600:900].astype(np.float64), large[:4, :4], large]
    for matrices in (large, few, np.stack([large[:300, :300]] * 3)):
        once, state = stable_rank(matrices)
        many, same = stable_rank(matrices, threads=threads)
        assert once == many
        for a, b in zip(state["carried"], same["carried"], strict=True):
            assert (a is None and b is None) or (a[0] == b[0] and a[1].tobytes() == b[1].tobytes())


def test_a_broadcast_matrix_larger_than_memory() -> None:
    """2^33 elements over one row: no copy of the whole is made. Its rank is 1."""
    row = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    result = one(np.broadcast_to(row, (300_000, 300)))
    assert result.stable_rank == pytest.approx(1, abs=1e-4)
    assert result.sigma == pytest.approx(math.sqrt(300_000) * float(np.linalg.norm(row)), rel=1e-4)
