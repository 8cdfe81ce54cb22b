"""Configuration doors: what is read, what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainmon import _config
from trainmon.config import ConfigError, TrainMonitorConfig, load_config


def write(tmp_path: Path, text: str | bytes, name: str = "c.yaml") -> str:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def refused(source: Any, *parts: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    return str(caught.value)


def plain(node: Any) -> Any:
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, tuple):
        return [plain(child) for child in node.value]
    return node.value


def test_defaults_of_a_bare_callback(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, "model: {x: 1}\ncallbacks:\n  - type: Other\n  - type: TrainMonitor\n")
    )
    assert config == TrainMonitorConfig() == load_config()
    assert config.sinks.log is not None and config.sinks.tensorboard is None


def test_inline_beats_file_and_code_beats_both(tmp_path: Path) -> None:
    write(tmp_path, "every: 7\nrun_name: far\ntag_style: megatron\n", "far.yaml")
    path = write(tmp_path, "callbacks: [{type: TrainMonitor, config: far.yaml, every: 5, run_name: near}]")
    config = load_config(path, run_name="code")
    assert (config.every, config.run_name, config.tag_style) == (5, "code", "megatron")


def test_merge_keys_take_the_earlier_source_and_are_no_duplicates() -> None:
    text = b"""a: &a {every: 10, window: {start: 1}}
b: &b {every: 20, level: 2}
x: {<<: [*a, *b]}
y: {every: 5, <<: *a}
z: {<<: *a, every: 5}
"""
    tree = plain(_config.load(text, "f"))
    assert tree["x"]["every"] == 10 and tree["x"]["level"] == 2
    assert tree["y"]["every"] == 5 and tree["z"]["every"] == 5 and tree["z"]["window"] == {"start": 1}


def test_two_literal_keys_of_one_name_are_an_error(tmp_path: Path) -> None:
    refused(write(tmp_path, "every: 1\nevery: 2\n"), "c.yaml:2:1", "every", "line 1")


def test_numbers_that_arrive_as_text(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "run_name: 1e-5\n")).run_name == "1e-5"
    refused(write(tmp_path, "loss:\n  every: 1e1\n"), "c.yaml:2:10", "loss.every", "integer")
    refused({"every": "1e1"}, "every", "integer")
    refused({"every": True}, "every", "integer")


def test_all_problems_at_once_with_place_and_nearest_key(tmp_path: Path) -> None:
    text = "callbacks:\n  - type: TrainMonitor\n    gradiants: true\n    every: soon\n    target: ['[']\n"
    message = refused(
        write(tmp_path, text),
        "3 problems",
        "c.yaml:3:5",
        "did you mean 'gradients'",
        "c.yaml:4:12",
        "c.yaml:5:14",
    )
    assert "Traceback" not in message


@pytest.mark.parametrize("name", TrainMonitorConfig.not_built)
def test_sections_that_come_later_say_so_unless_off(name: str) -> None:
    refused({name: {"every": 1}}, name, "not built yet")
    assert load_config({name: False}) == TrainMonitorConfig()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b"a: \xff\xfe", "UTF-8"),
        (b"a: [1, 2", "c.yaml"),
        (b"a: 1\n---\nb: 2\n", "document"),
        (b"- 1\n", "mapping"),
        (b"callbacks: [{type: TrainMonitor}, {type: TrainMonitor}]", "TrainMonitor"),
        (b"callbacks: [{type: Trainmonitor}]", "TrainMonitor"),
        (b"window: {start: 5, stop: 2}", "stop"),
    ],
)
def test_wrong_files_are_one_clear_error(tmp_path: Path, text: bytes, part: str) -> None:
    refused(write(tmp_path, text), part)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    refused(str(tmp_path / "none.yaml"), "none.yaml")
    refused(str(tmp_path), str(tmp_path))


def test_alias_bomb_and_depth_are_refused(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    refused(write(tmp_path, bomb), "c.yaml")
    refused(write(tmp_path, "[" * 10_000), "c.yaml")
    refused(write(tmp_path, "a: &a [*a]"), "c.yaml")


def test_scalars_resolve_as_in_pyyaml() -> None:
    words = "yes No on OFF true ~ null 12 -3 0x1F 0b101 017 1_000 1.5 -2.5e+3 .inf -.INF .nan 12:30 a '1' \"no\" 1e5"
    for word in words.split():
        ours, theirs = (
            _config.load(f"k: {word}".encode(), "f").value["k"].value,
            yaml.safe_load(f"k: {word}")["k"],
        )
        assert (ours == theirs and type(ours) is type(theirs)) or ours != ours, word


def test_random_damage_never_crashes() -> None:
    import random

    chance = random.Random(7)
    seed = b"a: &x {b: [1, 2.5, 'c'], d: null}\ne: *x\nf: |\n  text\n<<: *x\n"
    for _ in range(3000):
        text = bytearray(seed)
        for _ in range(chance.randint(1, 6)):
            text[chance.randrange(len(text))] = chance.choice(b"{}[]:,&*!|>-'\"\n \t%@`\x00\xffa1")
        try:
            _config.load(bytes(text), "f")
        except ValueError as error:
            assert "f" in str(error)


def test_to_dict_round_trip_and_digest() -> None:
    config = load_config({"target": ["w"], "loss": False, "sinks": {"tensorboard": True}, "every": 3})
    again = load_config(config.to_dict())
    assert again.to_dict() == config.to_dict() and again.digest() == config.digest()
    assert config.digest() != load_config().digest()


def test_the_page_of_all_keys_is_up_to_date() -> None:
    from trainmon.config.page import page

    shown = (Path(__file__).parents[2] / "docs/config.md").read_text()
    assert shown == page() + "\n", "python -m trainmon.config.page > docs/config.md"
