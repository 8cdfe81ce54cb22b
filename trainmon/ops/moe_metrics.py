"""Balance of a mixture of experts, layer by layer: metrics of a step's counts, and what they need to remember."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainmon.ops._extension import _core

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


class OverLayers(NamedTuple):
    """One metric over the layers that have it; NaN when none has."""

    max: float
    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class ExpertMetrics:
    """What one step's counts say, one element a layer: float64 arrays of shape [layers].

    NaN is null: a layer without assignments, `drop_rate` without `dropped`, the drop forecasts without
    `capacity_factor`, `ep_load_vio` without expert parallelism, `churn` at a layer's first step.

    With mu = C/E, p_i = c_i/C, C the sum of the layer's counts, c_(i) ascending:

    Attributes:
        max_vio: max c / mu - 1 of this step, in [0, E - 1]; 0 for equal counts.
        max_vio_window: the same over the counts of the last `window` steps, this one included, added up.
        max_vio_global: the same over all steps since the state began.
        min_vio: 1 - min c / mu, in [0, 1].
        load_entropy: H = -sum p ln p in nats, 0 ln 0 = 0.
        load_entropy_norm: H / ln E; 1 for one expert.
        experts_effective: exp(H).
        load_cv: population standard deviation of c / mu.
        load_jain: C^2 / (E sum c^2), in [1/E, 1].
        load_gini: 2 sum i c_(i) / (E C) - (E + 1)/E, in [0, 1 - 1/E].
        drop_rate: dropped / C: measured drops.
        drop_forecast: sum max(0, c_i - cap) / C with cap = ceil(capacity_factor * C / E); with counts of
            several groups the sum runs over groups too, each with the cap of its own C.
        drop_forecast_mf: sum max(0, p_i - capacity_factor / E), which MindFormers prints as drop_rate.
        dead: number of experts with c_i <= mu/1000 for `window` steps in a row.
        hot, cold: number with c_i > 2 mu, c_i < mu/4, for `hold` steps in a row.
        ep_load_vio: max L / mean L - 1 over the ranks' loads L.
        churn: half the sum of |p_i - p_i of the layer's step before|, in [0, 1].
        load: the counts, float64 [layers, E].
        dead_age, hot_age, cold_age: steps in a row so far, float64 [layers, E].
        ep_load: L, float64 [layers, ranks]; None without expert parallelism.
    """

    max_vio: Float64
    max_vio_window: Float64
    max_vio_global: Float64
    min_vio: Float64
    load_entropy: Float64
    load_entropy_norm: Float64
    experts_effective: Float64
    load_cv: Float64
    load_jain: Float64
    load_gini: Float64
    drop_rate: Float64
    drop_forecast: Float64
    drop_forecast_mf: Float64
    dead: Float64
    hot: Float64
    cold: Float64
    ep_load_vio: Float64
    churn: Float64
    load: Float64
    dead_age: Float64
    hot_age: Float64
    cold_age: Float64
    ep_load: Float64 | None

    def over_layers(self, metric: str = "max_vio") -> OverLayers:
        """The metric's maximum, median and 95th percentile (linear interpolation) over the layers."""
        values = self._of_layers(metric)
        values = values[~np.isnan(values)]
        if values.size == 0:
            return OverLayers(np.nan, np.nan, np.nan)
        p50, p95 = np.quantile(values, [0.5, 0.95])
        return OverLayers(float(values.max()), float(p50), float(p95))

    def worst(
        self, count: int = 5, metric: str = "max_vio", names: Sequence[str] | None = None
    ) -> list[tuple[str, float]]:
        """The `count` layers with the largest values, largest first, as (name, value).

        A layer's name is its position unless `names` has one for each. Layers that are null are left out;
        of equal ones the first comes first.
        """
        values = self._of_layers(metric)
        if names is not None and len(names) != values.size:
            raise ValueError(f"{len(names)} names for {values.size} layers")
        order = np.argsort(-values, kind="stable")  # NaN comes last
        chosen = [int(layer) for layer in order[: max(count, 0)] if not np.isnan(values[layer])]
        return [(names[i] if names is not None else str(i), float(values[i])) for i in chosen]

    def _of_layers(self, metric: str) -> Float64:
        if metric not in PER_LAYER:
            raise ValueError(f"metric must be one of {', '.join(PER_LAYER)}, not {metric!r}")
        values: Float64 = getattr(self, metric)
        return values


