"""grad/sign_agreement against momentum that the test reads itself, before each update; many ranks: tests/ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="momentum of real optimizers")

import trainmon  # noqa: E402
from trainmon.backend.host import HostBackend  # noqa: E402
from trainmon.config import ConfigError, load_config  # noqa: E402
from trainmon.events import GradsReady, ShardInfo, StepBegin, StepEnd, TensorView, TrainBegin  # noqa: E402
from trainmon.frame import Frame, Registry  # noqa: E402
from trainmon.probes.base import ProbeContext  # noqa: E402
from trainmon.probes.momentum import MomentumProbe  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402


class Lion(torch.optim.Optimizer):
    """Its momentum is called as Adam's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("exp_avg", torch.zeros_like(parameter))
            parameter -= 1e-2 * torch.sign(0.9 * state["exp_avg"] + 0.1 * parameter.grad)
            state["exp_avg"].lerp_(parameter.grad, 0.01)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "lion": Lion,
    "muon": lambda p: torch.optim.Muon(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


def truth(pairs: list[tuple[Any, Any]]) -> float | None:
    products = [torch.sign(g.double()) * torch.sign(m.double()) for g, m in pairs]
    return float((torch.cat([p.flatten() for p in products]).mean() + 1) / 2) if pairs else None


def run(
    directory: Path, optimizer: Any, backend: Any = "host", steps: int = 4, bias: bool = True, **keys: Any
) -> tuple[list[Any], list[Any], list[str]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 5, bias=bias), torch.nn.ReLU(), torch.nn.Linear(5, 3, bias=bias)
    )
    chosen = optimizer(list(model.parameters()))
    entry = {
        "output_dir": str(directory),
        "run_name": "r",
        "sinks": {"log": False},
        "gradients": {"signs": True, **keys},
    }
    expected = []
    with trainmon.attach(model, chosen, entry, backend=backend) as monitor:
        for number in range(steps):
            (model(torch.randn(4, 6)) - 1).square().mean().backward()
            pairs = []
            for name, parameter in model.named_parameters():
                state = chosen.state.get(parameter, {})
                momentum = state.get("exp_avg", state.get("momentum_buffer"))
                if momentum is not None and name.endswith(keys.get("target", "")):
                    pairs.append((parameter.grad.clone(), momentum.clone()))
            expected.append(truth(pairs))
            if number != 2:  # a loop that doesn't say when gradients are ready: they are seen at the update
                monitor.grads_ready()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            chosen.step()
            chosen.zero_grad()
            monitor.step_end()
    shown = [one for one in read_jsonl(directory / "r/rank_0/scalars.jsonl") if "step" in one]
    events = read_jsonl(directory / "r/rank_0/events.jsonl")
    assert not [one for one in events if one.get("kind") in ("internal_error", "probe_failed")]
    kinds = [one.get("kind") for one in events]
    return [one.get("grad/sign_agreement") for one in shown], expected, kinds


