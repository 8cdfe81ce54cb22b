"""MindSpore needs an environment of its own (`make mindspore`); elsewhere these tests are skipped."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.guard import ELSEWHERE, KeptOutcomes


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(ELSEWHERE) and importlib.util.find_spec("mindspore"):
        config.pluginmanager.register(KeptOutcomes(Path(__file__)), "trainmon-kept")


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore leaves files where it runs."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["graph", "pynative"])
def mode(request: Any) -> Iterator[str]:
    import mindspore

    from tests.hosts.mindspore.training import MODES

    mindspore.set_context(mode=MODES[request.param])
    yield request.param
    mindspore.set_context(mode=MODES["pynative"])
