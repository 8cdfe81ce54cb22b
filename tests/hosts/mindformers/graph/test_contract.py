"""What the trainer's contract says and a CPU can't run: stand-ins that follow it."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest

import trainmon
from tests.hosts.mindformers.graph.fakes import (
    MFPipelineWithLossScaleCell,
    MFTrainOneStepCell,
    Model,
    Trainer,
    fill,
    outputs,
    tensor,
)
from trainmon.adapters.mindformers.graph.callback import GraphMonitor
from trainmon.adapters.mindformers.graph.dumps import DumpReader
from trainmon.adapters.mindformers.graph.facts import Facts
from trainmon.adapters.mindformers.graph.host_config import HostConfig, plain
from trainmon.adapters.mindformers.graph.settings import settings_of

LOCAL = {"gradients": {"local": True, "device": True, "per_parameter": True}}
FIRST, SECOND = "layers.0.weight", "layers.1.weight"


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    """Context mode 0."""
    before = mindspore.get_context("mode")
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    yield
    mindspore.set_context(mode=before)


def parallel(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """MindSpore's parallel context, which a CPU can't be set to."""
    real = mindspore.get_auto_parallel_context
    monkeypatch.setattr(mindspore, "get_auto_parallel_context", lambda key: values.get(key, real(key)))


# -- what a step returns ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 4, 5, 7])
def test_outputs_of_every_size(size: int, tmp_path: Path) -> None:
    host = Trainer(tmp_path, cell=MFTrainOneStepCell(Model(), local_norm=size == 7))
    seven = outputs()
    host.run(host.build(**LOCAL), [seven[0] if size == 1 else seven[:size]])
    (record,) = host.steps()
    assert record["loss/global"] == 2.0
    assert record.get("optim/loss_scale") == (8.0 if size >= 3 else None)
    assert record["optim/lr"] == (0.25 if size >= 4 else None)
    if size == 7:
        assert record["grad/norm"] == np.sqrt(13.0) and record["grad/norm_device"] == np.sqrt(13.0)
        assert {row["name"]: float(row["grad/norm_local"]) for row in host.rows("gradients")} == {
            FIRST: 2.0,  # the root of the square that came back (G-5), in a stand-alone run (G-15)
            SECOND: 3.0,
        }
    else:
        assert record["grad/norm"] == (1.5 if size == 5 else None)


def test_without_clipping_there_is_no_norm_and_no_error(tmp_path: Path) -> None:
    """G-11: the host compares None with its threshold."""
    host = Trainer(tmp_path, {"monitor_config": {"monitor_on": True, "check_for_global_norm": True}})
    host.run(host.build(), [outputs(norm=None, squares=(1.0, 4.0))])
    assert host.steps()[0]["grad/norm"] == np.sqrt(5.0)
    other = Trainer(tmp_path / "b", host.config, MFTrainOneStepCell(Model(), local_norm=False))
    other.run(other.build(), [outputs(norm=None)[:5]])
    assert other.steps()[0]["grad/norm"] is None


def test_an_unavailable_scale_is_null(tmp_path: Path) -> None:
    """G-24: the host hands the word to its event files."""
    host = Trainer(tmp_path)
    host.run(host.build(), [(tensor(2.0), False, "unavailable")])
    assert host.steps()[0].get("optim/loss_scale") is None


@pytest.mark.parametrize(
    ("host", "stages", "divisor"),
    [
        ({}, 1, 1),
        ({"parallel_config": {"micro_batch_num": 4}}, 1, 1),
        ({"parallel_config": {"micro_batch_num": 4}}, 2, 4),
        ({"micro_batch_interleave_num": 2}, 1, 2),
        ({"runner_config": {"gradient_accumulation_steps": 3}, "micro_batch_interleave_num": 2}, 1, 6),
        ({"parallel_config": {"micro_batch_num": 4}, "calculate_per_token_loss": True}, 2, 1),
        (
            {"runner_config": {"gradient_accumulation_steps": 3}, "parallel_config": {"micro_batch_num": 4}},
            2,
            12,
        ),
    ],
)
def test_the_loss_is_divided_as_the_trainer_does(
    host: dict[str, Any], stages: int, divisor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel(monkeypatch, pipeline_stages=stages)
    assert Facts.of(HostConfig(host)).divisor == divisor


def test_a_stage_without_the_loss_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel(monkeypatch, pipeline_stages=2, pipeline_scheduler="1f1b")
    facts = Facts.of(HostConfig({"parallel_config": {"micro_batch_num": 4}}))
    assert [facts.has_loss(rank, 4) for rank in range(4)] == [False, False, True, True]
    parallel(monkeypatch, pipeline_stages=2, pipeline_scheduler="zero_bubble_v")
    facts = Facts.of(HostConfig({}))
    assert [facts.has_loss(rank, 4) for rank in range(4)] == [True, False, False, False]


def test_squares_of_the_pipelines_cell_are_of_placeholders(tmp_path: Path) -> None:
    host = Trainer(tmp_path, cell=MFPipelineWithLossScaleCell(Model()))
    host.run(host.build(**LOCAL), [outputs()])
    assert host.steps()[0]["grad/norm"] == 1.5 and host.steps()[0]["grad/norm_device"] is None
    assert "pipeline_squares" in {event["kind"] for event in host.events()}


# -- separate losses ----------------------------------------------------------------------------------------------------


class MFLossMonitor:
    """Sets what the graph has added up back, as the host's own does."""

    def __init__(self, register: Any, clears: bool) -> None:
        self._register, self._clears = register, clears

    def on_train_step_end(self, _context: Any) -> None:
        for target in self._register.values() if self._clears else ():
            fill(target, [0.0])


