"""MindFormers' own registry builds the monitor, with what the trainer gives each class."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore
import pytest

import trainmon
from tests.hosts.mindformers.graph.fakes import MFTrainOneStepCell, Model, Trainer, outputs
from tests.hosts.mindformers.graph.trainings import write
from trainmon.adapters.mindformers.graph.callback import GraphMonitor

#: What the trainer gives its own monitor beside ``config`` and ``step_interval``.
GIVEN: dict[str, Any] = {
    "origin_epochs": 2,
    "dataset_size": 10,
    "initial_epoch": 0,
    "initial_step": 0,
    "micro_batch_num": 1,
    "global_batch_size": 8,
    "tensor_model_parallel_size": 1,
    "check_for_nan_in_loss_and_grad": True,
    "use_skip_data_by_global_norm": False,
    "embedding_size": None,
    "use_local_norm": True,
}


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host copies what it registers into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGISTER_PATH", trainmon.register_path())


@pytest.fixture
def compiled() -> Iterator[None]:
    before = mindspore.get_context("mode")
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    yield
    mindspore.set_context(mode=before)


def build(entry: dict[str, Any], **given: Any) -> Any:
    from mindformers import MindFormerConfig
    from mindformers.core.callback import build_callback

    return build_callback(MindFormerConfig(**entry), default_args=given or None)


def quiet(folder: Path, **keys: Any) -> dict[str, Any]:
    return {"output_dir": str(folder), "run_name": "r", "sinks": {"log": False}, **keys}


def test_auto_register(tmp_path: Path) -> None:
    entry = {"type": "TrainMonitor", "auto_register": "trainmon_mf.TrainMonitor"}
    found = build({**entry, **quiet(tmp_path, gradients={"every": 3})})
    assert type(found) is trainmon.GraphMonitor and found.monitor.config.gradients.every == 3
    assert (tmp_path / "modules/openmind_modules/register/trainmon_mf.py").is_file()
    assert type(build({"type": "TrainMonitor"})) is GraphMonitor  # the name is known now


def test_an_error_comes_out_of_the_registry_as_itself(tmp_path: Path) -> None:
    entry = {"type": "TrainMonitor", "auto_register": "trainmon_mf.TrainMonitor"}
    with pytest.raises(
        trainmon.ConfigError, match=r"TrainMonitor: gradients\.evry: unknown key; did you mean"
    ):
        build({**entry, **quiet(tmp_path, gradients={"evry": 3})})


@pytest.mark.parametrize(
    ("monitor", "place"),
    [
        ({"gradients": {"evry": 3}}, r"train\.yaml:\d+:\d+: callbacks\[1\]\.gradients\.evry"),
        ({"config": "own.yaml"}, r"own\.yaml:2:9: every: expected an integer"),
        ({}, r"train\.yaml:\d+:\d+: trainmon\.weihgts: unknown key; did you mean"),
    ],
)
def test_errors_have_their_place(
    monitor: dict[str, Any], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the one on the command line."""
    (tmp_path / "own.yaml").write_text("output_dir: runs\nevery:  often\n")
    top = {} if monitor else {"trainmon": {"weihgts": True}}
    entry = {"type": "TrainMonitor", "auto_register": "trainmon_mf.TrainMonitor", **monitor}
    file = write(tmp_path, [entry], **top)
    monkeypatch.setattr("sys.argv", ["run_mindformer.py", "--config", str(file)])
    from mindformers import MindFormerConfig
    from mindformers.core.callback import build_callback

    config = MindFormerConfig(str(file))  # in the trainer's frame
    with pytest.raises(trainmon.ConfigError, match=place):
        build_callback(config.callbacks[1])


def test_which_trainer_builds_is_seen(tmp_path: Path) -> None:
    from trainmon.adapters.mindformers.entry import is_pynative

    assert not is_pynative()
    module: dict[str, Any] = {"__name__": "mindformers.pynative.trainer.trainer", "ask": is_pynative}
    exec("def build():\n    return ask()\n", module)
    assert module["build"]()


def test_in_the_place_of_the_hosts_monitor(tmp_path: Path, compiled: None) -> None:
    """The host's own rules find its place; what it gives is taken, and a second one for the check of NaN is the first."""
    from mindformers.core.callback.callback import TrainingStateMonitor as HostMonitor
    from mindformers.trainer.base_trainer import BaseTrainer

    section = {
        "monitor_on": True,
        "weight_state_format": "log",
        "step_interval": 2,
        "health_checkpoint": None,
    }
    keys = quiet(tmp_path, gradients={"local": True})
    name = "trainmon_mf.TrainingStateMonitor"
    entry = {"type": "TrainingStateMonitor", "auto_register": name, "config": section, "step_interval": 2}
    first = build({**entry, **keys}, **GIVEN)
    again = build({"type": "TrainingStateMonitor", "check_for_nan_in_loss_and_grad": True}, **GIVEN)
    assert isinstance(first, HostMonitor) and isinstance(again, HostMonitor)
    other = GraphMonitor(**quiet(tmp_path, run_name="other"))
    assert BaseTrainer.sort_callbacks([other, first, again]) == [again, other]
    host = Trainer(tmp_path, cell=MFTrainOneStepCell(Model()))
    host.begin(again)
    for _ in range(2):
        host.step(outputs())
    host.end()
    records = host.steps()
    assert records[1]["weight/norm"] is not None and again.settings.step_interval == 2
    assert again.monitor.config.gradients.local and again.monitor.config.tag_style == "mindformers"
    assert json.loads((tmp_path / "r/run.json").read_text())["lives"][-1]["status"] == "completed"
