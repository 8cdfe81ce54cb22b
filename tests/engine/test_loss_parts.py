"""The loss taken apart: named parts, positions, sources; on both backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.test_engine import events_of, monitor, steps_of
from trainmon.backend import Backend
from trainmon.backend.host import HostBackend
from trainmon.events import MicroEnd, StepBegin, StepEnd, TokenLosses, TrainBegin, TrainEnd

LOSSES = np.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, np.nan, 8.0]], np.float32)
WEIGHTS = np.array([[1, 1, 1, 1], [1, 1, 0, 1]])
SOURCES = np.array([[0], [2]])


def backends() -> list[Any]:
    return [pytest.param("host", id="host"), pytest.param("torch", id="torch")]


def make_backend(name: str) -> Backend:
    if name == "host":
        return HostBackend()
    torch = pytest.importorskip("torch")
    from trainmon.backend.torch import TorchBackend

    return TorchBackend(torch.device("cpu"))


def tensors(name: str, *arrays: np.ndarray) -> list[Any]:
    if name == "host":
        return list(arrays)
    torch = pytest.importorskip("torch")
    return [torch.from_numpy(array) for array in arrays]


@pytest.mark.parametrize("backend", backends())
def test_positions_and_sources(backend: str, tmp_path: Path) -> None:
    mon = monitor(tmp_path, loss={"positions": 2, "sources": ["web", "code", "books"]})
    mon.begin(TrainBegin(), make_backend(backend))
    losses, weights, sources = tensors(backend, LOSSES, WEIGHTS, SOURCES)
    mon.handle(StepBegin(1, 1.0))
    mon.handle(MicroEnd(1, 0, 29 / 7, 7, token_losses=TokenLosses(losses, weights, sources)))
    mon.handle(MicroEnd(1, 1, 3.0, 8, token_losses=TokenLosses(*tensors(backend, np.full((2, 4), 3.0)))))
    mon.handle(StepEnd(1, 2.0))
    mon.handle(TrainEnd(1, "completed"))
    mon.close()
    (record,) = steps_of(tmp_path)
    assert record["loss/position/0"] == pytest.approx((1 + 2 + 5 + 6 + 4 * 3) / 8, rel=1e-12)
    assert record["loss/position/1"] == pytest.approx((3 + 4 + 8 + 4 * 3) / 7, rel=1e-12)
    # The second micro-batch has no sources: it counts in none.
    assert record["loss/source/web"] == pytest.approx(10 / 4, rel=1e-12)
    assert record["loss/source/code"] is None, "no token of it: undefined, not 0"
    assert record["loss/source/books"] == pytest.approx(19 / 3, rel=1e-12)


@pytest.mark.parametrize("backend", backends())
def test_token_losses_that_are_not_finite_stay_so_in_their_bucket(backend: str, tmp_path: Path) -> None:
    mon = monitor(tmp_path, loss={"positions": 4})
    mon.begin(TrainBegin(), make_backend(backend))
    mon.handle(StepBegin(1, 1.0))
    mon.handle(MicroEnd(1, 0, 1.0, 8, token_losses=TokenLosses(*tensors(backend, LOSSES))))
    mon.handle(StepEnd(1, 2.0))
    mon.close(status="completed")
    (record,) = steps_of(tmp_path)
    shown = [record[f"loss/position/{bucket}"] for bucket in range(4)]
    assert shown[:2] == pytest.approx([3.0, 4.0]) and shown[3] == pytest.approx(6.0)
    assert np.isnan(shown[2])


@pytest.mark.parametrize("backend", backends())
def test_ids_outside_are_in_no_bucket(backend: str, tmp_path: Path) -> None:
    losses, weights, ids = tensors(backend, np.ones(4), np.ones(4, np.int64), np.array([-1, 0, 2, 7]))
    own = make_backend(backend)
    (table,) = own.read([own.bucket_sums(losses, weights, ids, 2)]).wait()
    assert table.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_named_parts_are_token_weighted_and_may_come_under_way(tmp_path: Path) -> None:
    mon = monitor(tmp_path)
    mon.begin(TrainBegin())
    mon.handle(StepBegin(1, 1.0))
    mon.handle(MicroEnd(1, 0, 2.0, 3, parts={"aux": 1.0}))
    mon.handle(MicroEnd(1, 1, 4.0, 1, parts={"aux": 5.0}))
    mon.handle(MicroEnd(1, 2, float("nan"), 0, parts={"aux": float("nan")}))
    mon.handle(StepEnd(1, 2.0))
    mon.handle(StepBegin(2, 2.0))
    mon.handle(MicroEnd(2, 0, 2.0, 3, parts={"mtp": 7.0}))
    mon.handle(StepEnd(2, 3.0, loss_parts={"indexer": np.float32(0.5)}))
    mon.close(status="completed")
    first, second = steps_of(tmp_path)
    assert first["loss/part/aux"] == 2.0
    assert second["loss/part/aux"] is None
    assert (second["loss/part/mtp"], second["loss/part/indexer"]) == (7.0, 0.5)
    assert "loss/position/0" not in second and "loss/source/web" not in second


def test_parts_that_nobody_wants_cost_nothing(tmp_path: Path) -> None:
    mon = monitor(tmp_path, loss={"parts": False})
    mon.begin(TrainBegin())
    mon.handle(StepBegin(1, 1.0))
    mon.handle(MicroEnd(1, 0, 2.0, 3, parts={"aux": object()}))
    mon.handle(StepEnd(1, 2.0))
    mon.close(status="completed")
    (record,) = steps_of(tmp_path)
    assert not [name for name in record if name.startswith("loss/part")]


def test_a_part_that_is_not_finite_is_named_before_the_loss_that_it_goes_into(tmp_path: Path) -> None:
    mon = monitor(tmp_path)
    mon.begin(TrainBegin())
    for step in range(1, 3):
        mon.handle(StepBegin(step, float(step)))
        bad = np.nan if step == 2 else 1.0
        for micro in range(2):
            value = bad if micro else 1.0
            mon.handle(MicroEnd(step, micro, value, 3, parts={"main": 1.0, "[/b]aux": value}))
        mon.handle(StepEnd(step, step + 1.0))
    mon.close()
    (told,) = [event for event in events_of(tmp_path) if event.get("kind") == "nonfinite_loss"]
    assert told["text"] == "loss of [/b]aux is not finite in micro-batch 1 of step 2; then loss"
    assert [one["name"] for one in told["data"]["findings"]] == ["[/b]aux", ""]


@pytest.mark.parametrize("wrong", ["text", [1.0, 2.0]])
def test_a_part_that_is_no_number_costs_only_the_parts(wrong: Any, tmp_path: Path) -> None:
    mon = monitor(tmp_path)
    mon.begin(TrainBegin())
    for step in range(1, 6):
        mon.handle(StepBegin(step, float(step)))
        mon.handle(MicroEnd(step, 0, 2.0, 3, parts={"aux": wrong if step < 4 else 1.0}))
        mon.handle(StepEnd(step, step + 1.0))
    mon.close(status="completed")
    records = steps_of(tmp_path)
    assert [record["loss/global"] for record in records] == [2.0] * 5
    assert not [name for name in records[-1] if name.startswith("loss/part")], "off after three"
    kinds = {event.get("kind"): event for event in events_of(tmp_path)}
    assert kinds["probe_failed"]["text"].startswith("loss parts: ")
    assert kinds["probe_off"]["text"].startswith("loss parts is switched off")


def test_parts_that_are_no_mapping_are_said_once_and_the_loss_stays(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="what the torch loop is handed")
    import trainmon

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = {"output_dir": str(tmp_path), "run_name": "r", "sinks": {"log": False}}
    with trainmon.attach(model, optimizer, keys) as mon:
        for _ in range(3):
            loss = model(torch.ones(2)).sum()
            loss.backward()
            mon.micro_end(loss, 1, parts=[loss])  # type: ignore[arg-type]
            optimizer.step()
            mon.step_end()
    assert all(record["loss/global"] is not None for record in steps_of(tmp_path))
    (said,) = [event for event in events_of(tmp_path) if event.get("kind") == "parts_unnamed"]
    assert "parts must map names to losses" in said["text"] and "not list" in said["text"]
