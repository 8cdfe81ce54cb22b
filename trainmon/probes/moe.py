"""Mixtures of experts: how evenly tokens are spread (formulas: docs/formulas.md, Mixture of experts).

Counts of the step's assignments add over calls, micro-batches and ranks; what they say is derived afterwards, so that
every rank comes to the same, memory of earlier steps included (ages, windows, the last shares). Steps are those that are
looked at. A layer without assignments is null in that step.

What is remembered goes with the run's state to its next life, layer by layer, on any number of ranks.

A capacity belongs to a rank's micro-batch: ``drop_forecast`` is worked out for each of them and then added up.
``max_vio_micro`` is the largest of any micro-batch, whose counts are those of all ranks that have one of this number: so
many counts are merged as ``micros`` says, and a step with more micro-batches has none.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmon.backend.base import Lazy
from trainmon.events import ExpertsSeen, StepBegin, StepEnd
from trainmon.frame import Flags, Floats, Frame, Part, Registry, identity, ratio
from trainmon.ops import expert_metrics, expert_migration
from trainmon.ops.moe_metrics import ExpertMetrics, ExpertState
from trainmon.probes.base import ProbeContext, Sample

__all__ = ["MoeProbe"]

Column = tuple[Floats, Flags]
_FORMAT = 1
#: Reports after which layers of a state that were not met are dropped: those that are heard of in a step have their place
#: in the next report.
_UNMET = 4
#: Metrics of a layer that derive from merged counts.
_DERIVED = (
    *("max_vio", "max_vio_window", "max_vio_global", "min_vio", "load_entropy", "load_entropy_norm"),
    *(
        "experts_effective",
        "load_cv",
        "load_jain",
        "load_gini",
        "ep_load_vio",
        "drop_rate",
        "drop_forecast_mf",
    ),
    *("dead", "hot", "cold", "churn"),
)


def _largest(values: Floats, valid: Flags) -> tuple[float, bool]:
    return float(values[valid].max(initial=-np.inf)), bool(valid.any())


def _sum(values: Floats, valid: Flags) -> tuple[float, bool]:
    return float(values[valid].sum()), bool(valid.any())


def _over_layers(reduce: Callable[[Floats, Flags], tuple[float, bool]]) -> Callable[[Column], Column]:
    def derive(column: Column) -> Column:
        value, known = reduce(*column)
        return np.array([value]), np.array([known])

    return derive


def _changed(same: Floats, of: Floats) -> tuple[Floats, Flags]:
    return 1 - same / of, of > 0


def _difference(high: Floats, low: Floats) -> tuple[Floats, bool]:
    return high - low, True


@dataclass(slots=True)
class _Call:
    """One event: which of its numbers are read, in this order."""

    layer: str
    micro: int
    first: int
    reads: dict[str, Lazy] = field(default_factory=dict)


class _Loads:
    """Counts of this rank's experts, and of which there are any."""

    def __init__(self, size: int) -> None:
        self.counts, self.seen = np.zeros(size), np.zeros(size, np.bool_)

    def write(self, frame: Frame, part: Part) -> None:
        frame.put(part, self.counts[self.seen], np.flatnonzero(self.seen))


