"""Ranks that hold the same piece of a parameter must hold the same bits: who doesn't has a fault.

Every so many steps the pieces that several ranks hold are fingerprinted (64 bits each, in C, at the speed of memory) and
the prints compared: bits that a chip or a memory flipped, a replica that missed an update, a wrong seed at the start.
A budget bounds the bytes of one check; the pieces take turns, the same ones on every rank.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainmon.backend import Backend, Lazy
from trainmon.config.schema import ReplicasConfig
from trainmon.dist import Gathering, Group
from trainmon.events import ModelView
from trainmon.frame import Floats
from trainmon.pieces import Keys, Pieces
from trainmon.schedule import Schedule

__all__ = ["Check", "Mismatch", "Replicas"]

_logger = logging.getLogger("trainmon")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A piece of which ranks hold different bits.

    Attributes:
        step: after whose update they were compared.
        name: the parameter.
        holders: ranks that hold the piece.
        differing: those that don't hold what most do; all holders where no majority is.
    """

    step: int
    name: str
    holders: tuple[int, ...]
    differing: tuple[int, ...]

    def __str__(self) -> str:
        what = f"{self.name} should be the same bits on ranks {', '.join(map(str, self.holders))}"
        if self.differing == self.holders:
            return f"{what} and is not; no majority says which are right"
        differing = ", ".join(map(str, self.differing))
        return f"{what}; {f'ranks {differing} differ' if len(self.differing) > 1 else f'rank {differing} differs'}"


@dataclass(frozen=True, slots=True)
class Check:
    """One check on its way.

    Attributes:
        step: after whose update the weights were read.
        asked: keys of the pieces whose turn it is, the same on every rank.
        holds: which of them this rank holds.
        prints: of those, from the backend.
        problem: why this rank could not read its own; empty if it could.
    """

    step: int
    asked: Keys
    holds: NDArray[np.bool_]
    prints: Lazy
    problem: str = ""


class Replicas:
    """Compares what replicas hold.

    Args:
        section: when, and how many bytes a check may read on a rank.
        group: the ranks.
        backend: makes the prints.
    """

    def __init__(self, section: ReplicasConfig, group: Group, backend: Backend) -> None:
        self._schedule = Schedule(section.every)
        self._budget = section.megabytes << 20
        self._group, self._backend = group, backend
        self._checks = 0
        self._turns: list[Keys] = []
        self._underway: tuple[Check, Gathering] | None = None
        self._bad: set[int] = set()

    def register(self, names: Sequence[str], pieces: Sequence[Pieces]) -> None:
        """Takes a new layout.

        Args:
            names: this rank's parameters, in the order of its keys.
            pieces: every rank's.
        """
        mine = pieces[self._group.rank].keys
        self._own = dict(zip(mine.tolist(), names, strict=True))
        every, counts = np.unique(np.concatenate([np.unique(one.keys) for one in pieces]), return_counts=True)
        shared = every[counts > 1]
        largest = max(int(one.sizes[np.isin(one.keys, shared)].sum()) for one in pieces)
        turns = max(1, min(-(-largest // self._budget), len(shared)))
        self._turns = [shared[turn::turns] for turn in range(turns)]

    def look(self, step: int, model: ModelView) -> Check | None:
        """Begins a check if it is time; None if not."""
        if not (len(self._turns[0]) and self._schedule.due(step)):
            return None
        asked = self._turns[self._checks % len(self._turns)]
        self._checks += 1
        try:
            weights = model.weights()
            held = dict(zip(weights.names, weights.tensors, strict=True))
            names = [self._own.get(key) for key in asked.tolist()]
            tensors = [held[name] for name in names if name is not None and name in held]
            holds = np.array([name in held for name in names], np.bool_)
            return Check(step, asked, holds, self._backend.fingerprints(tensors))
        except Exception as error:
            # The others gather: this rank has to be there, with nothing.
            _logger.debug("no fingerprints at step %d", step, exc_info=error)
            nothing, problem = Lazy((), lambda: np.empty((0, 2))), f"{type(error).__name__}: {error}"
            return Check(step, asked, np.zeros(len(asked), np.bool_), nothing, problem)

    def start(self, check: Check, prints: Floats) -> None:
        """Sends the prints, shape ``[pieces, 2]`` with halves below 2^32. What a rank doesn't hold is NaN.

        Raises:
            Lost: the group is lost.
        """
        table = np.full((len(check.asked), 2), np.nan)
        table[check.holds] = prints
        self._underway = check, self._group.gather(table.reshape(-1))

    def finish(self, merged: bool) -> list[Mismatch]:
        """Pieces that differ and did not before, of which this rank is the lowest holder.

        Raises:
            Lost: the group is lost.
        """
        underway, self._underway = self._underway, None
        if underway is None or not merged:
            return []
        check, gathering = underway
        rows = gathering.wait().reshape(self._group.size, -1, 2)
        held = ~np.isnan(rows[..., 0])
        agree = ((rows == np.nanmax(rows, axis=0, initial=-1.0)) | np.isnan(rows)).all(axis=(0, 2))
        self._bad -= set(check.asked[agree].tolist())
        found = []
        for index in np.flatnonzero(~agree).tolist():
            key = int(check.asked[index])
            holders = np.flatnonzero(held[:, index]).tolist()
            fresh, name = key not in self._bad, self._own.get(key)
            self._bad.add(key)
            if fresh and name is not None and holders[0] == self._group.rank:
                prints = [tuple(rows[rank, index].tolist()) for rank in holders]
                found.append(Mismatch(check.step, name, tuple(holders), _differing(holders, prints)))
        return found


def _differing(holders: Sequence[int], prints: Sequence[tuple[float, ...]]) -> tuple[int, ...]:
    (common, count), *_ = Counter(prints).most_common(1)
    if 2 * count <= len(holders):
        return tuple(holders)
    return tuple(rank for rank, one in zip(holders, prints, strict=True) if one != common)
