"""Decisions that all ranks take at the same step: NaN in a loss, a gradient, a weight; a killed rank; nobody hangs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import watched
from tests.ranks.gloo import on_ranks

STOP = {**watched.STOP, "action": "stop"}
LATE: dict[str, Any] = {"rules": [STOP]}
GATE: dict[str, Any] = {"gate": "before_update", "rules": [STOP]}
SKIP: dict[str, Any] = {"gate": "before_update", "rules": [{**STOP, "action": "skip_step"}]}

STORIES: dict[str, tuple[Any, ...]] = {
    "loss": (LATE, ("loss", 2, 3)),
    "gradient": (LATE, ("gradient", 1, 3)),
    "backward": (LATE, ("backward", 2, 3)),
    "weight": (LATE, ("weight", 3, 3)),
    "device": (LATE, ("gradient", 3, 3), "torch"),
    "gate": (GATE, ("gradient", 1, 3)),
    "gate loss": (GATE, ("loss", 3, 3)),
    "raise": ({"rules": [{**STOP, "action": "raise"}]}, ("gradient", 2, 3)),
    "skip": (SKIP, ("gradient", 2, 3)),
    "defaults": ({}, ("gradient", 2, 3)),
    "probe": (SKIP, ("probe", 2, 3)),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, dict[str, Any]]]:
    """Each story on four ranks."""
    return on_ranks(4, watched.stories, str(tmp_path_factory.mktemp("stories")), STORIES)


@pytest.mark.parametrize(
    ("story", "steps", "cause"),
    [
        # Late: the numbers of step 3 are merged while step 4 runs, and a device's come a step later still.
        ("loss", 4, "rank 2: loss is nan in micro-batch 0 of step 3; then gradient of 2.bias"),
        (
            "gradient",
            4,
            "rank 1: gradient of 2.bias is not finite at step 3 (reduced): 1 nan, first at element 1",
        ),
        # The reduction brings it to all ranks; hooks have seen where it came from.
        (
            "backward",
            4,
            "rank 2: gradient of 0.bias is not finite in micro-batch 0 of step 3 (before reduction); 1 more",
        ),
        ("weight", 4, "rank 3: weight of 0.weight is not finite at step 3: 1 +inf, first at element 20"),
        ("device", 5, "rank 3: gradient of 2.bias is not finite at step 3 (reduced): 1 nan"),
        (
            "gate",
            3,
            "rank 1: gradient of 2.bias is not finite at step 3 (reduced): 1 nan, first at element 1",
        ),
        ("gate loss", 3, "rank 3: loss is nan in micro-batch 0 of step 3; then gradient of 2.bias"),
    ],
)
def test_all_ranks_stop_at_the_same_step_and_know_why(
    told: dict[int, dict[str, dict[str, Any]]], story: str, steps: int, cause: str
) -> None:
    ranks = [told[rank][story] for rank in range(4)]
    assert [rank["done"] for rank in ranks] == [steps] * 4
    (reason,) = {rank["reason"] for rank in ranks}
    assert reason.startswith(f"rule 'no NaN': {cause}")
    assert all(rank["seconds"] < 30 for rank in ranks)
    # Before the update, no weight is touched by it.
    assert [rank["finite"] for rank in ranks] == [story.startswith("gate")] * 4 or story in (
        "gradient",
        "device",
    )
    life, events = ranks[0]["life"], ranks[0]["events"]
    assert life["status"] == "stopped" and life["reason"] == reason
    assert [event["kind"] for event in events].count("stop") == 1
    first = next(event for event in events if event["kind"].startswith("nonfinite_"))
    assert first["text"].startswith(cause) and first["step"] == 3
    assert [record["step"] for record in ranks[0]["scalars"]] == list(range(1, steps + 1))


def test_every_rank_raises_the_same(told: dict[int, dict[str, dict[str, Any]]]) -> None:
    texts = {told[rank]["raise"]["raised"] for rank in range(4)}
    (text,) = texts
    assert text.startswith("training stopped at step 3: rule 'no NaN': rank 2: gradient of 2.bias")
    assert [told[rank]["raise"]["done"] for rank in range(4)] == [3] * 4, "step_end of step 4 raised"


def test_every_rank_skips_the_same_step(told: dict[int, dict[str, dict[str, Any]]]) -> None:
    ranks = [told[rank]["skip"] for rank in range(4)]
    assert [rank["skipped"] for rank in ranks] == [[3]] * 4
    assert all(rank["finite"] and rank["done"] == watched.STEPS for rank in ranks)
    assert ranks[0]["scalars"][-1]["health/skipped_steps"] == 1


def test_every_rank_has_the_same_state(told: dict[int, dict[str, dict[str, Any]]]) -> None:
    for story in STORIES:
        states = {json.dumps(told[rank][story]["state"]) for rank in range(4)}
        assert len(states) == 1, story


def test_the_defaults_report_and_go_on(told: dict[int, dict[str, dict[str, Any]]]) -> None:
    ranks = [told[rank]["defaults"] for rank in range(4)]
    assert [rank["done"] for rank in ranks] == [watched.STEPS] * 4
    kinds = [event["kind"] for event in ranks[0]["events"] if event["level"] != "info"]
    assert kinds[0] == "nonfinite_gradient" and "stop" not in kinds
    assert ranks[0]["scalars"][2]["health/state"] == 2


def test_what_one_rank_could_not_give_is_null_for_all(told: dict[int, dict[str, dict[str, Any]]]) -> None:
    ranks = [told[rank]["probe"] for rank in range(4)]
    assert all(rank["done"] == watched.STEPS and not rank["skipped"] for rank in ranks)
    losses = [record["loss/global"] for record in ranks[0]["scalars"]]
    assert losses[2] is None and None not in losses[:2] + losses[3:]
    (event,) = [event for event in ranks[0]["events"] if event["kind"] == "probe_failed"]
    assert event["text"].startswith("rank 2: loss: ")


@pytest.mark.parametrize(("on_lost", "gate"), [("raise", "late"), ("stop", "before_update")])
def test_when_a_rank_is_killed_the_others_leave_in_time(tmp_path: Path, on_lost: str, gate: str) -> None:
    health = {"on_lost": on_lost, "timeout": 4, "gate": gate, "rules": [STOP]}
    arguments = (str(tmp_path), health, ("kill", 1, 2), "auto", False, 12, 0.1)
    found = on_ranks(4, watched.train, *arguments, silent=(1,))
    assert found.keys() == {0, 2, 3}
    for rank in found.values():
        assert rank["seconds"] < 25
        assert rank["done"] < 12 and "can't reach the others" in rank["reason"]
        assert (rank["raised"] is not None) == (on_lost == "raise")
    lost = [event for event in found[0]["events"] if event["kind"] == "ranks_lost"]
    assert len(lost) == 1
    assert found[0]["life"]["status"] == "stopped"


def test_a_maximum_does_not_lose_a_nan(tmp_path: Path) -> None:
    found = on_ranks(2, watched.maximum_loses_nan, str(tmp_path))
    for bad in (0, 1):
        first, second = found[0][bad], found[1][bad]
        assert all((rank["skip"], rank["step"]) == (True, 1) for rank in (first, second))
        assert first["reason"] == second["reason"]
        assert f"rank {bad}: gradient of weight is not finite at step 1" in first["reason"]
        assert first["reason"].count("first at element 1")
        (record,) = first["scalars"]
        assert record["grad/nonfinite"] == 1
        # Whoever owns the replicas: neither the norm nor the count loses what only the other rank has.
        assert record["grad/norm"] != record["grad/norm"]


def test_an_overflow_that_the_scaler_skips_is_no_illness(tmp_path: Path) -> None:
    found = on_ranks(2, watched.scaled, str(tmp_path))[0]
    assert [record["optim/overflow"] for record in found["scalars"]] == [0, 1, 0, 0]
    assert [record["optim/loss_scale"] for record in found["scalars"]] == [4, 4, 2, 2]
    norms = [record["grad/norm"] for record in found["scalars"]]
    assert [norms[index] for index in (0, 2, 3)] == [1.4142135623730951] * 3
    assert [record["health/state"] for record in found["scalars"]] == [0] * 4
    assert [record["health/nonfinite_steps"] for record in found["scalars"]] == [0] * 4
    assert not [event for event in found["events"] if event["level"] != "info"]