@pytest.mark.parametrize("backend", ["host", "torch"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_momentum_of_real_optimizers(tmp_path: Path, kind: str, backend: str) -> None:
    if kind == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    values, expected, _ = run(tmp_path, OPTIMIZERS[kind], backend, bias=kind != "muon")
    assert expected[0] is None, "no momentum before the first update"
    assert values == [None, *(pytest.approx(value, rel=1e-12) for value in expected[1:])]
    assert len(set(values)) > 2


def test_a_target_chooses_and_an_optimizer_without_momentum_has_none(tmp_path: Path) -> None:
    values, expected, _ = run(tmp_path / "a", OPTIMIZERS["adamw"], target="bias")
    assert values[1:] == [pytest.approx(value, rel=1e-12) for value in expected[1:]]
    values, _, _ = run(tmp_path / "b", lambda p: torch.optim.SGD(p, lr=0.1))
    assert values == [None] * 4
    values, _, _ = run(tmp_path / "c", OPTIMIZERS["adamw"], every=3)
    assert values.count(None) == 3  # of these steps two are not looked at


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_what_has_no_sign_other_dtypes_and_missing_gradients(tmp_path: Path, backend: Any) -> None:
    gradient = [1.0, -1.0, 0.0, float("nan"), float("inf"), -2.0]
    momentum = [2.0, 3.0, 1.0, 1.0, -1.0, float("nan")]  # one alike, two opposite, three without a sign
    model = torch.nn.ParameterList([torch.zeros(6, dtype=torch.bfloat16), torch.zeros(3), torch.zeros(2)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    entry = {
        "output_dir": str(tmp_path),
        "run_name": "r",
        "sinks": {"log": False},
        "gradients": {"signs": True},
    }
    with trainmon.attach(model, optimizer, entry, backend=backend) as monitor:
        model[0].grad = torch.tensor(gradient, dtype=torch.bfloat16)
        model[1].grad = torch.ones(3)  # no momentum yet
        optimizer.state[model[0]]["exp_avg"] = torch.tensor(momentum)
        optimizer.state[model[2]]["exp_avg"] = torch.ones(2)  # no gradient
        monitor.grads_ready()
        monitor.step_end()
        model[0].grad = None
        monitor.grads_ready()
        monitor.step_end()
    values = [
        one["grad/sign_agreement"] for one in read_jsonl(tmp_path / "r/rank_0/scalars.jsonl") if "step" in one
    ]
    assert values == [pytest.approx(((1 - 2) / 6 + 1) / 2), None]


def test_sparse_gradients_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    table = torch.nn.Embedding(7, 3, sparse=True)
    dense = torch.nn.Linear(3, 3)
    model = torch.nn.Sequential(table, dense)
    optimizers = [torch.optim.SparseAdam(table.parameters()), torch.optim.AdamW(dense.parameters())]
    entry = {
        "output_dir": str(tmp_path),
        "run_name": "r",
        "sinks": {"log": False},
        "gradients": {"signs": True},
    }
    with trainmon.attach(model, optimizers, entry) as monitor:
        for _ in range(3):
            model(torch.tensor([1, 1, 5])).square().sum().backward()
            monitor.grads_ready()
            for one in optimizers:
                one.step()
            model.zero_grad()
            monitor.step_end()
    (said,) = [
        one
        for one in read_jsonl(tmp_path / "r/rank_0/events.jsonl")
        if one.get("kind") == "momentum_left_out"
    ]
    assert "leaves out 0.weight" in said["text"]


def test_pieces_of_other_ranks_and_state_that_lies_elsewhere_are_left_out() -> None:
    """Of four parameters one is this rank's to count, one another's, one has its state elsewhere, one in two states."""
    names, one = ["mine", "another's", "elsewhere", "twice"], np.ones(4)
    shards = [ShardInfo(), ShardInfo(owner=False), ShardInfo(apart=True), ShardInfo()]

    class Optimizer:
        def moments(self) -> dict[str, TensorView]:
            buffer = TensorView(["twice"], [-one])
            return {"momentum_buffer": buffer, "exp_avg": TensorView(names, [one] * 4, shards)}

    said: list[str] = []
    begin = TrainBegin(optimizer=Optimizer())  # type: ignore[arg-type]
    context = ProbeContext(begin, HostBackend(), lambda *words, **_: said.append(words[2]), lambda _: None)
    probe, registry = MomentumProbe(names), Registry()
    probe.begin(context)
    probe.register(registry)
    registry.freeze()
    frame = Frame(registry)
    for step in (1, 2):
        probe.on_step_begin(StepBegin(step, 0.0))
        probe.on_grads_ready(GradsReady(step, TensorView(names, [one, one, one, -one]), "reduced"))
        probe.on_grads_ready(GradsReady(step, TensorView(names, [-one] * 4), "clipped"))  # the same once more
        sample = probe.close(StepEnd(step, 0.0))
        frame.clear(step)
        sample.write(frame, HostBackend().read(sample.lazies).wait())
        assert frame.sums.tolist() == [4 - 4, 8], "mine agrees, twice is against its exp_avg"
    (text,) = said
    assert "leaves out elsewhere and others like it: exp_avg is kept in other pieces" in text


def test_the_key_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"gradients\.signs"):
        load_config({"gradients": {"signs": "momentum"}})
