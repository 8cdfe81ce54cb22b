"""Attention logits: how large they get, and how much softmax spreads them (formulas: docs/formulas.md, Attention).

For each row of a head, m is its largest logit and l = sum of exp(z - m) its softmax denominator, from 1 (one key has all
the weight) to the number of keys. Whatever a layer hands over (largest logits, row maxima and sums, q and k, scores)
becomes one record of sums a head, which adds over calls, micro-batches and ranks; maxima start at -inf in every step.

Where rows are sampled, ``max_logit`` is a lower bound and the means are unbiased over steps; ``attention/sampled`` is the
share of the rows that were read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from trainmon.backend.base import ATTENTION_COLUMNS, Lazy
from trainmon.events import AttentionSeen, MaxLogits, QueryKey, RowSums, Scores, StepBegin, StepEnd
from trainmon.findings import Finding
from trainmon.frame import Flags, Floats, Frame, Registry, identity, ratio
from trainmon.ops import qk_clip
from trainmon.probes.base import ProbeContext, Sample

__all__ = ["AttentionProbe"]

Column = tuple[Floats, Flags]
_COLUMN = {name: index for index, name in enumerate(ATTENTION_COLUMNS)}
#: Per layer: series, numerator, denominator.
_MEANS = (
    ("mean_sum", "sum_l", "rows"),
    ("mean_sum_norm", "sum_norm", "norm_rows"),
    ("row_max_mean", "sum_m", "rows"),
    ("attn_prob_max_mean", "sum_inv_l", "rows"),
    ("logit_mean", "sum_z", "keys"),
)
_SUMS = tuple(
    dict.fromkeys(
        [*(name for _, *pair in _MEANS for name in pair), "nonfinite_rows", "empty_rows", "all_rows"]
    )
)


def _largest(maxima: Column) -> Column:
    values, valid = maxima
    return np.array([values[valid].max(initial=-np.inf)]), np.array([valid.any()])


def _mean_of_heads(maxima: Column) -> Column:
    values, valid = maxima
    return np.array([values[valid].mean() if valid.any() else 0.0]), np.array([valid.any()])


def _over_layers(choose: str) -> object:
    def derive(sums: Column, rows: Column) -> Column:
        known = sums[1] & (rows[0] > 0)
        values = sums[0][known] / rows[0][known]
        if not values.size:
            return np.zeros(1), np.zeros(1, np.bool_)
        return np.array([np.median(values) if choose == "median" else values.min()]), np.ones(1, np.bool_)

    return derive


def _all(counts: Column) -> Column:
    return np.array([counts[0][counts[1]].sum()]), np.array([counts[1].any()])


def _read_share(rows: Column, bad: Column, empty: Column, everything: Column) -> Column:
    known = everything[1]
    total = everything[0][known].sum()
    read = sum(float(part[0][known].sum()) for part in (rows, bad, empty))
    return np.array([read / total if total else 0.0]), np.array([total > 0])


def _heads_in(logits: MaxLogits | RowSums | QueryKey | Scores) -> int:
    """How many heads are given; 0 where there is one number for the whole layer."""
    match logits:
        case MaxLogits(values):
            size = math.prod(values.shape if hasattr(values, "shape") else np.shape(values))
            return size if size > 1 else 0
        case RowSums(maxima, _):
            return int(maxima.shape[-2])
        case QueryKey(q):
            return int(q.shape[-3])
        case Scores(values):
            return int(values.shape[-3])


@dataclass(frozen=True, slots=True)
class _Call:
    layer: str
    first_head: int
    micro: int
    order: int
    only_max: bool
    scaled: bool
    table: Lazy


@dataclass(frozen=True, slots=True)
class _Heads:
    """Where a layer's heads stand: the number of the first, how many, and the place of the first."""

    first: int
    count: int
    start: int


class _Step:
    """What the calls of a step add up to, by layer and head."""

    def __init__(self, layers: int, heads: int) -> None:
        self.seen, self.summed = np.zeros(layers, np.bool_), np.zeros(layers, np.bool_)
        self.max = np.full(layers, -np.inf)
        self.sums = np.zeros((layers, len(ATTENTION_COLUMNS)))
        self.heads, self.scaled = np.full(heads, -np.inf), np.full(heads, -np.inf)


