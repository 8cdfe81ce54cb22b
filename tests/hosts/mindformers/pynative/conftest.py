"""Trainings in processes of their own, each in an empty folder: what MindFormers imports leaves files where it runs."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import tempfile
from collections.abc import Callable
from typing import Any

import pytest

from tests.hosts.mindformers.pynative.runs import Runs, train
from tests.hosts.mindformers.pynative.scenarios import NEWEST, VERSIONS

if importlib.util.find_spec("mindformers"):
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        importlib.import_module("mindformers")
else:  # it has an environment of its own: make mindspore
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def runs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runs]:
    """The trainings of a version, done when they are first asked for."""
    done: dict[str, Runs] = {}

    def of(version: str) -> Runs:
        if version not in done:
            done[version] = train(version, tmp_path_factory.mktemp(version))
        return done[version]

    return of


@pytest.fixture
def runs(runs_of: Callable[[str], Runs]) -> Runs:
    return runs_of(NEWEST)


@pytest.fixture(params=VERSIONS)
def any_runs(request: Any, runs_of: Callable[[str], Runs]) -> Runs:
    return runs_of(request.param)
