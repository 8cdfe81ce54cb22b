"""The plain PyTorch loop with real torch: hooks, phases, backends, what goes wrong under way."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch adapter needs torch")

import trainmon  # noqa: E402
from trainmon.backend.host import HostBackend  # noqa: E402
from trainmon.backend.torch import TorchBackend  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402


def config(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    return {"output_dir": str(tmp_path), "run_name": "r", "sinks": {"log": False}, **keys}


def steps_of(tmp_path: Path) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(tmp_path / "r/rank_0/scalars.jsonl") if "step" in record]


def kinds_of(tmp_path: Path) -> list[Any]:
    return [record.get("kind") for record in read_jsonl(tmp_path / "r/rank_0/events.jsonl")]


def loop(
    mon: Any, model: Any, optimizer: Any, steps: int = 3, clip: float | None = 0.5, ready: bool = True
) -> list[float]:
    """Trains; returns the true norms before clipping."""
    norms = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 3)).square().mean()
        loss.backward()
        mon.micro_end(loss=loss, tokens=4)
        if ready:
            mon.grads_ready()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)))
        optimizer.step()
        optimizer.zero_grad()
        mon.step_end()
    return norms


def make() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_norms_before_and_after_clipping(tmp_path: Path, backend: Any) -> None:
    model, optimizer = make()
    keys = {"gradients": {"clipped": True, "per_parameter": True}}
    with trainmon.attach(model, optimizer, config(tmp_path, **keys), backend=backend) as mon:
        norms = loop(mon, model, optimizer)
    records = steps_of(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3]
    np.testing.assert_allclose([record["grad/norm"] for record in records], norms, rtol=1e-6)
    for record, norm in zip(records, norms, strict=True):
        assert record["grad/norm_clipped"] == pytest.approx(min(norm, 0.5), rel=1e-5)
        assert record["grad/clip_coef"] == pytest.approx(min(1.0, 0.5 / norm), rel=1e-5)
        assert record["optim/lr"] == 0.1 and record["grad/nonfinite"] == 0


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_no_gradient_is_kept_alive(tmp_path: Path, backend: Any) -> None:
    model, optimizer = make()
    with trainmon.attach(model, optimizer, config(tmp_path), backend=backend) as mon:
        model(torch.ones(1, 3)).sum().backward()
        mon.grads_ready()
        gradients = [weakref.ref(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        assert [gradient() for gradient in gradients] == [None] * 4
        mon.step_end()


def test_one_packed_read_a_step(tmp_path: Path) -> None:
    model, optimizer = make()
    with trainmon.attach(model, optimizer, config(tmp_path), backend="torch") as mon:
        loop(mon, model, optimizer, steps=5)
        backend = mon.monitor._backend
    assert backend.reads == 5


def test_without_grads_ready_only_the_clipped_phase_is_claimed(tmp_path: Path) -> None:
    model, optimizer = make()
    with trainmon.attach(model, optimizer, config(tmp_path, gradients={"per_parameter": True})) as mon:
        loop(mon, model, optimizer, ready=False)
    record = steps_of(tmp_path)[0]
    assert record["grad/norm"] is None and record["grad/norm_clipped"] == pytest.approx(0.5, rel=1e-4)
    assert kinds_of(tmp_path).count("gradients_clipped_only") == 1


def test_backends_agree_on_awkward_gradients() -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.randn(70_000, generator=generator),
        torch.randn(8, 6, generator=generator).t(),
        torch.zeros(0),
        torch.tensor(2.0),
        torch.tensor([1.0, float("nan"), float("inf"), -float("inf")]),
        torch.tensor([1.0, float("inf")]),
        torch.randn(33, generator=generator).bfloat16(),
    ]
    host, device, single = HostBackend(), TorchBackend("cpu"), TorchBackend("cpu", float64=False)
    (expected,) = host.read([host.summaries(tensors)]).wait()
    for backend, tolerance in ((device, 1e-12), (single, 1e-6)):
        (found,) = backend.read([backend.summaries(tensors)]).wait()
        np.testing.assert_allclose(found[:, :5], expected[:, :5], rtol=tolerance)
        finite = [*tensors[:4], tensors[6]]
        (total,) = backend.read([backend.square_sum(finite)]).wait()
        (truth,) = host.read([host.square_sum(finite)]).wait()
        np.testing.assert_allclose(total, truth, rtol=tolerance)


def test_missing_gradients_and_frozen_parameters(tmp_path: Path) -> None:
    model, optimizer = make()
    model[0].bias.requires_grad_(False)
    model.register_parameter("idle", torch.nn.Parameter(torch.ones(2)))
    sinks = {"log": False, "csv": True}
    keys = config(tmp_path, gradients={"per_parameter": True}, sinks=sinks)
    with trainmon.attach(model, optimizer, keys) as mon:
        loop(mon, model, optimizer, steps=1)
    (path,) = (tmp_path / "r/rank_0/tensors").glob("gradients_*.csv")
    rows = {line.split(",")[1]: line.split(",")[2] for line in path.read_text().splitlines()[1:]}
    assert rows["idle"] == "" and "0.bias" not in rows and float(rows["0.weight"]) > 0


def test_hooks_are_gone_after_close_and_none_when_gradients_are_off(tmp_path: Path) -> None:
    model, optimizer = make()
    with trainmon.attach(model, optimizer, config(tmp_path)) as mon:
        assert len(optimizer._optimizer_step_pre_hooks) == 1
        loop(mon, model, optimizer, steps=1)
    mon.close()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    off = config(tmp_path / "b", gradients=False, loss=False)
    with trainmon.attach(model, optimizer, off):
        assert not optimizer._optimizer_step_pre_hooks


def test_an_optimizer_replaced_under_way_is_said(tmp_path: Path) -> None:
    model, optimizer = make()
    with trainmon.attach(model, optimizer, config(tmp_path)) as mon:
        loop(mon, model, torch.optim.SGD(model.parameters(), lr=0.5), steps=4)
    assert kinds_of(tmp_path).count("optimizer_silent") == 1
    assert len(steps_of(tmp_path)) == 4


def test_parameters_added_under_way_get_their_row(tmp_path: Path) -> None:
    model, optimizer = make()
    sinks = {"log": False, "csv": True}
    keys = config(tmp_path, gradients={"per_parameter": True}, sinks=sinks)
    with trainmon.attach(model, optimizer, keys) as mon:
        loop(mon, model, optimizer, steps=1)
        model.append(torch.nn.Linear(2, 2))
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.2})
        loop(mon, model, optimizer, steps=2)
    text = "".join(path.read_text() for path in (tmp_path / "r/rank_0/tensors").glob("*.csv"))
    assert "2.weight" in text
    assert steps_of(tmp_path)[-1]["optim/lr/1"] == 0.2


def test_exception_and_ctrl_c_leave_whole_files(tmp_path: Path) -> None:
    for index, (error, status) in enumerate(((KeyboardInterrupt(), "interrupted"), (OSError("x"), "failed"))):
        model, optimizer = make()
        keys = config(tmp_path / str(index))
        with pytest.raises(type(error)), trainmon.attach(model, optimizer, keys) as mon:
            loop(mon, model, optimizer, steps=2)
            raise error
        run = json.loads((tmp_path / str(index) / "r/run.json").read_text())
        assert run["lives"][-1]["status"] == status and run["lives"][-1]["last_step"] == 2
        assert len(steps_of(tmp_path / str(index))) == 2


def test_wrong_configuration_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = make()
    with pytest.raises(trainmon.ConfigError, match=r"did you mean 'gradients'"):
        trainmon.attach(model, optimizer, config(tmp_path, gradiants=True))
    assert not optimizer._optimizer_step_pre_hooks and not list(tmp_path.iterdir())


def test_what_fails_while_an_event_is_made_does_not_reach_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make()
    with trainmon.attach(model, optimizer, config(tmp_path)) as mon:
        with monkeypatch.context() as patch:
            patch.setattr(type(mon._watch.parameters), "gradients", lambda self: 1 / 0)
            loop(mon, model, optimizer, steps=4)
        loop(mon, model, optimizer, steps=1)
    assert kinds_of(tmp_path).count("internal_error") == 1
    records = steps_of(tmp_path)
    assert [record["grad/norm"] is None for record in records] == [True] * 4 + [False]
    assert all(record["loss/global"] > 0 for record in records)


def test_an_optimizer_without_a_learning_rate(tmp_path: Path) -> None:
    model, optimizer = make()
    optimizer.param_groups[0]["lr"] = None
    with trainmon.attach(model, optimizer, config(tmp_path)) as mon:
        mon.step_end(loss=2.0)
    (record,) = steps_of(tmp_path)
    assert record["optim/lr"] is None and record["loss/global"] == 2.0
    assert "probe_failed" not in kinds_of(tmp_path)
