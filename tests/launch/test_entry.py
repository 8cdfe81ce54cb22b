"""Our entry is cut out of a host's file, and all else stays to the byte."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml

from trainmon.config import ConfigError
from trainmon.launch.entry import Entry, find_entry


def find(tmp_path: Path, text: str | bytes, name: str = "c.yaml") -> Entry | None:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return find_entry(str(path))[0]


def rest(tmp_path: Path, text: str | bytes, name: str = "c.yaml") -> str:
    entry = find(tmp_path, text, name)
    assert entry is not None and entry.rest is not None
    return entry.rest.decode()


HEAD = "# a comment\nmodel: {size: 3}   # kept\r\nname: 'é'\n\n"
TAIL = "# of train\ntrain:\n  lr: 1e-4\n"


@pytest.mark.parametrize(
    ("ours", "stays"),
    [
        ("callbacks:\n  - type: TrainMonitor\n", ""),
        ("callbacks: # ours\n- type: TrainMonitor\n  # of every\n  every: 5\n\n", "\n"),
        ("callbacks: [{type: TrainMonitor, every: 5}] # ours\n", ""),
        ("callbacks:\n  - {type: TrainMonitor,\nevery: 5\n}\n", ""),
        ("callbacks:\n  [\n    {type: TrainMonitor}\n  ]\n", ""),
        ("callbacks:\n  -\n    # c\n    type: TrainMonitor\n    run_name: |\n      a\n      # b\n\n# c\n", "\n# c\n"),
        ('"callbacks":\n  - "type": "TrainMonitor"\n    run_name: "a\nb\n"\n', ""),
        ("trainmon:\n  every: 5\n", ""),
        ("trainmon:\n", ""),
        ("callbacks:\n  - type: A\n  - type: TrainMonitor\n    every: 5\n", "callbacks:\n  - type: A\n"),
        ("callbacks:\n  - type: TrainMonitor\n    every: 5\n  # of A\n  - type: A\n",
         "callbacks:\n  # of A\n  - type: A\n"),
        (
            "callbacks:\n- type: A\n  x: |\n    - 1\n- type: TrainMonitor\n- B\n# z\n",
            "callbacks:\n- type: A\n  x: |\n    - 1\n- B\n# z\n",
        ),
        ("callbacks: [a, {type: TrainMonitor, run_name: 'it''s, ]'}, b] # c\n", "callbacks: [a, b] # c\n"),
        ("callbacks: [{type: TrainMonitor}, b] # c\n", "callbacks: [b] # c\n"),
        ("callbacks: [a, type: TrainMonitor] # c\n", "callbacks: [a] # c\n"),
        ("callbacks: [\n  it's,\n  {type: TrainMonitor},\n  b, # c\n]\n", "callbacks: [\n  it's,\n  b, # c\n]\n"),
        ("callbacks: [\n  a, # c\n  {type: TrainMonitor} # d\n]\n", "callbacks: [\n  a\n]\n"),
        ("callbacks:\n  - &a {type: A}\n  - type: TrainMonitor\n  - *a\n", "callbacks:\n  - &a {type: A}\n  - *a\n"),
        ("x: &x {y: 1}\ncallbacks:\n  - type: TrainMonitor\n<<: *x\n", "x: &x {y: 1}\n<<: *x\n"),
    ],
)  # fmt: skip
def test_the_entrys_lines_go_and_nothing_else(tmp_path: Path, ours: str, stays: str) -> None:
    for head, tail in (
        (HEAD, TAIL),
        (HEAD, ""),
        ("", TAIL),
        ("---\n" + HEAD, TAIL + "...\n"),
        ("\ufeff" + HEAD, TAIL),
    ):
        assert rest(tmp_path, head + ours + tail) == head + stays + tail


def test_line_ends_stay_as_they_are(tmp_path: Path) -> None:
    text = "a: 1\r\ncallbacks:\r\n  - type: TrainMonitor\r\n    every: 5\r\nb: 2\r\n"
    assert rest(tmp_path, text) == "a: 1\r\nb: 2\r\n"
    assert rest(tmp_path, "a: 1\rcallbacks:\r  - type: TrainMonitor\rb: 2") == "a: 1\rb: 2"
    assert rest(tmp_path, "a: 1\ncallbacks:\n  - type: TrainMonitor") == "a: 1\n"


def test_a_file_that_was_all_ours_is_an_empty_mapping(tmp_path: Path) -> None:
    assert yaml.safe_load(rest(tmp_path, "# c\ncallbacks:\n  - type: TrainMonitor\n")) == {}
    assert rest(tmp_path, '{"callbacks": [{"type": "TrainMonitor"}]}', "c.json") == "{}"


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_json(tmp_path: Path, indent: int | None, place: int) -> None:
    others = [{"type": "A", "text": '], {"'}, {"type": "B"}]
    callbacks = [*others[:place], {"type": "TrainMonitor", "loss": {"positions": [1, 2]}}, *others[place:]]
    for host in ({"callbacks": callbacks}, {"a": 1, "callbacks": callbacks, "b": [{"c": "é"}]}):
        text = json.dumps(host, indent=indent, ensure_ascii=False)
        assert json.loads(rest(tmp_path, text, "c.json")) == {**host, "callbacks": others}
        host["callbacks"] = callbacks[place : place + 1]
        text = json.dumps(host, indent=indent)
        assert json.loads(rest(tmp_path, text, "c.json")) == {
            k: v for k, v in host.items() if k != "callbacks"
        }


@pytest.mark.parametrize("flow", [None, True, False])
def test_whatever_pyyaml_writes(tmp_path: Path, flow: bool | None) -> None:
    """Random files: what is left reads as before, but for the entry."""
    random.seed(7)
    for _ in range(60):
        host = {random.choice("abcdefgh"): _anything(3) for _ in range(random.randint(0, 3))}
        others = [{"type": random.choice("ABC"), "x": _anything(2)} for _ in range(random.randint(0, 3))]
        ours = {"type": "TrainMonitor", "run_name": _anything(0), "loss": _anything(2)}
        host["callbacks"] = others[:]
        host["callbacks"].insert(random.randint(0, len(others)), ours)
        host |= {random.choice("pqrs"): _anything(2) for _ in range(random.randint(0, 2))}
        dumper = type("Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
        options = {"sort_keys": False, "width": random.choice([20, 200]), "indent": random.choice([2, 4])}
        text = yaml.dump(
            host, Dumper=dumper, default_flow_style=flow, allow_unicode=random.random() < 0.5, **options
        )
        left = {k: v for k, v in {**host, "callbacks": others}.items() if v or k != "callbacks"}
        assert yaml.safe_load(rest(tmp_path, text)) == left, text


def _anything(depth: int) -> object:
    kind = random.randint(0, 5 if depth else 2)
    if kind < 3:
        texts = [
            "",
            "- a",
            "# b\n\n- c: d\n",
            "it's: 'x', \"y\"]",
            "TrainMonitor",
            "é\u2028z",
            "word " * 9,
            "|",
            "a\\",
        ]
        return random.choice([*texts, 1, 1.5, None, True])
    if kind < 5:
        return {random.choice(["k", "l m", "n"]): _anything(depth - 1) for _ in range(random.randint(0, 3))}
    return [_anything(depth - 1) for _ in range(random.randint(0, 3))]


def test_files_without_an_entry_of_ours_are_the_hosts_business(tmp_path: Path) -> None:
    for text in (
        "a: 1\n",
        "a: 1\na: !tag {\n",
        "# TrainMonitor\na: !tag {\n",
        "[1, 2]\n",
        "- type: TrainMonitor\n",
        "# TrainMonitor\na: 1\n",
        "callbacks:\n  - type: Other\n",
        "callbacks: TrainMonitor\n",
        "",
    ):
        assert find(tmp_path, text) is None


def test_a_class_that_the_host_builds_by_itself_stays(tmp_path: Path) -> None:
    entry = find(
        tmp_path, "callbacks:\n  - type: TrainMonitor\n    auto_register: trainmon_mf.TrainMonitor\n"
    )
    assert entry is not None and entry.rest is None and entry.place.line == 2


def test_a_type_that_is_nearly_ours_is_told(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("callbacks:\n  - type: TrainMoniter\n")
    entry, hint = find_entry(str(path))
    assert entry is None and hint.startswith(f"{path}:2:3: ") and "did you mean 'TrainMonitor'" in hint


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a: 1\na: 2\ncallbacks:\n  - type: TrainMonitor\n", 2, "duplicate key 'a'"),
        ("a: !mine x\ncallbacks: [{type: TrainMonitor}]\n", 1, "!mine"),
        ("train:\n  callbacks:\n    - type: TrainMonitor\n", 3, "move it there"),
        ("m: &m {type: TrainMonitor}\ncallbacks:\n  - type: A\n  - *m\n", 1, "can't be cut out"),
        ("callbacks:\n  - type: TrainMonitor\n    run_name: &n x\nname: *n\n", 2, "can't be cut out"),
    ],
)
def test_what_cant_be_done_is_said_with_its_place(tmp_path: Path, text: str, line: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find(tmp_path, text)
    assert any(said in str(one) and one.place.line == line for one in caught.value.problems)
    assert "--monitor" in str(caught.value) or "move it" in str(caught.value)
