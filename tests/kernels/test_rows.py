"""csv_rows and json_rows against Python's csv and json, number by number and cell by cell."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import threading
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.awkward import DTYPES, LAYOUTS, arrays
from tests.campaign import size
from tests.twins.rows import csv_twin, json_twin, number_text
from trainmon import csv_rows, json_rows

Array = np.ndarray[Any, Any]


def lines(values: Any) -> list[str]:
    return csv_rows({"x": values}).decode().split("\n")[:-1]


# ---- numbers ----


def awkward_doubles(n: int) -> Array:
    """Random bits, few digits, powers of two and of ten with their neighbours, integers, the ends of the range."""
    rng = np.random.default_rng(0)
    powers = np.concatenate([2.0 ** np.arange(-1074, 1024), 10.0 ** np.arange(-323, 309)])
    special = [
        0.0,
        -0.0,
        5e-324,
        sys.float_info.max,
        sys.float_info.min,
        9007199254740993.0,
        1e16,
        1e-4,
        1e23,
        0.1,
    ]
    with np.errstate(all="ignore"):
        values = np.concatenate(
            [
                np.frombuffer(rng.bytes(8 * n), np.float64),
                rng.standard_normal(n // 4) * 10.0 ** rng.integers(-25, 25, n // 4),
                np.round(rng.standard_normal(n // 4), 3),
                rng.integers(-(2**60), 2**60, n // 8).astype(np.float64),
                np.arange(-100.0, 100.0),
                powers,
                np.nextafter(powers, 0),
                np.nextafter(powers, np.inf),
                -powers,
                special,
            ]
        )
    return values[np.isfinite(values)]


@pytest.mark.soak
def test_float64_is_repr() -> None:
    values = awkward_doubles(size(100_000, 20_000_000))
    assert lines(values) == [repr(value) for value in values.tolist()]


@pytest.mark.soak
def test_float32_has_the_digits_of_numpy() -> None:
    rng = np.random.default_rng(1)
    with np.errstate(all="ignore"):
        values = np.concatenate(
            [
                np.frombuffer(rng.bytes(4 * size(100_000, 20_000_000)), np.float32),
                awkward_doubles(8000).astype(np.float32),
                2 ** np.arange(-149, 128, dtype=np.float32),
            ]
        )
    values = values[np.isfinite(values)]
    texts = lines(values)
    assert texts == [number_text(value) for value in values]
    assert np.array_equal(np.array(texts, np.float64).astype(np.float32).view("u4"), values.view("u4"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
def test_every_narrow_float(dtype: str) -> None:
    bits = 8 * DTYPES[dtype].itemsize
    values = np.arange(2**bits, dtype=f"u{bits // 8}").view(DTYPES[dtype])
    with np.errstate(all="ignore"):
        assert lines(values) == [number_text(value) for value in values.astype(np.float32)]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_integers(dtype: str) -> None:
    info = np.iinfo(dtype)
    powers = [10**k + d for k in range(20) for d in (-1, 0, 1)]
    values = [v for v in [info.min, info.max, 0, *powers, *(-p for p in powers)] if info.min <= v <= info.max]
    assert lines(np.array(values, dtype)) == [str(value) for value in values]


def test_words() -> None:
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        values = np.array([math.nan, math.inf, -math.inf, -0.0], dtype)
        assert lines(values) == ["nan", "inf", "-inf", "-0.0"]
        assert (
            json_rows({"x": values}) == b'{"x": "NaN"}\n{"x": "Infinity"}\n{"x": "-Infinity"}\n{"x": -0.0}\n'
        )
    assert lines(np.array([True, False])) == ["True", "False"]
    assert json_rows({"x": np.array([True, False])}) == b'{"x": true}\n{"x": false}\n'


@settings(deadline=None, derandomize=True, max_examples=500)
@given(st.floats(), st.floats(width=32))
def test_property_round_trip(double: float, single: float) -> None:
    for dtype, value in ((np.float64, double), (np.float32, single)):
        (text,) = lines(np.array([value], dtype))
        assert np.array([float(text)], dtype).tobytes() == np.array([value], dtype).tobytes() or math.isnan(
            value
        )


# ---- rows ----

NAMES = [
    "a,b",
    'c"d',
    "e\nf",
    "",
    "layers.0.weight",
    "größe 重み 🎯",
    "tab\t",
    "\x01\x1f\x7f",
    " space ",
    "\\",
    "/",
]


def columns(rows: int, layout: str = "contiguous") -> dict[str, Any]:
    made: dict[str, Any] = {"name": [NAMES[i % len(NAMES)] for i in range(rows)]}
    for dtype in DTYPES:
        values = next(array for i, array in enumerate(arrays(dtype, "contiguous", n=3 * rows + 3)) if i == 5)
        if layout == "contiguous":
            made[dtype] = values[:rows]
        elif layout == "every third":
            made[dtype] = values[: 3 * rows : 3]
        else:
            made[dtype] = values[:rows][::-1]
    return made


def masks(rows: int, names: list[str]) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {name: rng.random(rows) < 0.7 for name in names[::2]}


@pytest.mark.parametrize("layout", ["contiguous", "every third", "reversed"])
@pytest.mark.parametrize("rows", [0, 1, 2, 50, 700])
def test_twin(rows: int, layout: str) -> None:
    table = columns(rows, layout)
    valid = masks(rows, list(table))
    before = [array.tobytes() for array in table.values() if isinstance(array, np.ndarray)]
    for masked in (None, valid):
        assert csv_rows(table, masked, header=True) == csv_twin(table, masked, True)
        assert csv_rows(table, masked) == csv_twin(table, masked, False)
        assert json_rows(table, masked) == json_twin(table, masked)
    assert [array.tobytes() for array in table.values() if isinstance(array, np.ndarray)] == before


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("0-d",)])
def test_layouts(layout: str) -> None:
    """Whatever has one axis is written; anything else is refused."""
    for dtype in ("float64", "int16", "bool"):
        for values in arrays(dtype, layout):
            if values.ndim == 1:
                assert csv_rows({"x": values}) == csv_twin({"x": values}, None, False)
            else:
                with pytest.raises(ValueError, match=r"column 'x'.* one axis"):
                    csv_rows({"x": values})


def test_readers_get_back_what_was_written() -> None:
    table = columns(60)
    text = csv_rows(table, header=True).decode()
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [row["name"] for row in rows] == table["name"]
    assert all(len(row) == len(table) for row in rows)
    assert [float(row["float64"]) for row in rows] == pytest.approx(
        table["float64"].tolist(), rel=0, nan_ok=True
    )
    records = [json.loads(line) for line in json_rows(table).decode().split("\n")[:-1]]
    assert [record["name"] for record in records] == table["name"]
    assert [record["int64"] for record in records] == table["int64"].tolist()
    assert [record["bool"] for record in records] == table["bool"].tolist()


def test_names_that_csv_must_quote() -> None:
    table: dict[str, Any] = {name: np.array([1.5]) for name in NAMES}
    rows = list(csv.reader(io.StringIO(csv_rows(table, header=True).decode(), newline="")))
    assert rows == [NAMES, ["1.5"] * len(NAMES)]
    assert json.loads(json_rows(table)) == dict.fromkeys(NAMES, 1.5)
    carriage = csv_rows({"a\rb": ["c\rd"]}, header=True)
    assert carriage == b'"a\rb"\n"c\rd"\n'  # RFC 4180; Python's writer would leave them bare


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\r", exclude_categories=("Cs",)), max_size=8), max_size=8
    )
)
def test_property_texts(texts: list[str]) -> None:
    named = dict.fromkeys(texts, texts[:1]) or {"": []}
    for table in ({"x": texts}, {"x": texts, "y": np.arange(len(texts))}, named):
        assert csv_rows(table, header=True) == csv_twin(table, None, True)
        assert json_rows(table) == json_twin(table, None)


def test_lone_surrogates_are_escaped() -> None:
    """As the sinks have it: names of files that are not UTF-8 come in as such."""
    assert csv_rows({"x": ["a\udc80,b", "\ud83d"]}) == b'"a\\udc80,b"\n\\ud83d\n'
    assert json.loads(json_rows({"\udcff": ["a\udc80b"]})) == {"\udcff": "a\udc80b"}
    assert csv_rows({"x": ["\ud7ff"]}).decode() == "\ud7ff\n"  # the last code before the surrogates


def test_null() -> None:
    table: dict[str, Any] = {"a": np.array([1.5, 2.5]), "b": ["x", None]}
    assert csv_rows(table, {"a": np.array([False, True])}) == b",x\n2.5,\n"
    assert (
        json_rows(table, {"a": np.array([False, True])}) == b'{"a": null, "b": "x"}\n{"a": 2.5, "b": null}\n'
    )
    assert csv_rows({"b": ["", None]}) == b'""\n""\n'
    assert csv_rows({"": ["a"]}, header=True) == b'""\na\n'
    assert csv_rows({"b": ["x", "y"]}, {"b": np.array([True, False])}) == b'x\n""\n'


def test_nothing() -> None:
    assert csv_rows({}) == b""
    assert json_rows({}) == b""
    assert csv_rows({"a": np.zeros(0), "b": []}, header=True) == b"a,b\n"
    assert json_rows({"a": np.zeros(0), "b": []}) == b""


def test_other_ways_to_pass_columns() -> None:
    expected = b"1,x\n2,y\n"
    numbers, texts = np.array([1, 2]), ["x", "y"]
    for table in (
        [("a", numbers), ("b", texts)],
        (pair for pair in [("a", numbers), ("b", tuple(texts))]),
        {"a": [1, 2], "b": np.array(texts)},
        {"a": (numbers.astype("i1").tobytes(), "i8"), "b": np.array(texts, object)},
        {"a": memoryview(numbers), "b": texts},
    ):
        assert csv_rows(table) == expected
    torch = pytest.importorskip("torch")
    assert csv_rows({"a": torch.tensor([0.1, 2], dtype=torch.bfloat16)}) == b"0.100097656\n2.0\n"


@pytest.mark.parametrize(
    ("table", "valid", "error", "message"),
    [
        ({"a": np.zeros(3), "b": np.zeros(2)}, None, ValueError, "column 'b' has 2 rows, 'a' has 3"),
        ({"a": ["x"], "b": np.zeros(2)}, None, ValueError, "column 'b' has 2 rows, 'a' has 1"),
        ({"a": np.zeros(2), "b": ["x"]}, None, ValueError, "column 'b' has 1 rows, 'a' has 2"),
        ({"a": np.zeros(2)}, {"a": np.ones(3, bool)}, ValueError, "column 'a' has 3 rows"),
        ({"a": np.zeros(2)}, {"a": np.ones(2)}, TypeError, "column 'a': its mask must be bool, not float64"),
        ({"a": np.zeros(2)}, {"b": np.ones(2, bool)}, ValueError, "valid has 'b', which is no column"),
        ({"a": np.zeros((2, 2))}, None, ValueError, r"column 'a': its values must have one axis, not 2"),
        ({"a": np.float64(1)}, None, ValueError, "one axis, not 0"),
        ({"a": np.zeros(2)}, {"a": np.ones((2, 1), bool)}, ValueError, "its mask must have one axis"),
        (
            {"a": np.zeros(2, complex)},
            None,
            TypeError,
            r"columns\[0\] \('a'\): dtype complex128 can't be read",
        ),
        ({"b": ["x", 3]}, None, TypeError, "column 'b': row 1 must be a str or None, not int"),
        ({"a": None}, None, TypeError, r"columns\[0\] \('a'\)"),
        ({3: np.zeros(2)}, None, TypeError, "str"),
    ],
)
def test_errors(table: Mapping[str, Any], valid: Any, error: type[Exception], message: str) -> None:
    held = [value for value in table.values() if isinstance(value, np.ndarray)]
    before = [sys.getrefcount(value) for value in held]
    for write in (csv_rows, json_rows):
        with pytest.raises(error, match=message):
            write(table, valid)
    assert [sys.getrefcount(value) for value in held] == before


def test_long_texts_grow_the_buffer() -> None:
    table = {"x": ["a" * n + '"' * n for n in (0, 1, 5000, 100_000)], "y": np.arange(4)}
    assert csv_rows(table) == csv_twin(table, None, False)
    assert json_rows({"k" * 10_000: table["y"], **table}) == json_twin(
        {"k" * 10_000: table["y"], **table}, None
    )


def test_threads_at_once() -> None:
    """The text is made without the GIL."""
    table = columns(3000)
    expected, results = csv_rows(table), []
    workers = [threading.Thread(target=lambda: results.append(csv_rows(table))) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [expected] * 8
