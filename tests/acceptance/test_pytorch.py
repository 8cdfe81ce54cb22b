"""Rows of the matrix on PyTorch eager, seen from outside: a real loop trains, its files are read back."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these rows are about torch loops")

import trainmon  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402

_NAMES = ["attention.bias", "attention.weight", "head.bias", "head.weight"]


def _make() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"attention": torch.nn.Linear(3, 5), "head": torch.nn.Linear(5, 2)})
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _loss(model: Any, seed: int, samples: int) -> Any:
    torch.manual_seed(seed)
    return model["head"](model["attention"](torch.randn(samples, 3)).tanh()).square().mean()


def _config(directory: Path, **keys: Any) -> dict[str, Any]:
    return {"output_dir": str(directory), "run_name": "r", "sinks": {"log": False, "csv": True}, **keys}


def _steps(directory: Path) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(directory / "r/rank_0/scalars.jsonl") if "step" in record]


def _table(directory: Path, probe: str) -> list[dict[str, str]]:
    (path,) = (directory / "r/rank_0/tensors").glob(f"{probe}_*.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("keys", "selected"),
    [
        ({}, _NAMES),
        ({"target": ["^att"]}, _NAMES[:2]),
        ({"exclude": ["bias$"]}, [_NAMES[1], _NAMES[3]]),
        ({"target": ["weight"], "exclude": ["head"]}, [_NAMES[1]]),
        ({"target": ["weight"], "invert": True}, [_NAMES[0], _NAMES[2]]),
    ],
)
def test_gradient_norms_of_the_selected_parameters(
    tmp_path: Path, keys: dict[str, Any], selected: list[str]
) -> None:
    model, optimizer = _make()
    config = _config(tmp_path, gradients={"per_parameter": True, **keys})
    truth: list[tuple[str, str, float]] = []
    totals = []
    with trainmon.attach(model, optimizer, config) as mon:
        for step in (1, 2):
            loss = _loss(model, step, 4)
            loss.backward()
            mon.micro_end(loss=loss, tokens=4)
            mon.grads_ready()
            own = {name: float(p.grad.double().norm()) for name, p in model.named_parameters()}
            truth += [(str(step), name, own[name]) for name in selected]
            totals.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
            optimizer.step()
            optimizer.zero_grad()
            mon.step_end()
    rows = _table(tmp_path, "gradients")
    found = sorted((row["step"], row["name"], float(row["grad/norm"])) for row in rows)
    assert [row[:2] for row in found] == [row[:2] for row in sorted(truth)]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in sorted(truth)], rel=1e-12)
    # The choice is of rows only: the global norm always counts every parameter.
    assert [record["grad/norm"] for record in _steps(tmp_path)] == pytest.approx(totals, rel=1e-6)


def test_losses_rates_and_data_wait_of_an_accumulating_loop(tmp_path: Path) -> None:
    model, optimizer = _make()
    config = _config(tmp_path, loss={"micro": True})
    micro, totals = [], []
    with trainmon.attach(model, optimizer, config, total_steps=6) as mon:
        for step in range(1, 7):
            weighted = 0.0
            for index, tokens in enumerate((5, 2, 9)):
                with mon.data_wait():
                    time.sleep(0.002)
                loss = _loss(model, 10 * step + index, tokens)
                loss.backward()
                mon.micro_end(loss=loss, tokens=tokens)
                micro.append((str(step), str(index), loss.item()))
                weighted += loss.item() * tokens
            totals.append(weighted / 16)
            optimizer.step()
            optimizer.zero_grad()
            mon.step_end(samples=3)
    records = _steps(tmp_path)
    assert [record["loss/global"] for record in records] == pytest.approx(totals, rel=1e-12)
    rows = _table(tmp_path, "loss")
    assert [(row["step"], row["name"], float(row["loss/micro"])) for row in rows] == micro
    for record in records:
        assert record["time/step"] > record["time/data_wait"] >= 0.006
        share = record["time/data_wait"] / record["time/step"]
        assert record["time/data_wait_share"] == pytest.approx(share)
        assert record["perf/tokens_per_second"] * record["time/step"] == pytest.approx(16)
        assert record["perf/samples_per_second"] * record["time/step"] == pytest.approx(3)
    assert records[-1]["time/eta"] == 0
    assert (records[-1]["data/tokens"], records[-1]["data/consumed_samples"]) == (96, 18)


def test_named_losses_positions_and_sources(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = torch.randn(3, 6, 4), torch.randint(7, (3, 6))
    keys = {"loss": {"positions": 3, "sources": ["web", "code"], "perplexity": True}}
    with trainmon.attach(model, optimizer, _config(tmp_path, **keys)) as mon:
        losses = torch.nn.functional.cross_entropy(
            model(inputs).flatten(0, 1), targets.flatten(), reduction="none"
        ).view(3, 6)
        auxiliary = model.weight.square().mean()
        (losses.mean() + auxiliary).backward()
        mon.micro_end(
            losses.mean(),
            18,
            parts={"aux": auxiliary},
            token_losses=losses,
            sources=torch.tensor([[0], [1], [0]]),
        )
        optimizer.step()
        mon.step_end()
    (record,) = _steps(tmp_path)
    rel = 1e-6
    assert record["loss/part/aux"] == pytest.approx(auxiliary.item(), rel=rel)
    assert record["loss/ppl"] == pytest.approx(math.exp(losses.mean().item()), rel=rel)
    for group in range(3):
        expected = losses[:, 2 * group : 2 * group + 2].mean().item()
        assert record[f"loss/position/{group}"] == pytest.approx(expected, rel=rel)
    assert record["loss/source/web"] == pytest.approx(losses[[0, 2]].mean().item(), rel=rel)
    assert record["loss/source/code"] == pytest.approx(losses[1].mean().item(), rel=rel)


def test_overflow_and_loss_scale_under_a_gradient_scaler(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    with trainmon.attach(model, optimizer, _config(tmp_path)) as mon:
        for step in (1, 2, 3, 4):
            scale = scaler.get_scale()
            loss = model(torch.ones(1, 2)).sum() * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            mon.grads_ready(loss_scale=scale)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            mon.step_end(loss=loss, tokens=1, overflow=scaler.get_scale() < scale)
    records = _steps(tmp_path)
    assert [record["optim/overflow"] for record in records] == [0, 1, 0, 0]
    assert [record["optim/loss_scale"] for record in records] == [4, 4, 2, 2]
    norms = [record["grad/norm"] for record in records]
    assert [norms[index] for index in (0, 2, 3)] == [1.4142135623730951] * 3


def test_tensorboard_and_jsonl_hold_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    model, optimizer = _make()
    sinks = {"log": False, "tensorboard": True}
    with trainmon.attach(model, optimizer, _config(tmp_path, sinks=sinks), total_steps=4) as mon:
        for step in range(1, 5):
            loss = _loss(model, step, 4)
            loss.backward()
            mon.micro_end(loss=loss, tokens=4)
            mon.grads_ready()
            optimizer.step()
            optimizer.zero_grad()
            mon.step_end(samples=4)
    reader = accumulator.EventAccumulator(str(tmp_path / "r/rank_0/tensorboard")).Reload()
    shown = {
        name: [(event.step, event.value) for event in reader.Scalars(name)]
        for name in reader.Tags()["scalars"]
    }
    written: dict[str, list[tuple[int, float]]] = {}
    for record in _steps(tmp_path):
        for name, value in record.items():
            if "/" in name and value is not None:
                # Event files hold float32.
                written.setdefault(name, []).append((record["step"], float(torch.tensor(value).float())))
    assert shown == written
    assert {"loss/global", "grad/norm", "optim/lr", "time/step", "perf/tokens_per_second"} <= set(shown)


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_nonfinite_loss_and_gradients_are_reported(tmp_path: Path, backend: Any) -> None:
    model, optimizer = _make()
    with trainmon.attach(model, optimizer, _config(tmp_path), backend=backend) as mon:
        for step in range(1, 5):
            loss = _loss(model, step, 4)
            loss.backward()
            if step == 2:
                model["head"].weight.grad[1, 3] = float("inf")
                model["head"].weight.grad[1, 4] = float("nan")
            mon.micro_end(loss=float("nan") if step == 3 else loss, tokens=4)
            mon.grads_ready()
            if step != 2:
                optimizer.step()
            optimizer.zero_grad()
            mon.step_end()
    records = _steps(tmp_path)
    assert [record["grad/nonfinite"] for record in records] == [0, 2, 0, 0]
    assert [math.isnan(record["loss/global"]) for record in records] == [False, False, True, False]
    said = {event.get("kind"): event for event in read_jsonl(tmp_path / "r/rank_0/events.jsonl")}
    assert "head.weight" in said["nonfinite_gradient"]["text"] and said["nonfinite_gradient"]["step"] == 2
    assert "step 3" in said["nonfinite_loss"]["text"]
