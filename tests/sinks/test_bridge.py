"""The bridge to any object with ``log(dict, step)``, from the engine on."""

from __future__ import annotations

import math
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sinks.make import run_info, snapshot, table
from trainmon.config import ConfigError
from trainmon.events import MicroEnd, StepBegin, StepEnd, TrainBegin, TrainEnd
from trainmon.monitor import TrainMonitor
from trainmon.sinks.bridge import BridgeSink, find_target
from trainmon.sinks.jsonl import read_jsonl
from trainmon.sinks.run_file import read_run


class Tracker:
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, dict[str, Any]]] = []
        self.threads: set[str] = set()

    def log(self, values: dict[str, Any], step: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append((step, values))


def train(mon: TrainMonitor, steps: int = 3, **end: Any) -> float:
    """So many steps; returns the longest time that one took, in seconds."""
    mon.begin(TrainBegin())
    longest = 0.0
    for step in range(1, steps + 1):
        began = time.perf_counter()
        mon.handle(StepBegin(step, float(step)))
        mon.handle(MicroEnd(step, 0, end.get("loss", float(step)), 1))
        mon.handle(StepEnd(step, step + 1.0, **{key: value for key, value in end.items() if key != "loss"}))
        longest = max(longest, time.perf_counter() - began)
    mon.handle(TrainEnd(steps, "completed"))
    mon.close()
    return longest


def config(directory: Path, **sinks: Any) -> dict[str, Any]:
    return {"output_dir": str(directory), "run_name": "r", "sinks": {"log": False, **sinks}}


def events(directory: Path) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(directory / "r/rank_0/events.jsonl") if "kind" in event]


def test_an_object_given_in_code_is_handed_plain_floats(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="one of the values is a 0-d bfloat16 tensor")
    tracker = Tracker()
    train(
        TrainMonitor(config(tmp_path), bridge=tracker),
        steps=2,
        loss=np.float32(0.1),
        grad_norm=np.float64(2.5),
        tokens=np.int64(3),
        overflow=np.bool_(True),
        learning_rates={"0": torch.tensor(1.5, dtype=torch.bfloat16)},
        loss_scale=None,
    )
    assert [step for step, _ in tracker.calls] == [1, 2] and tracker.threads == {"trainmon-writer"}
    values = tracker.calls[0][1]
    assert (values["loss/global"], values["grad/norm"], values["optim/lr"]) == (0.10000000149011612, 2.5, 1.5)
    assert values["optim/overflow"] == 1 and values["perf/tokens_per_second"] == 3
    assert {type(value) for _, values in tracker.calls for value in values.values()} == {float}
    assert {type(name) for _, values in tracker.calls for name in values} == {str}
    # The same numbers as in the file; null is left out.
    record = next(
        record for record in read_jsonl(tmp_path / "r/rank_0/scalars.jsonl") if record.get("step") == 1
    )
    shown = {
        name: value for name, value in record.items() if name not in ("step", "time") and value is not None
    }
    assert values == shown and len(shown) < len(record) - 2


def test_nonfinite_values_tables_and_styles() -> None:
    tracker = Tracker()
    sink = BridgeSink(tracker, every=2)
    sink.open(run_info(None, tag_style="mindformers"))
    norms = table({"a": 1.0, "b": None, "c": math.nan, "d": 3.0}, "grad/norm_local/<p>")
    sink.write(snapshot(1, norms, loss__global=math.nan, grad__norm=-math.inf, optim__lr=None))
    sink.write(snapshot(2, loss__global=None))
    sink.write(snapshot(3))
    sink.close()
    ((step, values),) = tracker.calls
    assert step == 1 and math.isnan(values["loss"]) and values["grad-norm"] == -math.inf
    assert values["local_norm/p50"] == 3.0 and math.isnan(values["local_norm/max"])
    assert sorted(values) == ["grad-norm", "local_norm/max", "local_norm/p50", "local_norm/p95", "loss"]


