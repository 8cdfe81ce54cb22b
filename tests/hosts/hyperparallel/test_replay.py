"""The fakes against every recorded trace of the real trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.hosts.hyperparallel.replay import differences, traces  # noqa: E402

TRACES = traces()


@pytest.mark.parametrize("name", TRACES)
def test_trace(name: str, tmp_path: Path) -> None:
    found = differences(TRACES[name], tmp_path)
    assert not found, "\n".join(found[:12])
