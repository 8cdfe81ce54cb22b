"""Shortened names, and names that select, as msProbe's older monitor has them."""

from __future__ import annotations

import pytest

from trainmon.msprobe.naming import ShortNames, picked, read_targets, row_filter


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("model.decoder.layers.0.mlp.weight", "layers.0.mlp.weight"),
        ("1:module.layers.7.w", "1:layers.7.w"),
        ("language_model.embedding.word.weight", "embedding.word.weight"),
        ("m.final_layernorm.weight", "final_layernorm.weight"),
        ("head.output_layer.weight", "output_layer.weight"),
        ("m.norm.weight", "norm.weight"),
        ("fc.weight", "fc.weight"),
    ],
)
def test_parameters(name: str, short: str) -> None:
    names = ShortNames([], [name])
    assert names.of("param", name, "param_origin") == short
    assert names.of("optimizer", f"{name}.exp_avg", "exp_avg") == f"{short}.exp_avg"


def test_the_kind_of_a_modules_row_is_no_part_of_its_name() -> None:
    names = ShortNames(["", "fc", "m.layers.0.output.dense"], [])
    assert names.of("module", "fc.output.0", "forward") == "fc.output.0"
    assert names.of("module", ".output.0", "forward") == ".output.0"
    assert names.of("module", "m.layers.0.output.dense.grad_input.1", "backward") == (
        "layers.0.output.dense.grad_input.1"
    )
    assert names.of("cc", "all_reduce/rank0/layers.1", "comm") == "all_reduce/rank0/layers.1"


def test_names_that_would_become_the_same_stay_whole() -> None:
    names = ShortNames(
        [], ["encoder.layers.0.w", "decoder.layers.0.w", "decoder.layers.1.w", "norm.b", "m.norm.b"]
    )
    assert names.of("param", "encoder.layers.0.w", "") == "encoder.layers.0.w"
    assert names.of("param", "decoder.layers.0.w", "") == "decoder.layers.0.w"
    assert names.of("param", "decoder.layers.1.w", "") == "layers.1.w"
    assert names.of("param", "m.norm.b", "") == "m.norm.b"


def test_targets_by_name() -> None:
    exact = picked({"fc": {}, "1:l": {}}, exactly=True)
    assert [exact(name) for name in ("fc", "0:fc", "fc1", "1:l", "0:l")] == [True, True, False, True, False]
    starts = picked({"fc": {}}, exactly=False)
    assert [starts(name) for name in ("fc.weight", "2:fc.bias", "m.fc")] == [True, True, False]


def test_what_of_a_module() -> None:
    targets = {"fc": {"input": "tuple[2]:1", "output_grad": "tensor"}, "all": {}}
    wanted = row_filter(targets, {"forward", "backward"})
    assert wanted is not None
    rows = ("fc.input.0", "fc.input.1", "fc.output.0", "0:fc.grad_output.3", "fc.grad_input.1", "all.input.5")
    assert [wanted(name, "forward") for name in rows] == [False, True, False, True, False, True]
    only = row_filter(None, {"backward"})
    assert only is not None and not only("fc.input.0", "forward") and only("fc.grad_input.0", "backward")
    assert row_filter({"fc": {}}, {"forward", "backward"}) is None


def test_what_is_no_target() -> None:
    said: list[str] = []
    given = {"a": {"input": 3}, "b": {"inputs": "tensor"}, "c": None, "d": {"output": "tensor"}}
    assert read_targets(given, "targets", said.append) == {"b": {}, "c": {}, "d": {"output": "tensor"}}
    assert "targets.a" in said[0] and "unknown ['inputs']" in said[1] and len(said) == 2
