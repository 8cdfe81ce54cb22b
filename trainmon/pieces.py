"""Which ranks hold the same piece of a parameter, or see the same tokens in the same part of a layer: found by comparing
what each rank says of its own.

Two ranks with the same piece of the same parameter hold the same numbers, and one of them counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from trainmon.dist import Group
from trainmon.events import Layout, ModelView

__all__ = ["Keys", "LayerWatcher", "Pieces", "share_layers", "share_pieces"]

Keys = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """What one rank holds: a key a parameter, equal for equal pieces, and its bytes on that rank."""

    keys: Keys
    sizes: Keys


def share_pieces(model: ModelView, group: Group) -> list[Pieces]:
    """Tells every rank what the others hold; of ranks with the same piece one owns it, a different one from piece to
    piece: copies and spectra that only owners need are spread over the replicas.

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
    held_by = np.array([np.isin(mine[0], one.keys) for one in everybody])
    before = held_by[: group.rank].sum(axis=0, dtype=np.uint64)
    holders = held_by.sum(axis=0, dtype=np.uint64)
    owns = before == mine[0] % holders
    owned = {name for name, own in zip(names, owns.tolist(), strict=True) if own}
    model.take_owners(owned, dict(zip(names, holders.tolist(), strict=True)))
    return everybody


@runtime_checkable
class LayerWatcher(Protocol):
    """A probe that adds up over ranks what single layers see of their tokens."""

    name: str

    def held(self) -> Sequence[str]:
        """What this rank sees: layers, or parts of them; equal texts for the same part on any rank."""
        ...

    def take_owners(self, owned: Collection[str]) -> None:
        """Those of them that this rank contributes to sums."""
        ...


def share_layers(watchers: Sequence[LayerWatcher], layout: Layout, group: Group) -> None:
    """Tells probes what of their layers this rank contributes: of ranks with equal ``data_rank`` that see the same part
    the lowest does. Where no data ranks are told, all ranks that count tokens do; the others what none of these sees.

    Raises:
        Lost: the group is lost.
    """
    seen = [(watcher, part) for watcher in watchers for part in watcher.held()]
    told, counts = layout.data_rank is not None, layout.counts_tokens
    suffix = f"on data rank {layout.data_rank}" if told else "counted"
    mine = np.array([_key(f"{watcher.name} {part} {suffix}") for watcher, part in seen], np.uint64)
    everybody = [
        np.frombuffer(packed, np.uint64)
        for packed in group.exchange(mine.tobytes() if told or counts else b"")
    ]
    others = everybody[: group.rank] if told else [] if counts else everybody
    copies = np.isin(mine, np.concatenate([np.zeros(0, np.uint64), *others])).tolist()
    for watcher in watchers:
        watcher.take_owners(
            {part for (other, part), copy in zip(seen, copies, strict=True) if other is watcher and not copy}
        )


def _key(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
