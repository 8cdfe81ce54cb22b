"""The comparison with the traces can fail: each kind of lie in a trace is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.hosts.hyperparallel.replay import Comparison, play, traces  # noqa: E402

Events = list[dict[str, Any]]


def first(events: Events, name: str) -> dict[str, Any]:
    return next(event for event in events if event["name"] == name)


def swap(events: Events) -> None:
    events[3], events[5] = events[5], events[3]


def drop(events: Events) -> None:
    del events[-1]


def keyword(events: Events) -> None:
    first(events, "on_step_end")["kwargs"]["grad_norm_after_clip"] = 1.0


def renamed(events: Events) -> None:
    kwargs = first(events, "on_pre_optimizer_step")["kwargs"]
    kwargs["norm"] = kwargs.pop("grad_norm")


def step(events: Events) -> None:
    first(events, "on_substep_end")["global_step"] -= 1


def dead(events: Events) -> None:
    first(events, "before_clip")["grads"]["alive"] -= 1


def spoiled(events: Events) -> None:
    first(events, "before_clip")["param_grad_norms"]["head.bias"] = "nan"


def lr(events: Events) -> None:
    first(events, "on_step_end")["lr"]["optimizer"][0] *= 1 + 1e-6


def loss(events: Events) -> None:
    first(events, "on_step_end")["kwargs"]["loss"] *= 1 + 3e-4


def experts(events: Events) -> None:
    first(events, "on_pre_optimizer_step")["tokens_per_expert"][0] += 1


LIES: list[Callable[[Events], None]] = [swap, drop, keyword, renamed, step, dead, spoiled, lr, loss, experts]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    trace = traces()["g1_base"]
    return trace, play(trace, tmp_path_factory.mktemp("run"))[0][0]


@pytest.mark.parametrize("lie", [None, *LIES])
def test_a_lie_is_found(lie: Any, played: tuple[dict[str, Any], dict[str, Any]]) -> None:
    trace, got = played
    run = copy.deepcopy(trace["runs"][0])
    if lie is not None:
        lie(run["ranks"][0]["events"])
    assert bool(Comparison(trace, run["settings"]).rank(run["ranks"][0], got)) is (lie is not None)


def test_an_end_is_compared(played: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    trace, got = played
    rank = {**trace["runs"][0]["ranks"][0], "ended": {"returned": False, "exception": "OSError"}}
    assert "ended" in Comparison(trace, trace["runs"][0]["settings"]).rank(rank, got)[0]
