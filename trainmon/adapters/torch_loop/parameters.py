"""What the engine may ask of a torch model and its optimizer: names, pieces, gradients, learning rates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from trainmon.adapters.base import plain_name
from trainmon.adapters.torch_loop.shards import FlatShards, is_partial, local
from trainmon.events import ShardInfo, TensorView

__all__ = ["OptimizerView", "ParameterList"]

#: The whole model is listed anew every so many steps, so that replaced modules are found too.
_RELIST_EVERY = 100

OWNED, REPLICA = ShardInfo(), ShardInfo(owner=False)


class OptimizerView:
    """Learning rates by group, read when asked."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def learning_rates(self) -> Mapping[str, float]:
        return {
            str(group.get("name", index)): group["lr"]
            for index, group in enumerate(self._optimizer.param_groups)
            if group.get("lr") is not None  # some optimizers find their own
        }


class ParameterList:
    """The trainable parameters by name, cached; looked up anew when the optimizer's groups change."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._signature: tuple[int, ...] = ()
        self._age = 0
        self._owned: Collection[str] | None = None  # None: all
        self.partial: str | None = None
        self._relist()

    def _relist(self) -> None:
        named = {
            id(p): (plain_name(name), p) for name, p in self._model.named_parameters() if p.requires_grad
        }
        for index, group in enumerate(self._optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                named.setdefault(id(parameter), (f"optimizer.{index}.{position}", parameter))
        self.names = [name for name, _ in named.values()]
        self.parameters = [parameter for _, parameter in named.values()]

    def refresh(self) -> None:
        """Once a step; cheap unless something changed."""
        signature = tuple(
            value
            for group in self._optimizer.param_groups
            for value in (id(group["params"]), len(group["params"]))
        )
        self._age += 1
        if signature != self._signature or self._age >= _RELIST_EVERY:
            self._signature, self._age = signature, 0
            self._relist()

    def parameter_names(self) -> Sequence[str]:
        return self.names

    def pieces(self) -> Sequence[str]:
        flat = FlatShards(self._model)
        return [flat.piece(parameter) for parameter in self.parameters]

    def take_owners(self, owned: Collection[str]) -> None:
        self._owned = owned

    def gradients(self) -> TensorView:
        """Gradients that are there, this rank's pieces, as dense tensors. Meta tensors hold nothing and are left out, and
        so is what is still a summand, whose norm says nothing; ``partial`` names one."""
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        shards: list[ShardInfo] = []
        for name, parameter in zip(self.names, self.parameters, strict=True):
            gradient = parameter.grad
            if gradient is None or gradient.is_meta:
                continue
            if is_partial(gradient):
                self.partial = name
                continue
            gradient = local(gradient)
            if gradient.is_sparse:
                gradient = gradient.coalesce().values()
            names.append(name)
            tensors.append(gradient)
            if self._owned is not None:
                shards.append(OWNED if name in self._owned else REPLICA)
        return TensorView(names, tensors, shards)