@pytest.mark.parametrize("cleared", [True, False])
@pytest.mark.parametrize("coefficient", [0.01, 0])
def test_separate_losses_are_the_steps_own(
    cleared: bool, coefficient: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before the host sets them back, told apart where it doesn't; without a coefficient there is no part (G-13)."""
    from mindformers.utils.parameter_register import parameter_register

    names = {"lm_loss": "lm", "aux_loss": "aux", "mtp_loss": "mtp", "indexer_loss": "indexer"}
    monkeypatch.setattr(parameter_register, "_params", {})
    for name in names:
        parameter_register.register(name, tensor([0.0]))
    host = Trainer(
        tmp_path,
        {
            "model": {"model_config": {"moe_aux_loss_coeff": coefficient}},
            "runner_config": {"gradient_accumulation_steps": 2},
        },
        before=[MFLossMonitor(parameter_register, cleared)],
    )

    def work(index: int) -> None:
        for number, name in enumerate(names):
            target = parameter_register.get(name)
            bad = name == "aux_loss" and coefficient == 0
            fill(target, target.asnumpy() + (np.nan if bad else (number + 1) * (index + 1)))

    host.run(host.build(), [outputs()] * 3, work)
    for index, record in enumerate(
        host.steps()[1:], 1
    ):  # a part has its place from the report after its first
        for number, part in enumerate(names.values()):
            if part == "aux" and coefficient == 0:
                assert "loss/part/aux" not in record
            else:
                assert record[f"loss/part/{part}"] == (number + 1) * (index + 1) / 2
    assert "on_train_step_end" not in vars(host.before[0])  # nothing stays wrapped


# -- files that the graph leaves ----------------------------------------------------------------------------------------


def dump(folder: Path, name: str, number: int, value: Any = 0.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"{name}_{number}.npy", np.array(value, np.float32))


def test_dumped_files_belong_to_the_step_between_two_ends(tmp_path: Path) -> None:
    dump(tmp_path, "local_norm__a.weight_float32", 1, 3.0)
    dump(tmp_path, "local_norm__b_float16_int_float32", 2, 4.0)
    dump(tmp_path, "device_local_norm_float32", 3, 5.0)
    dump(tmp_path, "local_loss__lm_float32", 4, 1.0)
    dump(tmp_path, "local_loss__lm_float32", 5, 2.0)
    dump(tmp_path, "finish_step_float32", 6)
    dump(tmp_path, "local_norm__a.weight_float32", 7, 6.0)
    reader = DumpReader(tmp_path)
    (first,) = reader.steps()
    assert first.local_norms == {"a.weight": 3.0, "b_float16_int": 4.0}
    assert first.device_norm == 5.0 and first.local_losses == {"lm": [1.0, 2.0]}
    assert reader.steps() == [] and len(list(tmp_path.iterdir())) == 7
    dump(tmp_path, "finish_step_float32", 10)
    dump(tmp_path, "local_norm__a.weight_float32", 11, 8.0)
    dump(tmp_path, "finish_step_float32", 12)
    assert [step.local_norms["a.weight"] for step in reader.steps()] == [6.0, 8.0]
    taker = DumpReader(tmp_path, take=True)
    assert len(taker.steps()) == 3 and list(tmp_path.iterdir()) == []
    assert DumpReader(tmp_path / "none").steps() == []


class TrainingStateMonitor:
    """Empties the folder, as the host's own does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_step_end(self, _context: Any) -> None:
        for path in self._folder.iterdir():
            path.unlink()


def test_dumped_norms_are_seen_before_the_host_takes_them_away(tmp_path: Path) -> None:
    folder = tmp_path / "dump/rank_0"
    section = {"monitor_on": True, "dump_path": str(tmp_path / "dump"), "local_norm_format": "log"}
    section["device_local_norm_format"] = "log"
    folder.mkdir(parents=True)
    host = Trainer(
        tmp_path / "runs",
        {"monitor_config": section},
        MFTrainOneStepCell(Model(), local_norm=False),
        [TrainingStateMonitor(folder)],
    )

    def work(index: int) -> None:
        start = 10 * index
        dump(folder, f"local_norm__{FIRST}_float32", start + 1, 3.0 + index)
        dump(folder, f"local_norm__{SECOND}_float32", start + 2, 4.0)
        dump(folder, "local_loss__lm_float32", start + 3, 1.5)
        dump(folder, "local_loss__lm_float32", start + 4, 2.5)
        dump(folder, "finish_step_float32", start + 5)

    host.run(host.build(), [outputs()[:5]] * 2, work)
    assert [record["grad/norm_device"] for record in host.steps()] == [5.0, np.sqrt(32.0)]
    assert [float(row["grad/norm_local"]) for row in host.rows("gradients")] == [3.0, 4.0, 4.0, 4.0]
    assert host.steps()[1]["loss/part/local_lm"] == 2.0


# -- the model's inside -------------------------------------------------------------------------------------------------


def test_largest_logits(tmp_path: Path) -> None:
    """G-4: the host's running maximum begins at zero, and its list leaves out a layer whose sum is not positive."""

    class MaxLogitsMonitor:  # before an object that was given in code
        def on_train_step_end(self, _context: Any) -> None:
            for layer in range(2):
                fill(model.logits(layer), [0.0, 0.0])

    host = Trainer(tmp_path, before=[MaxLogitsMonitor()])
    model = host.cell.network

    def work(index: int) -> None:
        fill(model.logits(0), [3.0 + index, 0.0])  # the second head had none above zero: unknown
        fill(model.logits(1), [0.0, 0.0])

    host.run(host.build(attention={"every": 1, "per_head": True}), [outputs()] * 2, work)
    record = host.steps()[1]
    layer = "decoder.layers.{}.self_attention.core_attention.max_logits_val"
    assert record["attention/max_logit"] == 4.0
    assert record[f"attention/max_logit/{layer.format(0)}"] == 4.0
    assert record.get(f"attention/max_logit/{layer.format(1)}") is None
    assert record.get("attention/mean_sum") is None
    assert "attention_sums" in {event["kind"] for event in host.events()}


@pytest.mark.parametrize("zeroed", [True, False])
def test_load_of_experts(zeroed: bool, tmp_path: Path) -> None:
    """Seen before the host's callback zeroes it, and as a difference where nobody does."""

    class TopkBiasBalanceCallback:
        def on_train_step_end(self, _context: Any) -> None:
            for layer in host.cell.network.decoder.layers if zeroed else ():
                fill(layer.mlp.router.expert_load, np.zeros(4))

    host = Trainer(tmp_path, before=[TopkBiasBalanceCallback()])
    layers = host.cell.network.decoder.layers

    def work(index: int) -> None:
        for number, layer in enumerate(layers):
            load = layer.mlp.router.expert_load
            fill(load, load.asnumpy() + np.array([4.0 + index, 2.0, 2.0, 0.0]) * (number + 1))
            fill(layer.mlp.router.expert_bias, [0.25, 0.0, 0.0, -0.25])

    host.run(host.build(moe={"per_expert": True, "capacity_factor": 1.0}), [outputs()] * 3, work)
    for index, record in enumerate(host.steps()):
        total = 8.0 + index
        np.testing.assert_allclose(
            record["moe/max_vio/decoder.layers.0.mlp"], (4.0 + index) / (total / 4) - 1, rtol=1e-6
        )
        over = (4.0 + index) / total - 0.25
        np.testing.assert_allclose(
            record["moe/drop_forecast_mf/decoder.layers.1.mlp"], max(over, 0) + 0.0, rtol=1e-6
        )
        assert record["moe/bias_span/decoder.layers.0.mlp"] == 0.5
    loads = [float(row["moe/load"]) for row in host.rows("moe") if row["name"] == "decoder.layers.1.mlp/1"]
    assert loads == [4.0] * 3


def test_experts_that_move(tmp_path: Path) -> None:
    host = Trainer(tmp_path, {"parallel_config": {"expert_parallel": 2}, "moe_config": {"expert_num": 4}})
    layers = host.cell.network.decoder.layers

    def work(index: int) -> None:
        for layer in layers:
            fill(layer.mlp.router.expert_load, [1.0, 1.0, 1.0, 1.0])
        if index == 2:
            fill(layers[0].mlp.expert_mapping, [0, 2, 1, 3])  # two experts have changed places

    host.run(host.build(moe={"placement": True}), [outputs()] * 3, work)
    moved = [record.get("moe/migration/decoder.layers.0.mlp") for record in host.steps()]
    assert moved[1] == 0 and moved[2] is not None and moved[2] > 0
    assert host.steps()[2]["moe/migration/decoder.layers.1.mlp"] == 0


# -- steps --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [40, None])
def test_a_sink_of_steps(size: int | None, tmp_path: Path) -> None:
    """G-19: the host needs the size of its data there."""
    host = Trainer(tmp_path, {"data_size": size})
    host.params["dataset_sink_mode"] = True
    host.begin(callback := host.build(**LOCAL))
    for loss in (2.0, 1.0):
        host.step(outputs(loss), stride=10)
    host.end()
    assert [(record["step"], record["loss/global"]) for record in host.steps()] == [(10, 2.0), (20, 1.0)]
    assert callback.monitor.step == 20


def test_a_step_that_fails_is_done_again(tmp_path: Path) -> None:
    """Recovery: no end of the step, then an earlier one; nothing counts as a sink of several."""
    host = Trainer(tmp_path)
    host.begin(host.build(weights={"every": 2}))
    host.step(outputs(5.0))
    host.step(outputs(4.0))
    host.step(outputs(9.0), fails=True)
    host.params["cur_step_num"] = 1
    for loss in (4.5, 3.0):
        host.step(outputs(loss))
    host.end()
    assert [(record["step"], record["loss/global"]) for record in host.steps()][-2:] == [(2, 4.5), (3, 3.0)]
    assert "sink_mode" not in {event["kind"] for event in host.events()}


def test_where_a_run_goes_on(tmp_path: Path) -> None:
    """The host's own count, and the one that recovery puts in its place."""
    host = Trainer(tmp_path, {"runner_config": {"initial_epoch": 1, "initial_step": 13}})
    host.params["cur_epoch_num"] = 2
    host.begin(host.build())
    host.step(outputs())
    host.params["initial_step"], host.params["cur_step_num"] = 3, 0
    host.step(outputs())
    host.end()
    assert [record["step"] for record in host.steps()] == [14, 4]


@pytest.mark.parametrize("rule", [False, True])
def test_an_exception_of_another_callback_leaves_the_step(rule: bool, tmp_path: Path) -> None:
    """Only ``__exit__`` is called; the step had come to its end before the host's own monitor raised."""

    class TrainingStateMonitor:
        def on_train_step_end(self, _context: Any) -> None:
            raise ValueError("There is nan in loss, terminate training.")

    host = Trainer(tmp_path, {"check_for_nan_in_loss_and_grad": rule}, before=[TrainingStateMonitor()])
    host.begin(callback := host.build())
    with pytest.raises(ValueError, match="terminate") as info:
        host.step(outputs(float("nan")))
    callback.__exit__(info.type, info.value, info.tb)
    assert np.isnan(host.steps()[0]["loss/global"])
    life = json.loads((tmp_path / "r/run.json").read_text())["lives"][-1]
    assert life["status"] == ("stopped" if rule else "failed") and life["last_step"] == 1
    assert any(event["kind"].startswith("nonfinite") for event in host.events())


def test_of_two_the_last_one_watches(tmp_path: Path) -> None:
    host = Trainer(tmp_path)
    first, last = host.build(run_name="a"), host.build()
    host.begin(first, last)
    host.step(outputs())
    host.end()
    assert len(host.steps()) == 1 and not (tmp_path / "a").exists()


def test_print_struct(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """G-18: names before anything is compiled, with shapes; the run ends after the step that the host makes anyway."""
    host = Trainer(tmp_path, {"monitor_config": {"monitor_on": True, "print_struct": True}})
    host.begin(host.build())
    told = capsys.readouterr().out
    assert f"{FIRST}  (4, 3)  Float32" in told and not host.stops
    host.step(outputs())
    assert host.stops
    host.end()


# -- the host's keys ----------------------------------------------------------------------------------------------------


def followed(**section: Any) -> Any:
    return settings_of(HostConfig({"monitor_config": {"monitor_on": True, **section}}))


def test_keys_of_monitor_config() -> None:
    found = followed(
        step_interval=3,
        target=["attention"],
        invert=True,
        local_norm_format="log",
        device_local_norm_format=["log", "tensorboard"],
        optimizer_state_format="tensorboard",
        weight_state_format=["log"],
        max_attention_logit_format="log",
        throughput_baseline=2.5,
    )
    assert found.problems == [] and found.throughput_baseline == 2.5
    choice = {"target": ["attention"], "invert": True}
    assert found.config == {
        "gradients": {"local": True, "device": True, "every": 3, **choice},
        "moments": {"per_parameter": True, "every": 3, **choice},
        "weights": {"norm": True, "every": 3},
        "attention": {"per_head": True, "every": 3},
    }
    assert found.formats["local_norm"] == {"log"}  # a text is one place, not its letters
    assert found.shown("mlp.weight") and not found.shown("attention.wq")
    trainmon.load_config(None, found.config)


def test_off_is_off_and_nothing_is_written_into_the_section() -> None:
    tree: dict[str, Any] = {"monitor_config": {"monitor_on": False, "local_norm_format": "log"}}
    found = settings_of(HostConfig(tree))
    assert found.config == {} and found.formats == {} and found.taken == []
    before = json.dumps(tree)
    settings_of(HostConfig(tree), {"local_norm_format": "log"})
    assert json.dumps(tree) == before  # G-17: nothing of the host's is changed


def test_a_part_of_stable_rank_config_has_the_defaults_of_the_rest() -> None:
    """G-1, G-2: the mode of the experts is a text, a format in one word is one place, the target holds."""
    found = followed(stable_rank_config={"format": "log", "target": ["experts"]})
    assert found.problems == [] and found.show_mode == "all" and found.stable_rank_interval == 100
    assert found.formats["stable_rank"] == {"log"}
    spectral = found.config["spectral"]
    assert spectral["every"] == 100 and spectral["target"] == ["experts"] and spectral["eigenvalue"] is True
    assert followed(stable_rank_config={"step_interval": 5}).config == {}  # no format: off


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"step_interval": 0}, "step_interval"),
        ({"step_interval": True}, "step_interval"),
        ({"target": "attention"}, "target"),
        ({"target": ["("]}, "target"),
        ({"invert": 1}, "invert"),
        ({"local_norm_format": "file"}, "local_norm_format"),
        ({"weight_state_format": 3}, "weight_state_format"),
        ({"throughput_baseline": -1}, "throughput_baseline"),
        ({"stable_rank_config": {"format": "log", "step_interval": -1}}, "stable_rank_config.step_interval"),
        ({"stable_rank_config": {"format": "logs"}}, "stable_rank_config.format"),
        ({"stable_rank_config": {"format": "log", "power_iteration_num": 1.5}}, "power_iteration_num"),
        ({"stable_rank_config": {"format": "log", "moe_show_mode": "some"}}, "moe_show_mode"),
        ({"check_for_global_norm": True, "global_norm_spike_threshold": "3"}, "global_norm_spike_threshold"),
    ],
)
def test_wrong_keys_of_monitor_config_are_errors(section: dict[str, Any], key: str, tmp_path: Path) -> None:
    host = Trainer(tmp_path, {"monitor_config": {"monitor_on": True, **section}})
    with pytest.raises(trainmon.ConfigError, match=key):
        host.build()


