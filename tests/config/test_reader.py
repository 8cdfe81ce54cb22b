"""The YAML reader: values, places, merge keys, limits, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmon import _config


def read(text: str | bytes, **limits: int) -> Any:
    return _config.load(text.encode() if isinstance(text, str) else text, "f.yaml", **limits)


def plain(node: Any) -> Any:
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, tuple):
        return [plain(child) for child in node.value]
    return node.value


def problems(text: str | bytes, **limits: int) -> list[tuple[int, int, str]]:
    with pytest.raises(_config.ParseError) as caught:
        read(text, **limits)
    error = caught.value
    assert error.filename == "f.yaml"
    assert str(error) == "\n".join(f"f.yaml:{line}:{column}: {what}" for line, column, what in error.problems)
    return list(error.problems)


def problem(text: str | bytes, **limits: int) -> tuple[int, int, str]:
    (only,) = problems(text, **limits)
    return only


class TextDates(yaml.SafeLoader):
    """PyYAML with the two differences that are on purpose: dates and `=` stay text."""


for tag in ("timestamp", "value"):
    TextDates.add_constructor(f"tag:yaml.org,2002:{tag}", lambda loader, node: node.value)


@settings(max_examples=400, deadline=None)
@given(st.text("0123456789_+-.:eExXbBoOaAfFiInNtTruUlLsSyYN~", max_size=9))
def test_plain_scalars_are_those_of_pyyaml(text: str) -> None:
    try:
        expected = yaml.load(f"[{text}, 1]", TextDates)[0]
    except yaml.YAMLError:
        return
    except ValueError:
        expected = text  # PyYAML stumbles over 0x_, a number without digit
    if isinstance(expected, dict):
        return  # a flow mapping of one pair: `a: b`
    found = plain(read(f"[{text}, 1]"))[0]
    assert repr(found) == repr(expected)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((word, True) for word in ["yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"]),
        *((word, False) for word in ["no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"]),
        *((word, None) for word in ["~", "null", "Null", "NULL"]),
        ("0x_ff", 255), ("0b1_01", 5), ("-0755", -493), ("1_000", 1000), ("190:20:30", 685230), ("-1:30", -90),
        ("1.5e+3", 1500.0), ("1_0.5", 10.5), (".5", 0.5), ("1:30.5", 90.5), ("-.INF", -math.inf), ("+.inf", math.inf),
        ("1e-5", "1e-5"), ("5e4", "5e4"), ("1e+5", "1e+5"), ("-.5", "-.5"), ("08", "08"), ("0o17", "0o17"),
        ("y", "y"), ("2024-01-02", "2024-01-02"), ("2024-01-02 03:04:05", "2024-01-02 03:04:05"), ("=", "="),
        ("!!str 5", "5"), ("! 5", "5"), ("!!int '5'", 5), ("!!float 5", 5.0), ("!!float 1e-5", 1e-5),
        ("!!bool 'yes'", True), ("!!null ''", None), ("'5'", "5"), ('"\\u00e9\\n"', "é\n"), ("|\n x\n y\n", "x\ny\n"),
    ],
)  # fmt: skip
def test_scalar(text: str, value: object) -> None:
    found = read(text).value
    assert found == value and type(found) is type(value)


def test_not_a_number_is_read() -> None:
    assert math.isnan(read(".NaN").value)


def test_every_value_and_key_knows_its_place_and_text() -> None:
    root = read("a: 1\né: {b: 0x1F,\n  c: ['x', ~]}\n")
    assert (root.line, root.column, root.keys) == (1, 1, {"a": (1, 1), "é": (2, 1)})
    inner = root.value["é"]
    assert (inner.line, inner.column, inner.keys) == (2, 4, {"b": (2, 5), "c": (3, 3)})
    assert inner.value["b"] == (31, "0x1F", True, 2, 8, None)
    assert inner.value["c"].value == (("x", "x", False, 3, 7, None), (None, "~", True, 3, 12, None))


def test_columns_count_characters_and_a_byte_order_mark_none() -> None:
    assert problem("\ufeffé: *x")[:2] == (1, 4)


def test_keys_are_text_as_written() -> None:
    assert list(read("1: a\non: b\n~: c\n'2': d\n").value) == ["1", "on", "~", "2"]
    assert plain(read("a: &k x\n*k : 1\n")) == {"a": "x", "x": 1}


MERGE = """a: &a {every: 10, window: {start: 1}}
b: &b {every: 20, level: 2}
x: {<<: [*a, *b]}
y: {every: 5, <<: *a}
z: {<<: *a, every: 5}
"""


def test_merge_keys() -> None:
    tree = plain(read(MERGE))
    assert tree["x"] == {"every": 10, "window": {"start": 1}, "level": 2}
    assert tree["y"] == tree["z"] == {"every": 5, "window": {"start": 1}}


def test_merged_values_keep_the_place_where_they_are_written() -> None:
    x = read(MERGE).value["x"]
    assert x.keys["level"] == (2, 19) and x.value["level"].line == 2


def test_repeated_merge_keys_and_merges_of_merges() -> None:
    text = MERGE + "v: &v {<<: *a, <<: *b, new: 1}\nw: {<<: *v, every: 1}\n"
    tree = plain(read(text))
    assert tree["v"] == {"every": 10, "window": {"start": 1}, "level": 2, "new": 1}
    assert tree["w"] == {"every": 1, "window": {"start": 1}, "level": 2, "new": 1}


def test_a_quoted_merge_key_is_a_key() -> None:
    assert plain(read("{'<<': 1, !!merge <<: {a: 2}}")) == {"<<": 1, "a": 2}


@pytest.mark.parametrize("text", ["{<<: 5}", "{<<: }", "{<<: [{a: 1}, 2]}"])
def test_only_mappings_can_be_merged(text: str) -> None:
    assert problem(text) == (1, 6, "a mapping or a list of mappings was expected after <<")


def test_duplicate_keys_are_all_told() -> None:
    found = problems("a: 1\nb: {c: 1, c: 2, c: 3}\n'a': 2\n")
    assert [(line, column) for line, column, _ in found] == [(2, 11), (2, 17), (3, 1)]
    assert found[2][2] == "duplicate key 'a' (first in line 1)"


def test_anchors_may_be_used_again_and_anew() -> None:
    assert plain(read("[&a 1, *a, &a [2], *a, *a]")) == [1, 1, [2], [2], [2]]


def test_an_empty_document_is_nothing() -> None:
    for text in ("", "\n", "# only words\n", "---\n", "---\n...\n", "\ufeff"):
        assert read(text).value is None
    assert read("").line == read("").column == 1


@pytest.mark.parametrize(
    ("text", "line", "column", "part"),
    [
        (b"a: 1\nb\0", 2, 2, "NUL"),
        (b"a: \x07", 1, 4, "U+0007"),
        ("a: \x80".encode(), 1, 4, "U+0080"),
        (b"\xc3\xa9: \xc3(", 1, 4, "0xc3 is not UTF-8"),
        (b"a\r\nb\rc\n\xff", 4, 1, "0xff is not UTF-8"),
        (b"\xe0\x80\x80", 1, 1, "not UTF-8"),
        (b"\xed\xa0\x80", 1, 1, "not UTF-8"),
        (b"\xf4\x90\x80\x80", 1, 1, "not UTF-8"),
        (b"a\xe2\x82", 1, 2, "not UTF-8"),
        ("a: 1".encode("utf-16"), 1, 1, "UTF-16"),
        ("a: 1".encode("utf-32"), 1, 1, "UTF-32"),
        ("a: 1".encode("utf-16-le"), 1, 2, "UTF-16"),
        (b"a: [1, 2\n", 2, 1, "expected ',' or ']'"),
        (b"a:\n\tb: 1\n", 2, 1, "tabs"),
        (b"a: b: c\n", 1, 5, "quote"),
        (b"a: 1\n---\nb: 2\n", 2, 1, "one document"),
        (b"a: *b\n", 1, 4, "no anchor &b"),
        (b"a: &x {y: [*x]}\n", 1, 12, "inside its own anchor"),
        (b"? [a]\n: 1\n", 1, 3, "a key is text"),
        (b"? {a: 1}\n: 1\n", 1, 3, "a key is text"),
        (b"a: &x [1]\n*x : 2\n", 2, 1, "a key is text"),
        (b"a: !python/name:os.system x\n", 1, 4, "tag"),
        (b"a: !!binary aGk=\n", 1, 4, "tag"),
        (b"a: !!map [1]\n", 1, 4, "tag"),
        (b"a: !!int x\n", 1, 4, "!!int"),
        (b"a: !!float x1\n", 1, 4, "!!float"),
        (b"a: " + b"9" * 5000, 1, 4, "too long"),
        (b'a: "\\ud800"\n', 1, 7, "Unicode"),
    ],
)
def test_refused(text: bytes, line: int, column: int, part: str) -> None:
    found = problem(text)
    assert found[:2] == (line, column) and part in found[2]


def test_tags_of_collections_that_say_the_obvious_are_fine() -> None:
    assert plain(read("!!map {a: !!seq [1], b: ! [2]}")) == {"a": [1], "b": [2]}


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_depth_ten_thousand_is_refused_where_it_gets_too_deep(opening: str) -> None:
    line, column, what = problem(opening * 10_000)
    assert line == 1 and ("a key is text" if opening == "? " else "nested deeper than 64 levels") in what
    assert column <= 64 * len(opening) + 1


def test_the_depth_limit_is_exact_and_counts_aliases() -> None:
    assert read("[" * 5 + "]" * 5, max_depth=5)
    assert problem("[" * 6 + "]" * 6, max_depth=5)[:2] == (1, 6)
    assert read("[&a [[1]], [[*a]]]", max_depth=5)
    assert "aliases expanded" in problem("[&a [[1]], [[[*a]]]]", max_depth=5)[2]


def test_the_count_limit_is_exact_and_counts_aliases() -> None:
    assert read("[1, 2, 3]", max_nodes=4)
    assert "more than 3 values" in problem("[1, 2, 3]", max_nodes=3)[2]
    assert read("[&a [1, 2], *a, *a]", max_nodes=10)
    assert "expand to more than 9 values" in problem("[&a [1, 2], *a, *a]", max_nodes=9)[2]


def test_the_size_limit_is_exact() -> None:
    assert read("[1, 2]", max_bytes=6)
    assert "at most 5" in problem("[1, 2]", max_bytes=5)[2]


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


def test_an_alias_bomb_is_refused_before_it_expands() -> None:
    line, _, what = problem(bomb(40))
    assert line == 6 and "aliases" in what  # 9^5 values pass the limit of 100,000 in the sixth line


def test_a_bomb_of_merge_keys_is_refused() -> None:
    keys = ", ".join(f"k{i}: 1" for i in range(200))
    text = f"a: &a {{{keys}}}\n" + "".join(f"m{i}: {{<<: *a}}\n" for i in range(1000))
    assert "aliases" in problem(text)[2]


@pytest.mark.parametrize(
    "limits", [{"max_bytes": 0}, {"max_nodes": 0}, {"max_depth": 0}, {"max_depth": 1001}]
)
def test_limits_out_of_range(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="max_depth 1 to 1000"):
        read("a", **limits)


def test_wrong_arguments() -> None:
    for arguments in ((), ("text", "f"), (b"text",), (b"text", b"f"), (b"text", "f", 1)):
        with pytest.raises(TypeError):
            _config.load(*arguments)
