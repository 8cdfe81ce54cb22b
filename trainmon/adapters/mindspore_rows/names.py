"""Names of Cells and parameters of a model, or of its chunks, with the chunk that each belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspore import nn

__all__ = ["Named", "named_cells", "named_parameters"]

#: The stage of what belongs to a model that is not given in chunks.
WHOLE = -1


@dataclass(frozen=True, slots=True)
class Named:
    """A Cell or parameter.

    Attributes:
        name: the path of attributes to it, with ``"<i>:"`` before it if the model is a list of chunks.
        stage: the chunk, or -1.
    """

    name: str
    stage: int
    thing: Any


def named_cells(model: Any) -> Iterator[Named]:
    """Each once, under its first name.

    Raises:
        TypeError: something else than Cells.
    """
    for prefix, stage, chunk in _chunks(model):
        for name, cell in chunk.cells_and_names():
            yield Named(prefix + name, stage, cell)


def named_parameters(model: Any, optimizer: Any) -> list[Named]:
    """Each parameter once: within a chunk under its first name, of several chunks under that in the last. Only if the
    model has none: what the optimizer updates.

    Raises:
        TypeError: something else than Cells.
    """
    found: dict[int, Named] = {}
    for prefix, stage, chunk in _chunks(model):
        for name, parameter in chunk.parameters_and_names():
            found[id(parameter)] = Named(prefix + name, stage, parameter)
    if not found:
        for parameter in getattr(optimizer, "parameters", None) or ():
            found.setdefault(id(parameter), Named(f"param_{len(found)}", WHOLE, parameter))
    return list(found.values())


def _chunks(model: Any) -> list[tuple[str, int, nn.Cell]]:
    """Prefix, stage and Cell of each; None is counted and left out."""
    if isinstance(model, list | tuple):
        chunks = [(f"{at}:", at, one) for at, one in enumerate(model) if one is not None]
    else:
        chunks = [] if model is None else [("", WHOLE, model)]
    for _, _, one in chunks:
        if not isinstance(one, nn.Cell):
            raise TypeError(f"model must be a mindspore.nn.Cell or a list of them, not {type(one).__name__}")
    return chunks
