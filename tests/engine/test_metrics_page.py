"""docs/metrics.md is what the catalogue and the code say."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from trainmon.config import TrainMonitorConfig
from trainmon.config.fields import known_keys
from trainmon.series import catalogue

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def metrics() -> ModuleType:
    spec = importlib.util.spec_from_file_location("metrics_page", ROOT / "scripts" / "metrics_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["metrics_page"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(metrics: ModuleType) -> None:
    shown = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert shown == metrics.page(), "run: python scripts/metrics_page.py"


def test_every_series_has_its_line_with_a_section_that_is_one(metrics: ModuleType) -> None:
    lines = [line for line in metrics.page().splitlines() if line.startswith("| `")]
    assert [re.split(r"`", line)[1] for line in lines] == sorted(
        catalogue(),
        key=lambda name: (list(metrics._GROUPS).index(name.split("/")[0]), list(catalogue()).index(name)),
    )
    keys = {*known_keys(TrainMonitorConfig), "always"}
    for line in lines:
        section, built = (cell.strip() for cell in line.rstrip(" |").rsplit("|", 2)[1:])
        assert set(section.split(", ")) <= keys and built in ("yes", "no"), line


def test_what_is_built_is_found(metrics: ModuleType) -> None:
    built = metrics.built()
    assert built["loss/global"] == "loss" and built["grad/norm/<p>"] == "gradients"
    assert built["perf/monitor_overhead"] == "always" and built["data/tokens"] == "throughput"
    assert built["loss/position/<b>"] == "loss", "registered by a pattern"
    assert built["weight/norm"] == "weights", "registered once a model was seen"
    assert "ckpt/failures" not in built and set(built) <= set(catalogue())
