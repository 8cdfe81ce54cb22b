"""Trainings that several tests look at. MindFormers needs an environment of its own (`make mindspore`)."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.mindformers.graph.trainings import EVERYTHING, Training, train, write

collect_ignore_glob = [] if importlib.util.find_spec("mindformers") else ["test_*.py"]

AUTO = {"auto_register": "trainmon_mf.TrainMonitor"}
#: As its own monitor was asked when its lines were kept (state_monitor_lines.txt).
STATE_MONITOR: dict[str, Any] = {
    "weight_state_format": ["log", "tensorboard"],
    "optimizer_state_format": ["log"],
    "local_norm_format": "log",
    "device_local_norm_format": "log",
    "target": ["attention"],
    "step_interval": 2,
    "throughput_baseline": 100,
    "stable_rank_config": {"format": ["log", "tensorboard"], "step_interval": 2},
}


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindFormers leaves files where it is imported."""
    monkeypatch.chdir(tmp_path)


def folder(factory: pytest.TempPathFactory, name: str) -> Path:
    return factory.mktemp(name, numbered=False)


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Two epochs, registered by the YAML; what a step returns has the squares of gradients."""
    here = folder(tmp_path_factory, "watched")
    spectra = {"every": 1, "eigenvalue": True, "elements": 1 << 40}
    file = write(
        here,
        [{**EVERYTHING, **AUTO, "spectral": spectra}],
        runner_config__epochs=2,
        tensorboard={"tensorboard_dir": "./board"},
    )
    return train(here, file, 3, "Order", "Truth")


@pytest.fixture(scope="session")
def in_pynative_context(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """The same in context mode 1, registered by importing the adapter; the configuration in a file of its own."""
    here = folder(tmp_path_factory, "context_1")
    own = {key: value for key, value in EVERYTHING.items() if key != "type"}
    own["attention"] = {"every": 1, "rows": 0}
    (here / "monitor.yaml").write_text(_yaml(own))
    entry = {"type": "TrainMonitor", "config": "monitor.yaml"}
    file = write(here, [entry], runner_config__epochs=2, context__mode=1)
    return train(here, file, 3, "Truth", "Logits", watch=True)


@pytest.fixture(scope="session")
def unwatched(tmp_path_factory: pytest.TempPathFactory) -> Training:
    here = folder(tmp_path_factory, "unwatched")
    return train(here, write(here, [], runner_config__epochs=2), 3, "Truth")


@pytest.fixture(scope="session")
def replaced(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Ours in the place of the host's own monitor, gradients by compiled hooks; a weight becomes NaN after step 3."""
    here = folder(tmp_path_factory, "replaced")
    entry = {
        **{key: value for key, value in EVERYTHING.items() if key not in ("weights", "moments")},
        "type": "TrainingStateMonitor",
        "auto_register": "trainmon_mf.TrainingStateMonitor",
        "config": STATE_MONITOR,
        "step_interval": 2,
    }
    file = write(
        here,
        [entry],
        check_for_nan_in_loss_and_grad=True,
        runner_wrapper__local_norm=False,
        tensorboard={"tensorboard_dir": "./board"},
    )
    return train(here, file, 6, "Order", "Poison")


@pytest.fixture(scope="session")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> list[Training]:
    """A rule stops a training in its second step; another goes on from the checkpoint, until a callback raises."""
    here = folder(tmp_path_factory, "resumed")
    rule = {
        "series": "data/consumed_samples",
        "detector": "threshold",
        "parameters": {"above": 3.0},
        "action": "stop",
    }
    saves = {"type": "CheckpointMonitor", "prefix": "tiny", "checkpoint_format": "safetensors"}
    place = {"save_path": "./ckpt", "save_interleaved_steps": 1, "save_max": 5}
    top = {key: value for key, value in EVERYTHING.items() if key != "type"}
    entry = {"type": "TrainMonitor", **AUTO}
    keys: dict[str, Any] = {"runner_wrapper__local_norm": False}
    first = write(
        here, [entry, saves], trainmon={**top, "health": {"rules": [rule]}}, checkpoint=place, **keys
    )
    stopped = train(here, first, 5)
    kept = here / "first"
    shutil.copytree(here / "runs", kept / "runs")
    shutil.copy(here / "ended.json", kept)
    again = write(
        here,
        [entry, saves],
        trainmon=top,
        checkpoint={**place, "load_path": "./ckpt", "no_load_optim": False},
        load_ckpt_format="safetensors",
        **keys,
    )
    return [Training(kept, stopped.output), train(here, again, 5, "Raises")]


def _yaml(value: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(value, sort_keys=False)
    return text
