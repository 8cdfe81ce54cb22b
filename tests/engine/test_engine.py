"""The engine without a framework: events in, files out (read back with the readers that users have)."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trainmon.backend.host import HostBackend
from trainmon.config import ConfigError
from trainmon.events import (
    GradsReady,
    Layout,
    MicroEnd,
    StepBegin,
    StepEnd,
    TensorView,
    TrainBegin,
    TrainEnd,
)
from trainmon.frame import Frame, Registry, ratio
from trainmon.monitor import TrainMonitor
from trainmon.schedule import Schedule
from trainmon.sinks.jsonl import read_jsonl
from trainmon.sinks.run_file import read_run


def monitor(tmp_path: Path, **keys: Any) -> TrainMonitor:
    sinks = keys.pop("sinks", {"log": False})
    return TrainMonitor({"output_dir": str(tmp_path), "run_name": "r", "sinks": sinks, **keys})


def steps_of(tmp_path: Path) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(tmp_path / "r/rank_0/scalars.jsonl") if "step" in record]


def events_of(tmp_path: Path) -> list[dict[str, Any]]:
    return read_jsonl(tmp_path / "r/rank_0/events.jsonl")


def run(mon: TrainMonitor, steps: list[list[tuple[Any, Any]]], first: int = 1, **begin: Any) -> None:
    """Each step is a list of (loss, tokens) and lasts one second."""
    mon.begin(TrainBegin(resumed_step=first - 1, **begin))
    for number, micros in enumerate(steps, start=first):
        mon.handle(StepBegin(number, float(number)))
        for index, (loss, tokens) in enumerate(micros):
            mon.handle(MicroEnd(number, index, loss, tokens))
        mon.handle(StepEnd(number, number + 1.0))
    mon.handle(TrainEnd(first + len(steps) - 1, "completed"))
    mon.close()


def test_schedule_first_step_multiples_window_and_count() -> None:
    every = Schedule(5)
    assert [s for s in range(3, 21) if every.due(s)] == [3, 5, 10, 15, 20]
    window = Schedule(start=4, stop=10, interval=3)
    assert [s for s in range(1, 15) if window.due(s)] == [4, 7, 10]
    counted = Schedule(count=2)
    assert [s for s in range(1, 9) if counted.due(s)] == [1, 2]
    assert [s for s in range(1, 9) if counted.due(s)] == [1, 2], "re-armed when the step goes back"


def test_frame_layout_is_sum_max_local_and_null_is_not_zero() -> None:
    registry = Registry()
    local = registry.part("x", "local")
    low, s, n = registry.part("low", "min"), registry.part("s", "sum"), registry.part("n", "sum")
    registry.add("loss/global", (s, n), ratio, probe="loss")
    registry.freeze()
    frame = Frame(registry)
    assert (s.offset, n.offset, low.offset, local.offset) == (0, 1, 2, 3)
    frame.add(low, 3.0)
    frame.add(low, -2.0)
    assert frame.maxima.tolist() == [2.0] and frame.get(low)[0].tolist() == [-2.0]
    shot = frame.snapshot(wall_time=0, elapsed=0, total_steps=None, due=lambda _: True)
    assert shot.scalars == {"loss/global": None}
    frame.set(s, 3.0)
    frame.set(n, 0.0)
    assert (
        frame.snapshot(wall_time=0, elapsed=0, total_steps=None, due=lambda _: True).scalars["loss/global"]
        is None
    )
    with pytest.raises(ValueError, match="catalogue"):
        Registry().add("no/such", (), probe="x")


def test_frame_maximum_keeps_nan() -> None:
    registry = Registry()
    top = registry.part("top", "max")
    registry.freeze()
    frame = Frame(registry)
    for value in (1.0, math.nan, 2.0):
        frame.add(top, value)
    assert math.isnan(frame.get(top)[0][0])


def test_loss_is_token_weighted_and_uncounted_micro_batches_are_left_out(tmp_path: Path) -> None:
    nan = math.nan
    run(
        monitor(tmp_path),
        [[(2.0, 3), (nan, 0), (4.0, 1)], [(nan, 0)], [(nan, 2)], [(6 / 3, 3), (4.0, 1)]],
    )
    first, empty, bad, check = steps_of(tmp_path)
    assert first["loss/global"] == 2.5 and first["loss/gap"] == 0.5 and first["loss/mean_of_means"] == 3.0
    assert empty["loss/global"] is None and empty["loss/gap"] is None and empty["loss/empty_steps"] == 1
    assert math.isnan(bad["loss/global"])
    assert check["loss/global"] == 2.5 and check["loss/gap"] == 0.5
    said = [event for event in events_of(tmp_path) if event.get("kind") == "nonfinite_loss"]
    assert len(said) == 1 and "micro-batch 0 of step 3" in said[0]["text"]


def test_empty_steps_are_counted_when_numbers_come_a_step_late(tmp_path: Path) -> None:
    class Late(HostBackend):
        deferred = True

    mon = monitor(tmp_path, loss={"every": 2})
    mon.begin(TrainBegin(), Late())
    for number in range(1, 6):
        mon.handle(StepBegin(number, float(number)))
        mon.handle(MicroEnd(number, 0, 1.0, 0 if number == 2 else 3))
        mon.handle(StepEnd(number, number + 1.0))
    mon.handle(TrainEnd(5, "completed"))
    mon.close()
    shown = {record["step"]: record.get("loss/empty_steps") for record in steps_of(tmp_path)}
    assert (shown[1], shown[2], shown[4]) == (0, 1, 1)


def test_short_last_window_of_accumulation(tmp_path: Path) -> None:
    run(monitor(tmp_path), [[(1.0, 8), (2.0, 8), (3.0, 8), (4.0, 8)], [(5.0, 8), (7.0, 8)]])
    assert [record["loss/global"] for record in steps_of(tmp_path)] == [2.5, 6.0]
    assert [record["perf/tokens_per_second"] for record in steps_of(tmp_path)] == [32.0, 16.0]


def test_micro_losses_of_any_number(tmp_path: Path) -> None:
    sinks = {"log": False, "csv": True}
    many = [(float(value), 1) for value in range(11)]
    run(monitor(tmp_path, loss={"micro": True}, sinks=sinks), [many, many[:2]])
    (path,) = (tmp_path / "r/rank_0/tensors").glob("loss_*.csv")
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    assert [(row[0], row[1], float(row[2])) for row in rows] == [
        *(("1", str(value), float(value)) for value in range(11)),
        *(("2", str(value), float(value)) for value in range(2)),
    ]


def test_this_ranks_own_losses_at_an_interval_of_their_own(tmp_path: Path) -> None:
    loss = {"micro": True, "device": True, "own_every": 3, "perplexity": True}
    run(monitor(tmp_path, loss=loss), [[(1.0 + step, 2), (3.0, 2)] for step in range(6)])
    records = steps_of(tmp_path)
    assert [record["loss/global"] for record in records] == [2.0, 2.5, 3.0, 3.5, 4.0, 4.5]
    assert all(record["loss/ppl"] == pytest.approx(math.exp(record["loss/global"])) for record in records)
    own = {record["step"]: record["loss/device"] for record in records if "loss/device" in record}
    assert own == {1: 2.0, 3: 3.0, 6: 4.5}
    rows = (tmp_path / "r/rank_0/tensors").glob("loss_*.csv")
    text = [line.split(",")[0] for path in rows for line in path.read_text().splitlines()[1:]]
    assert sorted(set(text)) == ["1", "3", "6"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_loss_is_said_once_though_two_look_at_it(tmp_path: Path, value: float) -> None:
    run(monitor(tmp_path, loss={"micro": True, "own_every": 2}), [[(1.0, 1)], [(value, 1)], [(1.0, 1)]])
    told = [event for event in events_of(tmp_path) if event.get("level") in ("warning", "error")]
    assert len([event for event in told if "loss" in event["text"]]) == 1


def gradients(step: int, **norms: float) -> GradsReady:
    tensors = [np.array([value], np.float32) for value in norms.values()]
    return GradsReady(step, TensorView(list(norms), tensors), "reduced")


@pytest.mark.parametrize(
    ("keys", "norm"),
    [
        ({}, None),
        ({"target": "a"}, 3.0),
        ({"target": "a", "invert": True}, 4.0),
        ({"exclude": "a"}, 4.0),
        ({"target": "c"}, 0.0),
        ({"target": "."}, 5.0),
    ],
)
def test_the_norm_of_the_selected_parameters_has_a_name_of_its_own(
    tmp_path: Path, keys: dict[str, Any], norm: float | None
) -> None:
    mon = monitor(tmp_path, gradients=keys)
    mon.begin(TrainBegin())
    mon.handle(StepBegin(1, 1.0))
    mon.handle(gradients(1, a=3.0, b=4.0))
    mon.handle(StepEnd(1, 2.0))
    mon.close()
    (record,) = steps_of(tmp_path)
    assert record["grad/norm"] == 5.0 and record.get("grad/norm_selected") == norm
    assert ("grad/norm_selected" in record) is (norm is not None)


def test_rates_and_time_left_after_a_resume(tmp_path: Path) -> None:
    run(monitor(tmp_path), [[(1.0, 1000)]] * 6, first=101, total_steps=200, consumed_tokens=1_000_000)
    records = steps_of(tmp_path)
    assert [record["perf/tokens_per_second"] for record in records] == [1000.0] * 6
    assert records[-1]["time/eta"] == 94.0 and records[-1]["data/tokens"] == 1_006_000
    assert records[0]["time/eta"] is None


def test_totals_go_on_from_the_run_s_own_file(tmp_path: Path) -> None:
    """Where the host doesn't know what earlier lives consumed; what came after the step doesn't count."""
    run(monitor(tmp_path), [[(1.0, 1000)]] * 4, consumed_tokens=0)
    run(monitor(tmp_path), [[(1.0, 10)]] * 3, first=3)
    assert [record["data/tokens"] for record in steps_of(tmp_path)][4:] == [2010, 2020, 2030]
    run(monitor(tmp_path), [[(1.0, 1)]], first=5)  # the newest life that had the step
    assert steps_of(tmp_path)[-1]["data/tokens"] == 2021
    run(monitor(tmp_path / "elsewhere"), [[(1.0, 10)]], first=3)
    (record,) = steps_of(tmp_path / "elsewhere")
    assert record["data/tokens"] is None and record["perf/tokens_per_second"] == 10


def test_values_of_any_scalar_type(tmp_path: Path) -> None:
    mon = monitor(tmp_path)
    mon.begin(TrainBegin())
    mon.handle(StepBegin(1, 0.0))
    mon.handle(
        StepEnd(
            1,
            1.0,
            loss=np.float32(0.1),
            grad_norm=np.float64(2.5),
            tokens=np.int64(3),
            overflow=np.bool_(True),
            learning_rates={"0": np.array(1.5, ml_dtypes.bfloat16)},
        )
    )
    mon.close()
    (record,) = steps_of(tmp_path)
    assert record["loss/global"] == 0.10000000149011612 and record["grad/norm"] == 2.5
    assert (
        record["perf/tokens_per_second"] == 3 and record["optim/lr"] == 1.5 and record["optim/overflow"] == 1
    )
    text = (tmp_path / "r/rank_0/scalars.jsonl").read_text()
    assert "np." not in text and "tensor(" not in text


def test_second_life_is_marked_and_replaces_its_steps(tmp_path: Path) -> None:
    run(monitor(tmp_path), [[(float(step), 1)] for step in range(1, 7)])
    run(monitor(tmp_path), [[(100.0 + step, 1)] for step in range(4, 9)], first=4)
    path = tmp_path / "r/rank_0/scalars.jsonl"
    latest = {r["step"]: r["loss/global"] for r in read_jsonl(path, latest=True) if "step" in r}
    assert latest == {1: 1, 2: 2, 3: 3, 4: 104, 5: 105, 6: 106, 7: 107, 8: 108}
    run_file = read_run(tmp_path / "r")
    assert run_file is not None
    assert [(life["resumed_step"], life["status"]) for life in run_file["lives"]] == [
        (0, "completed"),
        (3, "completed"),
    ]


def test_nonfinite_gradient_is_named_once(tmp_path: Path) -> None:
    mon = monitor(tmp_path, gradients={"per_parameter": True})
    mon.begin(TrainBegin())
    good, bad = np.array([3.0, 4.0], np.float32), np.array([1.0, np.nan, np.inf], np.float32)
    for step, second in enumerate((bad, bad, bad[:1]), start=1):
        mon.handle(StepBegin(step, float(step)))
        mon.handle(GradsReady(step, TensorView(["a,b", "[/b]w"], [good, second]), "reduced"))
        mon.handle(StepEnd(step, step + 1.0))
    mon.close()
    records, said = steps_of(tmp_path), events_of(tmp_path)
    assert [record["grad/nonfinite"] for record in records] == [2, 2, 0]
    assert math.isnan(records[0]["grad/norm"]) and records[2]["grad/norm"] == math.sqrt(26)
    (event,) = [event for event in said if event.get("kind") == "nonfinite_gradient"]
    assert (
        "[/b]w" in event["text"]
        and event["data"]["first"]["index"] == 1
        and event["data"]["first"]["counts"]
        == {
            "nan": 1,
            "+inf": 1,
        }
    )
    assert any(event.get("kind") == "finite_again" for event in said)


def test_a_failing_probe_is_switched_off_after_three_and_the_run_goes_on(tmp_path: Path) -> None:
    mon = monitor(tmp_path)
    run(mon, [[("no number", 1)]] * 5)
    kinds = [event.get("kind") for event in events_of(tmp_path)]
    assert kinds.count("probe_failed") == 1 and kinds.count("probe_off") == 1
    assert "loss/global" not in steps_of(tmp_path)[-1] and "time/step" in steps_of(tmp_path)[-1]
    assert mon.summary().switched_off == ("loss",)


def test_finished_frames_are_shown_to_readers_and_what_they_raise_is_said(tmp_path: Path) -> None:
    mon, seen = monitor(tmp_path), []

    def broken(_snapshot: Any) -> None:
        raise OSError("no place")

    mon.read_by(broken)
    mon.read_by(lambda snapshot: seen.append((snapshot.step, snapshot.scalars["loss/global"])))
    run(mon, [[(2.0, 1)], [(3.0, 1)]])
    assert seen == [(1, 2.0), (2, 3.0)]
    assert sum("no place" in event.get("text", "") for event in events_of(tmp_path)) == 1


def test_unwritable_output_directory_is_said_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    mon = TrainMonitor({"output_dir": str(tmp_path / "file"), "run_name": "r"})
    run(mon, [[(1.0, 1)]])
    assert "can't be written" in capfd.readouterr().err
    assert mon.summary().last_loss == 1.0 and mon.summary().directory is None


def test_sections_switched_off_publish_nothing(tmp_path: Path) -> None:
    off = dict.fromkeys(("loss", "gradients", "weights", "throughput", "timing"), False)
    run(monitor(tmp_path, **off), [[(1.0, 1)]])
    assert steps_of(tmp_path) == []
    run(monitor(tmp_path / "b", gradients=False, every=3), [[(float(s), 2)] for s in range(1, 8)])
    records = steps_of(tmp_path / "b")
    assert [record["step"] for record in records] == [1, 3, 6]
    assert records[-1]["data/tokens"] == 12, "totals count steps that are not shown"


def test_the_learning_rate_is_shown_with_the_loss_and_with_the_gradients(tmp_path: Path) -> None:
    mon = monitor(tmp_path, loss={"every": 4}, gradients={"every": 3}, throughput=False, timing=False)
    mon.begin(TrainBegin())
    for step in range(1, 7):
        mon.handle(StepBegin(step, float(step)))
        mon.handle(StepEnd(step, step + 1.0, loss=1.0, learning_rates={"0": 0.5}))
    mon.close()
    assert {record["step"]: record["optim/lr"] for record in steps_of(tmp_path)} == dict.fromkeys(
        (1, 3, 4, 6), 0.5
    )


def test_a_section_that_is_not_built_yet_says_so() -> None:
    with pytest.raises(ConfigError, match="not built yet"):
        TrainMonitor({"profiler": {"every": 10}})


@pytest.mark.parametrize(
    ("name", "folder"), [("../../x", "_._.._x"), ("a/b", "a_b"), ("..", "_."), ("a</script>", "a<_script>")]
)
def test_a_run_name_is_one_folder_of_the_output_directory(tmp_path: Path, name: str, folder: str) -> None:
    mon = TrainMonitor({"output_dir": str(tmp_path / "o"), "run_name": name, "sinks": {"log": False}})
    run(mon, [[(1.0, 1)]])
    assert [path.name for path in (tmp_path / "o").iterdir()] == [folder]
    record = read_run(tmp_path / "o" / folder)
    assert record is not None and record["run"] == name
    assert [path.name for path in tmp_path.iterdir()] == ["o"]


def test_a_forked_child_does_not_end_the_run(tmp_path: Path) -> None:
    mon = monitor(tmp_path)
    mon.begin(TrainBegin())
    child = os.fork()
    if child == 0:
        mon.close()
        os._exit(0)
    os.waitpid(child, 0)
    record = read_run(tmp_path / "r")
    assert record is not None and record["lives"][-1]["status"] == "running"
    mon.close()


@pytest.mark.parametrize(("ranks", "writes"), [(None, False), ([1], True), ("all", True)])
def test_another_rank_writes_if_it_is_asked_to_and_says_that_values_are_its_own(
    tmp_path: Path, ranks: Any, writes: bool
) -> None:
    run(monitor(tmp_path, ranks=ranks), [[(1.0, 1)]], layout=Layout(rank=1, world=2))
    assert (tmp_path / "r/rank_1/scalars.jsonl").exists() == writes
    assert not (tmp_path / "r/run.json").exists(), "rank 0's"
    if writes:
        said = [
            e for e in read_jsonl(tmp_path / "r/rank_1/events.jsonl") if e.get("kind") == "ranks_not_merged"
        ]
        assert len(said) == 1 and "rank 1's own" in said[0]["text"]
