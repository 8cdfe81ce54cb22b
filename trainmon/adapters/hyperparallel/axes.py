"""Rank and size along an axis of parallelism, by every name under which trainers keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["LOOKED_FOR", "axis", "group_members", "group_rank", "mesh_members", "whole_mesh"]

#: Where a rank along an axis is looked for, as it is said where it was not found.
LOOKED_FOR = "{0}_rank, get_local_rank(), get_group() and get_coordinate() of mesh and device_mesh"


def axis(trainer: Any, *names: str) -> tuple[int | None, int]:
    """Rank and size along an axis (``tp``, ``pp``, ``cp``, ``ep``, ``dp``).

    Args:
        names: how the axis may be called; the first that has a size counts.

    Returns:
        (0, 1) where there is none; a rank of None: there is one, and this process's place on it can't be told.
    """
    for name in names:
        size = _size(trainer, name)
        if size is not None:
            return (0, 1) if size <= 1 else (_rank(trainer, name, size), size)
    return 0, 1


def group_rank(group: Any, size: int) -> int | None:
    """This process's rank in a process group, or in what holds one as ``group``; None: none, or it isn't in it."""
    held = getattr(group, "group", None)
    group = group if held is None or callable(held) else held
    return _told(lambda: None if group is None else torch.distributed.get_rank(group), size)


def group_members(group: Any) -> list[int] | None:
    """The ranks of a process group, as they are numbered among all; None: it can't be told."""
    try:
        return None if group is None else list(torch.distributed.get_process_group_ranks(group))
    except Exception:  # of another library
        return None


def whole_mesh(mesh: Any) -> tuple[int | None, int]:
    """Rank in and size of a mesh of one axis."""
    size = _told(lambda: int(mesh.size()))
    if size is None:
        return None, 1
    rank = _told(lambda: int(mesh.get_local_rank()), size)
    return (_told(lambda: group_rank(mesh.get_group(), size), size) if rank is None else rank), size


def mesh_members(mesh: Any) -> list[int] | None:
    """The ranks of a mesh of one axis; None: it can't be told."""
    try:
        return group_members(mesh.get_group())
    except Exception:  # it has no groups
        return None


def _meshes(trainer: Any) -> Iterator[Any]:
    """The third generation keeps the mesh of devices in a context of meshes, which has numbers by name."""
    mesh = getattr(trainer, "mesh", None)
    for one in (mesh, getattr(mesh, "device_mesh", None), getattr(trainer, "device_mesh", None)):
        if one is not None:
            yield one


def _size(trainer: Any, name: str) -> int | None:
    dimensions = getattr(trainer, "parallel_dims", None)
    for owner in (getattr(trainer, "mesh", None), dimensions):
        for spelling in (f"{name}_size", name):
            size = getattr(owner, spelling, None)
            if isinstance(size, int) and not isinstance(size, bool):
                return size
    for mesh in _meshes(trainer):
        if name in (getattr(mesh, "mesh_dim_names", None) or ()):
            for ask in (lambda mesh=mesh: mesh[name].size(), lambda mesh=mesh: mesh.size(name)):
                size = _told(ask)
                if size is not None:
                    return size
    return None


def _rank(trainer: Any, name: str, size: int) -> int | None:
    for mesh in _meshes(trainer):
        for ask in _ways(mesh, name, size):
            rank = _told(ask, size)
            if rank is not None:
                return rank
    return _stage(trainer, size) if name == "pp" else None


def _ways(mesh: Any, name: str, size: int) -> tuple[Callable[[], Any], ...]:
    return (
        lambda: getattr(mesh, f"{name}_rank"),
        lambda: int(mesh[name].get_local_rank()),
        lambda: mesh.get_local_rank(name),
        lambda: group_rank(mesh.get_group(name), size),
        lambda: group_rank(mesh[name].get_group(), size),
        lambda: mesh.get_coordinate()[list(mesh.mesh_dim_names).index(name)],
    )


def _stage(trainer: Any, stages: int) -> int | None:
    """Trainers say of a stage whether it is the first or the last one."""
    first = getattr(trainer, "pp_has_first_stage", None)
    last = getattr(trainer, "pp_has_last_stage", None)
    if first:
        return 0
    if last:
        return stages - 1
    return 1 if stages == 3 and first is not None and last is not None else None


def _told(ask: Callable[[], Any], size: int | None = None) -> int | None:
    """A number that an object tells, if it does and it can be."""
    try:
        number = ask()
    except Exception:  # of any kind: it has no such method, no such axis, no groups
        return None
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        return None
    return number if size is None or number < size else None
