"""A tensor of which a rank has a piece, as HyperParallel has it: torch's DTensor in its names, of its own class."""

from __future__ import annotations

from typing import Any

import torch


class Shard:
    def __init__(self, dim: int) -> None:
        self.dim = dim

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def is_partial(self) -> bool:
        return False


class StridedShard(Shard):
    def __init__(self, dim: int, split_factor: int) -> None:
        super().__init__(dim)
        self.split_factor = split_factor

    def __str__(self) -> str:
        return f"SS({self.dim}, {self.split_factor})"


class Replicate:
    def is_shard(self, dim: int | None = None) -> bool:
        return False

    def is_partial(self) -> bool:
        return False


class Partial(Replicate):
    def is_partial(self) -> bool:
        return True


class Mesh:
    """One axis."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def get_coordinate(self) -> tuple[int, ...]:
        return (self._rank,)

    def get_local_rank(self, axis: int = 0) -> int:
        return self._rank

    def size(self, axis: int = 0) -> int:
        return self._size


class Piece(torch.Tensor):
    """Its shape is the whole's; arithmetic on it is an error, as where HyperParallel knows no layout for it."""

    detaches = True  # which making a parameter of it needs
    _local: torch.Tensor
    device_mesh: Any
    placements: tuple[Any, ...]

    @staticmethod
    def __new__(cls, local: torch.Tensor, mesh: Mesh, placement: Any) -> Piece:
        shape = list(local.shape)
        if placement.is_shard():
            shape[placement.dim] *= mesh.size()
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, requires_grad=True)
        self._local, self.device_mesh, self.placements = local, mesh, (placement,)
        return self

    def to_local(self) -> torch.Tensor:
        return self._local

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function is torch.ops.aten.detach.default and cls.detaches:
            piece = arguments[0]
            return cls(piece._local, piece.device_mesh, *piece.placements)
        raise NotImplementedError(f"no layout is known for {function}")


class Bare(Piece):
    """For which no operation at all is known."""

    detaches = False