def test_an_error_can_be_made_anew_of_its_text() -> None:
    """The host raises ``type(error)("Class: text")``."""
    with pytest.raises(trainmon.ConfigError, match="TrainMonitor: x") as info:
        raise trainmon.ConfigError("TrainMonitor: x")
    assert type(info.value)(f"again: {info.value}").problems
    assert "why" in str(trainmon.TrainingStopped("why"))


def test_nested_keys_of_the_host_are_plain() -> None:
    from mindformers import MindFormerConfig

    nested = MindFormerConfig(gradients={"every": 2}, sinks={"log": False}, target=["a"])
    found = plain(nested)
    assert type(found["gradients"]) is dict and found["target"] == ["a"]
    assert trainmon.load_config(found).gradients.every == 2


def test_both_places_at_once_are_an_error(tmp_path: Path) -> None:
    host = Trainer(tmp_path, {"trainmon": {"every": 2}})
    with pytest.raises(trainmon.ConfigError, match="keep one of them"):
        host.build()
    config = {"callbacks": [], "runner_config": {}, "trainmon": {"every": 2, "output_dir": str(tmp_path)}}
    assert GraphMonitor().monitor.config.every == 2 and config


@pytest.mark.parametrize("state", ["OFF", "ON"])
def test_train_precision_sync_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Of a process MindSpore's mode can be switched on, and not off again."""
    asked = mindspore.get_context
    monkeypatch.setattr(mindspore, "get_context", lambda key: state if key == "deterministic" else asked(key))
    host = Trainer(tmp_path, {"train_precision_sync": True})
    host.run(callback := host.build(), [outputs()])
    told = [event for event in host.events() if event["kind"] == "not_deterministic"]
    assert [event["level"] for event in told] == ([] if state == "ON" else ["warning"])
    assert "train_precision_sync" in callback.settings.taken


