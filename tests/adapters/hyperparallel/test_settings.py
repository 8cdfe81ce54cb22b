"""The host's own sections, below the user's configuration."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the adapter needs torch")

import trainmon  # noqa: E402
from tests.adapters.hyperparallel.runs import (  # noqa: E402
    build,
    config,
    inner_of,
    life_of,
    settings_of,
    spoil,
    steps_of,
    tables_of,
    train,
)
from tests.hosts.hyperparallel import model as task  # noqa: E402
from tests.hosts.hyperparallel.config_lm import MonitorConfig  # noqa: E402
from tests.ranks.gloo import on_ranks  # noqa: E402
from trainmon.adapters.hyperparallel.settings import settings_of as host_settings  # noqa: E402


def trainer_with(**roots: Any) -> Any:
    return SimpleNamespace(**roots)


def test_the_level_nearest_to_the_sections_wins() -> None:
    sections = [SimpleNamespace(log_steps=steps) for steps in (3, 5, 7)]
    train_level = SimpleNamespace(logging=sections[0])
    for trainer, steps in (
        (trainer_with(args=SimpleNamespace(train=train_level, logging=sections[1])), 3),
        (trainer_with(args=SimpleNamespace(train=SimpleNamespace(), logging=sections[1])), 5),
        (trainer_with(config={"logging": {"log_steps": 7}}), 7),
    ):
        assert host_settings(trainer).config == {"sinks": {"log": {"every": steps}}}


@pytest.mark.parametrize("trainer", [object(), trainer_with(args=None), trainer_with(args=3, config="x")])
def test_a_host_without_sections(trainer: Any) -> None:
    found = host_settings(trainer)
    assert (found.config, found.taken, found.problems, found.deterministic) == ({}, [], [], False)


def test_sections_that_make_no_sense_are_said() -> None:
    monitor = {"monitor_on": True, "target": ["(", "x"], "local_loss_format": 5}
    found = host_settings(
        trainer_with(args={}, config={"monitor": monitor, "logging": {"log_steps": "often"}})
    )
    assert len(found.problems) == 2 and "(" in found.problems[0]
    assert "target" not in found.config.get("gradients", {}) and "sinks" not in found.config


def test_what_the_user_says_beats_the_host(tmp_path: Path) -> None:
    def checked(configuration: Any) -> None:
        configuration.train.debug.check_nan_inf = True
        configuration.train.monitor = MonitorConfig(monitor_on=True, step_interval=3, dump_path="elsewhere")

    trainer = build("g1", settings_of("g1"), tmp_path, checked)
    keys = config(tmp_path, loss={"every": 1}, health={"gate": "late"})
    resolved = trainmon.attach_hyperparallel(trainer, keys).monitor.config
    assert resolved.output_dir == str(tmp_path) and resolved.loss is not None and resolved.loss.every == 1
    assert resolved.gradients is not None and resolved.gradients.own_every == 3
    assert resolved.sinks.log is None  # a list of sinks is all of them
    assert resolved.health is not None and resolved.health.gate == "late" and len(resolved.health.rules) == 1


def test_following_the_host_can_be_left_out(tmp_path: Path) -> None:
    trainer = build("g2", settings_of("g2", check_nan_inf=True), tmp_path)
    resolved = trainmon.attach_hyperparallel(trainer, config(tmp_path), host_settings=False).monitor.config
    assert resolved.health is not None and not resolved.health.rules


def check_on_ranks(directory: str) -> dict[str, str]:
    """On a rank: the host's own check is on, the gradient of one rank goes bad in step 2."""
    import torch.distributed as distributed

    ended = {}
    for bad in (0, 1):
        for name in ("g1", "g2", "g3_text"):
            place = Path(directory) / f"{name}_{bad}"
            trainer = build(name, settings_of(name, check_nan_inf=True), place)
            trainmon.attach_hyperparallel(trainer, config(place))
            if distributed.get_rank() == bad:
                spoil(trainer, 2)
            try:
                train(trainer)
                ended[place.name] = "returned"
            except Exception as error:
                step = inner_of(trainer).state.global_step
                ended[place.name] = f"{type(error).__name__} {step if name != 'g3_text' else step + 1}"
    return ended


def test_check_nan_inf_ends_all_ranks_and_not_rank_0_alone(tmp_path: Path) -> None:
    by_rank = on_ranks(2, check_on_ranks, str(tmp_path))
    assert by_rank[0] == by_rank[1] and set(by_rank[0].values()) == {"TrainingStopped 2"}
    for place in by_rank[0]:
        assert life_of(tmp_path / place)["status"] == "stopped"


@pytest.mark.parametrize("name", ["g1", "g2", "g3_text"])
def test_determinism(tmp_path: Path, name: str) -> None:
    def deterministic(configuration: Any) -> None:
        if name != "g3_text":
            configuration.train.debug.deterministic = True
        else:
            configuration.training.enable_full_determinism = True

    before = torch.are_deterministic_algorithms_enabled()
    try:
        trainer = build(name, settings_of(name), tmp_path, deterministic)
        torch.use_deterministic_algorithms(False)
        trainmon.attach_hyperparallel(trainer, config(tmp_path))
        train(trainer)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


