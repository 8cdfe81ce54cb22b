"""Which piece of a parameter a rank holds, read off what tensors know: placements of DTensors (torch's, and others that
have ``placements``, ``device_mesh`` and ``to_local()`` with the same meaning), FSDP1's flat shards.

Two ranks with the same piece of the same parameter hold the same numbers (data parallel, replicated norms of a tensor
parallel model), and one of them counts. No mesh has to be named for that: pieces are compared between ranks.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from trainmon.events import ShardInfo

__all__ = [
    "FlatShards",
    "detached",
    "Told",
    "gathered",
    "is_dtensor",
    "is_partial",
    "local",
    "owns_by_coordinate",
    "piece",
    "place",
    "same_piece",
    "start_along",
    "without_graph",
]

_WHOLE = {True: ShardInfo(), False: ShardInfo(owner=False)}

#: What the loop says of a piece: a name for it, or where it begins along the first dimension of how many in the whole.
Told = str | tuple[int, int]


def _of_torch(tensor: Any) -> bool:
    """Without importing torch.distributed.tensor, which a model that has none doesn't need."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_dtensor(tensor: Any) -> bool:
    """A tensor of which this rank has a piece: torch's or another library's."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    if _of_torch(tensor):
        return True
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece as a plain tensor, without communication."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def without_graph(value: Any) -> Any:
    """A tensor without its graph, of another library's DTensor this rank's piece: it may know of no operation, this one
    included. Anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    piece: Any = value
    return piece.to_local().detach() if is_dtensor(value) and not _of_torch(value) else value.detach()


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece without its graph."""
    return local(without_graph(tensor))


def is_partial(tensor: torch.Tensor) -> bool:
    """Whether ranks still hold summands of the tensor: their norms say nothing of the sum's."""
    return is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)  # type: ignore[attr-defined]


def start_along(tensor: torch.Tensor, dimension: int) -> int | None:
    """Where this rank's piece begins along a dimension of a DTensor that is cut along it, axis by axis of its mesh; None
    for any other tensor."""
    if not is_dtensor(tensor):
        return None
    mesh, size = tensor.device_mesh, tensor.shape[dimension]  # type: ignore[attr-defined]
    start = None
    for axis, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if placement.is_shard(dimension % tensor.ndim):
            piece = -(-size // mesh.size(axis))
            before = min(mesh.get_local_rank(axis) * piece, size)
            start, size = (start or 0) + before, min(piece, size - before)
    return start


def gathered(tensor: torch.Tensor, shard: torch.Tensor) -> bool:
    """Whether ``tensor`` is the whole of which FSDP2 has ``shard``."""
    return is_dtensor(shard) and not is_dtensor(tensor) and tensor.shape == shard.shape


def same_piece(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a rank's part of ``tensor`` lies where its part of ``parameter`` does."""
    if not is_dtensor(parameter):
        return True
    if not is_dtensor(tensor):
        return tensor.shape == local(parameter).shape
    return tensor.shape == parameter.shape and tensor.placements == parameter.placements  # type: ignore[attr-defined]


def owns_by_coordinate(tensor: torch.Tensor, otherwise: bool) -> bool:
    """Whether this rank is the first of those that hold the same piece of a DTensor, over its mesh."""
    if not is_dtensor(tensor):
        return otherwise
    at = tensor.device_mesh.get_coordinate() or ()  # type: ignore[attr-defined]
    return all(
        placement.is_shard() or not index
        for placement, index in zip(tensor.placements, at, strict=True)  # type: ignore[attr-defined]
    )


def place(tensor: torch.Tensor, owner: bool, told: Told | None = None) -> ShardInfo:
    """What is known of this rank's piece, and whether it contributes it.

    Args:
        told: what the loop says of the tensor as this rank has it, a DTensor of which may be a piece again.
    """
    if isinstance(told, str):
        return ShardInfo(owner=owner, placed=False)
    if not is_dtensor(tensor) and told is None:
        return _WHOLE[owner]
    if is_dtensor(tensor) and _interleaved(tensor):
        return ShardInfo(owner=owner, placed=False)
    start = _bounds(tensor)[1] if is_dtensor(tensor) else (0,) * tensor.ndim
    whole = tuple(tensor.shape)
    if told is not None:
        start, whole = (told[0] + start[0], *start[1:]), (told[1], *whole[1:])
    return ShardInfo(owner=owner, start=start, whole=whole)


def _interleaved(tensor: torch.Tensor) -> bool:
    """Whether another library's DTensor is cut along one dimension in an order of its own."""
    placements = tensor.placements  # type: ignore[attr-defined]
    return not _of_torch(tensor) and any(hasattr(placement, "split_factor") for placement in placements)


def _coordinates(tensor: torch.Tensor) -> str:
    """This rank's place along the mesh axes that cut the tensor."""
    at = tensor.device_mesh.get_coordinate() or ()  # type: ignore[attr-defined]
    cut = zip(tensor.placements, at, strict=True)  # type: ignore[attr-defined]
    return f"at {[(str(placement), index) for placement, index in cut if placement.is_shard()]}"


def _bounds(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and start of this rank's piece of a DTensor."""
    if not _of_torch(tensor):
        return tuple(local(tensor).shape), tuple(
            start_along(tensor, axis) or 0 for axis in range(tensor.ndim)
        )
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, start = compute_local_shape_and_global_offset(
        tensor.shape,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
    )
    return tuple(shape), tuple(start)


def piece(tensor: torch.Tensor) -> str:
    """Where this rank's piece begins in the whole tensor, and its shape; "whole" for a plain tensor."""
    if not is_dtensor(tensor):
        return "whole"
    if _interleaved(tensor):
        return _coordinates(tensor)
    shape, start = _bounds(tensor)
    return f"{start} {shape}"


class FlatShards:
    """The parameters of FSDP1 modules (``use_orig_params=True``): slices of flat parameters, a rank of its own each."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._piece: dict[int, str] = {}
        module = sys.modules.get("torch.distributed.fsdp")
        if module is None:
            return
        for child in module.FullyShardedDataParallel.fsdp_modules(model):
            strategy = child.sharding_strategy.name
            rank = child.process_group.rank()
            for parameter in child.parameters():
                if strategy != "NO_SHARD":
                    self._piece.setdefault(id(parameter), f"flat shard {rank}")

    def piece(self, parameter: torch.nn.Parameter) -> str:
        """As :func:`piece`, for any parameter."""
        return self._piece.get(id(parameter)) or piece(parameter)
