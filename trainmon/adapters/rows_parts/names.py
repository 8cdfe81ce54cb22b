"""A model or its chunks, and a part of one by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["WHOLE", "Named", "chunks_of"]

#: The stage of what belongs to a model that is not given in chunks.
WHOLE = -1
Model = TypeVar("Model")


@dataclass(frozen=True, slots=True)
class Named:
    """A module or parameter.

    Attributes:
        name: with ``"<i>:"`` before it if the model is a list of chunks.
        stage: the chunk, or -1.
    """

    name: str
    stage: int
    thing: Any


def chunks_of(model: Any, kind: type[Model], kind_name: str) -> list[tuple[str, int, Model]]:
    """Prefix, stage and model of each chunk; None is counted and left out.

    Args:
        kind, kind_name: what a chunk has to be, and how the user calls that.

    Raises:
        TypeError: something else.
    """
    if isinstance(model, list | tuple):
        chunks = [(f"{at}:", at, one) for at, one in enumerate(model) if one is not None]
    else:
        chunks = [] if model is None else [("", WHOLE, model)]
    for _, _, one in chunks:
        if not isinstance(one, kind):
            raise TypeError(f"model must be a {kind_name} or a list of them, not {type(one).__name__}")
    return chunks
