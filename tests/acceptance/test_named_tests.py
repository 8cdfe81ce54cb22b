"""The tests that the matrix names exist, and passed in this session if it is the whole suite."""

from __future__ import annotations

import pytest

from tests.acceptance.guard import FULL_SUITE, SessionOutcomes, missing_tests
from tests.acceptance.matrix import Matrix


def _report(faults: list[str]) -> str:
    return "the acceptance matrix names tests that prove nothing:\n" + "\n".join(faults)


def test_named_tests_exist(matrix: Matrix, pytestconfig: pytest.Config) -> None:
    faults = missing_tests(matrix.tests(), pytestconfig.rootpath)
    assert not faults, _report(faults)


def test_named_tests_passed_in_this_session(matrix: Matrix, outcomes: SessionOutcomes) -> None:
    if not outcomes.full:
        pytest.skip(f"checked when the whole suite runs with {FULL_SUITE}=1")
    faults = outcomes.unproven(matrix.tests())
    assert not faults, _report(faults)
