"""One run through every sink at once, read back with the reader of each; and sinks that fail while a run goes on."""

from __future__ import annotations

import csv
import math
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.sinks.make import Memory
from trainmon.events import GradsReady, MicroEnd, StepBegin, StepEnd, TensorView, TrainBegin, TrainEnd
from trainmon.monitor import TrainMonitor
from trainmon.outputs import build_sinks
from trainmon.sinks.blackbox import read_box
from trainmon.sinks.csv import read_csv
from trainmon.sinks.jsonl import read_jsonl
from trainmon.sinks.run_file import read_run

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
parser = pytest.importorskip("prometheus_client.parser")
pytest.importorskip("pyarrow")

from trainmon.sinks.parquet import read_parquet  # noqa: E402

SINKS: dict[str, Any] = {
    "log": True,
    "jsonl": True,
    "csv": True,
    "parquet": True,
    "tensorboard": True,
    "prometheus": {"interval": 0, "per_tensor": True},
    "blackbox": True,
}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine importing the readers' packages takes longer than a run waits for them."""
    monkeypatch.setattr("trainmon.run.CLOSING", 120.0)


class Tracker:
    def __init__(self) -> None:
        self.calls: list[tuple[int, dict[str, float]]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append((step, values))


def monitor(directory: Path, bridge: Any = None, **keys: Any) -> TrainMonitor:
    return TrainMonitor(
        {"output_dir": str(directory), "run_name": "r", "sinks": SINKS, **keys}, bridge=bridge
    )


def train(mon: TrainMonitor, steps: dict[int, list[tuple[Any, Any]]], **end: Any) -> None:
    """Each step is a list of (loss, tokens) and lasts a second."""
    mon.begin(TrainBegin(resumed_step=min(steps) - 1))
    for step, micros in steps.items():
        mon.handle(StepBegin(step, float(step)))
        for micro, (loss, tokens) in enumerate(micros):
            mon.handle(MicroEnd(step, micro, loss, tokens))
        mon.handle(StepEnd(step, step + 1.0, **end))
    mon.handle(TrainEnd(max(steps), "completed"))
    mon.close()


class Outputs:
    """What the files of a run say of a series, step by step."""

    def __init__(self, directory: Path) -> None:
        self.run = directory / "r"
        self.rank = self.run / "rank_0"
        self.tensors = self.rank / "tensors"

    def jsonl(self, series: str) -> list[tuple[int, Any]]:
        records = read_jsonl(self.rank / "scalars.jsonl", latest=True)
        return [(record["step"], record[series]) for record in records if series in record]

    def tensorboard(self, series: str) -> list[tuple[int, float]]:
        reader = event_accumulator.EventAccumulator(
            str(self.rank / "tensorboard"), size_guidance={"scalars": 0}
        )
        return [(event.step, event.value) for event in reader.Reload().Scalars(series)]

    def csv(self, probe: str, column: str) -> list[tuple[int, str, float | None]]:
        return [(row["step"], row["name"], row[column]) for row in read_csv(self.tensors, probe, latest=True)]

    def parquet(self, probe: str, column: str) -> list[tuple[int, str, float | None]]:
        rows = read_parquet(self.tensors, probe, latest=True).to_pylist()
        return [(row["step"], row["name"], row[column]) for row in rows]

    def prometheus(self, metric: str) -> dict[tuple[str, ...], float]:
        text = (self.rank / "metrics.prom").read_text(encoding="utf-8")
        return {
            tuple(
                value for key, value in sorted(sample.labels.items()) if key not in ("run", "rank")
            ): sample.value
            for family in parser.text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == metric
        }

    def files(self) -> list[Path]:
        return [path for path in self.run.rglob("*") if path.is_file()]


def test_a_short_last_window_of_accumulation(tmp_path: Path) -> None:
    tracker = Tracker()
    micros = {1: [(1.0, 8), (2.0, 8), (3.0, 8), (4.0, 8)], 2: [(5.0, 8), (7.0, 8)]}
    train(monitor(tmp_path, tracker, loss={"micro": True}), micros)
    found = Outputs(tmp_path)
    losses = [(1, 2.5), (2, 6.0)]
    assert found.jsonl("loss/global") == found.tensorboard("loss/global") == losses
    assert [(step, values["loss/global"]) for step, values in tracker.calls] == losses
    assert found.prometheus("trainmon_loss_global") == {(): 6.0}
    rows = [(1, "0", 1.0), (1, "1", 2.0), (1, "2", 3.0), (1, "3", 4.0), (2, "0", 5.0), (2, "1", 7.0)]
    assert found.csv("loss", "loss/micro") == found.parquet("loss", "loss/micro") == rows
    assert found.jsonl("perf/tokens_per_second") == [(1, 32.0), (2, 16.0)]
    assert found.jsonl("data/tokens") == [(1, 32.0), (2, 48.0)]
    box = read_box(found.rank / "blackbox.bin")
    assert [frame.values["loss/global"] for frame in box.frames] == [2.5, 6.0]
    assert [mark.micro for mark in box.marks if mark.phase == "micro_end"] == [0, 1, 2, 3, 0, 1]


def test_a_resume_at_an_earlier_step_shows_each_step_once(tmp_path: Path) -> None:
    tracker = Tracker()
    keys = {"loss": {"micro": True}}
    train(monitor(tmp_path, tracker, **keys), {step: [(float(step), 1)] for step in range(1, 7)})
    train(monitor(tmp_path, tracker, **keys), {step: [(100.0 + step, 1)] for step in range(4, 9)})
    expected = [
        *((step, float(step)) for step in range(1, 4)),
        *((step, 100.0 + step) for step in range(4, 9)),
    ]
    found = Outputs(tmp_path)
    assert found.jsonl("loss/global") == found.tensorboard("loss/global") == expected
    tables = found.csv("loss", "loss/micro"), found.parquet("loss", "loss/micro")
    for rows in tables:
        assert [(step, value) for step, _, value in rows] == expected
    # JSONL says where the second life begins.
    records = read_jsonl(found.rank / "scalars.jsonl")
    begins = [index for index, record in enumerate(records) if record.get("record") == "run"]
    assert [(records[index]["life"], records[index]["resumed_step"]) for index in begins] == [(1, 0), (2, 3)]
    assert records[begins[1] + 1]["step"] == 4 and records[begins[1] - 1]["step"] == 6
    assert found.prometheus("trainmon_loss_global") == {(): 108.0} and found.prometheus("trainmon_life") == {
        (): 2.0
    }
    older = read_box(found.rank / "blackbox_life1.bin")
    assert (older.last_complete_step, read_box(found.rank / "blackbox.bin").last_complete_step) == (6, 8)
    assert [step for step, _ in tracker.calls] == [*range(1, 7), *range(4, 9)]


def scalar_tensors() -> Iterator[Any]:
    """0-d values that are 1.5 in bfloat16."""
    yield np.array(1.5, ml_dtypes.bfloat16)
    torch = pytest.importorskip("torch", reason="a 0-d tensor needs torch")
    yield torch.tensor(1.5, dtype=torch.bfloat16)


def test_values_of_any_scalar_type(tmp_path: Path) -> None:
    for number, rate in enumerate(scalar_tensors()):
        tracker, directory = Tracker(), tmp_path / str(number)
        mon = monitor(directory, tracker, loss={"micro": True})
        train(
            mon,
            {1: [(np.float32(0.1), np.int64(3))]},
            grad_norm=np.float64(2.5),
            samples=np.int64(3),
            overflow=np.bool_(True),
            learning_rates={"0": rate},
        )
        found = Outputs(directory)
        (_, values), *_ = tracker.calls
        expected = {
            "loss/global": 0.10000000149011612,
            "grad/norm": 2.5,
            "perf/samples_per_second": 3.0,
            "optim/overflow": 1.0,
            "optim/lr": 1.5,
        }
        for series, value in expected.items():
            assert found.jsonl(series) == [(1, value)] and values[series] == value
            assert type(values[series]) is float
            assert found.tensorboard(series) == [(1, float(np.float32(value)))]
            metric = f"trainmon_{series.replace('/', '_')}"
            assert found.prometheus(metric) == {(): value}
        assert {type(value) for value in values.values()} == {float}
        rows = found.csv("loss", "loss/micro")
        assert rows == found.parquet("loss", "loss/micro") == [(1, "0", 0.10000000149011612)]
        frame = read_box(found.rank / "blackbox.bin").frames[-1]
        assert frame.values.items() >= expected.items()
        for path in found.files():
            content = path.read_bytes()
            assert b"np." not in content and b"tensor(" not in content, path
        assert {path.name for path in found.files()} >= {
            "run.json",
            "log.txt",
            "scalars.jsonl",
            "metrics.prom",
        }


def test_names_with_commas_and_quotes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the names are those of a ModuleDict")
    import trainmon

    model = torch.nn.ModuleDict({"a,b": torch.nn.Linear(2, 2), 'c"d': torch.nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {True: ["a,b.weight", "a,b.bias"], False: ["a,b.weight", "a,b.bias", 'c"d.weight', 'c"d.bias']}
    for selected, shown in names.items():
        directory = tmp_path / str(selected)
        gradients: dict[str, Any] = {"per_parameter": True, **({"target": "a,b"} if selected else {})}
        config = {"output_dir": str(directory), "run_name": "r", "sinks": SINKS, "gradients": gradients}
        with trainmon.attach(model, optimizer, config) as mon:
            for _ in range(2):
                sum(layer(torch.ones(1, 2)).sum() for layer in model.values()).backward()
                mon.grads_ready()
                optimizer.step()
                optimizer.zero_grad()
                mon.step_end(loss=1.0)
        found = Outputs(directory)
        (path,) = found.tensors.glob("gradients_*.csv")
        with path.open(newline="", encoding="utf-8") as stream:
            header, *rows = csv.reader(stream)
        assert {len(row) for row in rows} == {len(header)} and len(rows) == 2 * len(shown)
        assert sorted({row[1] for row in rows}) == sorted(shown)
        expected = [(1, name, 2.0 if "weight" in name else math.sqrt(2)) for name in shown]
        assert found.csv("gradients", "grad/norm")[: len(shown)] == expected
        assert found.parquet("gradients", "grad/norm")[: len(shown)] == expected
        labels = found.prometheus("trainmon_grad_norm_by_parameter")
        assert {label for (label,) in labels} == set(shown)
        reader = event_accumulator.EventAccumulator(str(found.rank / "tensorboard")).Reload()
        text = reader.Tensors("grad/norm/worst")[0].tensor_proto.string_val[0].decode()
        assert {line.split(". ", 1)[1] for line in text.splitlines()} == set(shown)


# -- sinks that fail while a run goes on


def with_sink(monkeypatch: pytest.MonkeyPatch, sink: Any) -> None:
    monkeypatch.setattr("trainmon.run.build_sinks", lambda config: [*build_sinks(config), sink])


def losses_of(directory: Path) -> dict[str, Any]:
    run = read_run(directory / "r")
    assert run is not None and run["lives"][-1]["status"] == "completed"
    counted: dict[str, Any] = run["lives"][-1]["counters"]["sinks"]
    return counted


def kinds(directory: Path) -> list[str]:
    return [record["kind"] for record in read_jsonl(directory / "r/rank_0/events.jsonl") if "kind" in record]


STEPS = {step: [(1.0, 1)] for step in range(1, 31)}


def test_a_sink_that_raises_is_switched_off_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Memory("broken")
    sink.errors = [None, RuntimeError("a"), None, ValueError("b"), KeyError("c"), OSError(5, "d")]
    with_sink(monkeypatch, sink)
    mon = monitor(tmp_path)
    train(mon, STEPS)
    # Step 1, 3: well; 2: one failure; 4, 5, 6: three in a row.
    assert [item for item in sink.items if isinstance(item, int)] == [1, 3]
    assert [step for step, _ in Outputs(tmp_path).jsonl("loss/global")] == list(STEPS)
    assert kinds(tmp_path) == ["sink_off", "sink_losses"]
    assert losses_of(tmp_path) == {"failed_calls": {"broken": 4}, "switched_off": ["broken"]}
    assert mon.summary().switched_off == ("broken",)


def test_a_sink_that_blocks_costs_its_own_steps_never_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmon.run.CLOSING", 0.3)
    sink = Memory("stuck")
    sink.gate.clear()
    with_sink(monkeypatch, sink)
    began = time.monotonic()
    train(limited(tmp_path, 8), STEPS)
    assert time.monotonic() - began < 30
    counted = losses_of(tmp_path)
    # At most one step is in the sink's hands (none, if the others were still opening), eight wait, the rest was dropped.
    assert set(counted) == {"steps_dropped", "steps_unwritten"} and counted["steps_unwritten"] <= 8
    assert sum(counted.values()) in (29, 30)
    assert read_box(tmp_path / "r/rank_0/blackbox.bin").last_complete_step == 30
    sink.gate.set()


def limited(directory: Path, queue: int) -> TrainMonitor:
    return monitor(directory, sinks={**SINKS, "queue": queue})


def test_a_slow_sink_loses_steps_with_a_count_and_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Memory("slow")
    sink.gate.clear()
    with_sink(monkeypatch, sink)
    threading.Timer(2.0, sink.gate.set).start()
    train(limited(tmp_path, 8), STEPS)
    shown = [item for item in sink.items if isinstance(item, int)]
    counted = losses_of(tmp_path)
    assert counted == {"steps_dropped": 30 - len(shown)} and counted["steps_dropped"] > 0
    # The newest are kept, and every sink saw the same steps.
    assert shown[-8:] == list(range(23, 31))
    assert [step for step, _ in Outputs(tmp_path).jsonl("loss/global")] == shown
    assert kinds(tmp_path) == ["sinks_slow", "sink_losses"]


def test_a_full_disk_costs_records_never_the_training(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        mon = monitor(disk, gradients={"per_parameter": True})
        mon.begin(TrainBegin())
        names = [f"layers.{n}.weight" for n in range(400)]
        arrays = [np.ones(4, np.float32)] * len(names)

        def steps(numbers: range) -> None:
            for step in numbers:
                mon.handle(StepBegin(step, float(step)))
                mon.handle(GradsReady(step, TensorView(names, arrays), "reduced"))
                mon.handle(StepEnd(step, step + 1.0, loss=1.0))

        steps(range(1, 4))
        assert mon._run is not None and mon._run.writer.flush(60)
        with (disk / "ballast").open("wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(4096))
            except OSError:
                pass
        steps(range(4, 60))
        assert mon._run.writer.flush(60)
        (disk / "ballast").unlink()
        steps(range(60, 63))
        mon.handle(TrainEnd(62, "completed"))
        mon.close()
        found = Outputs(disk)
        counted = losses_of(disk)
        assert set(counted) == {"lost_to_full_disk"} and {"csv", "jsonl", "parquet"} <= set(
            counted["lost_to_full_disk"]
        )
        shown = [step for step, _ in found.jsonl("loss/global")]
        assert shown[:3] == [1, 2, 3] and shown[-3:] == [60, 61, 62]
        assert len(shown) == 62 - counted["lost_to_full_disk"]["jsonl"]
        tables = found.csv("gradients", "grad/norm"), found.parquet("gradients", "grad/norm")
        for sink, rows in zip(("csv", "parquet"), tables, strict=True):
            per_step = {step: sum(1 for row in rows if row[0] == step) for step, _, _ in rows}
            # Whole steps only, and each lost one counted.
            assert set(per_step.values()) == {400}
            assert len(per_step) == 62 - counted["lost_to_full_disk"][sink]
        assert {60, 61, 62} <= {step for step, _, _ in found.csv("gradients", "grad/norm")}
        box = read_box(found.rank / "blackbox.bin")
        assert box.last_complete_step == 62 and box.torn == {}
        assert "disk_full" in kinds(disk) or "disk_room" in kinds(disk)
    finally:
        subprocess.run(["umount", disk], check=True)
