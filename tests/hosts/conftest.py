"""Hosts that need an environment of their own leave what became of their tests for the suite that names them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.acceptance.guard import ELSEWHERE, KeptOutcomes


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(ELSEWHERE) and importlib.util.find_spec("mindspore"):
        config.pluginmanager.register(KeptOutcomes(Path(__file__)), "trainmon-kept")
