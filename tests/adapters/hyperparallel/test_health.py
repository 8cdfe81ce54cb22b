"""Two ranks of each generation: how well gradients agree, replicas that differ, spikes and what follows from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the adapter needs torch")

from tests.adapters.hyperparallel.runs import (  # noqa: E402
    EACH,
    TRAINERS,
    build,
    config,
    inner_of,
    life_of,
    said,
    settings_of,
    steps_of,
    train,
    wrapped,
)
from tests.adapters.hyperparallel.test_ranks import local_gradients  # noqa: E402
from tests.hosts.hyperparallel import model as task  # noqa: E402
from tests.ranks.gloo import on_ranks  # noqa: E402

SPIKE = {
    "series": "grad/norm",
    "detector": "threshold",
    "parameters": {"above": 50.0},
    "name": "spike",
    "consecutive": 2,
    "action": ["log", "skip_step"],
}
#: How the ranks hold the parameters.
WAYS = {"g1": ("hsdp", "ddp"), "g2": ("hsdp",), "g3_text": ("hsdp",)}
#: Steps whose gradients are a thousand times too large: one alone, then three in a row.
SPIKES = (2, 5, 6, 7)


def spiky(trainer: Any, moved: list[bool]) -> None:
    """Gradients of some steps are too large; keeps whether each step has moved the weights."""
    inner = inner_of(trainer)
    before = [parameter.detach().clone() for parameter in inner.model.parameters()]

    def after_backward(step: int, index: int, count: int) -> None:
        if index == count - 1:
            if step > 1:
                moved.append(
                    any(not torch.equal(a, b) for a, b in zip(before, inner.model.parameters(), strict=True))
                )
            before[:] = [parameter.detach().clone() for parameter in inner.model.parameters()]
            for parameter in inner.model.parameters():
                parameter.grad.mul_(1000.0 if step in SPIKES else 1.0)

    inner.after_backward = after_backward


def on_a_rank(directory: str) -> dict[str, Any]:
    import trainmon

    task.setup()
    rank, told = torch.distributed.get_rank(), {}
    for name in EACH:
        for how in WAYS[name]:
            place = Path(directory) / f"{name}_{how}"
            trainer = build(name, settings_of(name), place, wrapped(how))
            trainmon.attach_hyperparallel(trainer, config(place, gradients={"align": True}))
            train(trainer)
        place = Path(directory) / f"{name}_flipped"
        trainer = build(name, settings_of(name), place)
        trainmon.attach_hyperparallel(trainer, config(place, replicas={"every": 1}))
        head = inner_of(trainer).model.head.weight

        def flip(step: int, index: int, count: int, head: Any = head) -> None:
            if rank == 1 and (step, index) == (2, 0):
                head.data.view(torch.int32)[1, 2] ^= 1

        inner_of(trainer).after_backward = flip
        train(trainer)
        place = Path(directory) / f"{name}_spikes"
        trainer = build(name, settings_of(name, max_steps=10, epochs=5), place)
        health = {"gate": "before_update", "defaults": False, "calm": 2, "rules": [SPIKE]}
        session = trainmon.attach_hyperparallel(trainer, config(place, health=health))
        moved: list[bool] = []
        spiky(trainer, moved)
        train(trainer)
        told[name] = json.dumps(session.state_dict(), sort_keys=True), moved
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    directory = tmp_path_factory.mktemp("ranks")
    return directory, on_ranks(2, on_a_rank, str(directory))


@pytest.mark.parametrize("name", EACH)
def test_agreement_of_the_ranks_gradients(told: tuple[Path, Any], name: str) -> None:
    directory, _ = told
    one, other = (local_gradients(TRAINERS[name][2], rank) for rank in (0, 1))
    mean = task.norm([(a + b) / 2 for a, b in zip(one, other, strict=True)])
    expected = mean**2 / ((task.norm(one) ** 2 + task.norm(other) ** 2) / 2)
    assert 0.5 < expected < 1
    for how in WAYS[name]:
        records = steps_of(directory / f"{name}_{how}")
        assert records[0]["grad/align"] == pytest.approx(expected, rel=1e-5)
        assert all(0 < record["grad/align"] < 1 for record in records)


@pytest.mark.parametrize("name", EACH)
def test_a_flipped_bit_is_named(told: tuple[Path, Any], name: str) -> None:
    events = said(told[0] / f"{name}_flipped", "replicas_differ")
    assert events and "head.weight" in events[0]["text"] and events[0]["data"]["holders"] == [0, 1]
    assert not said(told[0] / f"{name}_hsdp", "replicas_differ")


@pytest.mark.parametrize("name", EACH)
def test_spikes_in_a_row_are_skipped_and_the_state_follows(told: tuple[Path, Any], name: str) -> None:
    """The second and third of three in a row; one alone is let through."""
    directory, by_rank = told
    records = steps_of(directory / f"{name}_spikes")
    assert len(records) == 10
    assert [record["health/skipped_steps"] for record in records] == [0, 0, 0, 0, 0, 1, 2, 2, 2, 2]
    assert [record["health/state"] for record in records] == [0, 1, 1, 0, 1, 1, 1, 1, 0, 0]
    (state, moved), (other_state, other_moved) = (by_rank[rank][name] for rank in (0, 1))
    assert state == other_state and moved == other_moved
    assert moved == [step not in (6, 7) for step in range(1, 10)]
    life = life_of(directory / f"{name}_spikes")
    assert life["status"] == "completed"
    assert any("spike" in event["text"] for event in said(directory / f"{name}_spikes"))
