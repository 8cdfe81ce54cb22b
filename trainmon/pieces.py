"""Which ranks hold the same piece of a parameter: found by comparing what each rank says of its own.

Two ranks with the same piece of the same parameter hold the same numbers, and one of them counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from trainmon.dist import Group
from trainmon.events import ModelView

__all__ = ["Keys", "Pieces", "share_pieces"]

Keys = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """What one rank holds: a key a parameter, equal for equal pieces, and its bytes on that rank."""

    keys: Keys
    sizes: Keys


def share_pieces(model: ModelView, group: Group) -> list[Pieces]:
    """Tells every rank what the others hold; of ranks with the same piece the lowest owns it.

    Returns:
        Every rank's pieces.

    Raises:
        Lost: the group is lost.
    """
    names = model.parameter_names()
    held = [f"{name} {piece}" for name, piece in zip(names, model.pieces(), strict=True)]
    sizes = {name: tensor.nbytes for name, tensor, _ in model.weights()}
    mine = np.array([[_key(text) for text in held], [sizes.get(name, 0) for name in names]], np.uint64)
    everybody = [
        Pieces(*np.frombuffer(packed, np.uint64).reshape(2, -1)) for packed in group.exchange(mine.tobytes())
    ]
    lower = [one.keys for one in everybody[: group.rank]]
    replicas = np.isin(mine[0], np.concatenate(lower)) if lower else np.zeros(len(names), np.bool_)
    model.take_owners({name for name, copy in zip(names, replicas.tolist(), strict=True) if not copy})
    return everybody


def _key(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
