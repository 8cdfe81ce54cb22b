"""Health in a real torch loop: skipped steps, stops, exceptions, state in a checkpoint, what a rule may ask for."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch adapter needs torch")

import trainmon  # noqa: E402
from trainmon.backend.torch import TorchBackend  # noqa: E402
from trainmon.config import ConfigError  # noqa: E402
from trainmon.events import Action, TrainBegin  # noqa: E402
from trainmon.monitor import TrainMonitor  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402
from trainmon.sinks.run_file import read_run  # noqa: E402

NO_NAN = {"series": ["loss/global", "grad/*"], "detector": "nonfinite", "name": "no NaN"}
TOO_LARGE = {"series": "grad/norm", "detector": "threshold", "parameters": {"above": 100.0}, "name": "limit"}


def config(directory: Path, **health: Any) -> dict[str, Any]:
    return {"output_dir": str(directory), "run_name": "r", "sinks": {"log": False}, "health": health}


def make() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def events_of(directory: Path) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(directory / "r/rank_0/events.jsonl") if "kind" in event]


def steps_of(directory: Path) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(directory / "r/rank_0/scalars.jsonl") if "step" in record]


def train(
    mon: Any, model: Any, optimizer: Any, steps: int, bad: dict[int, float], norm: str = "measured"
) -> list[int]:
    """Trains as the documentation says; the last gradient of a step in `bad` is multiplied. Returns the steps that were
    taken."""
    updated = []
    for step in range(1, steps + 1):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 3)).square().mean()
        loss.backward()
        mon.micro_end(loss.item() if norm == "host" else loss, tokens=4)
        if step in bad:
            model[1].bias.grad[1] *= bad[step]
        total = None
        if norm == "host":
            total = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
        if not mon.grads_ready(grad_norm=total).skip:
            optimizer.step()
            updated.append(step)
        optimizer.zero_grad()
        mon.step_end()
        if mon.should_stop:
            break
    return updated


@pytest.mark.parametrize("backend", ["host", "torch"])
@pytest.mark.parametrize("norm", ["measured", "host"])
def test_steps_are_skipped_before_the_update(tmp_path: Path, backend: Any, norm: str) -> None:
    model, optimizer = make()
    rules = [{**NO_NAN, "action": ["log", "skip_step"]}, {**TOO_LARGE, "action": ["log", "skip_step"]}]
    keys = config(tmp_path, gate="before_update", rules=rules)
    with trainmon.attach(model, optimizer, keys, backend=backend) as mon:
        updated = train(mon, model, optimizer, 8, {3: math.nan, 4: math.inf, 6: 1e9}, norm)
        reads = mon.monitor._backend.reads
    rows = dict(mon.summary().rows())
    assert (
        rows["health"] == "recovering (unhealthy first at step 3)" and rows["steps skipped by rules"] == "3"
    )
    run = read_run(tmp_path / "r")
    assert run is not None
    counters = run["lives"][-1]["counters"]
    assert (counters["health"], counters["skipped_steps"]) == ("recovering", 3)
    assert updated == [1, 2, 5, 7, 8]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    records = steps_of(tmp_path)
    assert [record["health/skipped_steps"] for record in records] == [0, 0, 1, 2, 2, 3, 3, 3]
    assert [record["health/nonfinite_steps"] for record in records] == [0, 0, 1, 2, 2, 2, 2, 2]
    said = [(event["step"], event["kind"]) for event in events_of(tmp_path)]
    assert [one for one in said if one[1] == "step_skipped"] == [(3, "step_skipped"), (6, "step_skipped")]
    assert (3, "nonfinite_gradient") in said and (5, "finite_again") in said
    assert not any(kind == "optimizer_silent" for _, kind in said)
    if backend == "torch":
        # The gate reads once a step, and nothing where the loop has norm and losses as numbers.
        assert reads == (16 if norm == "measured" else 8)


def test_the_loss_before_the_update_is_that_of_the_report(tmp_path: Path) -> None:
    model, optimizer = make()
    rule = {"series": ["loss/global", "grad/norm"], "detector": "threshold", "parameters": {"above": 1e9}}
    keys = config(tmp_path, gate="before_update", rules=[{**rule, "action": "skip_step"}])
    shown: list[dict[str, float | None]] = []
    with trainmon.attach(model, optimizer, keys) as mon:
        health = mon.monitor._supervision.health
        look = health._gate.look
        health._gate.look = lambda step, scalars, *rest: (
            shown.append(dict(scalars)) or look(step, scalars, *rest)
        )
        train(mon, model, optimizer, 3, {})
    for record, early in zip(steps_of(tmp_path), shown, strict=True):
        assert early and all(record[name] == value for name, value in early.items())
    assert set(shown[0]) == {"loss/global", "grad/norm"}, "nothing is derived that no rule wants"


@pytest.mark.parametrize("gate", ["late", "before_update"])
def test_a_stop_names_its_cause_and_leaves_whole_files(tmp_path: Path, gate: str) -> None:
    model, optimizer = make()
    keys = config(tmp_path, gate=gate, rules=[{**NO_NAN, "action": "stop"}])
    with trainmon.attach(model, optimizer, keys) as mon:
        updated = train(mon, model, optimizer, 9, {4: math.nan})
        assert mon.should_stop
        assert mon.stop_reason is not None and "gradient of 1.bias is not finite at step 4" in mon.stop_reason
    assert updated == ([1, 2, 3] if gate == "before_update" else [1, 2, 3, 4])
    assert model[1].bias.isfinite().all() == (gate == "before_update")
    run = read_run(tmp_path / "r")
    assert run is not None
    (life,) = run["lives"]
    assert (life["status"], life["last_step"]) == ("stopped", 4)
    assert life["reason"].startswith("rule 'no NaN': gradient of 1.bias is not finite at step 4")
    assert life["health"] == [[4, "unhealthy"]]
    assert [record["step"] for record in steps_of(tmp_path)] == [1, 2, 3, 4]
    assert [event["kind"] for event in events_of(tmp_path)].count("stop") == 1


@pytest.mark.parametrize("gate", ["late", "before_update"])
def test_raise_raises_where_the_decision_is_made(tmp_path: Path, gate: str) -> None:
    model, optimizer = make()
    keys = config(tmp_path, gate=gate, rules=[{**NO_NAN, "action": "raise"}])
    with pytest.raises(
        trainmon.TrainingStopped, match=r"stopped at step 2: rule 'no NaN': gradient of 1.bias"
    ) as caught:
        with trainmon.attach(model, optimizer, keys) as mon:
            train(mon, model, optimizer, 9, {2: math.inf})
    assert caught.value.step == 2
    assert model[1].bias.isfinite().all() == (gate == "before_update")
    run = read_run(tmp_path / "r")
    assert run is not None and run["lives"][-1]["status"] == "stopped"


def test_two_optimizers_in_a_step_are_asked_for_each(tmp_path: Path) -> None:
    model, optimizer = make()
    keys = config(tmp_path, gate="before_update", rules=[{**TOO_LARGE, "action": "skip_step"}])
    with trainmon.attach(model, optimizer, keys) as mon:
        asked = []
        for step in range(1, 4):
            for part, scale in enumerate((1.0, 1e6 if step == 2 else 1.0)):
                (model(torch.ones(2, 3)).square().mean() * scale).backward()
                asked.append((step, part, mon.grads_ready().skip))
                optimizer.zero_grad()
            mon.step_end()
    assert [one[:2] for one in asked if one[2]] == [(2, 1)]
    assert [record["health/skipped_steps"] for record in steps_of(tmp_path)] == [0, 1, 1]
    assert "health_restarted" not in [event["kind"] for event in events_of(tmp_path)]


def test_the_defaults_stop_nothing(tmp_path: Path) -> None:
    model, optimizer = make()
    with trainmon.attach(model, optimizer, config(tmp_path)) as mon:
        assert train(mon, model, optimizer, 4, {2: math.nan}) == [1, 2, 3, 4]
        assert not mon.should_stop and mon.stop_reason is None
    records = steps_of(tmp_path)
    assert [record["health/state"] for record in records] == [0, 2, 2, 2]
    assert [record["health/nonfinite_steps"] for record in records] == [0, 1, 2, 3]


def test_a_late_device_decides_at_the_end_of_the_next_step(tmp_path: Path) -> None:
    model, optimizer = make()
    keys = config(tmp_path, rules=[{**NO_NAN, "action": "stop"}])
    with trainmon.attach(model, optimizer, keys, backend="torch") as mon:
        assert train(mon, model, optimizer, 9, {4: math.nan}) == [1, 2, 3, 4, 5]


def test_without_grads_ready_a_gate_can_only_stop_late_and_says_so(tmp_path: Path) -> None:
    model, optimizer = make()
    far_too_large = {**TOO_LARGE, "parameters": {"above": 1e5}, "action": "stop"}
    rules = [{**TOO_LARGE, "action": "skip_step"}, far_too_large]
    keys = config(tmp_path, gate="before_update", rules=rules)
    with trainmon.attach(model, optimizer, keys) as mon:
        for step in range(1, 5):
            model(torch.ones(2, 3)).square().mean().backward()
            mon.step_end(grad_norm={2: 1e3, 4: 1e6}.get(step, 1.0))
            optimizer.zero_grad()
            assert mon.should_stop == (step == 4)
    assert [event["kind"] for event in events_of(tmp_path)].count("gate_missed") == 1


def test_off_means_no_series_no_messages_and_no_work(tmp_path: Path) -> None:
    model, optimizer = make()
    keys = {**config(tmp_path), "health": False}
    with trainmon.attach(model, optimizer, keys) as mon:
        assert train(mon, model, optimizer, 3, {2: math.nan}) == [1, 2, 3]
        assert mon.state_dict()["health"] is None
    assert not [name for name in steps_of(tmp_path)[1] if name.startswith("health/")]
    assert not events_of(tmp_path)


def test_no_gate_no_read(tmp_path: Path) -> None:
    model, optimizer = make()
    keys = config(tmp_path, gate="before_update", rules=[{**TOO_LARGE, "action": "log"}])
    with trainmon.attach(model, optimizer, keys, backend="torch") as mon:
        train(mon, model, optimizer, 5, {})
        assert isinstance(mon.monitor._backend, TorchBackend) and mon.monitor._backend.reads == 5


def test_state_goes_through_a_torch_checkpoint(tmp_path: Path) -> None:
    model, optimizer = make()
    with trainmon.attach(model, optimizer, config(tmp_path / "a")) as mon:
        train(mon, model, optimizer, 40, {39: math.nan})
        saved = io.BytesIO()
        torch.save(mon.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    assert state["step"] == 41  # the step that runs
    model, optimizer = make()
    with trainmon.attach(model, optimizer, config(tmp_path / "b"), resumed_step=40) as mon:
        mon.load_state_dict(state)
        train(mon, model, optimizer, 2, {})
        mon.load_state_dict({"step": 1, "health": {"format": 99}})
    kinds = [event["kind"] for event in events_of(tmp_path / "b")]
    assert kinds[0] == "health_restored" and kinds[-1] == "health_not_restored"
    assert steps_of(tmp_path / "b")[0]["health/nonfinite_steps"] == 2


@pytest.mark.parametrize("action", ["skip_step", "stop", "raise"])
def test_a_rule_that_the_host_cannot_follow_is_an_error_at_the_start(tmp_path: Path, action: str) -> None:
    keys = config(tmp_path, gate="before_update", rules=[{**NO_NAN, "action": ["log", action]}])
    monitor = TrainMonitor(keys)
    expected = rf"health\.rules\[0\]\.action: the plain loop can't do {action}; it can do log, mark_unhealthy, notify"
    with pytest.raises(ConfigError, match=expected):
        monitor.begin(TrainBegin(host="plain"))
    assert not (tmp_path / "r").exists()
    TrainMonitor(keys).begin(TrainBegin(host="plain", actions=frozenset(Action)))


def test_a_probe_that_fails_is_null_and_rules_see_nothing(tmp_path: Path) -> None:
    model, optimizer = make()
    with trainmon.attach(model, optimizer, config(tmp_path)) as mon:
        for step in range(1, 4):
            mon.micro_end("no number" if step == 2 else 1.0, tokens=4)
            mon.step_end()
    records = steps_of(tmp_path)
    assert [record["loss/global"] for record in records] == [1.0, None, 1.0]
    assert [record["health/state"] for record in records] == [0, 0, 0]


class Root(torch.nn.Module):  # type: ignore[misc]
    """NaN for what is below zero."""

    def forward(self, x: Any) -> Any:
        return x.sqrt()


def test_the_module_that_made_a_nan_is_told_from_those_that_passed_it_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Identity(), Root(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    keys = {
        **config(tmp_path, rules=[{**NO_NAN, "action": "stop"}]),
        "activations": {"input": True, "every": 1},
    }
    with trainmon.attach(model, optimizer, keys) as mon:
        for step in range(1, 4):
            for micro in range(2):
                x = torch.ones(2, 3)
                with torch.no_grad():
                    model[0].weight.abs_()
                    model[0].bias.fill_(-100.0 if (step, micro) == (2, 1) else 1.0)
                loss = model(x).square().mean()
                loss.backward()
                mon.micro_end(loss, tokens=2)
            mon.grads_ready()
            optimizer.zero_grad()
            mon.step_end()
            if mon.should_stop:
                break
        reason = mon.stop_reason
    assert step == 2 and reason is not None
    assert reason.startswith(
        "rule 'no NaN': output of 2 is not finite in micro-batch 1 of step 2: 8 nan; its inputs were finite; "
    )
    first = next(event for event in events_of(tmp_path) if event["kind"] == "nonfinite_output")
    order = [(one["quantity"], one["micro"]) for one in first["data"]["findings"]]
    assert order == [("output", 1), ("input", 1), ("loss", 1), ("gradient", None)]


def test_an_overflow_is_no_illness_at_the_gate_either(tmp_path: Path) -> None:
    model, optimizer = make()
    keys = config(tmp_path, gate="before_update", rules=[{**NO_NAN, "action": "skip_step"}])
    with trainmon.attach(model, optimizer, keys) as mon:
        for step in range(1, 4):
            model(torch.ones(2, 3)).square().mean().backward()
            if step == 2:
                model[1].bias.grad[0] = math.inf
            assert mon.grads_ready(loss_scale=2.0).skip == (step == 2)
            optimizer.zero_grad()
            mon.step_end(overflow=step == 2)
    records = steps_of(tmp_path)
    assert [record["health/state"] for record in records] == [0, 0, 0]
    assert [record["health/skipped_steps"] for record in records] == [0, 1, 1]


def test_the_last_stage_of_a_pipeline_is_first_in_backward(tmp_path: Path) -> None:
    model, optimizer = make()
    with trainmon.attach(model, optimizer, config(tmp_path), stage=3) as mon:
        train(mon, model, optimizer, 2, {2: math.nan})
    first = next(event for event in events_of(tmp_path) if event["kind"] == "nonfinite_gradient")
    assert first["data"]["first"]["place"] == [0, 3]