# The rows of the extension's result: TM_EXPERT_METRICS in csrc/core/tm_moe.h.
PER_LAYER = tuple(field.name for field in fields(ExpertMetrics))[:18]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertState:
    """What `expert_metrics` remembers from step to step; it writes to these arrays.

    Saved and restored exactly by `arrays()` and `from_arrays()` (`np.savez(file, **state.arrays())`,
    `ExpertState.from_arrays(np.load(file))`), by pickle and by `copy.deepcopy`. The ring holds 8 bytes for each
    layer, expert and step of the window: 12.5 MB for 61 layers of 256 experts and 100 steps. Its float64
    counts are exact below 2^53, and so is `pooled` for whole counts; for counts with fractions each step adds
    a rounding error of up to 2^-52 of the pool.

    Attributes:
        steps: steps with assignments so far, int64 [layers].
        total: counts since the start, float64 [layers, E].
        pooled: counts of the last `window` steps, float64 [layers, E].
        ring: each of them, step s in row s % window, float64 [layers, window, E].
        share: p of the layer's last step, float64 [layers, E].
        dead_age, hot_age, cold_age: steps in a row so far, float64 [layers, E].
    """

    steps: Int64
    total: Float64
    pooled: Float64
    ring: Float64
    share: Float64
    dead_age: Float64
    hot_age: Float64
    cold_age: Float64

    @classmethod
    def new(cls, layers: int, num_experts: int, window: int = 100) -> ExpertState:
        """The state before the first step."""
        flat = (layers, num_experts)
        return cls(
            steps=np.zeros(layers, np.int64),
            total=np.zeros(flat),
            pooled=np.zeros(flat),
            ring=np.zeros((layers, window, num_experts)),
            share=np.zeros(flat),
            dead_age=np.zeros(flat),
            hot_age=np.zeros(flat),
            cold_age=np.zeros(flat),
        )

    def _arrays(self) -> tuple[Float64 | Int64, ...]:
        return (
            self.steps,
            self.total,
            self.pooled,
            self.ring,
            self.share,
            self.dead_age,
            self.hot_age,
            self.cold_age,
        )

    def arrays(self) -> dict[str, npt.NDArray[np.float64] | npt.NDArray[np.int64]]:
        """The arrays by name, not copied."""
        return {field.name: array for field, array in zip(fields(self), self._arrays(), strict=True)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[np.generic]]) -> ExpertState:
        """The state that `arrays()` described; copies.

        Raises:
            ValueError: a missing array, or shapes and dtypes that don't belong together.
        """
        missing = [field.name for field in fields(cls) if field.name not in arrays]
        if missing:
            raise ValueError(f"the saved state lacks {', '.join(missing)}")
        ring = np.asarray(arrays["ring"])
        if ring.ndim != 3:
            raise ValueError(f"ring must have shape [layers, window, E], not {ring.shape}")
        state = cls.new(ring.shape[0], ring.shape[2], ring.shape[1])
        for name, array in state.arrays().items():
            saved = np.asarray(arrays[name])
            if saved.shape != array.shape or saved.dtype != array.dtype:
                raise ValueError(
                    f"{name} must be {array.dtype} of shape {array.shape}, not {saved.dtype} of {saved.shape}"
                )
            array[...] = saved
        return state

    def _check(self, layers: int, num_experts: int, window: int) -> None:
        kept = self.ring.shape
        if kept != (layers, window, num_experts):
            raise ValueError(
                f"the state is of {kept[0]} layers, {kept[2]} experts and a window of {kept[1]} steps, not of "
                f"{layers}, {num_experts} and {window}: begin anew with state=None"
            )


