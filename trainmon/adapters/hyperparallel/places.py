"""Where this process is among the ranks, as the trainer's meshes say it, and which part of the batch it is fed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainmon.adapters.base import layout_from_environment
from trainmon.adapters.hyperparallel.axes import (
    LOOKED_FOR,
    axis,
    group_members,
    group_rank,
    mesh_members,
    whole_mesh,
)
from trainmon.adapters.hyperparallel.reading import read
from trainmon.dist import Group
from trainmon.events import Layout

__all__ = ["Places", "places_of"]

#: How the mesh may call the axis along which the batch is shared out, in the host's order.
_DATA = ("loss", "dp", "dp_shard", "dp_replicate")


@dataclass(frozen=True, slots=True)
class Places:
    """A rank's place.

    Attributes:
        layout: tokens count once, on the first tensor parallel rank of the last stage.
        feeds: number of parts into which the global batch is shared out.
        unknown: what could not be told, and what is uncertain then.
    """

    layout: Layout
    feeds: int
    unknown: tuple[str, ...] = ()


def places_of(trainer: Any, group: Group | None) -> Places:
    """This rank's place; ``group``: all ranks, if there are several."""
    layout = layout_from_environment() if group is None else Layout(group.rank, group.size)
    (tensor, tensors), (stage, stages) = axis(trainer, "tp"), axis(trainer, "pp")
    if tensors == stages == 1 or (stages == 1 and _splits_tokens(trainer, tensors)):
        return Places(layout, layout.world)
    unknown = []
    feed = _feed(trainer, layout)
    first = tensor == 0
    if tensor is None:
        first = stages > 1 or feed.members is None or 0 in feed.members
        if stages > 1 or feed.members is None:
            unknown.append(
                f"{_not_found('tp', tensors)}: each of {tensors} tensor parallel ranks counts its tokens (data/tokens, "
                f"tokens per second and loads of experts up to {tensors} times too large; the loss is right)"
            )
    last, told = stage in (None, stages - 1), getattr(trainer, "pp_has_last_stage", None)
    if stage is None:
        text = f"{_not_found('pp', stages)}: which stage was the first to go bad can't be told"
        if not isinstance(told, bool):
            text += f", and each of {stages} stages counts its tokens (data/tokens up to {stages} times too large)"
        unknown.append(text)
    if stages > 1 and isinstance(told, bool):
        last = told
    number = feed.number
    if number is None:
        unknown.append(
            f"{feed.missing}: what layers see of their tokens is counted on ranks that count tokens"
        )
    elif tensor is not None and read(trainer, "mesh", "sequence_parallel") is True:
        number = number * tensors + tensor  # routers see a part of the sequence each
    layout = Layout(
        layout.rank, layout.world, counts_tokens=first and last, data_rank=number, stage=stage or 0
    )
    return Places(layout, feed.of, tuple(unknown))


@dataclass(frozen=True, slots=True)
class _Feed:
    """Which part of the global batch this rank is fed, of how many; the ranks that share it all out, where known."""

    number: int | None
    of: int
    members: list[int] | None = None
    missing: str = ""


def _feed(trainer: Any, layout: Layout) -> _Feed:
    """From the group over which the host adds up losses."""
    number, of, members, folds = _summed(trainer, layout)
    context, contexts = (0, 1) if folds else axis(trainer, "cp")
    if number is None or context is None:
        name, size = ("dp", of) if number is None else ("cp", contexts)
        return _Feed(None, of * contexts, missing=_not_found(name, size))
    return _Feed(number * contexts + context, of * contexts, members if contexts == 1 else None)


def _summed(trainer: Any, layout: Layout) -> tuple[int | None, int, list[int] | None, bool]:
    """This rank in the group over which losses are added up, the group's size and members, and whether ranks of context
    parallelism are in it."""
    info, mesh = getattr(trainer, "_dp_group_info", None), read(trainer, "dp_cp_mesh")
    mesh = read(trainer, "mesh", "dp_cp_mesh") if mesh is None else mesh
    size = _number(getattr(info, "rank_size", None))
    if size is None:
        rank, size = whole_mesh(mesh)
        if rank is not None:
            return rank, size, mesh_members(mesh), True
        rank, size = axis(trainer, "dp", *_DATA)
        return rank, size, [layout.rank] if size == 1 else None, False
    members = group_members(getattr(info, "group", None))
    rank = group_rank(info, size)
    if size <= 1:
        rank, members = 0, [layout.rank]
    elif rank is None and size == layout.world:
        rank = layout.rank  # no group of its own: all ranks
    elif rank is None:
        rank, found = axis(trainer, *_DATA)
        rank = rank if found == size else None
    contexts, data = axis(trainer, "cp")[1], axis(trainer, "dp")[1]
    named = getattr(info, "group_name", None) == "loss"
    return rank, size, members, contexts == 1 or named or size == data * contexts


def _not_found(name: str, size: int) -> str:
    return f"this rank's place among {size} along {name} was not found (looked for {LOOKED_FOR.format(name)})"


def _splits_tokens(trainer: Any, tensors: int) -> bool:
    """Without any data parallel axis the tensor parallel ranks are the ones over which the loss is summed: sequence
    parallel, each has other tokens."""
    info = getattr(trainer, "_dp_group_info", None)
    summed = _number(getattr(info, "rank_size", None))
    dims = getattr(trainer, "parallel_dims", None)
    data = _number(getattr(dims, "dp_size", None))
    return summed == tensors and data == 1


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None
