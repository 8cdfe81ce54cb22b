"""Saves and loads of the host, announced or not, at once or in the background, and what is kept in them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the adapter needs torch")

import trainmon
from tests.adapters.hyperparallel.runs import (
    EACH,
    build,
    config,
    inner_of,
    life_of,
    said,
    settings_of,
    steps_of,
    train,
)
from trainmon.events import Load, Save, StepBegin
from trainmon.monitor import TrainMonitor

SOME = (*EACH, "g3_base")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine is told of saves and loads, and in which running step."""
    seen: list[Any] = []
    handle, step = TrainMonitor.handle, [0]

    def listen(monitor: TrainMonitor, event: Any) -> Any:
        if isinstance(event, StepBegin):
            step[0] = event.step
        if isinstance(event, Save | Load):
            seen.append((type(event).__name__, event.step, Path(event.path).name, step[0]))
        return handle(monitor, event)

    monkeypatch.setattr(TrainMonitor, "handle", listen)
    return seen


def directory(name: str, step: int) -> str:
    return f"{'global_step' if name.startswith('g3') else 'step'}_{step}"


@pytest.mark.parametrize("name", SOME)
def test_saves_and_loads_are_told(tmp_path: Path, name: str, events: list[Any]) -> None:
    """In the step whose time they take; the last one comes when training is over in the third generation."""
    whole = settings_of(name, save_steps=2, max_steps=6, epochs=3)
    trainer = build(name, {**whole, "max_steps": 4}, tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    first = [("Save", 2, directory(name, 2), 2 if name == "g1" else 3)]
    last = [] if name.startswith("g3") else [("Save", 4, directory(name, 4), 4)]
    assert events == [*first, *last]
    events.clear()
    restored = "LATEST" if name.startswith("g3") else str(tmp_path / "checkpoints/step_4")
    trainer = build(name, {**whole, "resume": restored}, tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    assert [event[:3] for event in events if event[0] == "Load"] == [("Load", 4, directory(name, 4))]
    saved = [event[1] for event in events if event[0] == "Save"]
    assert saved == ([] if name.startswith("g3") else [6])  # what was restored is not a save
    assert not said(tmp_path, "internal_error") and life_of(tmp_path)["status"] == "completed"


def kept(tmp_path: Path, name: str) -> dict[str, int]:
    """The step of the state in each checkpoint."""
    found = sorted((tmp_path / "checkpoints").glob("*/trainmon_state.json"))
    return {path.parent.name: json.loads(path.read_text().splitlines()[1])["step"] for path in found}


@pytest.mark.parametrize("name", SOME)
def test_a_checkpoint_written_in_the_background_has_the_state_of_its_step(tmp_path: Path, name: str) -> None:
    """However long it takes: the writer of step 2 waits for step 4."""
    whole = settings_of(name, save_steps=2, save_async=True, max_steps=6, epochs=3)
    trainer = build(name, whole, tmp_path)
    go = threading.Event()
    inner = inner_of(trainer)
    if name.startswith("g3"):
        saver = inner._callbacks[-1]
        write = saver.write

        def slow(place: Path, staged: Any) -> None:
            if place.name.endswith("_2"):
                assert go.wait(20)
            write(place, staged)

        saver.write = slow
    else:
        writer = inner.checkpoint_callback.writer if name == "g1" else inner.writer
        model = writer.model

        def slow_model(place: Path, *rest: Any) -> Any:
            if "step_2" in str(place):
                assert go.wait(20)
            return model(place, *rest)

        writer.model = slow_model
    inner.after_backward = lambda step, index, count: go.set() if step == 4 else None
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    assert kept(tmp_path, name) == {directory(name, step): step for step in (2, 4, 6)}
    assert len(steps_of(tmp_path)) == 6 and not said(tmp_path, "internal_error")


@pytest.mark.parametrize("name", ["g3_base"])
def test_a_directory_that_comes_later(tmp_path: Path, name: str, events: list[Any]) -> None:
    """Everything is in the payload that another process writes: not even the directory is there at the next step."""
    trainer = build(name, settings_of(name, save_steps=2, save_async=True, max_steps=6, epochs=3), tmp_path)
    inner = inner_of(trainer)
    saver, root = inner._callbacks[-1], tmp_path / "checkpoints"

    def on_step_end(state: Any, **_told: Any) -> None:
        if state.global_step in (4, 5):  # the directory of step 2, then that it is complete
            (root / "global_step_2").mkdir(parents=True, exist_ok=True)
        if state.global_step == 5:
            (root / "global_step_2/.metadata").write_text("")

    saver.on_step_end = on_step_end
    saver.on_epoch_end = saver.on_train_end = lambda state, **_more: None
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    assert kept(tmp_path, name) == {"global_step_2": 2}
    assert events == [("Save", 2, "global_step_2", 6)]


@pytest.mark.parametrize("name", EACH)
def test_a_resumed_run_goes_on_from_a_background_save(tmp_path: Path, name: str) -> None:
    whole = settings_of(name, save_steps=2, save_async=True, max_steps=4)
    trainer = build(name, {**whole, "max_steps": 2}, tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    resume = "LATEST" if name.startswith("g3") else str(tmp_path / "checkpoints/step_2")
    trainer = build(name, {**whole, "resume": resume}, tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    assert len(said(tmp_path, "health_restored")) == 1
    assert [record["step"] for record in steps_of(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["g1", "g2"])
def test_a_failed_save_keeps_nothing(tmp_path: Path, name: str, events: list[Any]) -> None:
    trainer = build(name, settings_of(name, save_steps=1), tmp_path)
    inner = inner_of(trainer)
    writer = inner.checkpoint_callback.writer if name == "g1" else inner.writer

    def fails(*_: Any) -> None:
        raise OSError("disk full")

    writer.model = fails
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    train(trainer)
    assert events == [] and kept(tmp_path, name) == {} and len(steps_of(tmp_path)) == 3