@dataclass(slots=True)
class _Memory:
    """What is remembered of the layers with one number of experts."""

    layers: tuple[str, ...]
    state: ExpertState
    placement: dict[str, NDArray[np.int64]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Saved:
    """What an earlier life remembered of one layer, until it is met."""

    experts: int
    arrays: dict[str, Floats | np.int64]
    placement: NDArray[np.int64] | None


class MoeProbe:
    """Publishes ``moe/max_vio`` and ``moe/dead`` of the model and everything under ``moe/`` of each layer.

    Args:
        per_expert: load and age of each expert too.
        capacity_factor, ep_size, span, hold: as ``capacity_factor``, ``ep_size``, ``window``, ``hold`` of
            :func:`trainmon.expert_metrics`.
        bias_cap: size from which a router's bias counts as saturated; None: not published.
        placement: follow which rank has which expert.
        micros: micro-batches of a step whose counts are kept apart, the same number on all ranks.
    """

    name = "moe"

    def __init__(
        self,
        *,
        per_expert: bool,
        capacity_factor: float | None,
        ep_size: int | None,
        bias_cap: float | None,
        placement: bool,
        span: int,
        hold: int,
        micros: int = 0,
    ) -> None:
        self.stale = False
        self._limit, self._limit_said = micros, False
        self._per_expert, self._bias_cap, self._placed = per_expert, bias_cap, placement
        self._capacity, self._ep_size, self._span, self._hold = capacity_factor, ep_size, span, hold
        self._experts: dict[str, int] = {}
        self._first: dict[str, int] = {}
        self._shared: Collection[str] = ()
        self._owned: Collection[str] = ()
        self._memory: dict[int, _Memory] = {}
        self._saved: dict[str, _Saved] = {}
        self._patience = 0
        self._calls: list[_Call] = []
        self._invalid_said = False
        self._dead_said: set[tuple[str, int]] = set()

    # -- before the steps -------------------------------------------------------------------------------------------

    def begin(self, context: ProbeContext) -> None:
        self._context = context
        for layer in context.begin.observed.experts:
            if layer.experts is not None:
                self._learn(layer.name, layer.experts, 0)

    @property
    def idle(self) -> bool:
        """No layer on any rank so far."""
        return not self._load.subjects

    def held(self) -> Sequence[str]:
        return [self._piece(layer, first) for layer, first in self._first.items()]

    def take_owners(self, owned: Collection[str]) -> None:
        self._shared, self._owned = frozenset(self.held()), owned

    @staticmethod
    def _piece(layer: str, first: int) -> str:
        return f"{layer} from expert {first}"

    def _mine(self, layer: str, first: int) -> bool:
        """Whether this rank contributes its counts; what it has not told the others yet, it does."""
        piece = self._piece(layer, first)
        return piece in self._owned or piece not in self._shared

    def _learn(self, layer: str, experts: int, first: int) -> None:
        if self._experts.get(layer) != experts or self._first.get(layer) != first:
            self._experts[layer], self._first[layer] = experts, first
            self.stale = True

    def register(self, registry: Registry) -> None:
        self.stale = False
        self._layers = tuple(self._experts)
        self._layer_index = {layer: index for index, layer in enumerate(self._layers)}
        self._offset: dict[str, int] = {}
        names: list[str] = []
        for layer, count in self._experts.items():
            self._offset[layer] = len(names)
            names += [f"{layer}/{expert}" for expert in range(count)]
        experts = tuple(names)
        self._placed_at: tuple[tuple[str, ...], Mapping[int, Mapping[str, NDArray[np.int64]]]] = ((), {})
        layers = self._layers

        def part(name: str, reduce: str, subjects: tuple[str, ...] = layers) -> Part:
            return registry.part(f"moe.{name}", reduce, subjects=subjects)  # type: ignore[arg-type]

        def add(name: str, parts: Sequence[Part], derive: object, **options: object) -> None:
            common = {"probe": self.name, "optional": True}
            registry.add(f"moe/{name}", parts, derive, **common, **options)  # type: ignore[arg-type]

        self._load, self._total = part("load", "sum", experts), part("total", "sum")
        self._dropped, self._over = part("dropped", "sum"), part("over", "sum")
        self._micro_loads = [part(f"load_{micro}", "sum", experts) for micro in range(self._limit)]
        self._micros, self._micro = part("micros", "max"), part("max_vio_micro", "local")
        self._same, self._of = part("same", "sum"), part("same_of", "sum")
        self._high, self._low = part("bias_high", "max"), part("bias_low", "min")
        self._derived = {name: part(name, "local") for name in _DERIVED}
        self._age = part("dead_age", "local", experts)
        add("max_vio", [self._derived["max_vio"]], _over_layers(_largest), sees_null=True)
        add("dead", [self._derived["dead"]], _over_layers(_sum), sees_null=True)
        for name in _DERIVED:
            add(f"{name}/<layer>", [self._derived[name]], identity, subjects=layers)
        if self._limit:
            add("max_vio_micro/<layer>", [self._micro], identity, subjects=layers)
        add("drop_forecast/<layer>", [self._over, self._total], ratio, subjects=layers)
        add("assign_churn/<layer>", [self._same, self._of], _changed, subjects=layers)
        add("bias_span/<layer>", [self._high, self._low], _difference, subjects=layers)
        if self._bias_cap is not None:
            self._saturated = part("bias_saturated", "max")
            add("bias_saturated/<layer>", [self._saturated], identity, subjects=layers)
        if self._per_expert:
            add("load/<layer>", [self._load], identity, subjects=experts)
            add("dead_age/<layer>", [self._age], identity, subjects=experts)
        if self._placed:
            self._place, self._moved = part("place", "max", experts), part("migration", "local")
            add("migration/<layer>", [self._moved], identity, subjects=layers)

    # -- a step -----------------------------------------------------------------------------------------------------

    def on_step_begin(self, event: StepBegin) -> None:
        self._calls = []

    def on_experts_seen(self, event: ExpertsSeen) -> None:
        backend = self._context.backend
        call = _Call(event.layer, event.micro, event.first_expert)
        experts = self._experts.get(event.layer, 0) if event.experts is None else event.experts
        if event.counts is not None:
            end = event.first_expert + math.prod(np.shape(event.counts))
            experts = experts or end
            if end > experts:
                raise ValueError(
                    f"{event.layer} has {experts} experts: there are no counts of experts {event.first_expert} to "
                    f"{end - 1}"
                )
            call.reads["counts"] = backend.vector(event.counts)
        elif event.indices is not None:
            if not experts:
                raise ValueError(f"{event.layer}: the number of experts must be told with indices")
            call.reads["counts"] = backend.bincount(event.indices, experts)
        if event.previous is not None:
            call.reads["common"] = backend.common(event.previous, event.indices, experts)
        for name in ("dropped", "bias", "placement"):
            value = getattr(event, name)
            if value is not None and (name != "placement" or self._placed):
                call.reads[name] = backend.vector(value)
        if experts and "counts" in call.reads:
            self._learn(event.layer, experts, event.first_expert)
        elif experts and event.layer not in self._experts:
            self._learn(event.layer, experts, 0)
        self._calls.append(call)

    def close(self, event: StepEnd) -> Sample:
        calls, self._calls = self._calls, []

        def write(frame: Frame, read: Sequence[Floats]) -> None:
            values = iter(read)
            micros: dict[tuple[str, int, int], Floats] = {}
            for call in calls:
                found = {name: next(values) for name in call.reads}
                if call.layer not in self._layer_index:
                    continue  # gets its place from the next report on
                self._write_rest(frame, call, found)
                if "counts" in found:
                    key = call.layer, call.micro, call.first
                    counts = self._valid_counts(event.step, call, found["counts"])
                    micros[key] = micros[key] + counts if key in micros else counts
            whole = _Loads(self._load.own)
            apart = {micro: _Loads(self._load.own) for _, micro, _ in micros if micro < self._limit}
            for (layer, micro, first), counts in micros.items():
                frame.add(self._micros, micro + 1, self._layer_index[layer])
                into = (whole, apart[micro]) if micro in apart else (whole,)
                self._add_counts(frame, into, layer, first, counts)
            whole.write(frame, self._load)
            for micro, loads in apart.items():
                loads.write(frame, self._micro_loads[micro])

        return Sample([lazy for call in calls for lazy in call.reads.values()], write)

    def _valid_counts(self, step: int, call: _Call, counts: Floats) -> Floats:
        """Without ids that are no expert's, of which the user is told once."""
        size = self._experts[call.layer]
        if call.first or len(counts) <= size:
            return counts
        if counts[size] and not self._invalid_said:
            self._invalid_said = True
            self._context.say(
                "warning",
                "invalid_experts",
                f"{int(counts[size])} assignments of {call.layer} at step {step} are to no expert from 0 to {size - 1}: "
                "they are not counted",
                step=step,
            )
        return counts[:size]

    def _say_limit(self, step: int, micros: float) -> None:
        """Once, what is missing where steps have more micro-batches than are kept apart."""
        if self._limit_said or not 0 < self._limit < micros:
            return
        self._limit_said = True
        text = (
            f"steps have {micros:g} micro-batches and moe.micros is {self._limit}: there is no moe/max_vio_micro; each "
            "more costs one more load of every expert in a report"
        )
        self._context.say("info", "micro_batches_not_told_apart", text, step=step)

    def _add_counts(
        self, frame: Frame, into: Sequence[_Loads], layer: str, first: int, counts: Floats
    ) -> None:
        size, index, total = self._experts[layer], self._layer_index[layer], float(counts.sum())
        whole = first == 0 and len(counts) == size
        if not self._mine(layer, first):
            return
        begin = self._offset[layer] + first
        mine = slice(begin, min(begin + len(counts), self._offset[layer] + size))
        for loads in into:
            loads.counts[mine] += counts[: size - first]
            loads.seen[mine] = True
        frame.add(self._total, total, index)
        if self._capacity is not None and whole:
            capacity = math.ceil(self._capacity * total / size)
            frame.add(self._over, float(np.maximum(counts - capacity, 0).sum()), index)

    def _write_rest(self, frame: Frame, call: _Call, found: Mapping[str, Floats]) -> None:
        index = self._layer_index[call.layer]
        if "dropped" in found and self._mine(call.layer, call.first):
            frame.add(self._dropped, float(found["dropped"].sum()), index)
        if "common" in found and self._mine(call.layer, call.first):
            frame.add(self._same, float(found["common"][0]), index)
            frame.add(self._of, float(found["common"][1]), index)
        if "bias" in found and found["bias"].size:
            frame.add(self._high, float(found["bias"].max()), index)
            frame.add(self._low, float(found["bias"].min()), index)
            if self._bias_cap is not None:
                # Biases are kept in float32, and so is the cap that they are held at.
                at_cap = np.abs(found["bias"]) >= float(np.float32(self._bias_cap))
                frame.add(self._saturated, float(np.mean(at_cap)), index)
        if "placement" in found:
            for expert, rank in enumerate(found["placement"].tolist(), start=self._offset[call.layer]):
                frame.add(self._place, rank, expert)

    # -- all ranks' counts ------------------------------------------------------------------------------------------

    def merged(self, frame: Frame) -> None:
        """Derives what the counts of all ranks say, the same on each of them."""
        names = self._load.subjects or ()
        self._forget_unmet(frame.step)
        if self._placed_at[0] != names:
            self._placed_at = names, _by_size(names)
        loads, known = frame.get(self._load)
        dropped, drops_known = frame.get(self._dropped)
        rows = {layer: row for row, layer in enumerate(self._total.subjects or ())}
        columns = {name: np.full(len(rows), np.nan) for name in _DERIVED}
        ages = np.full(len(names), np.nan)
        moved, worst = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
        for size, places in self._placed_at[1].items():
            memory = self._memory_of(size, tuple(places), frame.step)
            at = np.stack([places[layer] for layer in memory.layers])
            of_layer = np.array([rows[layer] for layer in memory.layers])
            placement, placed = self._placement(frame, memory, places, moved, of_layer)
            metrics, _ = expert_metrics(
                np.where(known[at], loads[at], 0.0),
                capacity_factor=self._capacity,
                state=memory.state,
                window=self._span,
                hold=self._hold,
                placement=placement,
                dropped=np.where(drops_known, dropped, 0.0)[of_layer],
            )
            for name in _DERIVED:
                columns[name][of_layer] = getattr(metrics, name)
            columns["drop_rate"][of_layer[~drops_known[of_layer]]] = np.nan
            columns["ep_load_vio"][of_layer[~placed]] = np.nan
            ages[at] = np.where(known[at], metrics.dead_age, np.nan)
            worst[of_layer] = self._worst_micro(frame, at)
            self._say_dead(frame.step, memory.layers, metrics)
        for name, values in columns.items():
            frame.replace(self._derived[name], values, ~np.isnan(values))
        frame.replace(self._age, ages, ~np.isnan(ages))
        micros = frame.get(self._micros)[0]
        worst[micros > self._limit] = np.nan  # of some of them there are no counts
        self._say_limit(frame.step, micros.max(initial=0.0))
        frame.replace(self._micro, worst, ~np.isnan(worst))
        if self._placed:
            frame.replace(self._moved, moved, ~np.isnan(moved))

    def _worst_micro(self, frame: Frame, at: NDArray[np.int64]) -> Floats:
        """By layer the largest ``max_vio`` of any micro-batch; ``at``: places of experts' counts, ``[layers, E]``."""
        worst = np.full(len(at), np.nan)
        for part in self._micro_loads:
            loads, known = frame.get(part)
            if known.any():
                counts = np.where(known[at], loads[at], 0.0)
                total = counts.sum(axis=1)
                vio = counts.max(axis=1) * at.shape[1] / np.where(total > 0, total, np.nan) - 1
                worst = np.fmax(worst, vio)
        return worst

    def _memory_of(self, size: int, layers: tuple[str, ...], step: int) -> _Memory:
        """The memory of the layers with ``size`` experts; new ones begin with what an earlier life remembered, or with
        nothing."""
        memory = self._memory.get(size)
        if memory is None or memory.layers != layers:
            state = ExpertState.new(len(layers), size, self._span)
            old = memory or _Memory((), ExpertState.new(0, size, self._span))
            before = old.layers
            kept = [(layers.index(layer), row) for row, layer in enumerate(before) if layer in layers]
            for name, array in state.arrays().items():
                for new, row in kept:
                    array[new] = old.state.arrays()[name][row]
            memory = self._memory[size] = _Memory(layers, state, old.placement)
            for row, layer in enumerate(layers):
                if layer not in before and layer in self._saved:
                    self._go_on(memory, row, self._saved.pop(layer), step)
        return memory

    def _go_on(self, memory: _Memory, row: int, saved: _Saved, step: int) -> None:
        layer, size = memory.layers[row], memory.state.total.shape[1]
        if saved.experts != size:
            self._context.say(
                "warning",
                "experts_changed",
                f"the state of {layer} is of {saved.experts} experts, and it has {size} now: ages, windows and shares "
                "begin anew",
                step=step,
            )
            return
        for name, array in memory.state.arrays().items():
            # A window of another length begins anew; what is older than it is kept.
            if array[row].shape == np.shape(saved.arrays[name]):
                array[row] = saved.arrays[name]
        if memory.state.ring[row].shape != np.shape(saved.arrays["ring"]):
            memory.state.pooled[row] = 0.0
        if saved.placement is not None:
            memory.placement[layer] = saved.placement
        dead = np.flatnonzero(memory.state.dead_age[row] >= self._span)
        self._dead_said |= {(layer, int(expert)) for expert in dead}

    # -- what the next life goes on from ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """By layer: what it remembers, whole arrays as compressed text."""
        layers: dict[str, Any] = {}
        for layer, saved in self._saved.items():  # not met yet
            layers[layer] = _packed(saved.experts, saved.arrays, saved.placement)
        for size, memory in self._memory.items():
            for row, layer in enumerate(memory.layers):
                arrays = {name: array[row] for name, array in memory.state.arrays().items()}
                layers[layer] = _packed(size, arrays, memory.placement.get(layer))
        return {"format": _FORMAT, "layers": layers} if layers else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Goes on from what an earlier life remembered; layers are told apart by name, and wait until they are met.

        Raises:
            ValueError: it is damaged, or of another version.
        """
        try:
            if state["format"] != _FORMAT:
                raise ValueError("the state is of another version of trainmon")
            saved = {str(layer): _unpacked(entry) for layer, entry in state["layers"].items()}
        except (KeyError, TypeError, AttributeError, zlib.error) as error:
            raise ValueError(f"the state is damaged: {type(error).__name__}: {error}") from error
        self._saved, self._memory, self._patience = saved, {}, _UNMET
        return f"ages, windows and shares of {len(saved)} layers go on"

    def _forget_unmet(self, step: int) -> None:
        """Layers of the state that this life doesn't have, once all have had the time to be met."""
        if not self._saved:
            return
        self._patience -= 1
        if self._patience <= 0:
            names = ", ".join(list(self._saved)[:5]) + (", ..." if len(self._saved) > 5 else "")
            text = f"the state has {len(self._saved)} layers of experts that this run hasn't: {names}; they are dropped"
            self._saved = {}
            self._context.say("warning", "experts_unmet", text, step=step)

    def _placement(
        self,
        frame: Frame,
        memory: _Memory,
        places: Mapping[str, NDArray[np.int64]],
        moved: Floats,
        of_layer: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64] | None, Flags]:
        """The rank of each expert, ``[layers, E]``, and of which layers it is known; counts the moves."""
        count, size = len(memory.layers), memory.state.total.shape[1]
        even = self._ep_size is not None and size % self._ep_size == 0
        placement = np.zeros((count, size), np.int64)
        known = np.full(count, even)
        if even and self._ep_size is not None:
            placement[:] = np.arange(size) // (size // self._ep_size)
        if self._placed:
            ranks, told = frame.get(self._place)
            for index, layer in enumerate(memory.layers):
                at = places[layer]
                before = memory.placement.get(layer)
                if told[at].all():
                    memory.placement[layer] = ranks[at].astype(np.int64)
                    if before is not None:
                        moved[of_layer[index]] = float(expert_migration(before, memory.placement[layer]))
                if layer in memory.placement:
                    placement[index], known[index] = memory.placement[layer], True
        return (placement if known.any() else None), known

    def _say_dead(self, step: int, layers: Sequence[str], metrics: ExpertMetrics) -> None:
        """Each expert that dies is told once, many at once in one message."""
        dead = {
            (layers[int(layer)], int(expert)) for layer, expert in np.argwhere(metrics.dead_age >= self._span)
        }
        new = sorted(dead - self._dead_said)
        self._dead_said = dead | {pair for pair in self._dead_said if pair[0] not in layers}
        if new:
            shown = ", ".join(f"{expert} of {layer}" for layer, expert in new[:5])
            more = f" and {len(new) - 5} more" if len(new) > 5 else ""
            text = f"experts have had almost no tokens for {self._span} steps: {shown}{more}"
            data = {"experts": [{"layer": layer, "expert": expert} for layer, expert in new]}
            self._context.say("warning", "dead_experts", text, step=step, data=data)


