"""expert_metrics against its twin: values, ranges, what a layer remembers; and the helpers on placements and biases."""

from __future__ import annotations

import copy
import io
import math
import pickle
import sys
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.twins.moe import LayerTwin, drop_twin, group_drop_twin, max_vio, rank_loads, shape_twin
from trainmon.ops import (
    ExpertMetrics,
    ExpertState,
    bias_saturated,
    bias_span,
    expert_metrics,
    expert_migration,
)
from trainmon.ops.moe_metrics import PER_LAYER

EXACT_SETTINGS = settings(max_examples=80, derandomize=True, deadline=None)
# Relative to 1: entropies up to 10 nats, sums of at most a few hundred rounded terms.
TOLERANCE = 1e-12


def near(value: float, expected: float) -> bool:
    return (math.isnan(value) and math.isnan(expected)) or abs(value - expected) <= TOLERANCE * max(
        1.0, abs(expected)
    )


def layer_counts(max_experts: int = 80) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    """Counts of one layer, not all zero: even, skewed, whole, with fractions."""
    whole = st.integers(0, 10) | st.integers(0, 2**40)
    fraction = st.floats(0, 1e6, allow_subnormal=False)
    return (
        (
            st.lists(whole, min_size=1, max_size=max_experts)
            | st.lists(fraction, min_size=1, max_size=max_experts)
        )
        .filter(lambda counts: sum(counts) > 1e-3)
        .map(lambda counts: np.array(counts, np.float64))
    )


def test_check_values() -> None:
    metrics, _ = expert_metrics([10, 0, 5, 5], capacity_factor=1.25, ep_size=2, dropped=2)
    expected = {
        "max_vio": 1,
        "max_vio_window": 1,
        "max_vio_global": 1,
        "min_vio": 1,
        "load_cv": 0.7071067811865476,
        "load_jain": 2 / 3,
        "load_entropy": 1.0397207708399179,
        "load_entropy_norm": 0.75,
        "experts_effective": 2.8284271247461903,
        "load_gini": 0.375,
        "drop_rate": 0.1,
        "drop_forecast": 3 / 20,  # cap = ceil(1.25 * 20 / 4) = 7
        "drop_forecast_mf": 0.5 - 1.25 / 4,
        "ep_load_vio": 0,
        "dead": 0,
        "hot": 0,
        "cold": 0,
    }
    for name, value in expected.items():
        assert getattr(metrics, name).shape == (1,)
        assert near(float(getattr(metrics, name)[0]), value), name
    assert math.isnan(metrics.churn[0])
    assert metrics.ep_load is not None
    assert metrics.ep_load.tolist() == [[10, 10]]
    assert metrics.dead_age.tolist() == [[0, 1, 0, 0]]
    assert metrics.load.tolist() == [[10, 0, 5, 5]]


def test_one_expert() -> None:
    metrics, _ = expert_metrics(np.array([[7], [3]]), capacity_factor=1.0, ep_size=1, dropped=[0, 0])
    one = {"load_entropy_norm": 1, "experts_effective": 1, "load_jain": 1}
    for name in PER_LAYER:
        values = getattr(metrics, name).tolist()
        assert values == [one.get(name, 0)] * 2 or (name == "churn" and np.isnan(values).all()), name


def test_rows_have_their_names() -> None:
    """The last of PER_LAYER's 18 names is the last row of the extension's result."""
    assert PER_LAYER[0] == "max_vio"
    assert PER_LAYER[-1] == "churn"
    counts = np.array([[4.0, 0], [1, 1]])
    metrics, state = expert_metrics(counts)
    metrics, _ = expert_metrics(counts[:, ::-1], state=state)
    assert metrics.churn.tolist() == [1, 0]


