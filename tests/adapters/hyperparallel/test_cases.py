"""Inputs from public reports, as this host's trainers would bring them."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the adapter needs torch")

import trainmon  # noqa: E402
from tests.adapters.hyperparallel.runs import (  # noqa: E402
    build,
    config,
    inner_of,
    said,
    settings_of,
    steps_of,
    train,
)
from tests.adapters.hyperparallel.test_pieces import Trainer, module  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402

#: Means and counted tokens of a step's micro-batches; the loss, and how far the mean of means is from it.
MICROS = (
    ([(2.0, 3), (math.nan, 0), (4.0, 1)], 2.5, 0.5),
    ([(math.nan, 0), (math.nan, 0), (math.nan, 0)], None, None),
    ([(1.0, 1), (math.nan, 2), (1.0, 1)], math.nan, math.nan),
)


def assert_losses(directory: Path, loss: float | None, gap: float | None) -> None:
    (record,) = steps_of(directory)
    for series, value in (("loss/global", loss), ("loss/gap", gap)):
        found = record[series]
        assert found is value is None or found == pytest.approx(value, nan_ok=True)
    assert not said(directory, "internal_error")


@pytest.mark.parametrize(("micros", "loss", "gap"), MICROS)
@pytest.mark.parametrize("name", ["g1", "g2"])
def test_a_micro_batch_without_a_counted_token(
    tmp_path: Path, name: str, micros: list[tuple[float, int]], loss: float | None, gap: float | None
) -> None:
    trainer = build(name, settings_of(name, micro_batches=3, loader_len=3, max_steps=1), tmp_path)
    inner = inner_of(trainer)
    told = inner._after_micro_batch
    inner._after_micro_batch = lambda index, *_: told(index, *micros[index])
    trainmon.attach_hyperparallel(trainer, config(tmp_path, health={"defaults": False}))
    train(trainer)
    assert_losses(tmp_path, loss, gap)


@pytest.mark.parametrize(("micros", "loss", "gap"), MICROS)
def test_a_micro_batch_without_a_counted_token_in_the_third_generation(
    tmp_path: Path, micros: list[tuple[float, int]], loss: float | None, gap: float | None
) -> None:
    class Loss(torch.nn.Module):  # type: ignore[misc]
        def forward(self, *, model_output: Any, labels: Any) -> Any:
            return torch.tensor(model_output)

    trainer = Trainer(module(w=torch.zeros(4)), loss_fn=Loss())

    def prepare() -> None:
        for value, tokens in micros:
            trainer.current_token_counts = {"foundation_tokens": torch.tensor(tokens)}
            trainer.loss_fn(model_output=value, labels=None)

    trainer.prepare_in_step = prepare  # type: ignore[method-assign]
    session = trainmon.attach_hyperparallel(trainer, config(tmp_path, health={"defaults": False}))
    trainer.step(1)
    session.end()
    assert_losses(tmp_path, loss, gap)


@pytest.mark.parametrize("name", ["g1", "g2", "g3_text"])
def test_resumed_at_an_earlier_step(tmp_path: Path, name: str) -> None:
    """Steps 1-6, then from the checkpoint of step 4 to 8: each step once, the later life's where there are two."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="reads event files"
    )
    keys = {**config(tmp_path), "sinks": ["jsonl", "tensorboard"]}
    whole = settings_of(name, save_steps=2, max_steps=8, epochs=8)
    trainer = build(name, {**whole, "max_steps": 6}, tmp_path)
    trainmon.attach_hyperparallel(trainer, keys)
    train(trainer)
    folder = f"{'global_step' if name.startswith('g3') else 'step'}_4"
    trainer = build(
        name, {**whole, "resume": str(tmp_path / "checkpoints" / folder), "data_seed": 5}, tmp_path
    )
    trainmon.attach_hyperparallel(trainer, keys)
    train(trainer)
    records = steps_of(tmp_path)
    assert [record["step"] for record in records] == [*range(1, 7), *range(5, 9)]
    last = {record["step"]: record["loss/global"] for record in records}
    assert last[5] != records[4]["loss/global"]  # the data are others
    reader = accumulator.EventAccumulator(str(next((tmp_path / "r").rglob("events.out*")).parent)).Reload()
    points = [(point.step, point.value) for point in reader.Scalars("loss/global")]
    assert points == [(step, pytest.approx(last[step])) for step in range(1, 9)]
    lives = [r for r in read_jsonl(tmp_path / "r/rank_0/scalars.jsonl") if "record" in r]
    assert [(life["life"], life["resumed_step"]) for life in lives] == [(1, 0), (2, 4)]


def test_loss_and_norm_of_any_type(tmp_path: Path) -> None:
    """What hooks of the third generation may bring: NumPy's numbers, tensors, nothing."""
    numpy = pytest.importorskip("numpy")
    trainer = Trainer(module(w=torch.zeros(4)))
    session = trainmon.attach_hyperparallel(trainer, config(tmp_path))
    state = SimpleNamespace(global_step=0, epoch=0)
    (callback,) = trainer._callbacks
    callback.on_epoch_begin(state)
    values = [
        (numpy.float32(0.1), numpy.float64(2.5)),
        (torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(2.0)),
    ]
    for number, (loss, norm) in enumerate([*values, (None, None)], start=1):
        trainer.norm = norm
        callback.on_step_begin(state)
        trainer.prepare_optimizer_step()
        state.global_step = number
        callback.on_step_end(state, loss=loss, loss_dict={"foundation_loss": loss}, grad_norm=norm)
    session.end()
    records = steps_of(tmp_path)
    assert [record["loss/global"] for record in records] == [0.10000000149011612, 1.5, None]
    assert [record["grad/norm"] for record in records] == [0.0] * 3  # measured: there is no gradient
    assert not said(tmp_path, "internal_error")
    text = (tmp_path / "r/rank_0/scalars.jsonl").read_text()
    assert "np." not in text and "tensor(" not in text