def _packed(experts: int, arrays: Mapping[str, Any], placement: NDArray[np.int64] | None) -> dict[str, Any]:
    """One layer as plain data; float64, compressed: counts are mostly zero bytes."""
    flat = {name: np.asarray(array, "<f8") for name, array in arrays.items()}
    if placement is not None:
        flat["placement"] = placement.astype("<f8")
    return {"experts": experts} | {
        name: base64.b64encode(zlib.compress(array.tobytes(), 1)).decode() for name, array in flat.items()
    }


def _unpacked(entry: Mapping[str, Any]) -> _Saved:
    """The layer that was packed.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, zlib.error: it is damaged.
    """
    experts = int(entry["experts"])
    found: dict[str, Any] = {}
    for name in (*ExpertState.new(0, 1, 1).arrays(), *(["placement"] if "placement" in entry else [])):
        values = np.frombuffer(zlib.decompress(base64.b64decode(entry[name], validate=True)), "<f8")
        rows = 1 if name == "steps" else experts
        if not values.size or values.size % rows or not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(f"the state is damaged: {name} of a layer of {experts} experts")
        if name != "ring" and values.size != rows:
            raise ValueError(f"the state is damaged: {name} has {values.size} values, not {rows}")
        found[name] = values.reshape(-1, experts) if name == "ring" else values.astype(np.float64)
    placement = found.pop("placement", None)
    found["steps"] = np.int64(found["steps"][0])
    return _Saved(experts, found, None if placement is None else placement.astype(np.int64))


def _by_size(names: Sequence[str]) -> dict[int, dict[str, NDArray[np.int64]]]:
    """Layers by their number of experts: where each expert's count stands."""
    places: dict[str, dict[int, int]] = {}
    for place, name in enumerate(names):
        layer, expert = name.rsplit("/", 1)
        places.setdefault(layer, {})[int(expert)] = place
    sizes: dict[int, dict[str, NDArray[np.int64]]] = {}
    for layer, experts in places.items():
        ordered = np.array([experts[expert] for expert in sorted(experts)], np.int64)
        sizes.setdefault(len(ordered), {})[layer] = ordered
    return sizes