@EXACT_SETTINGS
@given(counts=layer_counts(), factor=st.sampled_from([0.5, 1.0, 1.25, 2.0, 8.0]))
def test_shape_twin_and_ranges(counts: Any, factor: float) -> None:
    metrics, _ = expert_metrics(counts, capacity_factor=factor)
    n = counts.size
    expected = shape_twin(counts) | drop_twin(counts, factor)
    for name, value in expected.items():
        scale = n if name in ("max_vio", "experts_effective", "load_cv") else 1
        assert abs(getattr(metrics, name)[0] - value) <= TOLERANCE * scale * 10, name
    ranges = {
        "max_vio": (0, n - 1),
        "min_vio": (0, 1),
        "load_entropy": (0, math.log(n)),
        "load_entropy_norm": (0, 1),
        "experts_effective": (1, n),
        "load_cv": (0, math.sqrt(n)),
        "load_jain": (1 / n, 1),
        "load_gini": (0, 1 - 1 / n),
        "drop_forecast": (0, 1),
        "drop_forecast_mf": (0, 1),
    }
    for name, (low, high) in ranges.items():
        assert low <= getattr(metrics, name)[0] <= high, name


@EXACT_SETTINGS
@given(counts=layer_counts(), seed=st.integers(0, 100))
def test_order_of_experts_changes_no_bit(counts: Any, seed: int) -> None:
    shuffled = np.random.default_rng(seed).permutation(counts)
    one, _ = expert_metrics(counts, capacity_factor=1.25)
    other, _ = expert_metrics(shuffled, capacity_factor=1.25)
    of_sorted = set(PER_LAYER) - {"max_vio_window", "max_vio_global", "churn", "ep_load_vio"}
    for name in of_sorted:
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name
    for name in ("max_vio_window", "max_vio_global"):
        assert near(getattr(one, name)[0], getattr(other, name)[0])


@EXACT_SETTINGS
@given(counts=layer_counts(), power=st.integers(0, 10))
def test_scale_of_counts_changes_nothing(counts: Any, power: int) -> None:
    one, _ = expert_metrics(counts)
    other, _ = expert_metrics(counts * 2.0**power)
    for name in ("max_vio", "min_vio", "load_entropy", "load_cv", "load_jain", "load_gini"):
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name


@EXACT_SETTINGS
@given(counts=st.lists(st.integers(0, 1000), min_size=2, max_size=40).filter(any), data=st.data())
def test_evening_out_is_monotone(counts: list[int], data: st.DataObject) -> None:
    """Half the difference moved from a busier expert to a less busy one: no metric says 'less balanced'."""
    i, j = (data.draw(st.integers(0, len(counts) - 1)) for _ in range(2))
    high, low = (i, j) if counts[i] >= counts[j] else (j, i)
    evened = np.array(counts, np.float64)
    moved = (counts[high] - counts[low]) // 2
    evened[high] -= moved
    evened[low] += moved
    before, _ = expert_metrics(counts, capacity_factor=1.0)
    after, _ = expert_metrics(evened, capacity_factor=1.0)
    for name in ("max_vio", "min_vio", "load_cv", "load_gini", "drop_forecast", "drop_forecast_mf"):
        assert getattr(after, name)[0] <= getattr(before, name)[0] + TOLERANCE, name
    for name in ("load_entropy", "load_entropy_norm", "experts_effective", "load_jain"):
        assert getattr(after, name)[0] >= getattr(before, name)[0] - TOLERANCE * len(counts), name


