"""Tensors among the arguments and results of a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trainmon.adapters.torch_parts.modules import parts_of

__all__ = ["all_tensors", "one_level"]

_DEPTH = 8  # of containers within containers


def one_level(value: Any) -> list[tuple[int, torch.Tensor]]:
    """A tensor, or those in one list or tuple, by position."""
    if isinstance(value, torch.Tensor):
        return [(0, value)]
    if isinstance(value, list | tuple):
        return [(at, one) for at, one in enumerate(value) if isinstance(one, torch.Tensor)]
    return []


def all_tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Those in lists, tuples, mappings and dataclasses, depth first, each as often as it is there."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEPTH:
        for part in parts_of(value):
            yield from all_tensors(part, depth + 1)
