"""The binder: every type of key, through every door, with every problem at once."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from trainmon.config import ConfigError, bind, key, load_config, section
from trainmon.config.files import read_file
from trainmon.config.tree import Value, from_python


@dataclass(frozen=True, slots=True)
class Inner:
    level: int = key(3, "A level.", minimum=0, maximum=9, aliases=("depth",))
    names: tuple[str, ...] = key((), "Names.")


@dataclass(frozen=True, slots=True)
class Sample:
    threshold: float = key(0.5, "A threshold.", minimum=0)
    factor: float = key(1.0, "A factor.")
    cap: float | None = key(None, "A cap.")
    every: int = key(1, "A cadence.", minimum=1)
    on: bool = key(True, "A switch.")
    run_name: str | None = key(None, "A name.")
    mode: Literal["fast", "slow", False] = key("fast", "A choice.")
    ranks: Literal["all"] | tuple[int, ...] | None = key(None, "Ranks.", minimum=0, single=True)
    target: tuple[re.Pattern[str], ...] | None = key(None, "Patterns.", single=True, nonempty=True)
    inner: Inner | None = section(Inner(), "A section.")
    class_: str = key("x", "A keyword of Python.", name="class")


def from_file(tmp_path: Path, text: str, name: str = "c.yaml") -> Sample:
    path = tmp_path / name
    path.write_text(text)
    return bind(Sample, read_file(path))


def from_dict(data: Any) -> Sample:
    return bind(Sample, from_python(data))


def told(data: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_dict(data)
    return [str(problem) for problem in caught.value.problems]


def told_of_file(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path, text)
    return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]


NUMBERS = {"threshold": "1e-5", "factor": "5e4", "cap": "1e+5"}


def test_numbers_that_arrive_as_text_through_both_doors(tmp_path: Path) -> None:
    from_host = from_dict({**NUMBERS, "run_name": "1e-5"})
    read = from_file(tmp_path, "threshold: 1e-5\nfactor: 5e4\ncap: 1e+5\nrun_name: 1e-5\n")
    quoted = from_file(tmp_path, json.dumps({**NUMBERS, "run_name": "1e-5"}), "c.json")
    assert from_host == read == quoted
    assert (read.threshold, read.factor, read.cap, read.run_name) == (1e-05, 50000.0, 100000.0, "1e-5")
    assert told({"every": "1e1"}) == ["every: expected an integer of at least 1, found the text '1e1'"]
    assert told_of_file(tmp_path, "on: true\nevery: 1e1\n") == [
        "c.yaml:2:8: every: expected an integer of at least 1, found the text '1e1'"
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1.0), ("-.5", -0.5), ("1_0", 10.0), ("+1.", 1.0), ("1.5E3", 1500.0), ("0x10", None), ("", None)]
    + [(word, None) for word in ("nan", "inf", "infinity", "1e", "e5", "1 ", "٣", "_1", "1e5e5", "1,5")],
)
def test_text_for_a_number(text: str, value: float | None) -> None:
    if value is None:
        assert told({"factor": text}) == [f"factor: expected a number, found the text {text!r}"]
    else:
        assert from_dict({"factor": text}).factor == value


@pytest.mark.parametrize("data", [float("nan"), float("inf"), -float("inf"), "1e999"])
def test_a_number_is_finite(data: object) -> None:
    (problem,) = told({"factor": data})
    assert problem.endswith("; it must be finite")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("factor", True, "expected a number, found true"),
        ("threshold", -1, "expected a number of at least 0, found the integer -1"),
        ("factor", 10**400, "expected a number, found an integer too large"),
        ("every", True, "expected an integer of at least 1, found true"),
        ("every", 0, "expected an integer of at least 1, found the integer 0"),
        ("every", 10.0, "expected an integer of at least 1, found the number 10.0"),
        ("every", "10", "expected an integer of at least 1, found the text '10'; write it without quotes"),
        ("every", [1], "expected an integer of at least 1, found a list"),
        pytest.param("every", 10**5000, "expected an integer of at least 1, found an integer too large", id="huge"),
        ("on", 1, "expected true or false, found the integer 1"),
        ("on", "yes", "expected true or false, found the text 'yes'; write it without quotes"),
        ("run_name", True, "expected text, found true; put text in quotes"),
        ("run_name", 1.1, "expected text, found the number 1.1; put text in quotes"),
        ("run_name", " ", "expected text, found an empty one"),
        ("run_name", "a\0b", "expected text without control characters, found 'a\\x00b'"),
        ("run_name", {}, "expected text, found a mapping"),
        ("mode", "Slo", "expected 'fast', 'slow' or False, found the text 'Slo'; did you mean 'slow'?"),
        ("mode", 0, "expected 'fast', 'slow' or False, found the integer 0"),
        ("ranks", "al", "expected 'all', an integer of at least 0 or a list of integers of at least 0, "
                        "found the text 'al'; did you mean 'all'?"),
        ("target", 5, "expected a regular expression or a list of regular expressions, found the integer 5"),
        ("target", [], "the list is empty; remove the key to select everything"),
        ("inner", 5, "expected a mapping, true or false, found the integer 5"),
        ("inner", [], "expected a mapping, true or false, found a list"),
        ("class", object(), "expected text, found a Python object of type object"),
        ("class_", "x", "unknown key; did you mean 'class'?"),
    ],
)  # fmt: skip
def test_wrong_value(name: str, data: object, message: str) -> None:
    if name == "target" and data == 5:
        message = "expected a regular expression, found the integer 5"  # the one that stands for a list
    assert told({name: data}) == [f"{name}: {message}"]


def test_places_inside_lists_and_sections() -> None:
    assert told({"ranks": [0, -1, "x"], "inner": {"names": ["a", 1.5], "level": 10}}) == [
        "ranks[1]: expected an integer of at least 0, found the integer -1",
        "ranks[2]: expected an integer of at least 0, found the text 'x'",
        "inner.names[1]: expected text, found the number 1.5; put text in quotes",
        "inner.level: expected an integer from 0 to 9, found the integer 10",
    ]


def test_a_bad_pattern_is_told_at_its_place(tmp_path: Path) -> None:
    (problem,) = told_of_file(tmp_path, "target:\n  - ok\n  - 'a('\n")
    assert problem.startswith(
        "c.yaml:3:5: target[1]: expected a regular expression, found the text 'a(': missing )"
    )


def test_unknown_keys_name_the_nearest_and_where_a_key_belongs(tmp_path: Path) -> None:
    text = "evry: 1\nlevel: 2\nlevle: 2\nzzz: 1\ninner: {factor: 1, Level: 2}\nON: yes\n3: x\n"
    known = "threshold, factor, cap, every, on, run_name, mode, ranks, target, inner, class"
    assert told_of_file(tmp_path, text) == [
        "c.yaml:1:1: evry: unknown key; did you mean 'every'?",
        "c.yaml:2:1: level: unknown key here; it belongs under inner",
        "c.yaml:3:1: levle: unknown key; did you mean 'level' under inner?",
        f"c.yaml:4:1: zzz: unknown key; known here: {known}",
        "c.yaml:5:9: inner.factor: unknown key here; it belongs at the top level",
        "c.yaml:5:20: inner.Level: unknown key; did you mean 'level'?",
        "c.yaml:6:1: ON: unknown key; did you mean 'on'?",
        f"c.yaml:7:1: 3: unknown key; known here: {known}",
    ]


def test_keys_from_python_must_be_text() -> None:
    (problem,) = told({3: "x"})
    assert problem.startswith("3: expected a key that is text, found the integer 3; known here: threshold,")


def test_sections_on_off_and_default() -> None:
    assert from_dict({"inner": False}).inner is None
    for on in (True, None, {}):
        assert from_dict({"inner": on}).inner == Inner()


def test_null_asks_for_the_default() -> None:
    assert from_dict(dict.fromkeys(("every", "run_name", "class", "ranks", "on", "inner"))) == Sample()


def test_text_keys_take_numbers_as_they_are_written(tmp_path: Path) -> None:
    for text in ("007", "1.10", "20240601", "0x1F", "2024-06-01"):
        assert from_file(tmp_path, f"run_name: {text}\n").run_name == text
    assert from_dict({"run_name": 20240601}).run_name == "20240601"


def test_one_value_for_a_list() -> None:
    assert from_dict({"ranks": 3}).ranks == (3,) and from_dict({"ranks": "all"}).ranks == "all"
    assert from_dict({"target": "w"}).target == from_dict({"target": ["w"]}).target == (re.compile("w"),)


def test_an_alias_is_the_key_and_both_are_one_too_many() -> None:
    assert from_dict({"inner": {"depth": 5}}).inner == Inner(level=5)
    assert told({"inner": {"depth": 5, "level": 5}}) == [
        "inner.depth: means the same as 'level', which is given too; keep one"
    ]
    assert told({"inner": {"depth": "x"}})[0].startswith("inner.depth: expected an integer")


def test_layers_join_key_by_key_and_aliases_meet_their_keys() -> None:
    base = from_python({"every": 2, "inner": {"level": 1, "names": ["a"]}, "ranks": [1, 2]})
    top = from_python({"inner": {"depth": 7}, "ranks": [3], "every": None})
    assert bind(Sample, base, top) == Sample(inner=Inner(7, ("a",)), ranks=(3,))
    assert bind(Sample, base, from_python({"inner": True})).inner == Inner(1, ("a",))
    assert bind(Sample, base, from_python({"inner": False})).inner is None
    assert bind(Sample, from_python({"inner": False}), from_python({"inner": True})).inner == Inner()


def test_numpy_scalars_paths_and_tuples_are_plain_data() -> None:
    found = from_dict(
        {"every": np.int64(5), "factor": np.float32(0.5), "run_name": Path("a"), "ranks": (1, 2)}
    )
    assert found == Sample(every=5, factor=0.5, run_name="a", ranks=(1, 2))
    assert type(found.every) is int and type(found.factor) is float


def test_what_is_no_mapping_is_said() -> None:
    for data, found in ([], "a list"), (None, "nothing"), ("x", "the text 'x'"):
        with pytest.raises(ConfigError, match=f"^expected a mapping, found {found}$"):
            bind(Sample, Value(data) if data is None else from_python(data))


def test_python_data_in_a_circle_is_refused() -> None:
    circle: dict[str, Any] = {}
    circle["inner"] = circle
    with pytest.raises(ConfigError, match="nested deeper than 64 levels"):
        from_dict(circle)


def test_the_error_is_a_value_error_with_sorted_problems(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("window: {strt: 1}\nevry: 2\nloss: {micro: 3}\n")
    with pytest.raises(ValueError) as caught:
        load_config(path)
    error = caught.value
    assert isinstance(error, ConfigError)
    assert [(p.place.line, p.place.column, p.path) for p in error.problems] == [
        (1, 10, "window.strt"),
        (2, 1, "evry"),
        (3, 15, "loss.micro"),
    ]
    assert str(error).startswith(f"3 problems in the configuration:\n  {path}:1:10: window.strt: unknown key")


def test_an_error_can_be_made_anew_of_its_text() -> None:
    """As a host does that adds where it came from."""
    with pytest.raises(ConfigError) as caught:
        load_config({"every": 0, "gradientz": 1})
    again = type(caught.value)(f"in a host: {caught.value}")
    assert str(again) == f"in a host: {caught.value}"
