"""Spectra of weight matrices: stable rank with its interval, largest singular value, largest eigenvalue of W'W.

The matrices take turns: a step looks at as many as its budget of elements allows, at least one, and shows only these.
Each keeps its own warm state, so that later visits need few reads. A parameter with three dimensions is one matrix for
each index of the first, ``name[index]``. Formulas: docs/formulas.md, docs/kernels/spectral.md.

A matrix that lies in pieces on several ranks is looked at piece by piece, in the same step on all of them: with F the
sum of their squares, the largest eigenvalue is at least the largest of the pieces' lower bounds and at most the sum of
their upper bounds. That interval is right and can be as wide as the number of pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from trainmon.events import ShardInfo, StepEnd
from trainmon.frame import Flags, Floats, Frame, Registry
from trainmon.probes.base import ProbeContext, Rows, Sample, Selected

__all__ = ["SpectralProbe"]


@dataclass(frozen=True, slots=True)
class _Unit:
    """One matrix: ``part`` is this rank's piece of it, None where it has nothing to contribute."""

    name: str
    size: int
    part: Any
    cut: bool


def _stable_rank(square: Floats, low: Floats) -> tuple[Floats, Flags]:
    return np.maximum(1.0, square / low), np.isfinite(square) & (low > 0)


def _stable_rank_low(square: Floats, low: Floats, high: Floats) -> tuple[Floats, Flags]:
    known = np.isfinite(square) & (low > 0) & np.isfinite(high)
    return np.maximum(1.0, square / high), known


def _sigma(square: Floats, low: Floats) -> tuple[Floats, Flags]:
    return np.sqrt(low), np.isfinite(square) & (low > 0)


def _eigenvalue(square: Floats, low: Floats) -> tuple[Floats, Flags]:
    return low, np.isfinite(square) & (low > 0)


