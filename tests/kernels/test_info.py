"""cpu_info, build_info and the reference read."""

from __future__ import annotations

import numpy as np
import pytest

from tests.awkward import DTYPES, LAYOUTS, make
from trainmon.ops import build_info, cpu_info, multi_norm, plain_read


def test_cpu_info() -> None:
    info = cpu_info()
    assert set(info) == {"tier", "reason", "requested", "available", "compiled", "families"}
    assert info["tier"] in info["available"]
    assert info["available"] == info["compiled"][: len(info["available"])]
    assert info["available"][0] == "baseline"
    assert set(info["families"].values()) == {info["tier"]}
    assert info["reason"]


def test_build_info() -> None:
    info = build_info()
    assert set(info["dtypes"]) >= set(DTYPES)
    assert info["compiler"].split()[0] in ("gcc", "Clang", "Apple", "Ubuntu", "Debian")
    assert info["numpy"]["running"] == np.__version__
    assert info["numpy"]["api_running"] >= info["numpy"]["api_target"]
    assert isinstance(info["switches"], list)


def test_openblas_is_linked_and_computes() -> None:
    blas = build_info()["blas"]
    assert blas["works"] is True
    assert "OpenBLAS" in blas["config"]
    assert blas["core"]
    assert blas["threads"] == 1
    assert blas["threading"] in ("serial", "pthread", "openmp")


def test_every_listed_dtype_can_be_read() -> None:
    for name in build_info()["dtypes"]:
        assert multi_norm((b"", name)) == 0


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int8"])
def test_plain_read_reads_every_byte(dtype: str) -> None:
    for n in (1, 7, 64, 70001):
        array = make(dtype, "contiguous", "zeros", n=n)
        array[...] = 0
        flat = array.view(np.uint8)
        assert plain_read(array) == 0
        for position in {0, flat.size // 2, flat.size - 1}:
            flat[position] = 1
            assert plain_read([array]) != 0
            flat[position] = 0


def test_plain_read_takes_any_layout() -> None:
    for layout in LAYOUTS:
        assert isinstance(plain_read(make("float32", layout, "bits")), int)
