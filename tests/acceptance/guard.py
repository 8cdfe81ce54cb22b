"""Watches the outcomes of a session, so that the matrix can't name a test that does not exist or did not pass.

Registered as a plugin by ``conftest.py`` here. The checks in ``test_named_tests.py`` are moved behind all others.
With ``TRAINMON_FULL_SUITE=1`` every named test must have passed in this very session: one that was skipped,
failed, expected to fail or left out proves nothing. Without it only the existence of the tests is checked, by
reading their source, since a partial run collects a part only. Tests that need an environment of their own run in a
session of their own, which leaves its outcomes in the file that ``TRAINMON_OUTCOMES`` names.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

__all__ = ["ELSEWHERE", "FULL_SUITE", "KeptOutcomes", "SessionOutcomes", "missing_tests"]

FULL_SUITE = "TRAINMON_FULL_SUITE"
ELSEWHERE = "TRAINMON_OUTCOMES"


class SessionOutcomes:
    """What became of each test of this session, by node id: ``passed`` or why it does not count."""

    def __init__(self, checks: Path) -> None:
        self._checks = checks
        self._outcomes: dict[str, str] = {}

    @property
    def full(self) -> bool:
        """Whether this run claims to be the whole suite."""
        return os.environ.get(FULL_SUITE) == "1"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.path == self._checks)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "expected to fail"
        elif outcome == "failed" and report.when != "call":
            outcome = f"failed in {report.when}"
        if self._outcomes.get(report.nodeid, "passed") == "passed":
            # A test passed only if set-up and tear-down passed, too; the first fault of the three is kept.
            self._outcomes[report.nodeid] = outcome

    def unproven(self, tests: Iterable[str]) -> list[str]:
        """``id: why`` for each test id that did not pass, with all its parameter sets, in this session or in the one
        that left its outcomes."""
        faults = []
        outcomes = {**_kept(), **self._outcomes}
        for test in tests:
            runs = {id_: out for id_, out in outcomes.items() if id_ == test or id_.startswith(test + "[")}
            if not runs:
                faults.append(f"{test}: did not run in this session")
            faults += [f"{id_}: {out}" for id_, out in runs.items() if out != "passed"]
        return faults


class KeptOutcomes(SessionOutcomes):
    """Of a session in another environment: written to a file when it ends."""

    def pytest_sessionfinish(self) -> None:
        Path(os.environ[ELSEWHERE]).write_text(json.dumps(self._outcomes), encoding="utf-8")


def _kept() -> dict[str, str]:
    file = os.environ.get(ELSEWHERE)
    if not file or not Path(file).is_file():
        return {}
    found: dict[str, str] = json.loads(Path(file).read_text(encoding="utf-8"))
    return found


def missing_tests(tests: Iterable[str], root: Path) -> list[str]:
    """``id: why`` for each test id whose file, class or function is not in the source below ``root``.

    Parameters in brackets are not looked at. A test has to be defined where its id says, not inherited.
    """
    faults = []
    for test in tests:
        file, *names = test.partition("[")[0].split("::")
        path = root / file
        if not path.is_file():
            faults.append(f"{test}: no file {file}")
            continue
        body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8"), file).body
        for name in names:
            found = [node for node in body if getattr(node, "name", None) == name]
            if not found:
                faults.append(f"{test}: no {name} in {file}")
                break
            body = getattr(found[0], "body", [])
    return faults
