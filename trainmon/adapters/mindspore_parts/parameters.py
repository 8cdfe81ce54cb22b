"""What the engine may ask of a MindSpore model and its optimizer: live views of the memory of parameters and state.

On a CPU ``asnumpy()`` of a parameter copies nothing and follows its updates. On a device it would copy the whole
tensor to the host: there the tensors themselves are shown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from mindspore import Parameter, ParameterTuple

from trainmon.events import AdamStep, ShardInfo, TensorView

__all__ = ["OptimizerView", "ParameterList", "find_optimizer", "host_view", "optimizer_states"]

#: One name for what optimizers call differently.
_CANONICAL = {
    "moment1": "exp_avg",
    "moment2": "exp_avg_sq",
    "vhat": "max_exp_avg_sq",
    "moments": "momentum_buffer",
    "accum": "momentum_buffer",
    "exp_avgs": "exp_avg",
    "exp_avg_sqs": "exp_avg_sq",
    "moments1": "exp_avg",
    "moments2": "exp_avg_sq",
}


def own_piece(tensor: Any) -> Any:
    """This rank's piece of a distributed tensor; any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def host_view(tensor: Any) -> Any:
    """The memory of the tensor, or of this rank's piece, as an array that can't be written to."""
    array = own_piece(tensor).asnumpy().view()
    array.flags.writeable = False
    return array


def find_optimizer(*places: Any) -> Any:
    """The first optimizer among what may be one or hold one as ``.optimizer``: a step cell may own it."""
    for place in places:
        for one in (place, getattr(place, "optimizer", None)):
            if one is not None and hasattr(one, "parameters") and hasattr(one, "learning_rate"):
                return one
    return None


class ParameterList:
    """See :class:`trainmon.events.ModelView`.

    Args:
        network: the model, or a training step around it.
        optimizer: those of its parameters count that it updates; None: all trainable ones.
        addressable: whether the host can read parameters where they are.
        rank: None where every rank holds all of each parameter; else each rank's piece is its own.
    """

    def __init__(self, network: Any, optimizer: Any, addressable: bool, rank: int | None = None) -> None:
        updated = list(optimizer.parameters) if optimizer is not None else list(network.trainable_params())
        wanted = {id(parameter) for parameter in updated}
        inside = [one for one in network.trainable_params() if id(one) in wanted]
        there = {id(parameter) for parameter in inside}
        self.parameters: list[Parameter] = inside + [one for one in updated if id(one) not in there]
        self.names = [parameter.name for parameter in self.parameters]
        # Gradients come in the optimizer's order.
        place = {id(parameter): index for index, parameter in enumerate(updated)}
        self.order = [place[id(parameter)] for parameter in self.parameters]
        self._addressable, self._rank = addressable, rank
        self._owned: frozenset[str] | None = None
        self._holders: Mapping[str, int] = {}

    def parameter_names(self) -> Sequence[str]:
        return self.names

    def pieces(self) -> Sequence[str]:
        piece = "whole" if self._rank is None else f"rank {self._rank}"
        return [piece] * len(self.names)

    def take_owners(self, owned: Collection[str], holders: Mapping[str, int]) -> None:
        self._owned, self._holders = frozenset(owned), dict(holders)

    def shards(self, names: Sequence[str]) -> list[ShardInfo]:
        """Which of them this rank contributes; empty where it does all."""
        if self._owned is None:
            return []
        return [_shard(name in self._owned, self._holders.get(name, 0)) for name in names]

    def weights(self) -> TensorView:
        shown = [host_view(one) if self._addressable else own_piece(one) for one in self.parameters]
        return TensorView(self.names, shown, self.shards(self.names))

    def version(self) -> int:
        """MindSpore counts no writes; but ``set_data`` and loading a checkpoint move a parameter to other memory."""
        if not self._addressable:
            return 0
        return hash(tuple(one.asnumpy().ctypes.data for one in self.parameters))

    def gradients(self, values: Sequence[Any]) -> TensorView:
        """Those that an optimizer was called with, in the model's order."""
        names: list[str] = []
        arrays: list[Any] = []
        for name, index in zip(self.names, self.order, strict=True):
            if index < len(values) and values[index] is not None:
                gradient = values[index]
                names.append(name)
                # A row tensor holds the rows that are not zero.
                dense = gradient if hasattr(gradient, "asnumpy") else gradient.values
                arrays.append(host_view(dense) if self._addressable else own_piece(dense))
        return TensorView(names, arrays, self.shards(names))


@cache
def _shard(owner: bool, replicas: int) -> ShardInfo:
    return ShardInfo(owner=owner, replicas=replicas)


class OptimizerView:
    """See :class:`trainmon.events.OptimizerView`.

    Args:
        optimizer: of ``mindspore.nn``; None: nothing is known.
        parameters: gives names and ownership.
    """

    def __init__(self, optimizer: Any, parameters: ParameterList, addressable: bool) -> None:
        self._optimizer, self._parameters, self._addressable = optimizer, parameters, addressable

    def learning_rates(self) -> Mapping[str, float]:
        return self.rates()

    def rates(self, ago: int = 0) -> dict[str, float]:
        """By group, in group order: of the update that comes next, or of that so many before it."""
        optimizer = self._optimizer
        if optimizer is None:
            return {}
        grouped = bool(getattr(optimizer, "is_group_lr", False))
        entries = list(optimizer.learning_rate) if grouped else [optimizer.learning_rate]
        step = optimizer.global_step - ago if ago else optimizer.global_step
        found: dict[int, float] = {}
        for entry in entries:  # one a parameter; those of a group are one object
            if id(entry) not in found:
                rate = entry if isinstance(entry, Parameter) else entry(step)
                found[id(entry)] = float(np.asarray(rate.asnumpy(), np.float64).reshape(-1)[0])
        return {str(group): rate for group, rate in enumerate(found.values())}

    def moment_names(self) -> Sequence[str]:
        return [key for key, _ in self._states()]

    def moments(self) -> Mapping[str, TensorView]:
        views: dict[str, TensorView] = {}
        for key, state in self._states():
            names, order = self._parameters.names, self._parameters.order
            held = [state[index] for index in order]
            tensors = [host_view(one) if self._addressable else own_piece(one) for one in held]
            views[key] = TensorView(names, tensors, self._parameters.shards(names))
        return views

    def adam_steps(self) -> Sequence[AdamStep]:
        """MindSpore's Adam adds epsilon elsewhere than the formula does: nothing is estimated, updates are measured."""
        return ()

    def masters(self) -> TensorView:
        return TensorView((), ())

    def _states(self) -> Iterator[tuple[str, Sequence[Parameter]]]:
        return optimizer_states(self._optimizer)


def optimizer_states(optimizer: Any) -> Iterator[tuple[str, Sequence[Parameter]]]:
    """State of floats that runs parallel to the parameters, by its canonical name; of None there is none."""
    if optimizer is None:
        return
    updated = list(optimizer.parameters)
    for key, state in vars(optimizer).items():
        if not isinstance(state, ParameterTuple) or len(state) != len(updated):
            continue
        if any(one is other for one, other in zip(state, updated, strict=True)):
            continue  # the parameters themselves
        if all(
            one.shape == other.shape and "Float" in str(one.dtype)
            for one, other in zip(state, updated, strict=True)
        ):
            yield _CANONICAL.get(key, key), state