# -- what ends a run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clips", [True, False])
def test_check_for_global_norm(tmp_path: Path, clips: bool) -> None:
    """By an exception that MindSpore goes back on; the step that is done again is let pass. Without clipping the host has
    no norm, and compares None with its threshold."""
    section = {"monitor_on": True, "check_for_global_norm": True, "global_norm_spike_threshold": 3}

    def step(norm: float) -> None:
        host.step(outputs(norm=norm if clips else None, squares=(norm**2, 0.0)))

    host = Trainer(tmp_path, {"monitor_config": section})
    host.begin(host.build())
    step(2.5)
    with pytest.raises(RuntimeError, match=r"TREError: check_for_global_norm: the norm of step 2 is 3\.5"):
        step(3.5)
    host.params["cur_step_num"] = 1  # the host goes back, in the same loop
    step(3.25)
    step(math.nan)
    with pytest.raises(trainmon.TrainingStopped, match="step 4"):
        step(3.0)
    file = tmp_path / "r/abnormal_global_norm.json"
    assert json.loads(file.read_text()) == {"2": [3.5, 3.25], "4": [3.0]}
    assert [one["step"] for one in host.steps()] == [1, 2, 2, 3, 4]


def test_steps_that_an_earlier_life_left_pass_and_those_of_another_run_do_not(tmp_path: Path) -> None:
    section = {"monitor_on": True, "check_for_global_norm": True, "global_norm_spike_threshold": 3}
    file = tmp_path / "r/abnormal_global_norm.json"
    file.parent.mkdir()
    for content, resumed, passes in (
        ('{"2": [9.0]}', True, True),
        ('{"2": [9.0]}', False, False),
        ('{"2": [', True, False),
    ):
        file.write_text(content)
        host = Trainer(tmp_path, {"monitor_config": section})
        host.begin(host.build(**({"resumed_step": 1} if resumed else {})))
        if not resumed:
            host.step(outputs(norm=1.0))
        with contextlib.nullcontext() if passes else pytest.raises(RuntimeError, match="TREError"):
            host.step(outputs(norm=5.0))
        host.end()
    (told,) = [event for event in host.events() if event["kind"] == "abnormal_norms"]
    assert "can't be read" in told["text"]


