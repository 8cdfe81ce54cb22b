"""Gradients of tensors that lie in pieces, in ``main_grad``, on ranks that see the same tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the adapter needs torch")

import trainmon  # noqa: E402
from tests.adapters.hyperparallel.pieces import (  # noqa: E402
    Bare,
    Mesh,
    Partial,
    Piece,
    Replicate,
    Shard,
    StridedShard,
)
from tests.adapters.hyperparallel.runs import config, said, steps_of, tables_of  # noqa: E402
from tests.ranks.gloo import on_ranks  # noqa: E402


class Trainer:
    """As much of the third generation as one step needs."""

    def __init__(self, model: Any, **attributes: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self._callbacks: list[Any] = []
        self.config = SimpleNamespace(training=SimpleNamespace(max_grad_norm=1.0))
        self.mesh = None
        self.norm: Any = 1.0
        vars(self).update(attributes)

    def prepare_in_step(self) -> Any:
        """Forward and backward."""

    def prepare_optimizer_step(self) -> Any:
        return self.norm

    def step(self, number: int) -> None:
        (callback,) = self._callbacks
        state = SimpleNamespace(global_step=number - 1, epoch=0)
        if number == 1:
            callback.on_epoch_begin(state)
        callback.on_step_begin(state)
        self.prepare_in_step()
        self.prepare_optimizer_step()
        state.global_step = number
        callback.on_step_end(state, loss=None, loss_dict=None, grad_norm=self.norm)


def module(**parameters: Any) -> Any:
    model = torch.nn.Module()
    for name, parameter in parameters.items():
        model.register_parameter(name, torch.nn.Parameter(parameter))
    return model


def one_step(directory: str, kind: str) -> None:
    """On a rank: w is cut in two, b is on both."""
    import torch.distributed as distributed

    rank = distributed.get_rank()
    mesh = Mesh(rank, 2)
    cut = {"plain": Shard(0), "replicated": Shard(0), "strided": StridedShard(0, 2), "partial": Shard(0)}[
        kind
    ]

    def both(values: Any) -> Any:
        return (
            values
            if kind == "plain"
            else Piece(values, mesh, Partial() if kind == "partial" else Replicate())
        )

    model = module(w=Piece(torch.zeros(2), mesh, cut), b=both(torch.zeros(1)))
    model.w.grad = Piece(torch.tensor([[3.0, 0.0], [0.0, 4.0]][rank]), mesh, cut)
    model.b.grad = both(torch.tensor([12.0]))
    trainer = Trainer(model)
    keys = config(Path(directory), weights=False, ranks="all")
    session = trainmon.attach_hyperparallel(trainer, keys)
    trainer.step(1)
    trainer.step(2)
    session.end()


@pytest.mark.parametrize(
    ("kind", "norm"), [("plain", 13), ("replicated", 13), ("strided", 13), ("partial", 5)]
)
def test_replicated_parameters_count_once(tmp_path: Path, kind: str, norm: float) -> None:
    """mindspore-ai/hyper-parallel#735."""
    on_ranks(2, one_step, str(tmp_path), kind)
    for rank in range(2):
        assert [record["grad/norm"] for record in steps_of(tmp_path, rank)] == [norm, norm]
    assert bool(said(tmp_path, "partial_gradients")) == (kind == "partial")
    assert not said(tmp_path, "internal_error")


@pytest.mark.parametrize("kind", ["plain", "replicated"])
def test_in_a_world_of_one_the_norm_is_the_same(tmp_path: Path, kind: str) -> None:
    mesh = Mesh(0, 1)
    both = (lambda values: values) if kind == "plain" else (lambda values: Piece(values, mesh, Replicate()))
    model = module(w=Piece(torch.zeros(4), mesh, Shard(0)), b=both(torch.zeros(1)))
    model.w.grad = Piece(torch.tensor([3.0, 0.0, 0.0, 4.0]), mesh, Shard(0))
    model.b.grad = both(torch.tensor([12.0]))
    trainer = Trainer(model)
    session = trainmon.attach_hyperparallel(trainer, config(tmp_path, weights=False))
    trainer.step(1)
    session.end()
    (record,) = steps_of(tmp_path)
    assert record["grad/norm"] == 13 and not said(tmp_path, "internal_error")


def test_main_grad_is_the_gradient(tmp_path: Path) -> None:
    model = module(w=torch.zeros(4), b=torch.zeros(1))
    model.w.main_grad, model.b.main_grad = torch.tensor([3.0, 0, 0, 4]), torch.tensor([12.0])
    model.w.grad = torch.full((4,), 100.0)  # what the last micro-batch left there
    trainer = Trainer(model)
    session = trainmon.attach_hyperparallel(trainer, config(tmp_path))
    trainer.step(1)
    session.end()
    (record,) = steps_of(tmp_path)
    assert record["grad/norm"] == 13


def test_losses_norms_and_activations_that_lie_in_pieces(tmp_path: Path) -> None:
    """Nothing is asked of them but this rank's piece."""
    mesh = Mesh(0, 1)

    class Layer(torch.nn.Module):
        def forward(self) -> Any:
            return Bare(torch.tensor([3.0, 4.0]), mesh, Replicate())

    class Loss(torch.nn.Module):
        def forward(self, *, model_output: Any, labels: Any) -> Any:
            return Bare(torch.tensor(2.5), mesh, Replicate())

    model = module(w=torch.zeros(4))
    model.layer = Layer()
    trainer = Trainer(model, loss_fn=Loss(), current_token_counts={"foundation_tokens": torch.tensor(7)})

    def prepare() -> None:
        trainer.loss_fn(model_output=trainer.model.layer(), labels=torch.zeros(2, 4))
        model.w.grad = torch.tensor([3.0, 0, 0, 4])

    trainer.norm, trainer.prepare_in_step = Bare(torch.tensor(5.0), mesh, Replicate()), prepare
    session = trainmon.attach_hyperparallel(
        trainer, config(tmp_path, activations={"every": 1, "target": "layer"})
    )
    trainer.step(1)
    session.end()
    (record,) = steps_of(tmp_path)
    assert (record["loss/global"], record["data/tokens"], record["grad/norm"]) == (2.5, 7, 5)
    assert tables_of(tmp_path)["activation/norm", "1", "layer"] == 5 and not said(tmp_path, "internal_error")


def test_no_losses_no_norms_no_counts(tmp_path: Path) -> None:
    trainer = Trainer(module(w=torch.zeros(4)), loss_fn=torch.nn.Identity())
    trainer.config.training.max_grad_norm = 0
    session = trainmon.attach_hyperparallel(trainer, config(tmp_path))
    trainer.step(1)
    session.end()
    (record,) = steps_of(tmp_path)
    assert record["loss/global"] is None and record["grad/norm"] == 0 and not said(tmp_path, "internal_error")