def test_even_and_lonely_counts_are_exact() -> None:
    """No rounding where the answer is a whole number."""
    for n in (2, 3, 7, 61, 256):
        even, _ = expert_metrics(np.full(n, 1001.0))
        assert even.max_vio[0] == even.min_vio[0] == even.load_cv[0] == even.load_gini[0] == 0
        lonely, _ = expert_metrics(np.eye(n)[0] * 1001)
        assert lonely.max_vio[0] == n - 1
        assert (lonely.min_vio[0], lonely.load_entropy[0], lonely.experts_effective[0]) == (1, 0, 1)


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 256, 1000, 70_000])
@pytest.mark.parametrize("kind", ["small", "whole", "fractions", "equal", "huge", "tiny"])
def test_sorting(n: int, kind: str) -> None:
    """gini sees the order: every length around the sorts' border, every width of the keys."""
    rng = np.random.default_rng([n, *kind.encode()])
    counts = {
        "small": rng.integers(0, 9, n).astype(float),
        "whole": rng.integers(0, 2**30, n).astype(float),
        "fractions": rng.random(n) * 1e5,
        "equal": np.full(n, 12345.0),
        "huge": rng.random(n) * 2.0**53,
        "tiny": rng.random(n) * 1e-290,
    }[kind]
    counts[0] += counts.max() == 0
    metrics, _ = expert_metrics(counts, window=1)
    expected = shape_twin(np.ldexp(counts, 960) if kind == "tiny" else counts)
    assert metrics.load_jain[0] == pytest.approx(expected["load_jain"], rel=1e-9)
    assert metrics.load_cv[0] == pytest.approx(expected["load_cv"], rel=1e-9, abs=1e-12)
    assert metrics.load_gini[0] == pytest.approx(expected["load_gini"], abs=1e-9)
    assert metrics.max_vio[0] == pytest.approx(expected["max_vio"], rel=1e-12, abs=1e-12 * n)


@EXACT_SETTINGS
@given(data=st.data(), layers=st.integers(0, 3), groups=st.integers(1, 4), experts=st.integers(1, 20))
def test_groups_twin(data: st.DataObject, layers: int, groups: int, experts: int) -> None:
    """Each group has its own capacity; everything else is about the sum, which gives a lower bound."""
    size = layers * groups * experts
    flat = data.draw(st.lists(st.integers(0, 50), min_size=size, max_size=size))
    counts = np.array(flat, np.int64).reshape(layers, groups, experts)
    each, _ = expert_metrics(counts, 1.25)
    pooled, _ = expert_metrics(counts.sum(axis=1), 1.25)
    for field in fields(ExpertMetrics):
        if field.name not in ("drop_forecast", "ep_load"):
            assert getattr(each, field.name).tobytes() == getattr(pooled, field.name).tobytes(), field.name
    for layer in range(layers):
        assert near(each.drop_forecast[layer], group_drop_twin(counts[layer].astype(float), 1.25))
    whole = counts * 4 * experts  # capacities without rounding
    each, pooled = (expert_metrics(c, 1.25)[0] for c in (whole, whole.sum(axis=1)))
    assert not np.any(pooled.drop_forecast > each.drop_forecast + TOLERANCE)


def test_dropped() -> None:
    metrics, _ = expert_metrics([[3, 1], [0, 0], [5, 5]], dropped=[1, 0, 10])
    assert metrics.drop_rate[[0, 2]].tolist() == [0.25, 1]
    assert math.isnan(metrics.drop_rate[1])
    assert metrics.over_layers("drop_rate").max == 1
    _, state = expert_metrics([[3, 1]])
    before = copy.deepcopy(state)
    for bad in (-1, 5, math.nan, [math.inf]):
        with pytest.raises(ValueError, match=r"dropped\[0\] is .*: it must be from 0 to the layer's 4 assig"):
            expert_metrics([3, 1], state=state, dropped=bad)
    with pytest.raises(ValueError, match=r"dropped must have shape \[1\], not \(2,\)"):
        expert_metrics([3, 1], state=state, dropped=[1, 2])
    with pytest.raises(TypeError, match="dropped must be numbers, not bool"):
        expert_metrics([3, 1], state=state, dropped=[True])
    for name, array in before.arrays().items():
        assert array.tobytes() == state.arrays()[name].tobytes()


# ---- memory ----


def sequence(seed: int, layers: int, experts: int, steps: int) -> list[np.ndarray[Any, Any]]:
    """Steps in which experts stay dead, hot or cold for a while, and layers now and then get nothing."""
    rng = np.random.default_rng(seed)
    weight = rng.choice([0, 0.02, 1, 1, 1, 8], (layers, experts))
    result = []
    for _ in range(steps):
        change = rng.random((layers, experts)) < 0.05
        weight = np.where(change, rng.choice([0, 0.02, 1, 1, 1, 8], (layers, experts)), weight)
        counts = rng.poisson(weight * 200)
        counts[rng.random(layers) < 0.1] = 0
        result.append(counts)
    return result


