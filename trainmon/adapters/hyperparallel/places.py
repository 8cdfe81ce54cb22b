"""Where this process is among the ranks, as the trainer's meshes say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainmon.adapters.base import layout_from_environment
from trainmon.dist import Group
from trainmon.events import Layout

__all__ = ["axis", "chunk_names", "layout_of", "model_of"]


def axis(trainer: Any, name: str) -> tuple[int, int]:
    """Rank and size along an axis of parallelism (``tp``, ``pp``, ``cp``, ``dp``); (0, 1) where there is none."""
    mesh: Any = getattr(trainer, "mesh", None)
    size = _number(getattr(mesh, f"{name}_size", None))  # the third generation's context of meshes
    if size is not None:
        return _number(getattr(mesh, f"{name}_rank", None)) or 0, size
    size = _number(getattr(getattr(trainer, "parallel_dims", None), name, None))
    if size is None or size <= 1:
        return 0, 1
    try:
        return int(mesh[name].get_local_rank()), size
    except Exception:  # a mesh without this name, or without ranks
        if name != "pp":
            return 0, size
        last = getattr(trainer, "pp_has_last_stage", False) and not getattr(
            trainer, "pp_has_first_stage", False
        )
        return (size - 1 if last else 0), size


def layout_of(trainer: Any, group: Group | None) -> Layout:
    """The layout: tokens count once, on the first tensor parallel rank of the last stage."""
    layout = layout_from_environment() if group is None else Layout(group.rank, group.size)
    (tensor, tensors), (stage, stages) = axis(trainer, "tp"), axis(trainer, "pp")
    if tensors == stages == 1:
        return layout
    if stages == 1 and _splits_tokens(trainer, tensors):
        return Layout(layout.rank, layout.world)
    return Layout(
        layout.rank,
        layout.world,
        counts_tokens=tensor == 0 and stage == stages - 1,
        data_rank=_data_rank(trainer),
        stage=stage,
    )


def chunk_names(model: torch.nn.Module) -> Callable[[str], str] | None:
    """Names without the number of a stage's chunk, where a pipeline gives a rank several; None elsewhere. Chunks that
    have equal names keep their numbers."""
    if not isinstance(model, torch.nn.ModuleList):
        return None
    names = [name.partition(".")[2] for name, _ in model.named_parameters()]
    if len(set(names)) < len(names):
        return None
    return lambda name: name.partition(".")[2] or name


def model_of(trainer: Any) -> torch.nn.Module:
    """What this rank trains: the model, or its parts where they aren't in one module."""
    model: torch.nn.Module = trainer.model
    parts = getattr(trainer, "model_parts", None)
    if not isinstance(parts, list | tuple) or len(parts) < 2:
        return model
    inside = {id(module) for module in model.modules()}
    return model if all(id(part) in inside for part in parts) else torch.nn.ModuleList(parts)


def _data_rank(trainer: Any) -> int:
    """Which part of the global batch this rank is fed."""
    info = getattr(trainer, "_dp_group_info", None)
    if info is not None:
        group = getattr(info, "group", None)
        try:
            return int(torch.distributed.get_rank(group)) if group is not None else 0
        except (RuntimeError, ValueError, TypeError):
            return 0
    (data, _), (context, contexts) = axis(trainer, "dp"), axis(trainer, "cp")
    return data * contexts + context


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
