"""The interval of stable_rank against an independent twin of the whole iteration, and intervals of blocks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.child import SANITIZED, output
from tests.kernels.spectra import SPECTRA, iterate, orthonormal, planted
from tests.twins.spectral import covers, krylov_twin, spectral_twin
from trainmon.ops import merge_spectral, stable_rank

Array = np.ndarray[Any, Any]


def pair_for(kind: str, w: Array, rng: np.random.Generator) -> Array | None:
    """Warm vectors: none, random ones, or exact lower singular vectors."""
    if kind == "cold":
        return None
    vectors = orthonormal(w.shape[1], 2, rng).T if kind == "random" else np.linalg.svd(w)[2][1:3]
    return np.ascontiguousarray(vectors, np.float32)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.sampled_from([name for name in SPECTRA if name not in ("flat", "rank 3", "decay")]),
    st.integers(30, 90),
    st.integers(30, 90),
    st.sampled_from([1e-9, 1e-6, 1e-2, 0.3]),
    st.sampled_from(["cold", "random", "wrong"]),
    st.integers(0, 2**32 - 1),
)
def test_property_bounds_are_those_of_the_formula(
    spectrum: str, m: int, n: int, epsilon: float, warm: str, seed: int
) -> None:
    """`high` is Nyström's bound; `low` the largest root of the probabilistic bound, which a grid must not miss."""
    rng = np.random.default_rng(seed)
    w = planted(m, n, spectrum, rng)
    pair = pair_for(warm, w, rng)
    carried = None if pair is None else ((m, pair[None]),)
    result, _ = iterate(w, carried, epsilon, seed)
    below, above = krylov_twin(w, result.passes, epsilon, seed, pair)
    sumsq = float(np.sum(np.square(w)))
    assert result.norm == pytest.approx(math.sqrt(sumsq), rel=1e-13)
    assert sumsq / result.high == pytest.approx(below * (1 - 1e-9), rel=1e-11)
    found = sumsq / result.low / (1 + 1e-9)
    assert found >= above * (1 - 1e-11)
    assert found - below <= 1.03 * (above - below) + 1e-7 * sumsq


def test_vectors_that_carry_nothing_are_a_cold_start() -> None:
    w = np.random.default_rng(0).standard_normal((280, 300), dtype=np.float32)
    nothing = {"step": 3, "carried": [(280, np.zeros((1, 2, 300), np.float32))]}
    assert stable_rank(w, nothing)[0] == stable_rank(w, {"step": 3, "carried": [None]})[0]
    zeros, state = stable_rank(np.zeros_like(w))
    assert zeros[0].stopped_by == "zero"
    assert stable_rank(w, state)[0] == stable_rank(w, {"step": 1, "carried": [None]})[0]


def test_going_back_a_step_gives_the_same_results() -> None:
    """A state that was saved is not changed by later calls, and restores what they gave."""
    rng = np.random.default_rng(1)
    weights = [rng.standard_normal((300, 290), dtype=np.float32) * (1 + 0.01 * step) for step in range(4)]
    state, saved, seen = None, [], []
    for w in weights:
        saved.append(state)
        results, state = stable_rank(w, state)
        seen.append(results)
    for step in (2, 1, 3):
        assert stable_rank(weights[step], saved[step])[0] == seen[step]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("spectrum", ["gap .5", "bulk", "rank 3"])
def test_blocks_cover_the_whole(spectrum: str, axis: int) -> None:
    w = planted(600, 540, spectrum, np.random.default_rng(2)).astype(np.float32)
    twin = spectral_twin(w)
    assert twin is not None
    for parts in (1, 2, 3):
        blocks, _ = stable_rank(np.array_split(w, parts, axis))
        merged = merge_spectral(blocks)
        assert covers(merged, twin)
        assert merged.stopped_by == "blocks"
        assert merged.high / merged.low <= 1.03 * parts
        assert merged.norm == pytest.approx(float(np.linalg.norm(w.astype(np.float64))), rel=1e-12)
        assert merged.sigma <= twin.sigma * (1 + 1e-12)
        assert merged.passes == max(block.passes for block in blocks)
        if parts == 1:
            assert (merged.low, merged.high) == pytest.approx((blocks[0].low, blocks[0].high), rel=1e-14)


def test_blocks_without_values() -> None:
    blocks, _ = stable_rank([np.eye(3), np.zeros((2, 3)), np.eye(3) * 1e200, np.full((1, 3), np.nan)])
    assert merge_spectral(blocks).stopped_by == "nonfinite"
    assert merge_spectral(blocks[1:2]).stopped_by == "zero"
    assert merge_spectral([]).stopped_by == "zero"
    assert math.isnan(merge_spectral([]).high)
    assert merge_spectral(blocks[:2]).high == pytest.approx(3)
    assert merge_spectral(blocks[:3]).norm == pytest.approx(3**0.5 * 1e200)


MEMORY = """
from tests.memory import peak
import numpy as np
from trainmon.ops import stable_rank

w = np.random.default_rng(0).standard_normal((3000, 3000), dtype=np.float32)
before = peak()
passes = stable_rank(w)[0][0].passes
print(passes, (peak() - before) * 1024)
"""


@pytest.mark.skipif(SANITIZED, reason="the sanitizer keeps freed memory")
def test_no_memory_grows_with_the_square() -> None:
    """The basis, 64 bytes a column and pass, once more while it grows, and a few blocks: a quarter of W itself."""
    passes, grown = map(int, output(MEMORY).split())
    assert passes > 8
    assert grown < 3000 * 3000 * 4 / 4