def test_a_bridge_that_hangs_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainmon.run.CLOSING", 0.2)
    free = threading.Event()

    class Hanging:
        def log(self, values: dict[str, float], step: int) -> None:
            free.wait(60)

    longest = train(TrainMonitor(config(tmp_path, queue=10, on_full="block"), bridge=Hanging()), steps=40)
    free.set()
    # Even where training is to wait for files, it does not wait for the bridge.
    assert longest < 5
    records = read_jsonl(tmp_path / "r/rank_0/scalars.jsonl")
    assert [record["step"] for record in records if "step" in record] == list(range(1, 41))
    (said,) = [event["text"] for event in events(tmp_path) if event["kind"] == "sink_hangs"]
    assert said.startswith("bridge did not finish within 0.2 s; 10 steps")
    run = read_run(tmp_path / "r")
    assert run is not None
    losses = run["lives"][-1]["counters"]["sinks"]
    assert (
        losses["steps_dropped"] + losses["steps_unwritten"] == 39
        and run["lives"][-1]["status"] == "completed"
    )


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), MemoryError()])
def test_a_bridge_that_raises_is_switched_off_and_said(tmp_path: Path, error: BaseException) -> None:
    calls = []

    class Raising:
        def log(self, values: dict[str, float], step: int) -> None:
            calls.append(step)
            raise error

    mon = TrainMonitor(config(tmp_path), bridge=Raising())
    train(mon, steps=6)
    assert calls == [1, 2, 3] and mon.summary().switched_off == ("bridge",)
    (said,) = [event["text"] for event in events(tmp_path) if event["kind"] == "sink_off"]
    assert (
        said.startswith("bridge failed 3 times in a row and is switched off: ")
        and type(error).__name__ in said
    )
    records = read_jsonl(tmp_path / "r/rank_0/scalars.jsonl")
    assert [record["step"] for record in records if "step" in record] == list(range(1, 7))
    run = read_run(tmp_path / "r")
    assert run is not None
    assert run["lives"][-1]["counters"]["sinks"] == {
        "failed_calls": {"bridge": 3},
        "switched_off": ["bridge"],
    }


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("their_tracking")
    made.tracker = Tracker()  # type: ignore[attr-defined]
    made.inner = types.SimpleNamespace(tracker=Tracker())  # type: ignore[attr-defined]
    made.make = lambda: made.tracker  # type: ignore[attr-defined]
    made.Class = Tracker  # type: ignore[attr-defined]
    made.number = 5  # type: ignore[attr-defined]

    def broken() -> None:
        raise OSError("no server")

    made.broken = broken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_tracking", made)
    return made


def test_an_import_path_names_an_object_or_what_makes_one(tmp_path: Path, module: Any) -> None:
    assert find_target("their_tracking:tracker") is module.tracker
    assert find_target("their_tracking:make") is module.tracker
    assert find_target("their_tracking:inner.tracker") is module.inner.tracker
    assert isinstance(find_target("their_tracking:Class"), Tracker)
    train(TrainMonitor(config(tmp_path, bridge={"to": "their_tracking:tracker", "every": 2})))
    assert [step for step, _ in module.tracker.calls] == [1, 2]


@pytest.mark.parametrize(
    ("to", "message"),
    [
        (None, "sinks.bridge.to: names no target: one of swanlab, trackio, wandb, or package.module:name; or give "
         "bridge= in code"),
        ("their_tracking:none", "sinks.bridge.to: ImportError: module 'their_tracking' has no attribute 'none'"),
        ("their_trackin:none", "sinks.bridge.to: ModuleNotFoundError: No module named 'their_trackin'"),
        ("their_tracking:number", "sinks.bridge.to: TypeError: their_tracking:number has no method log(dict, step)"),
        ("their_tracking:broken", "sinks.bridge.to: OSError: no server"),
    ],
)  # fmt: skip
def test_a_target_that_is_none(tmp_path: Path, module: Any, to: str | None, message: str) -> None:
    mon = TrainMonitor(config(tmp_path, bridge={"to": to}))
    with pytest.raises(ConfigError) as caught:
        mon.begin(TrainBegin())
    assert str(caught.value).strip() == message and not (tmp_path / "r").exists()


def test_an_object_without_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"bridge: TypeError: expected an object with a method log\(dict, step\), found int"
    ):
        TrainMonitor(config(tmp_path), bridge=5).begin(TrainBegin())


def test_a_tracker_that_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    with pytest.raises(ConfigError, match="the bridge to wandb needs the package: pip install wandb"):
        TrainMonitor(config(tmp_path, bridge={"to": "wandb"})).begin(TrainBegin())