@pytest.mark.parametrize("seed", range(6))
def test_state_machine(seed: int) -> None:
    """Against lists in plain Python, saved and restored in the middle."""
    layers, experts, window, hold = 3, 1 + 5 * seed, 7, 3
    twins = [LayerTwin(experts, window, hold) for _ in range(layers)]
    state = None
    for step, counts in enumerate(sequence(seed, layers, experts, 60)):
        if step in (20, 41):
            assert state is not None
            state = saved_and_restored(state, step)
        metrics, state = expert_metrics(counts, state=state, window=window, hold=hold)
        for layer, twin in enumerate(twins):
            expected = twin.step(counts[layer].astype(float))
            if expected is None:
                for name in PER_LAYER:
                    assert np.isnan(getattr(metrics, name)[layer]), name
                for name in ("dead_age", "hot_age", "cold_age"):
                    assert np.isnan(getattr(metrics, name)[layer]).all(), name
                continue
            for name, value in expected.items():
                assert near(float(getattr(metrics, name)[layer]), value), (step, name)
            assert metrics.dead_age[layer].tolist() == twin.dead
            assert metrics.hot_age[layer].tolist() == twin.hot
            assert metrics.cold_age[layer].tolist() == twin.cold
            assert state.pooled[layer].tolist() == np.sum(twin.steps, axis=0).tolist()
            assert state.total[layer].tolist() == twin.total.tolist()


def saved_and_restored(state: ExpertState, step: int) -> ExpertState:
    if step == 20:
        file = io.BytesIO()
        np.savez(file, **state.arrays())  # type: ignore[arg-type]
        file.seek(0)
        return ExpertState.from_arrays(np.load(file))
    restored: ExpertState = pickle.loads(pickle.dumps(state))
    return restored


def test_restored_state_gives_the_same_bits() -> None:
    steps = sequence(9, 4, 16, 30)
    state = None
    for counts in steps[:15]:
        _, state = expert_metrics(counts, state=state, window=10)
    assert state is not None
    other = ExpertState.from_arrays(state.arrays())
    for counts in steps[15:]:
        one, state = expert_metrics(counts, 1.25, 4, state, window=10)
        two, other = expert_metrics(counts, 1.25, 4, other, window=10)
        for field in fields(ExpertMetrics):
            assert getattr(one, field.name).tobytes() == getattr(two, field.name).tobytes()
    for name, array in state.arrays().items():
        assert array.tobytes() == other.arrays()[name].tobytes()


def test_nothing_assigned_leaves_no_trace() -> None:
    _, state = expert_metrics([[4, 0], [1, 1]], ep_size=2)
    before = copy.deepcopy(state)
    metrics, after = expert_metrics([[0, 0], [0.0, -0.0]], 1.0, 2, state)
    assert after is state
    for field in fields(ExpertMetrics):
        if field.name != "load":
            assert np.isnan(getattr(metrics, field.name)).all(), field.name
    for name, array in before.arrays().items():
        assert array.tobytes() == state.arrays()[name].tobytes(), name
    assert metrics.worst() == []
    assert np.isnan(metrics.over_layers()).all()


def test_dead_after_a_window() -> None:
    state = None
    for _ in range(102):
        metrics, state = expert_metrics([1000, 1000, 1], state=state)
        assert metrics.dead[0] == 0  # 1 is more than a thousandth of 667
    for step in range(1, 103):
        metrics, state = expert_metrics([1000, 1000, 0], state=state)
        assert metrics.dead[0] == (step >= 100)
        assert metrics.dead_age[0].tolist() == [0, 0, step]
    metrics, state = expert_metrics([1000, 1000, 2], state=state)
    assert metrics.dead[0] == metrics.dead_age[0, 2] == 0


def test_borders_are_as_written() -> None:
    """<= mu/1000 is dead; > 2 mu is hot, 2 mu is not; < mu/4 is cold, mu/4 is not."""
    metrics, _ = expert_metrics([1000, 1, 1999, 1000], hold=1, window=1)  # mu = 1000
    assert metrics.dead_age.tolist() == [[0, 1, 0, 0]]
    metrics, _ = expert_metrics([8, 1, 3, 4], hold=1)  # mu = 4
    assert (metrics.hot[0], metrics.cold[0]) == (0, 0)
    metrics, _ = expert_metrics([9, 0, 3, 4], hold=1)
    assert (metrics.hot[0], metrics.cold[0]) == (1, 1)


