"""Who owns a piece that several ranks hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainmon.dist import Single
from trainmon.events import TensorView
from trainmon.pieces import share_pieces


class _Model:
    """The parameters of one rank, by name and piece."""

    def __init__(self, pieces: dict[str, str]) -> None:
        self._pieces, self.owned = pieces, set[str]()

    def parameter_names(self) -> list[str]:
        return list(self._pieces)

    def pieces(self) -> list[str]:
        return list(self._pieces.values())

    def weights(self) -> TensorView:
        return TensorView(list(self._pieces), [np.zeros(8) for _ in self._pieces])

    def take_owners(self, owned: Any, holders: Any) -> None:
        self.owned = set(owned)


class _Rank(Single):
    """One of several: what it sends is kept, then everybody's comes back."""

    def __init__(self, rank: int, sent: list[bytes]) -> None:
        self.rank, self._sent = rank, sent

    def exchange(self, message: bytes) -> list[bytes]:
        if len(self._sent) <= self.rank:
            self._sent.append(message)
        return self._sent


def shared(*ranks: dict[str, str]) -> list[set[str]]:
    """What each rank owns."""
    models = [_Model(pieces) for pieces in ranks]
    sent: list[bytes] = []
    for _ in range(2):  # the first time only to hear what all send
        for rank, model in enumerate(models):
            share_pieces(model, _Rank(rank, sent))  # type: ignore[arg-type]
    return [model.owned for model in models]


def test_every_piece_has_one_owner_and_replicas_share_the_work() -> None:
    names = {f"layer.{i}": "whole" for i in range(200)}
    owned = shared(names, names, names, names)
    assert sorted(name for own in owned for name in own) == sorted(names)
    assert all(30 <= len(own) <= 70 for own in owned)


def test_shards_are_everybodys_own_and_what_one_rank_alone_has_is_its() -> None:
    owned = shared(
        {"w": "(0, 0) (2, 4)", "b": "whole"}, {"w": "(2, 0) (2, 4)", "b": "whole", "head": "whole"}
    )
    assert all("w" in own for own in owned)
    assert "head" in owned[1]
    assert sum("b" in own for own in owned) == 1
    assert shared({}, {"w": "whole"}) == [set(), {"w"}]
