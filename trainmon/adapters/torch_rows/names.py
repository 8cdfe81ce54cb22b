"""Names of modules and parameters of a model, or of its chunks, with the chunk that each belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trainmon.adapters.rows_parts import names as parts
from trainmon.adapters.rows_parts.names import WHOLE, Named

__all__ = ["chunks_of", "flattened", "is_sharded", "named_modules", "named_parameters"]


def chunks_of(model: Any) -> list[tuple[str, int, nn.Module]]:
    """Prefix, stage and module of each chunk; None is counted and left out.

    Raises:
        TypeError: something else than modules.
    """
    return parts.chunks_of(model, nn.Module, "torch.nn.Module")


def named_modules(model: Any) -> Iterator[Named]:
    for prefix, stage, chunk in chunks_of(model):
        for name, module in chunk.named_modules():
            yield Named(prefix + name, stage, module)


def named_parameters(model: Any, optimizer: Any) -> list[Named]:
    """Each parameter once: within a chunk under its first name, of several chunks under that in the last. Only if the
    model has none: what the optimizer updates."""
    found: dict[torch.Tensor, Named] = {}
    for prefix, stage, chunk in chunks_of(model):
        for name, parameter in chunk.named_parameters():
            found[parameter] = Named(prefix + name, stage, parameter)
    if not found:
        groups = getattr(optimizer, "param_groups", None) or []
        for parameter in (one for group in groups for one in group["params"]):
            found.setdefault(parameter, Named(f"param_{len(found)}", WHOLE, parameter))
    return list(found.values())


def is_sharded(model: Any) -> bool:
    """Whether FSDP, of either kind, reduces the gradients inside backward."""
    return any(_has(chunk, "FSDPModule", "FullyShardedDataParallel") for _, _, chunk in chunks_of(model))


def flattened(model: Any) -> list[nn.Module]:
    """The chunks whose parameters FSDP1 has put together."""
    return [chunk for _, _, chunk in chunks_of(model) if _has(chunk, "FullyShardedDataParallel")]


def _has(chunk: nn.Module, *kinds: str) -> bool:
    return any(base.__name__ in kinds for module in chunk.modules() for base in type(module).__mro__)