def test_window_of_whole_counts_is_exact_for_long() -> None:
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 2**45, (300, 1, 5))
    state = None
    for counts in steps:
        metrics, state = expert_metrics(counts, state=state, window=8)
    assert state is not None
    assert state.pooled.tolist() == steps[-8:].sum(axis=0).tolist()
    assert near(metrics.max_vio_window[0], max_vio(steps[-8:].sum(axis=(0, 1)).astype(float)))


# ---- placement ----


def test_ranks_in_order() -> None:
    counts = np.arange(24.0).reshape(2, 12)
    metrics, _ = expert_metrics(counts, ep_size=4)
    assert metrics.ep_load is not None
    expected = counts.reshape(2, 4, 3).sum(axis=2)
    assert metrics.ep_load.tolist() == expected.tolist()
    assert metrics.ep_load_vio.tolist() == [max_vio(loads) for loads in expected]
    for ranks in (1, 12):
        metrics, _ = expert_metrics(counts, ep_size=ranks)
        assert metrics.ep_load_vio[0] == (0 if ranks == 1 else metrics.max_vio[0])


@pytest.mark.parametrize("seed", range(4))
def test_placements(seed: int) -> None:
    """One map for all layers, one a layer, and copies of experts."""
    rng = np.random.default_rng(seed)
    layers, experts, ranks = 3, 10, 4
    counts = rng.integers(1, 100, (layers, experts)).astype(float)
    copies = rng.integers(-1, ranks, (layers, experts, 3))
    copies[:, :, 1] = rng.integers(0, ranks, (layers, experts))
    for placement, holders in (
        (copies[0, :, 1], [[[r] for r in copies[0, :, 1]]] * layers),
        (copies[:, :, 1], [[[r] for r in row] for row in copies[:, :, 1]]),
        (copies, [[[r for r in places if r >= 0] for places in row] for row in copies]),
    ):
        metrics, _ = expert_metrics(counts, ep_size=ranks, placement=placement)
        assert metrics.ep_load is not None
        for layer in range(layers):
            loads = rank_loads(counts[layer], holders[layer], ranks)
            assert metrics.ep_load[layer].tolist() == pytest.approx(loads.tolist(), rel=1e-14)
            assert near(float(metrics.ep_load_vio[layer]), max_vio(loads))


def test_placement_names_the_number_of_ranks() -> None:
    metrics, _ = expert_metrics([1, 2, 3], placement=[2, 0, 0])
    assert metrics.ep_load is not None
    assert metrics.ep_load.tolist() == [[5, 0, 1]]