def test_trackers_and_event_files(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {
        "tensorboard": {"enabled": True, "log_steps": 5},
        "wandb": {"enabled": True, "project": "p", "log_steps": 2},
        "moe_monitor": {"enabled": True},
    }
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    found = host_settings(trainer_with(args={}, config=sections))
    assert found.config == {
        "sinks": {
            "tensorboard": {"every": 5},
            "bridge": {"to": "wandb", "online": True, "every": 2, "project": "p"},
        },
        "moe": {"per_expert": True},
    }
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = host_settings(trainer_with(args={}, config=sections))
    assert "sinks" not in found.config and len(found.problems) == 2


#: As much of the tracker's package as a run of it needs.
TRACKER = """
run = None
logged = []

class Run:
    def log(self, values, step=None):
        logged.append((step, dict(values)))
    def finish(self, *_, **__):
        logged.append("finished")

def init(**asked):
    global run
    logged.append(asked)
    run = Run()
    return run
"""


@pytest.mark.filterwarnings("ignore:.*not implemented")
@pytest.mark.parametrize("name", ["g1", "g2", "g3_text"])
def test_the_numbers_go_to_the_tracker_that_the_host_names(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host has a section and nothing behind it."""
    (tmp_path / "wandb.py").write_text(TRACKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)

    def tracked(configuration: Any) -> None:
        if name == "g3_text":
            configuration.wandb.enable, configuration.wandb.project = True, "mine"
        else:
            section = configuration.train.wandb
            section.enabled, section.project, section.log_steps = True, "mine", 2

    trainer = build(name, settings_of(name), tmp_path, tracked)
    trainmon.attach_hyperparallel(trainer, output_dir=str(tmp_path), run_name="r")
    train(trainer)
    begun, *logged, finished = sys.modules["wandb"].logged
    monkeypatch.delitem(sys.modules, "wandb")
    assert begun["project"] == "mine" and finished == "finished"
    records = {record["step"]: record for record in steps_of(tmp_path)}
    assert [step for step, _ in logged] == ([1, 2, 3] if name == "g3_text" else [1, 2])
    for step, values in logged:
        for series in ("loss/global", "grad/norm", "optim/lr"):
            assert values[series] == records[step][series]


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("name", ["g1", "g2"])
def test_the_load_of_each_expert_if_the_host_watches_them(tmp_path: Path, name: str, enabled: bool) -> None:
    settings = {**settings_of(name), "moe_monitor": enabled}
    trainer = build(name, settings, tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    rows = tables_of(tmp_path)
    assert all(record["moe/max_vio"] > 0 for record in steps_of(tmp_path))
    for number, step in enumerate(task.plain_run(settings, "token"), start=1):
        for expert, count in enumerate(step["tokens_per_expert"]):
            row = rows.get(("moe/load", str(number), f"moe/{expert}"))
            assert row == count if enabled else row is None


@pytest.mark.filterwarnings("ignore:.*not implemented")
@pytest.mark.parametrize("name", ["g1", "g2"])
def test_sections_where_the_configuration_keeps_them_and_the_host_does_not_look(
    tmp_path: Path, name: str
) -> None:
    """The first generation's callbacks look for `args.<section>`: there nothing is."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="reads event files"
    )

    def sections(configuration: Any) -> None:
        train_level = configuration.train
        train_level.tensorboard.enabled, train_level.tensorboard.log_steps = True, 2
        train_level.logging.log_steps, train_level.debug.check_nan_inf = 2, True

    settings = settings_of(name, sections="nested", max_steps=5, epochs=3)
    trainer = build(name, settings, tmp_path, sections)
    trainmon.attach_hyperparallel(trainer, output_dir=str(tmp_path), run_name="r")
    spoil(trainer, 5)
    with pytest.raises(trainmon.TrainingStopped, match="check_nan_inf"):
        train(trainer)
    assert inner_of(trainer).state.global_step == 5
    history = inner_of(trainer).state.log_history
    assert history == [] if name == "g1" else len(history) == 2
    lines = (tmp_path / "r/rank_0/log.txt").read_text().splitlines()
    assert [line.split("step ")[1].split("/")[0].strip() for line in lines if "grad norm" in line] == [
        "1",
        "2",
        "4",
    ]
    (events,) = (tmp_path / "r").rglob("events.out.tfevents*")
    points = accumulator.EventAccumulator(str(events)).Reload().Scalars("loss/global")
    assert [point.step for point in points] == [1, 2, 4]


def test_determinism_as_far_as_it_goes(tmp_path: Path) -> None:
    def warns(configuration: Any) -> None:
        configuration.train.debug.deterministic = True
        configuration.train.debug.deterministic_warn_only = True

    before = torch.are_deterministic_algorithms_enabled()
    try:
        trainer = build("g1", settings_of("g1"), tmp_path, warns)
        trainmon.attach_hyperparallel(trainer, config(tmp_path))
        assert not torch.is_deterministic_algorithms_warn_only_enabled()  # not before training begins
        train(trainer)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        state = life_of(tmp_path)["reproduction"]
        assert state["torch.is_deterministic_algorithms_warn_only_enabled"] is True
    finally:
        torch.use_deterministic_algorithms(before)
