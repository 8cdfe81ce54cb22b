"""``trainmon replay`` on a run whose spikes are known, through the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainmon.cli import main
from trainmon.events import MicroEnd, StepBegin, StepEnd, TrainBegin, TrainEnd
from trainmon.health.replay import Label, every_detector, replay
from trainmon.health.rules import Rule
from trainmon.monitor import TrainMonitor

SPIKES = (200, 310)
RULES = """
rules:
  - {name: "[/b]usual", series: loss/global, detector: mad}
  - {name: blind, series: loss/global, detector: threshold, parameters: {above: 100}, action: [stop, notify]}
  - {name: jumpy, series: loss/global, detector: mad, parameters: {k: 3}, consecutive: 2, cooldown: 10, action: skip_step}
"""
LABELS = "[{start: 201, stop: 204, name: bad batch}, 310, 399]"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 steps of noise with two spikes: four steps from 200 on, one step at 310."""
    directory = tmp_path_factory.mktemp("replay")
    losses = np.random.default_rng(4).normal(3.0, 0.05, 401)
    losses[200:204] += 4
    losses[310] += 4
    monitor = TrainMonitor({"output_dir": str(directory), "run_name": "r", "sinks": {"log": False}})
    monitor.begin(TrainBegin())
    for step in range(1, 401):
        monitor.handle(StepBegin(step, float(step)))
        monitor.handle(MicroEnd(step, 0, float(losses[step]), 8))
        monitor.handle(StepEnd(step, step + 1.0))
    monitor.handle(TrainEnd(400, "completed"))
    monitor.close()
    return directory / "r"


@pytest.fixture
def files(tmp_path: Path) -> Callable[[str, str], str]:
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_alarms_leads_and_misses(run: Path, files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "replay",
        str(run),
        "--rules",
        files("r.yaml", RULES),
        "--labels",
        files("l.yaml", LABELS),
        "--json",
    ]
    assert main([*arguments, "--before", "10", "--after", "0"]) == 0
    usual, blind, jumpy = json.loads(capsys.readouterr().out)
    assert usual["steps"] == 400 and usual["alarms"] == [*SPIKES] and usual["alarms_per_1000"] == 5.0
    assert usual["caught"] == {"bad batch (201-204)": 1, "310": 0} and usual["lead"] == 0.5
    assert usual["missed"] == ["399"] and usual["elsewhere"] == 0
    assert blind["alarms"] == [] and blind["lead"] is None and len(blind["missed"]) == 3
    assert jumpy["alarms"] == [201], "two in a row"


def test_the_table_shows_names_as_they_are(run: Path, files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(run / "rank_0/scalars.jsonl")
    assert main(["replay", path, "--rules", files("r.yaml", RULES)]) == 0
    table = capsys.readouterr().out
    assert (
        "[/b]usual" in table and "200, 310" in table and "Steps 1 to 400" in table and "caught" not in table
    )


def test_a_run_says_the_same_as_its_replay(run: Path) -> None:
    from trainmon.sinks.jsonl import read_jsonl

    said = [
        event["step"] for event in read_jsonl(run / "rank_0/events.jsonl") if event.get("kind") == "alarm"
    ]
    records = read_jsonl(run / "rank_0/scalars.jsonl", latest=True)
    (again,) = replay(records, [Rule("loss spike", ("loss/global",), "mad")])
    assert said == again.alarms == [*SPIKES]


def test_every_detector_without_a_file_of_rules(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--json"]) == 0
    found = {one["detector"]: one for one in json.loads(capsys.readouterr().out)}
    assert {"mad", "cusum", "ewma", "skip_step_sigma", "zclip", "nonfinite"} <= found.keys()
    assert found["mad"]["alarms"] == [*SPIKES] and found["nonfinite"]["alarms"] == []
    assert "global_norm_spike" not in found, "nobody can guess its limit"
    assert {rule.parameters.get("log") for rule in every_detector() if rule.detector == "ewma"} == {None, 1.0}


def test_labels_far_from_any_alarm_are_missed() -> None:
    records = [{"step": step, "loss/global": 9.0 if step == 50 else 1.0} for step in range(1, 101)]
    rule = Rule("r", ("loss/global",), "threshold", {"above": 5.0})
    (one,) = replay(records, [rule], [Label(60, 60), Label(80, 80), Label(20, 29)], before=10, after=20)
    assert one.caught == {"60": 10} and one.missed == ["80", "20-29"] and one.elsewhere == 0
    (one,) = replay(records, [rule], [Label(20, 30)], before=10, after=20)
    assert one.caught == {"20-30": -30}, "late"
    (one,) = replay(records, [rule], [Label(99, 99)], before=10, after=20)
    assert one.elsewhere == 1


@pytest.mark.parametrize(
    ("rules", "labels", "message"),
    [
        (
            "rules: [{series: loss/global, detector: madd}]",
            None,
            "r.yaml:1:41: rules[0].detector: expected the id",
        ),
        (
            "health: {rules: [{series: loss/global, detector: mad, action: notify}]}",
            None,
            "notify needs a webhook",
        ),
        ("health: false", None, "the section health is off"),
        (None, "3", "expected a list of steps"),
        (None, "[{start: 5, stop: 4}]", "l.yaml:1:19: [0].stop: expected a step of at least start (5)"),
        (None, "[{stop: 4}]", "expected the first step"),
    ],
)
def test_what_cannot_be_used_is_said_with_its_place(
    run: Path,
    files: Any,
    capsys: pytest.CaptureFixture[str],
    rules: str | None,
    labels: str | None,
    message: str,
) -> None:
    extra = [
        *(["--rules", files("r.yaml", rules)] if rules else []),
        *(["--labels", files("l.yaml", labels)] if labels else []),
    ]
    assert main(["replay", str(run), *extra]) == 2
    assert message in capsys.readouterr().err


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    assert "scalars.jsonl: No such file" in capsys.readouterr().err
    (tmp_path / "x.jsonl").write_text('{"record": "run"}\n')
    assert main(["replay", str(tmp_path / "x.jsonl")]) == 2
    assert "holds no steps" in capsys.readouterr().err
