"""What this rank trains: the model or its stages, and the names and pieces of parameters that only the trainer tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainmon.adapters.base import plain_name
from trainmon.adapters.hyperparallel.axes import LOOKED_FOR, axis
from trainmon.adapters.torch_parts.shards import Told, is_dtensor

__all__ = ["Experts", "chunk_names", "model_of"]

NameOf = Callable[[str], str]


def model_of(trainer: Any) -> torch.nn.Module:
    """What this rank trains: the model, or its parts where they aren't in one module."""
    model: torch.nn.Module = trainer.model
    parts = getattr(trainer, "model_parts", None)
    if not isinstance(parts, list | tuple) or len(parts) < 2:
        return model
    inside = {id(module) for module in model.modules()}
    return model if all(id(part) in inside for part in parts) else torch.nn.ModuleList(parts)


def chunk_names(model: torch.nn.Module) -> NameOf | None:
    """Names without the number of a stage's chunk, where a pipeline gives a rank several; None elsewhere. Chunks that
    have equal names keep their numbers."""
    if not isinstance(model, torch.nn.ModuleList):
        return None
    names = [name.partition(".")[2] for name, _ in model.named_parameters()]
    if len(set(names)) < len(names):
        return None
    return lambda name: name.partition(".")[2] or name


class Experts:
    """Experts of which a rank has some: two plain tensors with one name on two ranks would be taken for copies.

    DTensors tell by themselves. Stacked in one tensor they are rows of the whole; in modules numbered from 0 on every
    rank they get their numbers among all.

    Args:
        name_of: names without a chunk's number.

    Attributes:
        unknown: what could not be told, and what is uncertain then.
    """

    def __init__(self, trainer: Any, model: torch.nn.Module, name_of: NameOf | None) -> None:
        self._name_of = name_of
        self._rank, self._ranks = axis(trainer, "ep")
        self.unknown: str | None = None
        self._stacks: dict[str, tuple[int, int]] = {}  # rows here and in all, by the prefix of names
        self._lists: dict[str, int] = {}  # the first one's number
        for name, module in model.named_modules():
            experts, total = getattr(module, "experts", None), getattr(module, "num_experts", None)
            if experts is None or not isinstance(total, int) or isinstance(total, bool):
                continue
            self._look(f"{name}.experts" if name else "experts", experts, total)

    def _look(self, place: str, experts: Any, total: int) -> None:
        prefix = self._plain(place)
        if isinstance(experts, torch.nn.ModuleList):
            here = len(experts)
        else:
            tensors = list(experts.parameters()) if isinstance(experts, torch.nn.Module) else [experts]
            plain = [
                one for one in tensors if isinstance(one, torch.Tensor) and one.ndim and not is_dtensor(one)
            ]
            rows = {one.shape[0] for one in plain}
            here = rows.pop() if len(rows) == 1 else total
        if not 0 < here < total or total % here:
            return
        if self._rank is None or here * self._ranks != total:
            self.unknown = (
                f"{prefix}: this rank has {here} of {total} experts, and which they are was not found "
                f"(looked for {LOOKED_FOR.format('ep')}): norms count one rank's experts alone"
            )
        elif isinstance(experts, torch.nn.ModuleList):
            self._lists[prefix] = self._rank * here
        else:
            self._stacks[prefix] = here, total

    def _plain(self, name: str) -> str:
        name = plain_name(name)
        return name if self._name_of is None else self._name_of(name)

    @property
    def naming(self) -> NameOf | None:
        """Names over all ranks; None: they are that already."""
        if not self._lists:
            return self._name_of

        def name(own: str) -> str:
            own = own if self._name_of is None else self._name_of(own)
            for prefix, first in self._lists.items():
                number, dot, rest = own.removeprefix(f"{prefix}.").partition(".")
                if own.startswith(f"{prefix}.") and number.isdecimal():
                    return f"{prefix}.{int(number) + first}{dot}{rest}"
            return own

        return name

    def piece(self, name: str, parameter: torch.Tensor) -> Told | None:
        """Which part of a parameter this rank has; ``name`` is one over all ranks."""
        for prefix, (here, total) in self._stacks.items():
            if (name == prefix or name.startswith(f"{prefix}.")) and parameter.shape[:1] == (here,):
                return (self._rank or 0) * here, total
        return None
