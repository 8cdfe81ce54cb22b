"""The overhead governor: what is shed, in which order, how it comes back, alike on all ranks."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engine.test_engine import events_of, monitor, steps_of
from trainmon.backend.host import HostBackend
from trainmon.config.schema import OverheadConfig
from trainmon.events import MicroEnd, StepBegin, StepEnd, TensorView, TrainBegin, TrainEnd
from trainmon.frame import Frame, Registry
from trainmon.governor import SHED_FIRST, Governor
from trainmon.schedule import Schedule
from trainmon.slots import Slot

BUDGET = 0.01


class Run:
    """A governor over slots whose cost a look is given, in seconds; a step lasts one."""

    def __init__(self, costs: dict[str, float]) -> None:
        self.costs = costs
        self.slots = {
            name: Slot(SimpleNamespace(name=name), Schedule())  # type: ignore[arg-type]
            for name in costs
        }
        self.governor = Governor(OverheadConfig(BUDGET), list(self.slots.values()))
        registry = Registry()
        self.governor.register(registry)
        registry.freeze()
        self.frame, self.step, self.said = Frame(registry), 0, []

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            spent = 0.0
            for name, slot in self.slots.items():
                slot.arm(self.step)
                if slot.due:
                    slot.spent_ns += int(self.costs[name] * 1e9)
                    spent += self.costs[name]
            self.frame.clear(self.step)
            self.governor.write(self.frame)
            self.said += self.governor.judge(self.frame, spent, 1.0, self.step)

    def stretches(self) -> dict[str, int]:
        return {name: slot.stretch for name, slot in self.slots.items()}


def test_within_the_budget_nothing_changes() -> None:
    run = Run({"loss": 0.001, "weights": 0.004, "spectral": 0.003})
    run.go(500)
    assert set(run.stretches().values()) == {1}
    assert run.said == []


def test_it_sheds_in_order_until_the_rest_fits_and_leaves_the_core_alone() -> None:
    run = Run({"loss": 0.002, "weights": 0.01, "spectral": 0.03, "activations": 0.0001})
    run.go(300)
    stretches = run.stretches()
    assert stretches["loss"] == 1 and stretches["activations"] == 1, "what costs nothing brings nothing"
    assert stretches["spectral"] > stretches["weights"]
    cost = sum(run.costs[name] / stretch for name, stretch in stretches.items())
    assert cost <= BUDGET
    assert SHED_FIRST.index("spectral") < SHED_FIRST.index("weights")
    assert "over its budget of 1.00% (overhead.budget): spectral comes at one in 2" in run.said[0].text


def test_what_was_shed_comes_back_when_there_is_room() -> None:
    run = Run({"loss": 0.001, "weights": 0.05})
    run.go(200)
    assert run.stretches()["weights"] > 4
    run.costs["weights"] = 0.0005
    run.go(400)
    assert run.stretches()["weights"] == 1
    assert run.said[-1].text.endswith("weights comes as configured from now on")


def test_a_core_that_is_over_the_budget_alone_sheds_all_else_and_stops_there() -> None:
    run = Run({"loss": 0.02, "weights": 0.001})
    run.go(3000)
    assert 1 < run.stretches()["weights"] <= 256
    assert len(run.said) < 12


def test_the_first_steps_count_for_nothing() -> None:
    run = Run({"weights": 5.0})
    run.go(10)
    run.costs["weights"] = 0.001
    run.go(100)
    assert run.stretches()["weights"] == 1


class _Slow(HostBackend):
    def summaries(self, tensors: Any) -> Any:
        time.sleep(0.02)
        return super().summaries(tensors)


class _Model:
    def parameter_names(self) -> list[str]:
        return ["w"]

    def pieces(self) -> list[str]:
        return ["whole"]

    def take_owners(self, owned: Any, holders: Any) -> None: ...

    def weights(self) -> TensorView:
        return TensorView(["w"], [np.ones(3)])


@pytest.mark.parametrize("governed", [True, False])
def test_in_a_run_it_is_said_and_published(governed: bool, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"weights": {"every": 1}, "gradients": False}
    mon = monitor(tmp_path, **keys) if governed else monitor(tmp_path, overhead=False, **keys)
    mon.begin(TrainBegin(model=_Model()), _Slow())
    for step in range(1, 71):
        mon.handle(StepBegin(step, float(step)))
        mon.handle(MicroEnd(step, 0, 1.0, 1))
        mon.handle(StepEnd(step, step + 1.0))
    mon.handle(TrainEnd(70, "completed"))
    mon.close()
    shown = [record.get("weight/norm") is not None for record in steps_of(tmp_path)]
    said = [event for event in events_of(tmp_path) if event.get("kind") == "overhead"]
    coverage = [record["perf/monitor_coverage"] for record in steps_of(tmp_path)]
    assert coverage[0] == 1.0 and all(shown[:20])
    if governed:
        assert said[0]["data"]["probe"] == "weights" and said[0]["data"]["one_in"] == 2
        assert not all(shown[31:]) and any(shown[31:])
        assert all((part == 1.0) == seen for part, seen in zip(coverage, shown, strict=True))
    else:
        assert all(shown) and not said and set(coverage) == {1.0}
