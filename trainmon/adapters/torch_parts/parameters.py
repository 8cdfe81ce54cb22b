"""What the engine may ask of a torch model: names of parameters, this rank's pieces of them and of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from trainmon.adapters.base import plain_name
from trainmon.adapters.torch_parts.optimizers import optimizers_of, slots_of
from trainmon.adapters.torch_parts.shards import (
    FlatShards,
    Told,
    gathered,
    is_dtensor,
    is_partial,
    local,
    place,
)
from trainmon.events import ShardInfo, TensorView

__all__ = ["NameOf", "ParameterList", "PieceOf", "dense", "gradient_of"]

NameOf = Callable[[str], str]
PieceOf = Callable[[str, torch.nn.Parameter], "Told | None"]

#: The whole model is listed anew every so many steps, so that replaced modules are found too.
_RELIST_EVERY = 100


class ParameterList:
    """The trainable parameters by name, cached; looked up anew when the optimizer's groups change.

    A loop may give the optimizer copies of all parameters in higher precision, in the model's order or as each one's
    ``main_param``: such masters go by the names of the parameters they stand for. A parameter's ``main_grad``, where a
    host sums gradients in higher precision, is its gradient.

    Args:
        model: names come from it, without wrapper prefixes.
        optimizer: one, a list or a wrapper; what it updates beside the model's parameters gets a name by position.
        name_of: the name over all ranks that belongs to a name on this one.
        piece_of: which piece of a parameter this rank holds, where the tensor doesn't tell; None: as it looks.

    Raises:
        ValueError: ``piece_of`` says what can't be.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        name_of: NameOf | None = None,
        piece_of: PieceOf | None = None,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._named, self._piece = name_of, piece_of
        self._signature: tuple[int, ...] = ()
        self._age = 0
        self._owned: Collection[str] | None = None  # None: all
        self._holders: Mapping[str, int] = {}
        self._masters: dict[int, torch.nn.Parameter] = {}  # by the id of the model's parameter
        self._places: list[ShardInfo] = []
        self._flags: list[ShardInfo] = []
        self._known: dict[int, tuple[str, ShardInfo]] = {}
        self.partial: str | None = None
        self._plain: bool | None = None
        self.names: list[str] = []
        self.parameters: list[torch.nn.Parameter] = []
        self._relist()

    def _relist(self) -> None:
        self._plain = None
        before = dict(zip(self.names, self.parameters, strict=True))
        named: dict[int, tuple[str, torch.nn.Parameter]] = {}
        for full_name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                name = plain_name(full_name)
                name = name if self._named is None else self._named(name)
                # Between FSDP2's forward and backward the model shows gathered parameters: the optimizer has the shards.
                shard = before.get(name)
                own = shard if shard is not None and gathered(parameter, shard) else parameter
                named[id(own)] = name, own
        frozen = {id(parameter) for parameter in self._model.parameters() if not parameter.requires_grad}
        slots = {id(parameter): (name, parameter) for name, parameter, _ in slots_of(self._inner())}
        self._linked = _linked([parameter for _, parameter in named.values()], slots)
        self._masters = self._linked or _pair(list(named.values()), list(slots.values()))
        copies = {id(master) for master in self._masters.values()}
        for key, slot in slots.items():
            if key not in copies and key not in frozen:
                named.setdefault(key, slot)
        self.names = [name for name, _ in named.values()]
        self.parameters = [parameter for _, parameter in named.values()]
        self._in_pieces = any(is_dtensor(parameter) for parameter in self.parameters)
        self._name_of = {key: name for key, (name, _) in named.items()}
        self._master_ids = copies
        for key, master in self._masters.items():
            self._name_of[id(master)] = self._name_of[key]
        self._told = [self._piece_told(*one) for one in zip(self.names, self.parameters, strict=True)]
        self._places, self._flags, self._known = [], [], {}

    def _piece_told(self, name: str, parameter: torch.nn.Parameter) -> Told | None:
        told = None if self._piece is None else self._piece(name, parameter)
        if told is None or isinstance(told, str):
            return told
        rows = parameter.shape[0] if parameter.ndim else 0
        match told:
            case (int(first), int(whole)) if parameter.ndim and 0 <= first <= first + rows <= whole:
                return first, whole
        raise ValueError(
            f"piece_of({name!r}) is {told!r}: a tensor {list(parameter.shape)} needs (first, whole), where its {rows} "
            "rows begin among the whole's along the first dimension, a text, or None"
        )

    def _inner(self) -> list[torch.optim.Optimizer]:
        return optimizers_of(self._optimizer)

    def refresh(self) -> None:
        """Once a step; cheap unless something changed."""
        signature = tuple(
            value
            for optimizer in self._inner()
            for group in optimizer.param_groups
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
        found = [flat.piece(parameter) for parameter in self.parameters]
        return [own if more is None else f"{more} {own}" for own, more in zip(found, self._told, strict=True)]

    def take_owners(self, owned: Collection[str], holders: Mapping[str, int]) -> None:
        self._owned, self._holders = owned, holders
        self._places, self._flags, self._known = [], [], {}

    def known(self, parameter: torch.nn.Parameter) -> tuple[str, ShardInfo] | None:
        """Name and ownership of a trainable parameter or of its master; None for any other."""
        if not self._known:
            for key, name in self._name_of.items():
                self._known[key] = name, self._share(name)
        return self._known.get(id(parameter))

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates masters in some parameter's stead."""
        return bool(self._master_ids)

    def master(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this is a master that the optimizer updates in a parameter's stead."""
        return id(parameter) in self._master_ids

    def weights(self) -> TensorView:
        """This rank's pieces; meta tensors hold nothing and are left out, and so is what has been frozen since."""
        self.refresh()
        if len(self._places) != len(self.names):
            owned = [self._owned is None or name in self._owned for name in self.names]
            self._places = [place(*one) for one in zip(self.parameters, owned, self._told, strict=True)]
        names, tensors, shards = self.names, self.parameters, self._places
        real = [index for index, one in enumerate(tensors) if one.requires_grad and not one.is_meta]
        if len(real) < len(tensors):
            names, tensors = [names[index] for index in real], [tensors[index] for index in real]
            shards = [shards[index] for index in real]
        if not self._in_pieces:
            return TensorView(names, tensors, shards)
        with torch.no_grad():
            return TensorView(names, [local(parameter) for parameter in tensors], shards)

    def version(self) -> int:
        """Torch counts what is done to a tensor in place. What goes through ``.data`` it doesn't, nor what foreach
        operations do to DTensors: an optimizer's own writes may be missed, ``load_state_dict`` is not."""
        self.refresh()
        written = [parameter._version for parameter in self.parameters]
        written += [master._version for master in self._masters.values()]
        return hash(tuple(written))

    def _share(self, name: str) -> ShardInfo:
        """Whether this rank contributes its piece, and how many have the same."""
        if self._owned is None:
            return _shard(True, 1)
        return _shard(name in self._owned, self._holders.get(name, 0))

    def _ownership(self) -> list[ShardInfo]:
        """Of all parameters; empty where this rank owns them all."""
        if self._owned is None:
            return []
        if len(self._flags) != len(self.names):
            self._flags = [self._share(name) for name in self.names]
        return self._flags

    def _all_plain(self, gradients: Sequence[Any]) -> bool:
        """Whether all gradients lie in memory as they are; asked once a listing, as a module makes them of one kind."""
        if self._plain is None:
            self._plain = not any(one.is_sparse or one.is_meta for one in gradients)
        return self._plain

    def updated(self) -> list[torch.nn.Parameter]:
        """What the optimizer takes gradients from: the parameters and their masters."""
        return [*self.parameters, *self._masters.values()]

    def sums_apart(self) -> bool:
        """Whether gradients are summed in another place than ``grad``; all parameters of a model are treated alike."""
        return bool(self.parameters) and getattr(self.parameters[0], "main_grad", None) is not None

    def gradients(self) -> TensorView:
        """Gradients that are there, this rank's pieces, as dense tensors; a master's where there is one. Meta tensors
        hold nothing and are left out, and so is what is still a summand, whose norm says nothing; ``partial`` names
        one."""
        usual = not (self._in_pieces or self._masters or self.sums_apart())
        if usual:  # for many parameters
            there = [parameter.grad for parameter in self.parameters]
            if not [one for one in there if one is None] and self._all_plain(there):
                return TensorView(self.names, there, self._ownership())
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        shards: list[ShardInfo] = []
        for name, parameter in zip(self.names, self.parameters, strict=True):
            gradient = gradient_of(parameter)
            if self._masters and (master := self._masters.get(id(parameter))) is not None:
                # A linked master takes the gradient over when the optimizer steps: until then its own is an old one.
                old = master.grad is None or (self._linked and gradient is not None)
                gradient = gradient if old else master.grad
            if gradient is None or gradient.is_meta:
                continue
            if self._in_pieces and is_partial(gradient):
                self.partial = name
                continue
            names.append(name)
            tensors.append(dense(gradient) if self._in_pieces or gradient.is_sparse else gradient)
            if self._owned is not None:
                shards.append(self._share(name))
        return TensorView(names, tensors, shards)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """What a parameter has of its gradient: in ``main_grad``, where a host sums in higher precision, else in ``grad``."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


@cache
def _shard(owner: bool, replicas: int) -> ShardInfo:
    return ShardInfo(owner=owner, replicas=replicas)


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a gradient; of a sparse one its entries, each row once."""
    gradient = local(gradient)
    return gradient.coalesce().values() if gradient.is_sparse else gradient


Named = tuple[str, torch.nn.Parameter]


def _linked(
    parameters: Sequence[torch.nn.Parameter], updated: Collection[int]
) -> dict[int, torch.nn.Parameter]:
    """Masters by the id of the parameter that names them, as far as an optimizer updates them."""
    links = ((id(parameter), getattr(parameter, "main_param", None)) for parameter in parameters)
    return {key: main for key, main in links if main is not None and id(main) in updated}


def _pair(model: Sequence[Named], optimizer: Sequence[Named]) -> dict[int, torch.nn.Parameter]:
    """Masters by the id of the model's parameter: if the optimizer updates none of the model's but as many of the same
    shapes, in the same order."""
    own = {id(parameter) for _, parameter in model}
    others = [parameter for _, parameter in optimizer]
    if len(own) != len(others) or any(id(parameter) in own for parameter in others):
        return {}
    if any(mine.shape != other.shape for (_, mine), other in zip(model, others, strict=True)):
        return {}
    return {id(mine): other for (_, mine), other in zip(model, others, strict=True)}
