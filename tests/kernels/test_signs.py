"""sign_agreement against its twin: every dtype beside every other, any layout, any place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.awkward import DTYPES, FLOATS, LAYOUTS, VALUES, make
from tests.kernels.child import digests
from tests.twins.signs import signs_twin
from trainmon.ops import SignAgreement, sign_agreement

Array = np.ndarray[Any, Any]
CHUNK = 65536


def counts(got: SignAgreement) -> tuple[int, int, int]:
    return got.same, got.opposite, got.n


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_twin(dtype: str, layout: str) -> None:
    a = [make(dtype, layout, values) for values in VALUES]
    b = [make(dtype, layout, values, seed=1) for values in VALUES]
    assert counts(sign_agreement(a, b)) == signs_twin(a, b)
    for x, y in zip(a, b, strict=True):
        assert counts(sign_agreement(x, y)) == signs_twin([x], [y])
        assert counts(sign_agreement(x, y.copy())) == signs_twin([x], [y])


@pytest.mark.parametrize("other", DTYPES)
def test_any_two_dtypes(other: str) -> None:
    for dtype in DTYPES:
        for values in ("ordinary", "bits"):
            a, b = make(dtype, "contiguous", values, n=1500), make(other, "reversed", values, n=1500, seed=3)
            assert counts(sign_agreement(a, b)) == signs_twin([a], [b]), (dtype, other)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pattern_of_a_half_has_its_sign(dtype: str) -> None:
    every = np.arange(65536, dtype=np.uint16).view(DTYPES[dtype])
    for value in (1.0, -1.0):
        other = np.full(65536, value, np.float32)
        assert counts(sign_agreement(every, other)) == signs_twin([every], [other])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_what_has_no_sign_and_what_has_one(dtype: str) -> None:
    tiny = {"float16": 2.0**-24, "bfloat16": 2.0**-133}.get(dtype, 2.0**-149)  # subnormal
    signs = [0.0, -0.0, math.nan, math.inf, -math.inf, tiny, -tiny, 1.0]
    for n in (8, 72, 8 * CHUNK // 2 + 8):  # in a lane, behind the last whole row, over chunks
        column = np.resize(np.array(signs, np.float32).astype(DTYPES[dtype]), n)
        got = sign_agreement(column, np.ones(n, np.int8))
        assert counts(got) == (3 * n // 8, 2 * n // 8, n)
        assert got.share == pytest.approx((1 / 8 + 1) / 2)
        again = sign_agreement(column, column)
        assert counts(again) == (5 * n // 8, 0, n)


def test_check_values() -> None:
    """(mean(sign g * sign m) + 1) / 2 on numbers that one can do by hand; nothing is undefined."""
    got = sign_agreement(
        [np.array([3.0, -2.0]), np.array([[0.0, 5.0]])], [np.array([1.0, 4.0]), np.ones((1, 2))]
    )
    assert (counts(got), got.share) == ((2, 1, 4), 0.625)
    assert sign_agreement(np.ones(5), -np.ones(5)).share == 0.0
    assert sign_agreement(np.ones(5), np.zeros(5)).share == 0.5
    for nothing in (sign_agreement([], []), sign_agreement(np.zeros((0, 3)), np.zeros((0, 3)))):
        assert nothing.n == 0 and math.isnan(nothing.share)


@given(cut=st.integers(0, 300_000), seed=st.integers(0, 99), dtype=st.sampled_from(list(FLOATS)))
@settings(max_examples=30, deadline=None)
def test_pieces_add_up(cut: int, seed: int, dtype: str) -> None:
    a = make(dtype, "contiguous", "bits", n=300_000, seed=seed)
    b = make("float32", "contiguous", "bits", n=300_000, seed=seed + 1)
    whole = sign_agreement(a, b)
    assert sign_agreement(a[:cut], b[:cut]) + sign_agreement(a[cut:], b[cut:]) == whole
    assert sign_agreement(b, a) == whole == sign_agreement(a[::-1], b[::-1])
    with pytest.raises(TypeError):
        whole + 1  # type: ignore[operator]


def test_threads_change_nothing() -> None:
    n = 20 * 2**20 // 4 + 12345
    a, b = (np.resize(make("float32", "contiguous", "ordinary", n=CHUNK + 7, seed=s), n) for s in (0, 1))
    expected = sign_agreement([a, b[:5]], [b, a[:5]])
    assert counts(expected) == signs_twin([a, b[:5]], [b, a[:5]])
    for threads in (2, 3, 8):
        assert sign_agreement([a, b[:5]], [b, a[:5]], threads=threads) == expected


_PROGRAM = """
import hashlib
from tests.awkward import DTYPES, make
from trainmon.ops import cpu_info, sign_agreement

digest = hashlib.sha256()
for dtype in DTYPES:
    for values in ("ordinary", "bits", "zeros"):
        a, b = make(dtype, "contiguous", values, n=70_001), make(dtype, "reversed", values, n=70_001, seed=1)
        digest.update(repr(sign_agreement(a, b)).encode())
print(cpu_info()["tier"], digest.hexdigest())
"""


def test_tiers_give_the_same_counts() -> None:
    results = digests(_PROGRAM)
    assert len(set(results.values())) == 1, results


def test_lists_that_do_not_match() -> None:
    a = np.ones((2, 3))
    with pytest.raises(ValueError, match=r"b has 1 arrays for 2 in a"):
        sign_agreement([a, a], [a])
    with pytest.raises(ValueError, match=r"b\[1\]: has shape \(3, 2\), its partner in a has \(2, 3\)"):
        sign_agreement([a, a], [a, a.T])
    with pytest.raises(TypeError, match=r"b\[1\]: None is not an array"):
        sign_agreement([a, a], [a, None])
    with pytest.raises(ValueError, match="threads must be from 1"):
        sign_agreement(a, a, threads=0)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    gradient, momentum = torch.randn(300, 7, dtype=torch.bfloat16), torch.randn(300, 7)
    got = sign_agreement([gradient], [momentum])
    product = torch.sign(gradient.float()) * torch.sign(momentum)
    assert got.share == pytest.approx((float(product.mean()) + 1) / 2)
