"""The guard itself: small projects whose matrix names a test that is missing, skipped, failing, or fine."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.acceptance.guard import ELSEWHERE, FULL_SUITE

pytest_plugins = ["pytester"]

_HERE = Path(__file__).parent

_MATRIX = """
documents: {{'000': A document}}
hosts: {{pytorch: PyTorch}}
reasons: {{later: not built yet}}
sections:
  - id: 000/1
    title: Section
    source_title: Section
    rows:
      - {{id: named, source: 000/1 Named, source_title: x, title: x, meaning: x,
          hosts: {{pytorch: {{tests: {tests}}}}}}}
      - {{id: later, source: 000/1 Later, source_title: x, title: x, meaning: x, hosts: {{pytorch: later}}}}
"""

# Its file lies behind the directory "acceptance" in the alphabet: that order is part of the proof.
_SUITE = """
import pytest

def test_fine(): pass
def test_fails(): assert False
def test_skips(): pytest.skip("no device")
@pytest.mark.skip
def test_marked(): pass
@pytest.mark.xfail
def test_expected(): assert False
@pytest.mark.xfail(strict=False)
def test_unexpected(): pass
@pytest.fixture
def broken(): raise OSError
def test_setup(broken): pass
@pytest.fixture
def broken_end():
    yield
    raise OSError
def test_teardown(broken_end): pass
@pytest.mark.parametrize("n", [1, 2])
def test_each(n):
    if n == 2: pytest.skip("only one")
class TestGroup:
    def test_inside(self): pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv(FULL_SUITE, raising=False)
    monkeypatch.delenv(ELSEWHERE, raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    acceptance = pytester.path / "tests" / "acceptance"
    acceptance.mkdir(parents=True)
    for name in ("conftest.py", "guard.py", "matrix.py", "test_named_tests.py"):
        shutil.copy(_HERE / name, acceptance / name)
    (pytester.path / "tests" / "test_suite.py").write_text(_SUITE)
    # The same layout as the real one: test modules are found from the root.
    pytester.makeini("[pytest]\naddopts = --import-mode=importlib -p no:cacheprovider\npythonpath = .\n")
    return pytester


def _run(project: pytest.Pytester, tests: list[str], *arguments: str) -> str:
    """The output of a run of the project, whose matrix names these tests of its suite."""
    matrix = project.path / "tests" / "acceptance" / "matrix.yaml"
    matrix.write_text(_MATRIX.format(tests=[f"tests/test_suite.py::{test}" for test in tests]))
    return project.runpytest_subprocess("-rA", *arguments).stdout.str()


def _faults(output: str) -> list[str]:
    """What the failed check of the session lists, in its order."""
    return re.findall(r"^E +tests/test_suite\.py::(.*)$", output, re.MULTILINE)


_PASSED_CHECK = "tests/acceptance/test_named_tests.py::test_named_tests_passed_in_this_session"
_EXIST_CHECK = "tests/acceptance/test_named_tests.py::test_named_tests_exist"


@pytest.mark.parametrize("test", ["test_fine", "test_each[1]", "TestGroup::test_inside"])
def test_a_passed_test_satisfies_the_full_suite(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, test: str
) -> None:
    monkeypatch.setenv(FULL_SUITE, "1")
    output = _run(project, [test])
    assert f"PASSED {_PASSED_CHECK}" in output
    assert f"PASSED {_EXIST_CHECK}" in output


_FAULTS = {
    "test_absent": "test_absent: did not run in this session",
    "test_skips": "test_skips: skipped",
    "test_fails": "test_fails: failed",
    "test_marked": "test_marked: skipped",
    "test_expected": "test_expected: expected to fail",
    "test_unexpected": "test_unexpected: expected to fail",
    "test_setup": "test_setup: failed in setup",
    "test_teardown": "test_teardown: failed in teardown",
    "test_each": "test_each[2]: skipped",
    "test_each[3]": "test_each[3]: did not run in this session",
    "test_fin": "test_fin: did not run in this session",
}


@pytest.mark.parametrize("test", ["test_absent", "test_skips", "test_fails"])
def test_one_missing_skipped_or_failed_test_fails_the_full_suite(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, test: str
) -> None:
    monkeypatch.setenv(FULL_SUITE, "1")
    output = _run(project, [test], "--deselect", _EXIST_CHECK)
    assert f"FAILED {_PASSED_CHECK}" in output
    assert _faults(output) == [_FAULTS[test]]


def test_every_other_outcome_than_passed_is_a_fault(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FULL_SUITE, "1")
    output = _run(project, ["test_fine", *_FAULTS], "--deselect", _EXIST_CHECK)
    assert _faults(output) == list(_FAULTS.values())


def test_a_deselected_test_fails_the_full_suite(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FULL_SUITE, "1")
    output = _run(project, ["test_fine"], "--deselect", "tests/test_suite.py::test_fine")
    assert f"FAILED {_PASSED_CHECK}" in output
    assert _faults(output) == ["test_fine: did not run in this session"]


def test_outcomes_of_another_session_count_where_there_are_none_of_this_one(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = tmp_path / "kept.json"
    monkeypatch.setenv(FULL_SUITE, "1")
    monkeypatch.setenv(ELSEWHERE, str(kept))
    one, other = "tests/test_suite.py::test_fine", "tests/test_suite.py::test_skips"
    kept.write_text(json.dumps({one: "passed", other: "passed"}))
    output = _run(project, ["test_fine"], "--deselect", one)
    assert f"PASSED {_PASSED_CHECK}" in output
    output = _run(project, ["test_fine", "test_skips"], "--deselect", one)
    assert _faults(output) == [
        _FAULTS["test_skips"]
    ]  # skipped here: what is known of it elsewhere is no excuse
    kept.write_text(json.dumps({one: "failed"}))
    output = _run(project, ["test_fine"], "--deselect", one)
    assert _faults(output) == ["test_fine: failed"]


def test_a_partial_run_checks_existence_only(project: pytest.Pytester) -> None:
    output = _run(project, ["test_skips"], "tests/acceptance")
    assert f"PASSED {_EXIST_CHECK}" in output
    assert f"FAILED {_PASSED_CHECK}" not in output


def test_a_partial_run_fails_for_tests_that_do_not_exist(project: pytest.Pytester) -> None:
    absent = ["test_absent", "TestGroup::test_absent", "TestAbsent::test_inside"]
    output = _run(project, ["test_fine", "TestGroup::test_inside", *absent], "tests/acceptance")
    assert f"FAILED {_EXIST_CHECK}" in output
    assert _faults(output) == [
        "test_absent: no test_absent in tests/test_suite.py",
        "TestGroup::test_absent: no test_absent in tests/test_suite.py",
        "TestAbsent::test_inside: no TestAbsent in tests/test_suite.py",
    ]


def test_a_file_that_does_not_exist_is_named(project: pytest.Pytester) -> None:
    (project.path / "tests" / "test_suite.py").unlink()
    output = _run(project, ["test_fine"], "tests/acceptance")
    assert _faults(output) == ["test_fine: no file tests/test_suite.py"]
