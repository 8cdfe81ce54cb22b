"""The loss taken apart: named parts, positions in the sequence, sources of the data (docs/formulas.md, Loss).

A part is an auxiliary loss beside the main one; positions and sources are the main loss restricted to some tokens,
for which the loop hands over the losses of single tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainmon.backend.base import Lazy
from trainmon.events import MicroEnd, StepBegin, StepEnd, TokenLosses
from trainmon.findings import LAST_CALL, Finding
from trainmon.frame import Floats, Frame, Registry, ratio
from trainmon.ops import position_buckets
from trainmon.probes.base import ProbeContext, Sample

__all__ = ["LossPartsProbe"]


@dataclass(slots=True)
class _Seen:
    """One named part in one micro-batch; ``tokens`` None: it weighs as much as any other."""

    name: str
    value: Lazy
    tokens: Lazy | None
    is_sum: bool
    micro: int | None


class LossPartsProbe:
    """Publishes ``loss/part/<name>``, ``loss/position/<b>`` and ``loss/source/<b>``.

    Args:
        parts: show what the loop names in ``parts=``.
        positions: so many groups of consecutive positions, as equal as can be; 0: none.
        sources: names of the sources by their ids.
    """

    name = "loss"
    title = "loss parts"

    def __init__(self, *, parts: bool, positions: int, sources: Sequence[str]) -> None:
        self.stale = False
        self._shows_parts = parts
        self._positions, self._sources = positions, tuple(sources)
        self._names: tuple[str, ...] = ()
        self._parts: list[_Seen] = []
        self._buckets: list[tuple[str, Lazy]] = []

    def begin(self, context: ProbeContext) -> None:
        self._context = context

    def register(self, registry: Registry) -> None:
        self.stale = False
        groups = {
            "part": self._names,
            "position": tuple(map(str, range(self._positions))),
            "source": self._sources,
        }
        self._frame_parts = {
            kind: tuple(registry.part(f"loss.{kind}.{part}", "sum", subjects=subjects) for part in ("s", "n"))
            for kind, subjects in groups.items()
        }
        for kind, subject in (("part", "name"), ("position", "b"), ("source", "b")):
            registry.add(
                f"loss/{kind}/<{subject}>",
                self._frame_parts[kind],
                ratio,
                probe=self.name,
                subjects=groups[kind],
            )
        self._index = {name: index for index, name in enumerate(self._names)}

    def on_step_begin(self, event: StepBegin) -> None:
        self._parts, self._buckets = [], []

    def on_micro_end(self, event: MicroEnd) -> None:
        self._take_parts(event.parts, event.tokens, event.reduction == "sum", event.micro)
        if event.token_losses is not None:
            self._take_tokens(event.token_losses)

    def close(self, event: StepEnd) -> Sample:
        self._take_parts(event.loss_parts, None, False, None)
        parts, buckets = self._parts, self._buckets
        self._parts, self._buckets = [], []
        fresh = dict.fromkeys(part.name for part in parts if part.name not in self._index)
        if not fresh.keys() <= set(self._names):
            self._names = tuple(dict.fromkeys((*self._names, *fresh)))
            self.stale = True
        lazies = [part.value for part in parts]
        lazies += [part.tokens for part in parts if part.tokens is not None]
        lazies += [lazy for _, lazy in buckets]

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            self._find(event.step, parts, read)
            if not self._context.begin.layout.counts_tokens:
                return
            values, rest = read[: len(parts)], iter(read[len(parts) :])
            for part, value in zip(parts, values, strict=True):
                weight = 1.0 if part.tokens is None else float(next(rest)[0])
                if weight > 0 and part.name in self._index:
                    total = float(value[0]) * (1.0 if part.is_sum else weight)
                    self._add(frame, "part", self._index[part.name], total, weight)
            for (kind, _), table in zip(buckets, rest, strict=True):
                for index, (total, weight) in enumerate(table.tolist()):
                    if weight > 0:
                        self._add(frame, kind, index, total, weight)

        return Sample(lazies, write)

    def _find(self, step: int, parts: Sequence[_Seen], read: Sequence[Floats]) -> None:
        """The first part that is not finite; the loss that it goes into comes after it."""
        weights = iter(read[len(parts) :])
        for part, value in zip(parts, read, strict=False):
            weight = 1.0 if part.tokens is None else float(next(weights)[0])
            if weight > 0 and not np.isfinite(value[0]):
                series = f"loss/part/{part.name}"
                found = Finding(step, "forward", "loss", part.name, series, part.micro, LAST_CALL - 1)
                self._context.found(found)
                return

    def _add(self, frame: Frame, kind: str, index: int, total: float, weight: float) -> None:
        s, n = self._frame_parts[kind]
        frame.add(s, total, index)
        frame.add(n, weight, index)

    def _take_parts(self, parts: Mapping[str, Any], tokens: Any, is_sum: bool, micro: int | None) -> None:
        if not (self._shows_parts and parts):
            return
        scalar = self._context.backend.scalar
        weight = None if tokens is None else scalar(tokens)
        for name, value in parts.items():
            self._parts.append(_Seen(name, scalar(value), weight, is_sum and weight is not None, micro))

    def _take_tokens(self, tokens: TokenLosses) -> None:
        sums = self._context.backend.bucket_sums
        if self._positions:
            groups = position_buckets(int(tokens.losses.shape[-1]), self._positions)
            self._buckets.append(("position", sums(tokens.losses, tokens.weights, groups, self._positions)))
        if self._sources and tokens.sources is not None:
            count = len(self._sources)
            self._buckets.append(("source", sums(tokens.losses, tokens.weights, tokens.sources, count)))
