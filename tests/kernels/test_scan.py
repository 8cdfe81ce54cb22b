"""scan_nonfinite against its twin: the first bad element, by name, index and kind."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from tests.awkward import DTYPES, LAYOUTS, arrays, make
from tests.twins.stats import scan_twin
from trainmon.ops import NonFinite, scan_nonfinite


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_twin(dtype: str, layout: str) -> None:
    tensors = list(arrays(dtype, layout))
    for start in range(len(tensors)):
        found, expected = scan_nonfinite(tensors[start:]), scan_twin(tensors[start:])
        if expected is None:
            assert found is None
        else:
            assert found is not None
            assert (int(found.name), found.index, found.kind) == expected


def test_every_position() -> None:
    for dtype in ("float64", "float32", "float16", "bfloat16", "float8_e5m2"):
        for position in (*range(70), 511, 65535, 65536, 70000):
            array = make(dtype, "contiguous", "zeros", n=70001)
            array[position] = np.float32(-np.inf).astype(DTYPES[dtype])
            array[70000] = np.float32(np.nan).astype(DTYPES[dtype])
            found = scan_nonfinite([np.ones(3), array])
            assert found is not None
            kind = "nan" if position == 70000 else "-inf"
            assert (found.name, found.index, found.kind) == ("1", position, kind)


def test_names() -> None:
    tensors = [np.ones(2), np.array([1, np.inf])]
    assert scan_nonfinite(tensors, names=["a", "b"]) == NonFinite("b", 1, "+inf", math.inf)
    assert scan_nonfinite(iter(tensors), names=(name for name in "ab")) == NonFinite("b", 1, "+inf", math.inf)
    assert scan_nonfinite(tensors[1], names="w") == NonFinite("w", 1, "+inf", math.inf)
    with pytest.raises(ValueError, match="names has 1 entries for 2 tensors"):
        scan_nonfinite(tensors, names=["a"])
    with pytest.raises(TypeError, match=r"names\[1\] must be a str, not int"):
        scan_nonfinite(tensors, names=["a", 1])  # type: ignore[list-item]


def test_result_is_frozen() -> None:
    found = scan_nonfinite(np.array([np.nan]))
    assert found is not None
    assert math.isnan(found.value)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.index = 3  # type: ignore[misc]


def test_finite_and_empty() -> None:
    assert scan_nonfinite([]) is None
    assert scan_nonfinite([np.empty(0), np.arange(5)]) is None
    assert scan_nonfinite(np.array([np.finfo(np.float64).max, -5e-324, -0.0])) is None
