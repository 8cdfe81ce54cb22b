"""What became of a spike."""

from __future__ import annotations

import numpy as np
import pytest

from trainmon import SpikeClass, classify_spike

BEFORE = [1.0, 2.0] * 50  # median 1.5, MAD 0.5
BOUND = 1.5 + 2 * 1.4826 * 0.5


def test_recovering_names_the_first_of_five_calm_steps() -> None:
    after = [9.0, 8.0, 2.9, 9.0, 2.9, 2.9, 2.9, 2.9, 2.9]
    assert classify_spike(BEFORE, after) == SpikeClass("recovering", 4, pytest.approx(BOUND))
    assert classify_spike(BEFORE, after[:-1]).kind == "open"
    assert classify_spike(BEFORE, [9.0, *[BOUND] * 5]).time_to_recover == 1


def test_recovery_after_a_hundred_steps_comes_too_late() -> None:
    assert classify_spike(BEFORE, [9.0] * 96 + [2.0] * 5).kind == "recovering"
    assert classify_spike(BEFORE, [9.0] * 97 + [2.0] * 9).kind == "lingering"


def test_lingering_or_divergent_by_the_trend_of_the_running_median() -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, 101)
    falling, rising = 9 - 0.02 * np.arange(101) + noise, 9 + 0.02 * np.arange(101) + noise
    assert classify_spike(BEFORE, falling).kind == "lingering"
    assert classify_spike(BEFORE, rising).kind == "divergent"
    assert classify_spike(BEFORE, np.full(101, 9.0)).kind == "lingering"
    assert classify_spike(BEFORE, rising[:100]).kind == "open"


def test_a_value_that_is_not_finite_diverges_unless_the_run_recovers() -> None:
    assert classify_spike(BEFORE, [9.0, np.nan]).kind == "divergent"
    assert classify_spike(BEFORE, [np.inf]).kind == "divergent"
    assert classify_spike(BEFORE, [np.nan, 2, 2, 2, 2, 2]) == SpikeClass(
        "recovering", 1, pytest.approx(BOUND)
    )
    assert classify_spike([*BEFORE, np.nan], [9.0]).bound == pytest.approx(BOUND)


@pytest.mark.parametrize(("before", "after"), [([], [1.0]), ([np.nan], [1.0]), ([1.0], []), ([[1.0]], [1.0])])
def test_errors(before: list[float], after: list[float]) -> None:
    with pytest.raises(ValueError):
        classify_spike(before, after)
