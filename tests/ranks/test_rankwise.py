"""The ranks' own values side by side, on real gloo ranks: files, the message, a rank that stands out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.gloo import on_ranks

STEPS = 8


def watch(directory: str, keys: dict[str, Any]) -> Any:
    """Steps of about a second, of five on rank 2 from step 3 on; rank 1 has no loss in step 4 and NaN in step 5."""
    from trainmon.dist.torch_group import TorchGroup
    from trainmon.events import Layout, MicroEnd, StepBegin, StepEnd, TrainBegin, TrainEnd
    from trainmon.monitor import TrainMonitor
    from trainmon.sinks.jsonl import read_jsonl

    group = TorchGroup()
    monitor = TrainMonitor({"output_dir": directory, "run_name": "r", "sinks": {"log": False}, **keys})
    monitor.begin(TrainBegin(layout=Layout(group.rank, group.size)), None, group)
    now = 0.0
    for step in range(1, STEPS + 1):
        monitor.handle(StepBegin(step, now))
        loss = math.nan if group.rank == 1 and step == 5 else float(group.rank + step)
        if (group.rank, step) != (1, 4):
            monitor.handle(MicroEnd(step, 0, loss, 10))
        now += 5.0 if group.rank == 2 and step >= 3 else 1.0 + group.rank / 1000
        monitor.handle(StepEnd(step, now))
    monitor.handle(TrainEnd(STEPS, "completed"))
    monitor.close()
    place = Path(directory) / "r/rank_0"
    if group.rank or not (place / "ranks.jsonl").exists():
        return None
    return read_jsonl(place / "ranks.jsonl"), read_jsonl(place / "events.jsonl")


def test_each_ranks_own_values_and_the_rank_that_stands_out(tmp_path: Path) -> None:
    records, events = on_ranks(4, watch, str(tmp_path), {"comparison": {"every": 1}})[0]
    steps = {record["step"]: record["series"] for record in records if "step" in record}
    assert sorted(steps) == list(range(1, STEPS + 1))
    loss = steps[1]["loss/global"]
    assert (loss["low"], loss["low_rank"], loss["high"], loss["high_rank"]) == (1.0, 0, 4.0, 3)
    assert (loss["median"], loss["spread"], loss["known"], loss["outliers"]) == (2.5, 3.0, 4, [])
    assert (steps[4]["loss/global"]["known"], steps[5]["loss/global"]["nonfinite"]) == (3, [1])
    assert steps[2]["loss/device"]["low"] == 2.0 and steps[2]["loss/device"]["high_rank"] == 3
    time = steps[3]["time/step"]
    assert (time["high"], time["high_rank"], time["outliers"]) == (5.0, 2, [2])
    said = [event for event in events if event.get("kind") == "rank_stands_out"]
    behind = {event["data"]["series"] for event in said if event["data"]["rank"] == 1}
    assert behind == {"data/tokens"}, "a micro-batch less than the others"
    (slow,) = [event for event in said if event["data"]["series"] == "time/step"]
    assert slow["text"].startswith("time/step of rank 2 stands out among 4 ranks: the median is 1.002")


@pytest.mark.parametrize(("keys", "expected"), [({}, [1]), ({"comparison": False}, None)])
def test_now_and_then_or_never(keys: dict[str, Any], expected: list[int] | None, tmp_path: Path) -> None:
    found = on_ranks(2, watch, str(tmp_path), keys)[0]
    assert (found and [record["step"] for record in found[0] if "step" in record]) == expected
