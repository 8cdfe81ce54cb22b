"""MindSpore needs an environment of its own (`make mindspore`); elsewhere these tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


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