class SpectralProbe:
    """Publishes ``spectral/stable_rank/<p>``, ``stable_rank_low/<p>``, ``sigma/<p>``, ``eigenvalue/<p>``.

    Args:
        selected: whether a parameter of this name is looked at.
        stable_rank, sigma, eigenvalue: what is published.
        elements: budget of a step, in elements of whole matrices.
        tolerance, epsilon: of the interval (:func:`trainmon.stable_rank`).
    """

    name = "spectral"

    def __init__(
        self,
        selected: Selected,
        *,
        stable_rank: bool,
        sigma: bool,
        eigenvalue: bool,
        elements: int,
        tolerance: float,
        epsilon: float,
    ) -> None:
        self.stale = False
        self._selected = selected
        self._stable_rank, self._sigma, self._eigenvalue = stable_rank, sigma, eigenvalue
        self._elements, self._tolerance, self._epsilon = elements, tolerance, epsilon
        self._rows = Rows(_Every())
        self._states: dict[str, Any] = {}
        self._turn = 0
        self._unplaced: str | None = None
        self._said: set[str] = set()

    def begin(self, context: ProbeContext) -> None:
        self._context = context
        # A life that goes on begins with another matrix than the last one did: short lives come to all of them.
        self._turn = context.begin.resumed_step
        self._rows.extend([unit.name for unit in self._units()])

    def register(self, registry: Registry) -> None:
        self.stale = False
        if self._context.begin.model is None:
            return  # a host that shows none
        names = self._rows.names
        self._square = registry.part("spectral.f", "sum", subjects=names)
        self._low = registry.part("spectral.lo", "max", subjects=names)
        self._high = registry.part("spectral.up", "sum", subjects=names)
        low, both = (self._square, self._low), (self._square, self._low, self._high)
        for wanted, what, parts, derive in (
            (self._stable_rank, "stable_rank", low, _stable_rank),
            (self._stable_rank, "stable_rank_low", both, _stable_rank_low),
            (self._sigma, "sigma", low, _sigma),
            (self._eigenvalue, "eigenvalue", low, _eigenvalue),
        ):
            if wanted:
                registry.add(
                    f"spectral/{what}/<p>", parts, derive, probe=self.name, subjects=names, optional=True
                )

    def close(self, event: StepEnd) -> Sample:
        if self._context.begin.model is None:
            return Sample((), lambda frame, read: None)
        units = list(self._units())
        if self._rows.extend([unit.name for unit in units]):
            self.stale = True
        mine = [unit for unit in self._take_turn(units) if unit.part is not None]
        self._say_limits(event.step, units)
        names = [unit.name for unit in mine]
        lazy, states = self._context.backend.spectra(
            [unit.part for unit in mine],
            [self._states.get(name) for name in names],
            [_seed(name) for name in names],
            self._tolerance,
            self._epsilon,
        )
        self._states.update(zip(names, states, strict=True))

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            (table,) = read
            for column, part in enumerate((self._square, self._low, self._high)):
                self._rows.write(frame, part, names, table[:, column])

        return Sample((lazy,), write)

    def _take_turn(self, units: list[_Unit]) -> list[_Unit]:
        """The next ones whose sizes fit; the same on all ranks that list the same matrices."""
        taken: list[_Unit] = []
        size = 0
        while len(taken) < len(units):
            unit = units[self._turn % len(units)]
            if taken and size + unit.size > self._elements:
                break
            taken.append(unit)
            size += unit.size
            self._turn = (self._turn + 1) % len(units)
        return taken

    def _units(self) -> Iterator[_Unit]:
        """All selected matrices in the model's order, whoever holds them."""
        model = self._context.begin.model
        if model is None:
            return
        for name, tensor, shard in model.weights():
            shape = tuple(tensor.shape) if shard.whole is None else shard.whole
            if len(shape) not in (2, 3) or len(tensor.shape) != len(shape) or name not in self._selected:
                continue
            if len(shape) == 3 and not shard.placed:
                self._unplaced = (
                    name  # its matrices have no names: those of other ranks would pass for the same
                )
                continue
            cut = tuple(tensor.shape)[-2:] != shape[-2:] or not shard.placed
            size = int(np.prod(shape[-2:]))
            if len(shape) == 2:
                yield _Unit(name, size, _piece(tensor, shard), cut)
                continue
            first = 0 if shard.start is None else shard.start[0]
            for index in range(shape[0]):
                here = first <= index < first + tensor.shape[0]
                part = _piece(tensor[index - first], shard) if here else None
                yield _Unit(f"{name}[{index}]", size, part, cut)

    def _say_limits(self, step: int, units: Sequence[_Unit]) -> None:
        if self._unplaced is not None:
            text = (
                f"{self._unplaced} is a piece of a stack of matrices, and piece_of doesn't say which ones these are: no "
                "spectrum; let it return (first, whole), the place of the first one and the number of all"
            )
            self._say(step, "spectral_unplaced", text)
        if not units and self._unplaced is None:
            text = "no selected parameter is a matrix here (FSDP1 keeps flat pieces, which have no spectrum)"
            self._say(step, "spectral_nothing", text)
        elif any(unit.cut for unit in units):
            text = (
                "matrices lie in pieces on several ranks: their intervals come from the pieces' and can be as wide as "
                "the number of pieces (stable_rank is the upper end, stable_rank_low the lower)"
            )
            self._say(step, "spectral_pieces", text)
        if self._context.backend.name == "torch":
            text = (
                "on a device the largest eigenvalue is bounded from below only: stable_rank is an upper end, "
                "stable_rank_low is null; backend='host' certifies both"
            )
            self._say(step, "spectral_one_sided", text)

    def _say(self, step: int, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._context.say("info", kind, text, step=step)


class _Every:
    """Selects every name: matrices are chosen by the names of their parameters."""

    def __contains__(self, name: str, /) -> bool:
        return True


def _piece(tensor: Any, shard: ShardInfo) -> Any:
    """What this rank contributes."""
    return tensor if shard.owner and 0 not in tuple(tensor.shape) else None


def _seed(name: str) -> int:
    """Every matrix has draws of its own."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
