"""What of the host's own sections is followed, in the shapes in which they come."""

from __future__ import annotations

import importlib.util
import re
from types import SimpleNamespace
from typing import Any

import pytest

from trainmon.adapters.mindformers.pynative.experts import ExpertCounts, place_of
from trainmon.adapters.mindformers.pynative.lines import expert_lines, number
from trainmon.adapters.mindformers.pynative.settings import Layers, Names, settings_of


def args(**sections: Any) -> Any:
    """As dataclasses of the host: attributes."""

    def attributes(value: Any) -> Any:
        if isinstance(value, dict):
            return SimpleNamespace(**{key: attributes(one) for key, one in value.items()})
        return value

    return attributes(sections)


@pytest.mark.parametrize(
    ("value", "names", "others"),
    [
        (True, ["a", "b.c"], []),
        ("layers.1", ["layers.1.w", "layers.10.w"], ["layers.2.w", "layersx1"]),
        (["q", "", "k."], ["q", "k.w"], ["kw", "v"]),
        (".*", ["w.*"], ["w", "anything"]),
    ],
)
def test_norms_are_asked_for_by_substrings(value: Any, names: list[str], others: list[str]) -> None:
    chosen = Names.of(value, "local_norm")
    assert chosen is not None
    assert [name in chosen for name in names + others] == [True] * len(names) + [False] * len(others)
    # The tables' own selection is by patterns, of the same names.
    target = (
        settings_of(args(monitor={"train_state": {"local_norm": value}})).config["gradients"].get("target")
    )
    for name in names + others:
        selected = target is None or any(re.search(pattern, name) for pattern in target)
        assert selected == (name in names)


@pytest.mark.parametrize("value", [False, "", None, [], [""]])
def test_what_switches_norms_off(value: Any) -> None:
    assert Names.of(value, "local_norm") is None
    assert settings_of(args(monitor={"train_state": {"local_norm": value}})).config == {}


@pytest.mark.parametrize("value", [1, 0.5, {"a": 1}, ["a", 1], ["a", True]])
def test_other_types_are_said(value: Any) -> None:
    with pytest.raises(
        TypeError, match=r"local_norm: expected true, false, a text or a list of texts, found"
    ):
        Names.of(value, "local_norm")
    found = settings_of(args(monitor={"train_state": {"local_norm": value, "device_norm": "w"}}))
    assert len(found.problems) == 1 and found.device_norm == Names(("w",))


@pytest.mark.parametrize("target", [None, 3, [0, 2]])
def test_layers(target: Any) -> None:
    """An integer means so many of the first layers, a list those of these numbers; both leave prediction layers out."""
    records = Layers.of(2, target)
    assert records is not None and records.every == 2
    places = [place_of(f"decoder.layers.{layer}.mlp") for layer in range(4)]
    mtp = [
        place_of("mtp.layers.1.transformer_layer.mlp"),
        place_of("mtp.layers.2.mtp_model_layer.layers.5.mlp"),
    ]
    assert [(place.mtp, place.layer) for place in mtp if place] == [(1, 0), (2, 5)]
    expected = {None: [0, 1, 2, 3], 3: [0, 1, 2]}.get(target if not isinstance(target, list) else 0, [0, 2])
    assert [place.layer for place in places if place and place in records] == expected
    assert all((place in records) == (target is None) for place in mtp if place)
    assert (
        place_of("decoder.layers.1.mlp.router") is None and place_of("model.decoder.layers.7.mlp") is not None
    )


@pytest.mark.parametrize(
    ("every", "target", "error"),
    [
        (True, None, TypeError),
        ("2", None, TypeError),
        (0, None, ValueError),
        (-1, None, ValueError),
        (1, True, TypeError),
        (1, 0, ValueError),
        (1, [0, -1], ValueError),
        (1, [0, True], TypeError),
        (1, "0", TypeError),
    ],
)
def test_wrong_layers(every: Any, target: Any, error: type[Exception]) -> None:
    with pytest.raises(
        error, match=r"monitor.moe_monitor\.(save_tokens_per_expert_interval|target_layers): expected"
    ):
        Layers.of(every, target)
    section = {"save_tokens_per_expert_interval": every, "target_layers": target}
    found = settings_of(args(monitor={"moe_monitor": section}))
    assert found.experts is None and len(found.problems) == 1


def test_records_of_prediction_layers() -> None:
    records = Layers(2)
    counts = [
        ExpertCounts("x", place_of(name), micro, [3.0, 1.0])
        for name in ("mtp.layers.0.transformer_layer.mlp", "decoder.layers.4.mlp")
        for micro in range(2)
    ]
    assert list(expert_lines(7, 13, records, counts)) == [
        '{"iter": 14, "step": 7, "micro_step": 2, "block": "decoder", "layer": 4, "tpe": [[3, 1]]}',
        '{"iter": 14, "step": 7, "micro_step": 2, "block": "mtp", "mtp_idx": 0, "layer": 0, "tpe": [[3, 1]]}',
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.123456, "  0.123456"), (0.0, "  0.000000"), (3.2e-8, "3.200000e-08"), (-4e-9, "-4.000000e-09")],
)
def test_small_norms_are_not_printed_as_zero(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize("there", [True, False])
def test_event_files_of_our_own_where_the_host_has_no_place(
    monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if there and name == "tensorboard" else None
    )
    found = settings_of(args(monitor={"tensorboard": {"tensorboard_dir": "b"}}))
    assert found.config == ({"sinks": {"tensorboard": {}}} if there else {})
    assert len(found.problems) == (not there)
    # With several ranks they come a step late.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    directory = args(monitor={"tensorboard": {"output_dir": "b"}})
    assert settings_of(directory).config == {}
    assert settings_of(directory, ranks=2).config == {"sinks": {"tensorboard": {}}}


def test_the_directory_of_event_files_has_two_names() -> None:
    assert settings_of(args(monitor={"tensorboard": {"output_dir": "a"}})).tensorboard == "a"
    assert settings_of(args(monitor={"tensorboard": {"tensorboard_dir": "b"}})).tensorboard == "b"
    assert settings_of(args(monitor={"tensorboard": {"output_dir": ""}})).tensorboard is None
    assert settings_of(args()).tensorboard is None


def test_logits_that_the_host_makes_the_model_keep() -> None:
    muon = settings_of(args(optimizer={"type": "Muon", "qk_clip_threshold": 30}))
    assert muon.config["attention"] == {"qk_clip": 30.0, "every": 1}
    assert settings_of(args(optimizer={"type": "Muon"})).config["attention"]["qk_clip"] == 100.0
    assert settings_of(args(optimizer={"type": "Muon", "qk_clip_enabled": False})).config == {}
    assert settings_of(args(optimizer={"type": "AdamW"})).config == {}
    listed = settings_of(args(callbacks=[SimpleNamespace(type="MaxLogitsMonitor", step_interval=5)]))
    assert listed.config["attention"] == {"every": 5, "per_head": True}


def test_a_section_that_the_host_uses_nowhere_is_said() -> None:
    usual = {"global_norm_skip_threshold": 100.0, "global_norm_skip_time": 10}
    assert settings_of(args(monitor={"health_checkpoint": usual})).problems == []
    found = settings_of(args(monitor={"health_checkpoint": {**usual, "global_norm_skip_threshold": 5.0}}))
    (problem,) = found.problems
    assert problem.startswith("monitor.health_checkpoint (global_norm_skip_threshold)")