def test_skipped_data_ends_the_run_after_so_many_in_a_row(tmp_path: Path) -> None:
    section = {"global_norm_spike_count_threshold": 3, "monitor_on": True}
    host = Trainer(
        tmp_path,
        {"monitor_config": section, "use_skip_data_by_global_norm": True},
        MFTrainOneStepCell(Model(), local_norm=False),
    )
    host.begin(host.build())
    for norm in (4.0, 4.0, 1.0, 4.0, 4.0):
        host.step(outputs(norm=norm)[:5])
    with pytest.raises(trainmon.TrainingStopped, match="use_skip_data_by_global_norm"):
        host.step(outputs(norm=4.0)[:5])
    both = {
        "monitor_config": {**section, "check_for_global_norm": True},
        "use_skip_data_by_global_norm": True,
    }
    with pytest.raises(trainmon.ConfigError, match="exclude each other"):
        Trainer(tmp_path, both).build()


def test_check_for_nan(tmp_path: Path) -> None:
    host = Trainer(tmp_path, {"check_for_nan_in_loss_and_grad": True})
    host.begin(host.build())
    host.step(outputs())
    with pytest.raises(trainmon.TrainingStopped, match="check_for_nan_in_loss_and_grad"):
        host.step(outputs(squares=(np.inf, 1.0)))