class AttentionProbe:
    """Publishes ``attention/max_logit``, ``attention/mean_sum`` and what belongs to them, of the model and of each layer;
    with ``per_head`` each head's largest logit, with ``tau`` the factors of QK-clip.

    Args:
        sample_rows: query rows that are read of each head, sequence and call; None: all.
        tau: largest logit that QK-clip would let be; None: not published.
    """

    name = "attention"

    def __init__(self, *, sample_rows: int | None, per_head: bool, tau: float | None) -> None:
        self.stale = False
        self._rows, self._per_head, self._tau = sample_rows, per_head, tau
        self._layers: dict[str, int | None] = {}  # that this rank sees: its first head there, once it is seen
        self._heads: dict[str, tuple[int, int]] = {}  # with a row: the first, and one past the last
        self._shared: Collection[str] = ()
        self._owned: Collection[str] = ()
        self._calls: list[_Call] = []
        self._step = 0

    def begin(self, context: ProbeContext) -> None:
        self._context = context
        for layer in context.begin.observed.attention:
            self._layers[layer.name] = None
            if layer.heads is not None:
                self._heads[layer.name] = 0, layer.heads

    def held(self) -> Sequence[str]:
        return [self._piece(layer, first) for layer, first in self._layers.items() if first is not None]

    def take_owners(self, owned: Collection[str]) -> None:
        self._shared, self._owned = frozenset(self.held()), owned

    def _mine(self, layer: str, first_head: int) -> bool:
        """Whether this rank contributes its sums; what it has not told the others yet, it does."""
        piece = self._piece(layer, first_head)
        return piece in self._owned or piece not in self._shared

    @staticmethod
    def _piece(layer: str, first_head: int) -> str:
        return f"{layer} from head {first_head}"

    def register(self, registry: Registry) -> None:
        self.stale = False
        layers = tuple(self._layers)
        heads = tuple(
            f"{layer}/{head}" for layer, (first, end) in self._heads.items() for head in range(first, end)
        )
        self._layer_index = {layer: index for index, layer in enumerate(layers)}
        self._head_places, start = {}, 0
        for layer, (first, end) in self._heads.items():
            self._head_places[layer] = _Heads(first, end - first, start)
            start += end - first
        self._max = registry.part("attention.max", "max", subjects=layers)
        self._max_heads = registry.part("attention.max_heads", "max", subjects=heads)
        self._sums = {name: registry.part(f"attention.{name}", "sum", subjects=layers) for name in _SUMS}
        named = {"probe": self.name, "optional": True}
        whole = {**named, "sees_null": True}
        sums = self._sums

        def add(name: str, parts: Sequence[object], derive: object, **options: object) -> None:
            registry.add(f"attention/{name}", parts, derive, **options)  # type: ignore[arg-type]

        add("max_logit", [self._max], _largest, **whole)
        add("max_logit/<layer>", [self._max], identity, subjects=layers, **named)
        add("max_logit_mean", [self._max_heads], _mean_of_heads, **whole)
        add("mean_sum", [sums["sum_l"], sums["rows"]], _over_layers("median"), **whole)
        add("mean_sum_min", [sums["sum_l"], sums["rows"]], _over_layers("min"), **whole)
        for name, numerator, denominator in _MEANS:
            add(f"{name}/<layer>", [sums[numerator], sums[denominator]], ratio, subjects=layers, **named)
        add("nonfinite_rows", [sums["nonfinite_rows"]], _all, **whole)
        read = [sums[name] for name in ("rows", "nonfinite_rows", "empty_rows", "all_rows")]
        add("sampled", read, _read_share, **whole)
        if self._per_head:
            add("max_logit_heads/<layer>", [self._max_heads], identity, subjects=heads, **named)
        if self._tau is not None:
            self._scaled = registry.part("attention.max_scaled", "max", subjects=heads)
            add("qk_clip_gamma/<layer>", [self._scaled], self._gamma, subjects=heads, **named)
            add("qk_clip_share", [self._scaled], self._clipped, **whole)

    def _gamma(self, maxima: Floats) -> tuple[Floats, Flags]:
        clip = qk_clip(maxima, self._tau or 1.0)
        return clip.gamma, ~clip.alarm

    def _clipped(self, maxima: Column) -> Column:
        share = qk_clip(maxima[0][maxima[1]], self._tau or 1.0).share
        return np.array([share]), np.array([share == share])

    def on_step_begin(self, event: StepBegin) -> None:
        self._calls, self._step = [], event.step

    def on_attention_seen(self, event: AttentionSeen) -> None:
        backend, logits = self._context.backend, event.logits
        self._learn(event)
        seed = self._step * 4096 + event.micro
        match logits:
            case MaxLogits():
                table = backend.vector(logits.values)
            case RowSums():
                table = backend.attention_rows(logits.maxima, logits.sums)
            case QueryKey():
                table = backend.attention(
                    logits.q,
                    logits.k,
                    scale=logits.scale,
                    causal=logits.causal,
                    q_start=logits.q_start,
                    mask=logits.mask,
                    sample_rows=self._rows,
                    seed=seed,
                )
            case Scores():
                table = backend.attention_scores(logits.values, sample_rows=self._rows, seed=seed)
        only_max = isinstance(logits, MaxLogits)
        scaled = not isinstance(logits, Scores)
        order = self._context.order()
        self._calls.append(_Call(event.layer, event.first_head, event.micro, order, only_max, scaled, table))

    def _learn(self, event: AttentionSeen) -> None:
        """Layers and heads that are seen for the first time get their place: in this very report where there is one rank,
        else in the next."""
        if self._layers.get(event.layer) != event.first_head:
            self._layers[event.layer] = event.first_head
            self.stale = True
        heads = _heads_in(event.logits)
        first, end = self._heads.get(event.layer, (event.first_head, event.first_head))
        seen = min(first, event.first_head), max(end, event.first_head + heads)
        if heads and self._heads.get(event.layer) != seen:
            self._heads[event.layer] = seen
            self.stale = True

    def close(self, event: StepEnd) -> Sample:
        calls, self._calls = self._calls, []

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            bad: list[tuple[_Call, float]] = []
            step = _Step(len(self._layer_index), self._max_heads.own)
            for call, values in zip(calls, read, strict=True):
                largest = values if call.only_max else values[0]
                if call.layer in self._layer_index:
                    self._add(step, call, largest, None if call.only_max else values)
                worst = float(largest.max(initial=-np.inf))
                if np.isnan(worst) or worst == np.inf:
                    bad.append((call, worst))
            self._fill(frame, step)
            if bad:
                call, worst = bad[0]
                self._context.found(
                    Finding(
                        step=event.step,
                        stage="forward",
                        quantity="largest attention logit",
                        name=call.layer,
                        series="attention/max_logit",
                        micro=call.micro,
                        call=call.order,
                        counts={"nan" if np.isnan(worst) else "+inf": 1},
                        more=len(bad) - 1,
                    )
                )

        return Sample([call.table for call in calls], write)

    def _add(self, step: _Step, call: _Call, largest: Floats, columns: Floats | None) -> None:
        layer = self._layer_index[call.layer]
        step.seen[layer] = True
        step.max[layer] = np.maximum(step.max[layer], largest.max(initial=-np.inf))  # NaN wins
        place = self._head_places.get(call.layer)
        known = place is not None and call.first_head >= place.first
        if place is not None and known and (largest.size > 1 or not call.only_max):
            first, end = place.start + call.first_head - place.first, place.start + place.count
            some = largest[: max(end - first, 0)]
            step.heads[first : first + some.size] = np.maximum(step.heads[first : first + some.size], some)
            if call.scaled:
                step.scaled[first : first + some.size] = np.maximum(
                    step.scaled[first : first + some.size], some
                )
        if columns is not None and self._mine(call.layer, call.first_head):
            sums = columns.sum(axis=1)
            if sums[_COLUMN["keys"]] == 0:  # rows from a kernel come without keys
                sums[_COLUMN["sum_z"]] = 0.0
            step.sums[layer] += sums
            step.summed[layer] = True

    def _fill(self, frame: Frame, step: _Step) -> None:
        frame.fill(self._max, step.max, step.seen)
        frame.fill(self._max_heads, step.heads, step.heads != -np.inf)
        if self._tau is not None:
            frame.fill(self._scaled, step.scaled, step.scaled != -np.inf)
        for name, part in self._sums.items():
            frame.fill(part, step.sums[:, _COLUMN[name]], step.summed)
