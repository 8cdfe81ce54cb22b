"""What the engine may ask of torch optimizers, single, chained or wrapped: rates, moments, master copies.

Everything is looked up when asked: ``load_state_dict`` replaces all state, and a wrapper may make its optimizer anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainmon.adapters.torch_parts.shards import detached, is_dtensor, local, owns_by_coordinate, same_piece
from trainmon.events import AdamStep, ShardInfo, TensorView

if TYPE_CHECKING:
    from trainmon.adapters.torch_parts.parameters import ParameterList

__all__ = ["OptimizerView", "optimizers_of", "slots_of"]

#: Where wrappers and chains keep what they wrap: Accelerate, DeepSpeed, Megatron (`optimizer`, `chained_optimizers`),
#: torchtitan (`optimizers`), ZeroRedundancyOptimizer (`optim`).
_INSIDE = ("chained_optimizers", "optimizers", "optimizer", "optim")

#: One name for what optimizers call differently.
_CANONICAL = {
    "moment1": "exp_avg",
    "adam_m": "exp_avg",
    "moment2": "exp_avg_sq",
    "adam_v": "exp_avg_sq",
    "variance": "exp_avg_sq",
    "row_var": "exp_avg_sq_row",
    "col_var": "exp_avg_sq_col",
}
_MASTERS = ("master_param", "master_weight", "master")
_NO_MOMENTS = frozenset({"step", "mu_product", *_MASTERS})

_WHOLE = ShardInfo()

#: What an optimizer of this class will hold once it has stepped.
_EXPECTED: Mapping[str, tuple[str, ...]] = {
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "Lion": ("exp_avg",),
    "Muon": ("momentum_buffer",),
}


def optimizers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers that do the work: of a list, a chain, a wrapper, or the optimizer itself.

    Raises:
        TypeError: there is none.
    """
    found: dict[int, torch.optim.Optimizer] = {}
    seen: set[int] = set()

    def look(thing: Any) -> bool:
        if id(thing) in seen:
            return True
        seen.add(id(thing))
        if isinstance(thing, list | tuple):
            return bool(sum(look(entry) for entry in thing))  # all of them
        for name in _INSIDE:
            inside = _attribute(thing, name)
            if inside is not None and look(inside):
                return True
        if isinstance(thing, torch.optim.Optimizer):
            found[id(thing)] = thing
            return True
        return False

    look(optimizer)
    if not found:
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer, a list of them, or hold one as .optimizer or .optimizers, not "
            f"{type(optimizer).__name__}"
        )
    return list(found.values())


def _attribute(thing: Any, name: str) -> Any:
    """None too where a property refuses: a chain of several may have no ``optimizer``."""
    try:
        return getattr(thing, name, None)
    except Exception:
        return None


def slots_of(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.nn.Parameter, Any]]:
    """What all optimizers update: a name by group and position, the parameter, its optimizer."""
    number = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for position, parameter in enumerate(group["params"]):
                yield f"optimizer.{number}.{position}", parameter, optimizer
            number += 1


