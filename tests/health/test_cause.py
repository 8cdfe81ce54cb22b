"""The first cause: an order of computation, not of clocks; a sentence that names tensor, rank and step."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import Any

from trainmon.findings import Finding, kinds_of
from trainmon.health.cause import first_cause
from trainmon.health.episode import Episode
from trainmon.messages import found_together, pack_messages


def finding(stage: Any = "forward", name: str = "x", **keys: Any) -> Finding:
    quantity = keys.pop(
        "quantity", {"forward": "output", "backward": "gradient", "optimizer": "weight"}[stage]
    )
    return Finding(keys.pop("step", 1), stage, quantity, name, "s", **keys)


def test_the_order_is_that_of_the_computation() -> None:
    ordered = [
        finding(micro=0, place=(0, 0), call=0, rank=3),
        finding(micro=0, place=(0, 0), call=1, rank=2),
        finding(micro=0, place=(0, 1), call=0, rank=1),
        finding(micro=0, place=(1, 0), call=0, rank=3),
        finding("backward", micro=0, place=(1, 1), call=0, rank=0),
        finding("backward", micro=0, place=(1, 0), call=0, rank=3),
        finding("backward", micro=0, place=(0, 1), call=0, rank=2),
        finding("backward", micro=0, place=(0, 0), call=0, rank=2),
        finding(micro=1, place=(0, 0), call=0, rank=0),
        finding("backward", micro=None, place=(0, 1), call=0, rank=0),  # all micro-batches together
        finding("backward", micro=None, place=(0, 0), call=0, rank=0),
        finding("optimizer", micro=None, place=(0, 0), call=0, rank=0),
        finding(step=2, micro=0, rank=0),
    ]
    named = [replace(one, name=str(index)) for index, one in enumerate(ordered)]
    for seed in range(20):
        shuffled = named[:]
        random.Random(seed).shuffle(shuffled)
        cause = first_cause(shuffled, world=4)
        assert [entry["name"] for entry in cause.data["findings"]] == [str(i) for i in range(len(named))]
        assert cause.first.name == "0" and cause.ranks == (3,)


def test_the_sentence() -> None:
    bad = finding("backward", "4.bias", counts=kinds_of([1, 2, 0]), index=1, more=3, note="reduced", rank=2)
    assert first_cause([bad], 4).text == (
        "rank 2: gradient of 4.bias is not finite at step 1 (reduced): 1 nan and 2 +inf, first at element 1; "
        "3 more tensors are not finite"
    )
    everywhere = [replace(bad, rank=rank, more=0) for rank in range(4)]
    assert first_cause(everywhere, 4).text.startswith("gradient of 4.bias")
    assert first_cause(everywhere[1:], 4).text.startswith("ranks 1-3: gradient of 4.bias")
    loss = Finding(7, "forward", "loss", "", "loss/global", 0, counts={"nan": 1})
    assert first_cause([loss, replace(bad, step=7)], 1).text == (
        "loss is nan in micro-batch 0 of step 7; then gradient of 4.bias"
    )
    made = finding(name="[/b]layer", role="producer", micro=1, call=4)
    assert first_cause([made], 1).text == (
        "output of [/b]layer is not finite in micro-batch 1 of step 1; its inputs were finite"
    )
    passed = finding(role="propagator")
    assert first_cause([passed], 1).text.endswith("its inputs were not finite already")


def test_others_are_named_but_not_all() -> None:
    first = finding(rank=1)
    others = [finding("backward", f"p{i}", call=i, rank=rank) for i in range(6) for rank in (0, 1)]
    text = first_cause([first, *others], 3).text
    assert text.endswith(
        "; then gradient of p0 (ranks 0-1), gradient of p1 (ranks 0-1), gradient of p2 (ranks 0-1) and 3 more"
    )


def test_findings_travel_between_ranks() -> None:
    mine, theirs = finding(counts={"nan": 2}, place=(1, 2)), finding("backward", "[/b]ä", index=5)
    packed = [pack_messages([], [mine]), pack_messages([], []), pack_messages([], [theirs])]
    assert found_together(packed) == [mine, replace(theirs, rank=2)]
    json.dumps(first_cause([mine, theirs], 3).data)


def test_an_episode_is_told_once_with_what_it_spreads_to_and_its_end() -> None:
    episode = Episode(2)
    gradient = finding("backward", "w", rank=1)
    loss = Finding(3, "forward", "loss", "", "loss/global", 0, counts={"nan": 1})
    assert episode.follow(1, []) == []
    (first,) = episode.follow(2, [replace(gradient, step=2)])
    assert first.kind == "nonfinite_gradient" and first.data["ranks"] == [1]
    (spread,) = episode.follow(3, [loss, replace(gradient, step=3)])
    assert spread.kind == "nonfinite_loss"
    assert spread.text.endswith("(since step 2: gradient)") and spread.data["since"] == 2
    assert episode.follow(4, [replace(loss, step=4)]) == []
    (end,) = episode.follow(5, [])
    assert end.kind == "finite_again" and "after 3 steps" in end.text
    assert [told.kind for told in episode.follow(6, [loss])] == ["nonfinite_loss"]


def test_a_report_of_the_step_before_what_a_gate_has_found_ends_nothing() -> None:
    """With several ranks a step is reported in the next one, after the gate has seen that one's gradients."""
    episode = Episode(2)
    gradient = replace(finding("backward", "w", rank=1), step=2)
    assert len(episode.follow(2, [gradient])) == 1
    assert episode.follow(1, []) == []
    assert episode.follow(2, [gradient]) == [], "it has been told"
    (end,) = episode.follow(3, [])
    assert end.text == "all values are finite again after 1 step"


def test_any_order_of_ranks_gives_the_same_cause() -> None:
    some = [finding(rank=rank, call=rank % 2, name=f"m{rank % 2}") for rank in range(4)]
    texts = {first_cause(list(order), 4).text for order in itertools.permutations(some)}
    assert texts == {"ranks 0, 2: output of m0 is not finite at step 1; then output of m1 (ranks 1, 3)"}