# ---- errors ----


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, 2.0**53, -1e-300])
def test_bad_counts_leave_the_state_alone(bad: float) -> None:
    _, state = expert_metrics([[1.0, 2.0], [3, 4]])
    before = copy.deepcopy(state)
    with pytest.raises(ValueError, match=r"counts\[1, 0\] is .*: a count must be from 0 to below 2\^53"):
        expert_metrics([[5.0, 6.0], [bad, 1]], state=state)
    with pytest.raises(ValueError, match=r"counts\[1, 2, 0\] is .*: a count must be from 0 to below 2\^53"):
        expert_metrics([[[5.0, 6.0]] * 3, [[1, 1], [1, 1], [bad, 1]]], state=state)
    for name, array in before.arrays().items():
        assert array.tobytes() == state.arrays()[name].tobytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity_factor": 0.0}, "capacity_factor must be positive"),
        ({"capacity_factor": -1.0}, "capacity_factor must be positive"),
        ({"capacity_factor": math.inf}, "capacity_factor must be positive"),
        ({"ep_size": 3}, "ep_size 3 does not divide 4 experts"),
        ({"ep_size": 0}, "ep_size must be 1 or more"),
        ({"ep_size": 8}, "ep_size 8 does not divide 4 experts"),
        ({"window": 0}, "window and hold must be 1 or more"),
        ({"hold": 0}, "window and hold must be 1 or more"),
        ({"placement": [0, 1]}, "placement must have shape"),
        ({"placement": [[0, 1, 0, 1]] * 2}, "placement must have shape"),
        (
            {"placement": [0, 1, 2, 3], "ep_size": 3},
            "placement of expert 3 in layer 0: rank 3 is not one of 3",
        ),
        ({"placement": [0, 1, -1, 1]}, "placement of expert 2 in layer 0: no rank has it"),
        ({"placement": [0, 1, -2, 1]}, "placement of expert 2 in layer 0: rank -2"),
        ({"placement": [-1, -1, -1, -1]}, "placement has no rank"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expert_metrics([1, 2, 3, 4], **options)


def test_bad_shapes_and_types() -> None:
    for shape in ((), (1, 2, 3, 4), (3, 0), (2, 0, 4), (2, 3, 0)):
        with pytest.raises(ValueError, match="counts must have shape"):
            expert_metrics(np.ones(shape))
    for counts in (["a"], [True, False], [1j]):
        with pytest.raises(TypeError, match="counts must be numbers"):
            expert_metrics(counts)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="placement must hold integer ranks"):
        expert_metrics([1, 2], placement=[0.0, 1.0])


def test_state_of_another_shape() -> None:
    _, state = expert_metrics(np.ones((2, 4)))
    for counts, options in ((np.ones((3, 4)), {}), (np.ones((2, 5)), {}), (np.ones((2, 4)), {"window": 50})):
        with pytest.raises(ValueError, match="the state is of 2 layers, 4 experts and a window of 100 steps"):
            expert_metrics(counts, state=state, **options)  # type: ignore[arg-type]


def test_restoring_something_else() -> None:
    arrays = ExpertState.new(2, 4, 3).arrays()
    with pytest.raises(ValueError, match="lacks ring"):
        ExpertState.from_arrays({name: array for name, array in arrays.items() if name != "ring"})
    with pytest.raises(ValueError, match=r"total must be float64 of shape \(2, 4\), not float64 of \(2, 5\)"):
        ExpertState.from_arrays(arrays | {"total": np.zeros((2, 5))})
    with pytest.raises(ValueError, match="steps must be int64"):
        ExpertState.from_arrays(arrays | {"steps": np.zeros(2)})
    with pytest.raises(ValueError, match="ring must have shape"):
        ExpertState.from_arrays(arrays | {"ring": np.zeros(3)})


def test_state_arrays_that_cannot_be_written() -> None:
    state = ExpertState.new(1, 2)
    state.total.flags.writeable = False
    with pytest.raises(TypeError, match="total must be a contiguous, writable float64 array"):
        expert_metrics([1, 2], state=state)


@pytest.mark.parametrize("steps", [-1, -(2**63), 2**53])
def test_state_with_impossible_steps(steps: int) -> None:
    """The number of steps chooses a row of the ring."""
    _, state = expert_metrics(np.ones((2, 3)))
    state.steps[1] = steps
    with pytest.raises(ValueError, match=r"state.steps\[1\] is -?\d+: no number of steps"):
        expert_metrics(np.ones((2, 3)), state=state)


def test_inputs_stay_and_references_return() -> None:
    counts = np.arange(8).reshape(2, 4)
    placement = np.zeros((2, 4), np.int64)
    _, state = expert_metrics(counts)
    held = [counts, placement, *state.arrays().values()]
    before = [sys.getrefcount(array) for array in held]
    kept = counts.copy()
    for _ in range(10):
        metrics, state = expert_metrics(counts, state=state, placement=placement)
        with pytest.raises(ValueError, match="does not divide"):
            expert_metrics(counts, state=state, ep_size=3)
        del metrics
    assert np.array_equal(counts, kept)
    assert [sys.getrefcount(array) for array in held] == before


