"""Names of Cells and parameters of a model, or of its chunks, with the chunk that each belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspore import nn

from trainmon.adapters.rows_parts.names import WHOLE, Named, chunks_of

__all__ = ["named_cells", "named_parameters"]


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
    return chunks_of(model, nn.Cell, "mindspore.nn.Cell")
