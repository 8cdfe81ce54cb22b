"""Embeddings that two stages of a pipeline share: each stage has a tensor of its own, under a name of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from trainmon.adapters.torch_parts.shards import detached
from trainmon.dist import Group

__all__ = ["renamed", "tied_names"]

#: Rows of a table that are compared.
_ROWS = 64


def renamed(name_of: Callable[[str], str] | None, names: Mapping[str, str]) -> Callable[[str], str]:
    """``name_of``, and then what ``names`` says by now."""

    def name(own: str) -> str:
        own = own if name_of is None else name_of(own)
        return names.get(own, own)

    return name


def tied_names(
    model: torch.nn.Module, named: Iterable[tuple[str, torch.nn.Parameter]], first: bool, group: Group
) -> dict[str, str]:
    """Names on the first stage of what is an embedding there, by the names here: tables of one shape with the same bits.

    A collective: to be called on all ranks, whatever they hold.

    Args:
        named: this rank's parameters by their names over all ranks.
        first: whether this rank has the first stage.

    Raises:
        Lost: the group is lost.
    """
    tables = {name: parameter for name, parameter in named if parameter.ndim == 2 and not parameter.is_meta}
    embeddings = {
        id(weight)
        for module in model.modules()
        if "embed" in type(module).__name__.lower()
        for weight in module.parameters(recurse=False)
    }
    mine = {name: table for name, table in tables.items() if first and id(table) in embeddings}
    told = json.dumps([[name, list(table.shape), _bits(table)] for name, table in mine.items()])
    shapes: dict[tuple[int, ...], dict[str, str]] = {}
    for message in group.exchange(told.encode()):
        for name, shape, bits in json.loads(message):
            if bits is not None:
                shapes.setdefault(tuple(shape), {})[bits] = name
    found = {}
    for name, table in tables.items():
        known = shapes.get(tuple(table.shape))
        if known and name not in mine and (other := known.get(_bits(table) or "")) is not None:
            found[name] = other
    return {name: other for name, other in found.items() if other not in tables}


@torch.no_grad()
def _bits(table: Any) -> str | None:
    """What some rows hold; None where that tells nothing: they are all the same number."""
    try:
        rows = detached(table)
        rows = rows[:: max(1, rows.shape[0] // _ROWS)].cpu().contiguous()
    except Exception:  # no tensor that can be read
        return None
    if not rows.numel() or bool((rows == rows.view(-1)[0]).all()):
        return None
    return hashlib.blake2b(rows.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
