"""NumPy arrays that are refused, and by which words; what a call leaves as it was."""

from __future__ import annotations

import gc
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.awkward import DTYPES, LAYOUTS, make
from trainmon.ops import multi_norm, plain_read, scan_nonfinite, tensor_stats

REFUSED = {
    "complex64": np.ones(2, np.complex64),
    "object": np.array([1, None]),
    "datetime64": np.array(["2020-01-01"], "datetime64[D]"),
    "timedelta64": np.array([1], "timedelta64[s]"),
    "<U1": np.array(["x"]),
    "S1": np.array([b"x"]),
    "void": np.zeros(2, [("a", "f4")]),
    "int4": np.ones(2, ml_dtypes.int4),
}


@pytest.mark.parametrize("word", REFUSED)
def test_other_dtypes_are_named(word: str) -> None:
    array = REFUSED[word]
    expected = "f4" if word == "void" else word
    with pytest.raises(TypeError, match=rf"^tensors\[1\]: .*{expected}"):
        tensor_stats([np.ones(2), array])


def test_long_double_is_refused_where_it_is_not_float64() -> None:
    array = np.ones(2, np.longdouble)
    if array.itemsize == 8:
        pytest.skip("long double is float64 here")
    with pytest.raises(TypeError, match=r"float|longdouble"):
        multi_norm(array)


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "i4", "i2", "u8", "u4", "u2"])
def test_byte_swapped_arrays_are_refused(dtype: str) -> None:
    array = np.ones(3, np.dtype(dtype).newbyteorder())
    with pytest.raises(TypeError, match="byte order of another machine"):
        multi_norm(array)
    assert multi_norm(array.astype(dtype)) > 0


def test_error_names_position_and_name() -> None:
    for function in (tensor_stats, scan_nonfinite):
        with pytest.raises(TypeError, match=r"tensors\[1\] \('layers.0.w'\): dtype"):
            function([np.ones(1), np.array(["x"])], names=["a", "layers.0.w"])


def test_masked_arrays_are_refused() -> None:
    with pytest.raises(TypeError, match="mask would be ignored"):
        multi_norm(np.ma.masked_greater(np.arange(4.0), 2))


def test_subclasses_are_arrays(tmp_path: Any) -> None:
    file = np.memmap(tmp_path / "x", np.float32, "w+", shape=(2,))
    file[:] = 3, 4
    assert multi_norm(file) == 5
    assert multi_norm(np.array([(1, 3.0), (2, 4.0)], [("i", "i4"), ("x", "f8")]).view(np.recarray).x) == 5


def test_numpy_scalars_are_arrays() -> None:
    assert multi_norm(np.float32(-2.5)) == 2.5
    assert multi_norm([np.int64(3), np.float64(4)]) == 5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_stay_as_they_are(dtype: str, layout: str) -> None:
    array = make(dtype, layout, "bits")
    before, flags = array.tobytes(), str(array.flags)
    tensor_stats(array)
    multi_norm(array)
    scan_nonfinite(array)
    plain_read(array)
    assert array.tobytes() == before
    assert str(array.flags) == flags


def references(objects: list[Any]) -> list[int]:
    gc.collect()
    return [sys.getrefcount(item) for item in objects]


def test_references_on_success() -> None:
    tensors: list[Any] = [make("float32", layout, "ordinary") for layout in LAYOUTS]
    names = [f"tensor {i}" for i in range(len(tensors))]
    objects = [*tensors, *names, tensors, *{id(t.dtype): t.dtype for t in tensors}.values()]
    before = references(objects)
    for _ in range(10):
        tensor_stats(tensors, names)
        multi_norm(tensors, per_tensor=True)
        scan_nonfinite(tensors, names)
        plain_read(tensors)
    assert references(objects) == before


@pytest.mark.parametrize(
    "bad",
    [
        *REFUSED.values(),
        np.ones(2, ">f4"),
        np.ma.ones(3),
        None,
        3.5,
        "text",
        ((1, 2), "bf16"),
        (np.ones(2), "bf17"),
        object(),
    ],
    ids=repr,
)
def test_references_after_every_raise(bad: Any) -> None:
    good = [make("float32", layout, "ordinary") for layout in ("contiguous", "fortran", "reversed")]
    names = [f"name {number}" for number in range(4)]  # of nobody else
    tensors = [*good, bad]
    objects = [*good, bad, *names, tensors]
    before = references(objects)
    for _ in range(10):
        with pytest.raises(TypeError):
            tensor_stats(tensors, names)
        with pytest.raises(TypeError):
            multi_norm(tensors)
        with pytest.raises(ValueError, match="names has"):
            scan_nonfinite(good, names)
        with pytest.raises(ValueError, match="threads"):
            scan_nonfinite(good, threads=0)
    assert references(objects) == before