class OptimizerView:
    """See :class:`trainmon.events.OptimizerView`.

    Args:
        optimizer: as given to ``attach``.
        parameters: gives names and ownership of what it updates.
    """

    def __init__(self, optimizer: Any, parameters: ParameterList) -> None:
        self._optimizer, self._parameters = optimizer, parameters

    def learning_rates(self) -> Mapping[str, float]:
        groups = [group for one in optimizers_of(self._optimizer) for group in one.param_groups]
        return {
            str(group.get("name", index)): group["lr"]
            for index, group in enumerate(groups)
            if group.get("lr") is not None  # some optimizers find their own
        }

    def moment_names(self) -> Sequence[str]:
        names: dict[str, None] = {}
        for optimizer in optimizers_of(self._optimizer):
            names.update(dict.fromkeys(_EXPECTED.get(type(optimizer).__name__, ())))
            for group in optimizer.param_groups:
                if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
                    names["momentum_buffer"] = None
                if group.get("amsgrad"):
                    names["max_exp_avg_sq"] = None
        return tuple(names)

    def moments(self) -> Mapping[str, TensorView]:
        columns: dict[str, tuple[list[str], list[torch.Tensor], list[ShardInfo]]] = {}
        sliced = _holds_slices(self._optimizer)
        for parameter, name, shard, state in self._states():
            in_pieces = is_dtensor(parameter)
            for key, value in state.items():
                if key in _NO_MOMENTS or not _is_numbers(value):
                    continue
                column = columns.get(key)
                if column is None:
                    column = columns[key] = [], [], []
                names, tensors, shards = column
                names.append(name)
                if not in_pieces:
                    tensors.append(value)
                    shards.append(
                        _WHOLE if sliced else shard
                    )  # sliced: it is only where the parameter is updated
                    continue
                tensors.append(local(value))
                if same_piece(value, parameter):
                    shards.append(shard)
                else:
                    shards.append(ShardInfo(owner=owns_by_coordinate(value, shard.owner), apart=True))
        views: dict[str, TensorView] = {}
        for key, column in columns.items():
            name, view = _CANONICAL.get(key, key), TensorView(*column)
            views[name] = _joined(views[name], view) if name in views else view
        return views

    def masters(self) -> TensorView:
        if not self._keeps_masters():
            return TensorView((), ())
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        shards: list[ShardInfo] = []
        for parameter, name, shard, state in self._states():
            values = (
                [parameter] if self._parameters.master(parameter) else [state.get(key) for key in _MASTERS]
            )
            for value in values:
                if isinstance(value, torch.Tensor) and value.numel() == parameter.numel():
                    names.append(name)
                    tensors.append(detached(value))
                    shards.append(shard)
                    break
        return TensorView(names, tensors, shards)

    def adam_steps(self) -> Sequence[AdamStep]:
        steps = []
        sliced = _holds_slices(self._optimizer)
        for optimizer in optimizers_of(self._optimizer):
            kind = type(optimizer).__name__
            if kind not in ("Adam", "AdamW", "FusedAdam"):
                continue
            for group in optimizer.param_groups:
                decoupled = group.get("decoupled_weight_decay", kind != "Adam")
                for parameter in group["params"]:
                    state, known = optimizer.state.get(parameter), self._parameters.known(parameter)
                    if not state or known is None or "exp_avg_sq" not in state:
                        continue
                    square = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
                    name, shard = known
                    steps.append(
                        AdamStep(
                            name,
                            local(state["exp_avg"]),
                            local(square),
                            state.get("step", group.get("step", 0)),
                            group["lr"],
                            group["betas"],
                            group["eps"],
                            group["weight_decay"] if decoupled else 0.0,
                            sliced or shard.owner,
                        )
                    )
        return steps

    def _keeps_masters(self) -> bool:
        """As the first parameter of each group has it that has state at all: all of a group are kept alike."""
        for optimizer in optimizers_of(self._optimizer):
            if not optimizer.state and not self._parameters.has_masters:
                continue
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter)
                    if self._parameters.master(parameter) or any(key in (state or ()) for key in _MASTERS):
                        return True
                    if state:
                        break
        return False

    def _states(self) -> Iterator[tuple[torch.nn.Parameter, str, ShardInfo, Mapping[str, Any]]]:
        """All trainable parameters that have state already, or are masters."""
        for _, parameter, optimizer in slots_of(optimizers_of(self._optimizer)):
            state = optimizer.state.get(parameter)  # never [..]: that would make an empty one
            if not state and not self._parameters.master(parameter):
                continue
            known = self._parameters.known(parameter)
            if known is not None:
                yield parameter, *known, state or {}


def _joined(one: TensorView, other: TensorView) -> TensorView:
    """Of optimizers that name the same state differently."""
    return TensorView(
        [*one.names, *other.names], [*one.tensors, *other.tensors], [*one.shards, *other.shards]
    )


def _is_numbers(value: Any) -> bool:
    """A tensor that holds floating point numbers here."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and not value.is_meta


def _holds_slices(optimizer: Any) -> bool:
    """Whether each rank updates some of the parameters only, and sends them to the others."""
    return type(optimizer).__name__ == "ZeroRedundancyOptimizer"
