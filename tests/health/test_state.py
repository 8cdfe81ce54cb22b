"""The state of a run, the class of a spike, and the whole of health over reports."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from trainmon.config import ConfigError, load_config
from trainmon.events import Action
from trainmon.findings import Finding
from trainmon.health.health import Health
from trainmon.health.machine import Machine, State


def health(world: int = 1, early: Sequence[str] = (), **keys: Any) -> Health:
    config = load_config(health=keys).health
    assert config is not None
    return Health(config, world, early)


def test_the_state_machine() -> None:
    machine = Machine(calm=2)

    def follow(*steps: str) -> list[str]:
        said = []
        for step in steps:
            machine.follow(flagged=step == "f", unhealthy=step == "u")
            said.append(machine.state.name.lower())
        return said

    assert follow("-", "f", "-", "f", "-", "-", "-") == [
        *("healthy", "suspect", "suspect", "suspect", "suspect", "healthy", "healthy")
    ]
    assert follow("f", "u", "f", "-", "f", "-", "-", "f") == [
        *("suspect", "unhealthy", "unhealthy", "recovering", "recovering", "recovering", "healthy", "suspect")
    ]
    assert follow("u", "-", "u", "-", "-") == [
        "unhealthy",
        "recovering",
        "unhealthy",
        "recovering",
        "healthy",
    ]
    copy = Machine(calm=2)
    copy.load_state_dict(json.loads(json.dumps(machine.state_dict())))
    assert copy.state == machine.state == State.HEALTHY


def losses(seed: int = 0, steps: int = 60) -> list[float]:
    return [float(x) for x in np.random.default_rng(seed).normal(2.0, 0.05, steps)]


@pytest.mark.parametrize(
    ("after", "kind", "decided"),
    [
        ([9.0, 8.0, *[2.0] * 10], "recovering", 7),
        ([9.0] * 130, "lingering", 101),
        ([9.0 + 0.1 * i for i in range(130)], "divergent", 101),
        ([9.0, *[math.nan] * 10], "divergent", 6),
    ],
)
def test_spikes_are_classed_when_it_is_certain(after: list[float], kind: str, decided: int) -> None:
    run = health()
    told = []
    for step, value in enumerate([*losses(), *after], start=1):
        for message in run.report(step, {"loss/global": value}).messages:
            if message.kind == "spike_class":
                told.append((message.step - 60, message.data["class"], message.data["began"], message.level))
                assert kind != "divergent" or run.state == State.UNHEALTHY
    assert told == [(decided, kind, 61, "warning" if kind == "divergent" else "info")]


def test_a_gradient_spike_is_judged_and_classed_by_logarithms() -> None:
    run = health()
    rng = np.random.default_rng(2)
    norms = [float(x) for x in np.exp(rng.normal(0, 0.3, 400))]
    quiet = [run.report(step, {"grad/norm": norm}).messages for step, norm in enumerate(norms, start=1)]
    assert not any(quiet), "log-normal noise is no alarm"
    kinds = []
    for step, norm in enumerate([60.0, *[1.0] * 8], start=401):
        kinds += [message.kind for message in run.report(step, {"grad/norm": norm}).messages]
    assert kinds == ["alarm", "health_state", "alarm_over", "spike_class"]


def test_defaults_name_what_is_not_finite_once_and_mark_the_run() -> None:
    run = health(world=4)
    found = [Finding(2, "backward", "gradient", "w", "grad/nonfinite", counts={"nan": 1}, rank=2)]
    bad = {"loss/global": 1.0, "grad/norm": math.nan, "grad/nonfinite": 1.0}
    good = {"loss/global": 1.0, "grad/norm": 1.0, "grad/nonfinite": 0.0}
    assert run.report(1, good).messages == []
    first = run.report(2, bad, findings=found)
    assert [message.kind for message in first.messages] == ["nonfinite_gradient", "health_state"]
    assert first.messages[0].text.startswith("rank 2: gradient of w is not finite at step 2")
    assert first.messages[1].data["state"] == "unhealthy"
    assert not first.decision.actions, "the defaults report, and stop nothing"
    assert run.report(3, bad, findings=found).messages == []
    assert [message.kind for message in run.report(4, good).messages] == ["finite_again", "health_state"]
    values = run.values()
    assert values == {"health/state": 3.0, "health/nonfinite_steps": 2.0, "health/skipped_steps": 0.0}


def test_without_a_finding_the_rule_says_what_it_saw() -> None:
    run = health()
    (alarm, _) = run.report(1, {"loss/global": 1.0, "grad/norm": math.inf}).messages
    assert alarm.kind == "alarm" and alarm.text == "rule 'nonfinite': grad/norm is inf"


def test_a_loss_scaler_that_skipped_the_step_is_no_alarm() -> None:
    run = health()
    found = [Finding(1, "backward", "gradient", "w", "grad/nonfinite")]
    scaled = {"loss/global": 1.0, "grad/norm": math.inf, "grad/nonfinite": 3.0, "optim/overflow": 1.0}
    assert run.report(1, scaled, findings=found).messages == []
    assert run.state == State.HEALTHY and run.nonfinite_steps == 0


def test_overflow_three_times_in_a_row() -> None:
    rule = {"series": "optim/overflow", "detector": "threshold", "parameters": {"above": 1}, "consecutive": 3}
    run = health(rules=[{**rule, "action": "stop", "name": "scaler"}])
    stops = [
        run.report(step, {"optim/overflow": float(flag)}).decision.stop
        for step, flag in enumerate((True, True, True, False), start=1)
    ]
    assert stops == [False, False, True, False]


@pytest.mark.parametrize("action", ["stop", "raise"])
def test_a_decision_names_rule_cause_and_step(action: str) -> None:
    run = health(
        defaults=False,
        rules=[{"series": "grad/*", "detector": "nonfinite", "action": ["log", action], "name": "no NaN"}],
    )
    found = [Finding(5, "backward", "gradient", "w", "grad/nonfinite", rank=0)]
    outcome = run.report(5, {"grad/nonfinite": 1.0, "grad/norm": math.nan}, findings=found)
    assert outcome.decision.actions == {Action(action)} and outcome.decision.step == 5
    assert outcome.decision.reason == "rule 'no NaN': gradient of w is not finite at step 5"
    assert [message.kind for message in outcome.messages] == ["nonfinite_gradient", "stop", "health_state"]
    again = run.report(6, {"grad/nonfinite": 1.0}, findings=found)
    assert again.decision.stop and not again.messages, "said once, asked for as long as it stands"


def test_a_step_back_starts_detectors_anew_and_says_so() -> None:
    run = health()
    for step, value in enumerate(losses(), start=1):
        run.report(step, {"loss/global": value})
    told = run.report(30, {"loss/global": 2.0}).messages
    assert [message.kind for message in told] == ["health_restarted"]
    assert "from 60 to 30" in told[0].text
    assert not run.report(31, {"loss/global": 900.0}).messages, "no history, no verdict"


def test_state_goes_with_the_checkpoint() -> None:
    run, late = health(), health()
    values = losses(3, 50)
    for step, value in enumerate(values, start=1):
        run.report(step, {"loss/global": value})
    run.report(51, {"loss/global": 9.0})
    run.report(52, {"loss/global": math.nan})
    (told,) = late.load_state_dict(json.loads(json.dumps(run.state_dict())), 52)
    assert told.kind == "health_restored" and "unhealthy" in told.text
    for step, value in enumerate([9.0, *[2.0] * 6], start=53):
        one, other = (side.report(step, {"loss/global": value}) for side in (run, late))
        assert [m for m in one.messages if m.kind != "finite_again"] == other.messages
        assert run.values() == late.values()
    other = health(rules=[{"series": "loss/global", "detector": "ewma"}])
    (told,) = other.load_state_dict(run.state_dict(), 52)
    assert "others than those of the state" in told.text and other.state == run.state


@pytest.mark.parametrize("damage", ["format", "late", "machine"])
def test_a_damaged_state_is_refused(damage: str) -> None:
    state = health().state_dict()
    state[damage] = None
    with pytest.raises(ValueError, match=r"health state"):
        health().load_state_dict(state, 1)


def test_rules_that_watch_nothing_are_said() -> None:
    run = health(rules=[{"series": "weight/norm", "detector": "mad", "name": "weights"}])
    (told,) = run.check(["loss/global", "grad/norm"])
    assert told.kind == "rule_idle" and "'weights'" in told.text
    assert not run.check(["weight/norm"])


def test_a_step_can_only_be_skipped_by_what_is_known_before_it() -> None:
    rule = {"series": ["grad/norm", "update/norm"], "detector": "mad", "action": "skip_step"}
    run = health(early=["grad/norm", "loss/global"], gate="before_update", rules=[rule])
    run.check(["grad/norm"])
    with pytest.raises(ConfigError, match=r"rules\[0\]\.series: skip_step: update/norm is not known before"):
        run.check(["grad/norm", "update/norm"])
    rule["series"] = "**/norm"
    run = health(early=["grad/norm", "loss/global"], gate="before_update", rules=[rule])
    run.check(["grad/norm", "update/norm"])  # what the glob matches beside it is left alone
    with pytest.raises(ConfigError, match="is not known before"):
        run.check(["update/norm"])