def expert_metrics(
    counts: npt.ArrayLike,
    capacity_factor: float | None = None,
    ep_size: int | None = None,
    state: ExpertState | None = None,
    window: int = 100,
    hold: int = 10,
    placement: npt.ArrayLike | None = None,
    dropped: npt.ArrayLike | None = None,
) -> tuple[ExpertMetrics, ExpertState]:
    """The balance of one step's expert counts, all layers in one call.

    Args:
        counts: assignments per expert, shape [layers, E], or [E] for one layer; numbers from 0 to below
            2^53, whole or not. Counts of the whole batch: pooled over ranks before the call. Those of one
            micro-batch, with a state of their own or none, give its `max_vio`. Shape [layers, groups, E]
            keeps apart the groups that have a capacity each (a rank's micro-batch, as a rule): they count
            for `drop_forecast`, to which pooled counts give a lower bound (but for the rounding of
            capacities); all else is about their sum.
        capacity_factor: CF of the router; None: no drop forecasts.
        ep_size: ranks of expert parallelism; None: none, or with `placement` its largest rank + 1.
        state: what the last call returned; None begins anew. It is advanced in place.
        window: steps of `max_vio_window`, and steps until an expert is dead.
        hold: steps until an expert is hot or cold.
        placement: the rank of each expert, integers [E] or [layers, E]; with replicas [layers, E, copies],
            -1 where there is no copy: copies share their expert's load equally. None: E/ep_size experts a
            rank, in order.
        dropped: measured drops of each layer, [layers], among the assignments in `counts`; one number for
            one layer.

    Returns:
        (metrics, state). A layer without assignments is null in every number, and its state stays as it is.

    Raises:
        ValueError: counts, shapes or options out of range, a placement that doesn't fit, or a state of other
            shapes; the state is then unchanged.
        TypeError: counts or ranks that are no numbers.

    Formulas: `ExpertMetrics`; sources in docs/kernels/moe.md.
    """
    block, groups = _counts(counts)
    _, layers, experts = block.shape
    ranks, places = _placement(placement, ep_size, layers, experts)
    if window < 1 or hold < 1:
        raise ValueError(f"window and hold must be 1 or more, not {window} and {hold}")
    if state is None:
        state = ExpertState.new(layers, experts, window)
    state._check(layers, experts, window)
    metric, ep_load = _core.expert_metrics(
        block,
        (window, hold, capacity_factor, ranks),
        places,
        groups,
        _dropped(dropped, layers),
        state._arrays(),
    )
    load, dead_age, hot_age, cold_age = block
    return (
        ExpertMetrics(
            **dict(zip(PER_LAYER, metric, strict=True)),
            load=load,
            dead_age=dead_age,
            hot_age=hot_age,
            cold_age=cold_age,
            ep_load=ep_load if ranks else None,
        ),
        state,
    )


def _counts(counts: npt.ArrayLike) -> tuple[Float64, Float64 | None]:
    """float64 [4, layers, E] with the counts in front and room for three ages behind, in one piece because
    memory of this size is then kept from call to call; and [layers, groups, E], if there are groups."""
    given = np.asarray(counts)
    if given.dtype.kind not in "iuf":
        raise TypeError(f"counts must be numbers, not {given.dtype}")
    if given.ndim not in (1, 2, 3) or given.shape[-1] == 0 or (given.ndim == 3 and given.shape[1] == 0):
        raise ValueError(f"counts must have shape [layers, E], [E] or [layers, groups, E], not {given.shape}")
    layers = given.shape[0] if given.ndim > 1 else 1
    block = np.empty((4, layers, given.shape[-1]))
    if given.ndim < 3:
        block[0] = given
        return block, None
    groups = np.ascontiguousarray(given, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # refused later, with their place
        groups.sum(axis=1, out=block[0])  # the method: np.sum crashes Python 3.11 when memory fails in it
    return block, groups


def _dropped(dropped: npt.ArrayLike | None, layers: int) -> Float64 | None:
    if dropped is None:
        return None
    given = np.asarray(dropped)
    if given.dtype.kind not in "iuf":
        raise TypeError(f"dropped must be numbers, not {given.dtype}")
    if given.shape != (layers,) and (given.shape, layers) != ((), 1):
        raise ValueError(f"dropped must have shape [{layers}], not {given.shape}")
    return np.ascontiguousarray(given.reshape(layers), np.float64)


def _placement(
    placement: npt.ArrayLike | None, ep_size: int | None, layers: int, experts: int
) -> tuple[int, Int64 | None]:
    """Number of ranks (0: no expert parallelism), and the ranks as [1 or layers, E, copies]."""
    if ep_size is not None and ep_size < 1:
        raise ValueError(f"ep_size must be 1 or more, not {ep_size}")
    if placement is None:
        return ep_size or 0, None
    given = np.asarray(placement)
    if given.dtype.kind not in "iu":
        raise TypeError(f"placement must hold integer ranks, not {given.dtype}")
    places = given[None, :, None] if given.ndim == 1 else given[:, :, None] if given.ndim == 2 else given
    if places.ndim != 3 or places.shape[0] not in (1, layers) or places.shape[1] != experts:
        raise ValueError(
            f"placement must have shape [{experts}], [{layers}, {experts}] or [{layers}, {experts}, copies],"
            f" not {given.shape}"
        )
    ranks = int(places.max(initial=-1)) + 1 if ep_size is None else ep_size
    if ranks < 1:
        raise ValueError("placement has no rank from 0 on")
    return ranks, np.ascontiguousarray(places, np.int64)
