"""What the adapter does in a step, counted rather than timed: calls of its own functions, reads of the gradients."""

from __future__ import annotations

import cProfile
import pstats
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the adapter needs torch")

import trainmon  # noqa: E402
from tests.adapters.hyperparallel.runs import EACH, build, config, inner_of, settings_of, train  # noqa: E402
from trainmon.adapters.hyperparallel.auxiliary import AuxiliaryLoss  # noqa: E402


@pytest.mark.parametrize("name", EACH)
def test_calls_of_a_step_of_two_micro_batches(tmp_path: Path, name: str) -> None:
    trainer = build(name, settings_of(name, max_steps=14, epochs=14), tmp_path)
    trainmon.attach_hyperparallel(trainer, config(tmp_path))
    profile = cProfile.Profile()

    def after_backward(step: int, index: int, count: int) -> None:
        if (step, index) == (3, 0):
            profile.enable()
        if (step, index) == (13, 0):
            profile.disable()

    inner_of(trainer).after_backward = after_backward
    train(trainer)
    own = reads = 0
    for (file, _, function), (calls, *_rest) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        own += calls if "trainmon/adapters/hyperparallel/" in file else 0
        reads += calls if file.endswith("trainmon/backend/host.py") and function == "summaries" else 0
    assert 0 < own / 10 <= 140
    assert 10 <= reads <= 12  # gradients once a step, and what is read every tenth


def layers(*losses: Any) -> Any:
    model = torch.nn.Module()
    for number, loss in enumerate(losses):
        child = torch.nn.Module()
        child.last_aux_loss = loss
        model.add_module(str(number), child)
    return model


def test_the_auxiliary_loss_of_layers_of_any_kind() -> None:
    one, two = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, dtype=torch.bfloat16)
    for kept, mean in (
        ((one, torch.tensor(2.0)), 1.5),
        ((one, None, two), 1.5),
        ((torch.tensor([4.0]), torch.tensor(2.0)), 3.0),
        ((0.5, one), 0.75),
        ((torch.tensor([3.0]),), 3.0),
    ):
        found = AuxiliaryLoss(layers(*kept)).of_micro_batch()
        assert found is not None and found.shape == () and not found.requires_grad and float(found) == mean
    assert AuxiliaryLoss(layers(None)).of_micro_batch() is None
    assert AuxiliaryLoss(SimpleNamespace(modules=list)).of_micro_batch() is None  # type: ignore[arg-type]