def test_metrics_keep_their_counts() -> None:
    counts = np.array([[1.0, 2.0]])
    metrics, _ = expert_metrics(counts)
    counts[:] = 9
    assert metrics.load.tolist() == [[1, 2]]


def test_other_kinds_of_counts() -> None:
    expected, _ = expert_metrics([[3, 1, 2], [1, 1, 1]])
    array = np.array([[3, 1, 2], [1, 1, 1]])
    wide = np.zeros((2, 6), np.int32)
    wide[:, ::2] = array
    for counts in (
        array,
        array.astype(np.uint16),
        array.astype(np.float32),
        wide[:, ::2],
        np.asfortranarray(array),
    ):
        metrics, _ = expert_metrics(counts)
        assert metrics.max_vio.tobytes() == expected.max_vio.tobytes()
    torch = pytest.importorskip("torch")
    metrics, _ = expert_metrics(torch.tensor(array))
    assert metrics.max_vio.tobytes() == expected.max_vio.tobytes()


def test_no_layers() -> None:
    metrics, state = expert_metrics(np.zeros((0, 4)))
    metrics, state = expert_metrics(np.zeros((0, 4)), state=state)
    assert metrics.max_vio.shape == (0,)
    assert metrics.worst() == []


# ---- over layers, placements, biases ----


def test_over_layers_and_worst() -> None:
    counts = np.array([[4, 0], [1, 1], [0, 0], [3, 1], [0, 4]])
    metrics, _ = expert_metrics(counts)
    assert metrics.max_vio[[0, 1, 3, 4]].tolist() == [1, 0, 0.5, 1]
    assert metrics.worst(3) == [("0", 1), ("4", 1), ("3", 0.5)]
    assert metrics.worst(9, names=list("abcde")) == [("a", 1), ("e", 1), ("d", 0.5), ("b", 0)]
    assert metrics.worst(0) == []
    overall = metrics.over_layers()
    assert overall == (1, 0.75, 1)
    assert overall.p95 == np.quantile([1, 0, 0.5, 1], 0.95)
    assert metrics.over_layers("load_gini").max == 0.5
    for call in (metrics.over_layers, lambda name: metrics.worst(metric=name)):
        with pytest.raises(ValueError, match="metric must be one of max_vio"):
            call("load")
    with pytest.raises(ValueError, match="2 names for 5 layers"):
        metrics.worst(names=["a", "b"])


def test_expert_migration() -> None:
    assert expert_migration([0, 0, 1, 1], [0, 1, 0, 1]) == 2
    assert expert_migration([[0, 1], [1, 0]], np.array([[0, 1], [0, 1]], np.int8)).tolist() == [0, 2]
    copies = np.array([[[0, 1], [2, -1], [3, 1]]])
    assert expert_migration(copies, copies[:, :, ::-1]).tolist() == [0]
    assert expert_migration(copies, [[[0, 2], [2, 2], [1, 3]]]).tolist() == [2]
    for old, new in (([0, 1], [0, 1, 2]), (0, 0), (np.zeros((1, 1, 1, 1), int), np.zeros((1, 1, 1, 1), int))):
        with pytest.raises(ValueError, match="shape"):
            expert_migration(old, new)
    with pytest.raises(TypeError, match="new_map must hold integer ranks"):
        expert_migration([0, 1], [0.0, 1.0])


def test_router_biases() -> None:
    bias = np.array([[0.1, -0.1, 0.05], [0, 0, 0]], np.float32)
    assert bias_span(bias).tolist() == pytest.approx([0.2, 0])
    assert bias_saturated(bias, np.float32(0.1)).tolist() == [2 / 3, 0]
    assert bias_span([1.0, np.nan]) != bias_span([1.0, np.nan])
    assert np.isnan(bias_saturated([[1.0, np.nan]], 1)).all()
    assert bias_saturated([1.0, np.inf], 1) == 1
    for call in (bias_span, lambda bias: bias_saturated(bias, 1)):
        with pytest.raises(ValueError, match="bias must have shape"):
            call(np.zeros((2, 0)))
    with pytest.raises(ValueError, match="cap must be positive"):
        bias_saturated([1.0], 0)
