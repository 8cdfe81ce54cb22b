"""What the ranks' own values of one number say, against plain definitions."""

from __future__ import annotations

import math
import statistics

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainmon.spread import compare_ranks


def test_extremes_and_the_rank_that_stands_out() -> None:
    values = np.array([[1.0], [1.1], [0.9], [5.0], [1.0]])
    (one,) = compare_ranks(values, np.ones((5, 1), bool))
    assert one is not None
    assert (one.low, one.low_rank, one.high, one.high_rank) == (0.9, 2, 5.0, 3)
    assert (one.median, one.spread, one.known, one.outliers, one.nonfinite) == (1.0, 4.1, 5, (3,), ())


def test_equal_values_and_one_that_differs_in_the_last_digits() -> None:
    same = np.full((4, 1), 3e-4)
    (one,) = compare_ranks(same, np.ones((4, 1), bool))
    assert one is not None and one.spread == 0 and one.outliers == ()
    same[2] *= 1 + 1e-4
    (one,) = compare_ranks(same, np.ones((4, 1), bool))
    assert one is not None and one.outliers == (2,)


def test_two_ranks_have_extremes_but_no_outlier() -> None:
    (one,) = compare_ranks(np.array([[1.0], [1e9]]), np.ones((2, 1), bool))
    assert one is not None
    assert (one.low_rank, one.high_rank, one.outliers) == (0, 1, ())


def test_ranks_that_do_not_know_and_values_that_are_not_finite() -> None:
    values = np.array([[0.0, 1.0, 0.0], [2.0, math.nan, 0.0], [4.0, math.inf, 0.0], [3.0, 1.0, 0.0]])
    valid = np.array([[False, True, False], [True, True, False], [True, True, False], [True, True, False]])
    first, second, third = compare_ranks(values, valid)
    assert first is not None and (first.known, first.low_rank, first.high_rank) == (3, 1, 2)
    assert second is not None and second.nonfinite == (1, 2) and second.spread == 0.0
    assert third is None
    (none,) = compare_ranks(np.array([[math.nan], [math.inf]]), np.ones((2, 1), bool))
    assert none is not None and none.low_rank == -1 and math.isnan(none.spread)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12), st.floats(1.0, 20.0))
def test_as_defined(column: list[float], bound: float) -> None:
    (one,) = compare_ranks(np.array(column)[:, None], np.ones((len(column), 1), bool), bound)
    assert one is not None
    assert (
        one.low == min(column)
        and column[one.low_rank] == one.low
        and one.low_rank == column.index(min(column))
    )
    assert one.high == max(column) and one.high_rank == column.index(max(column))
    assert one.median == statistics.median(column)
    away = [abs(x - one.median) for x in column]
    floor = max(statistics.median(away), 1e-6 * abs(one.median), 1e-12)
    flagged = {rank for rank, far in enumerate(away) if 0.6745 * far / floor > bound}
    assert set(one.outliers) == (flagged if len(column) >= 3 else set())
