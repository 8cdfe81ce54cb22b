"""Rules that are edited while the run goes on."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="a real loop is edited")

import trainmon  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402

HEAD = "run_name: r\nsinks: {log: false}\nweights: {every: 1}\n"
STOP = "{series: [loss/global, grad/norm], detector: nonfinite, action: stop, name: n}"


def train(path: Path, edits: dict[int, str], bad: int, steps: int = 10) -> tuple[int, list[dict[str, Any]]]:
    """Steps that were taken, and the messages; the loss of step `bad` is NaN."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = 0
    with trainmon.attach(model, optimizer, str(path), output_dir=str(path.parent)) as mon:
        for step in range(1, steps + 1):
            if step in edits:
                path.write_text(edits[step])
                os.utime(path, ns=(step * 10**9, step * 10**9))
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            mon.micro_end(math.nan if step == bad else loss, 2)
            if not mon.grads_ready().skip:
                optimizer.step()
                done = step
            optimizer.zero_grad()
            mon.step_end()
            if mon.should_stop:
                break
    events = read_jsonl(path.parent / "r/rank_0/events.jsonl")
    return done, [event for event in events if "kind" in event]


def test_a_rule_that_comes_under_way_holds_from_the_next_step_on(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(HEAD)
    done, events = train(path, {3: HEAD + f"health: {{rules: [{STOP}]}}\n"}, bad=6)
    assert done == 6
    kinds = [event["kind"] for event in events]
    assert kinds.index("config_changed") < kinds.index("stop")
    restored = next(event for event in events if event["kind"] == "health_restored")
    assert "other" in restored["text"]


def test_the_gate_may_come_under_way_and_go(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(HEAD)
    gated = HEAD + f"health: {{gate: before_update, rules: [{STOP}]}}\n"
    assert train(path, {3: gated}, bad=6)[0] == 5, "weights of step 6 stay as they are"
    other = tmp_path / "b" / "c.yaml"
    other.parent.mkdir()
    other.write_text(gated)
    assert train(other, {3: HEAD + "health: false\n"}, bad=6)[0] == 10


@pytest.mark.parametrize(
    "wrong",
    [
        "health: {rules: [{series: loss/global, detector: madd}]}",
        "health: {rules: [{series: loss/global, detector: mad, action: skip_step}]}",
        # Known only where the run's series are: all ranks find it when they take the configuration.
        "health: {gate: before_update, rules: [{series: weight/norm, detector: mad, action: skip_step}]}",
    ],
)
def test_wrong_rules_are_said_and_the_old_ones_go_on(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(HEAD + f"health: {{rules: [{STOP}]}}\n")
    done, events = train(path, {3: HEAD + wrong + "\n"}, bad=7)
    assert done == 7
    (said,) = [event for event in events if event["kind"] == "config_ignored"]
    assert "health" in said["text"]
    assert [event["kind"] for event in events].count("stop") == 1
