"""The loaded matrix, and the plugin that remembers what ran in this session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.guard import SessionOutcomes
from tests.acceptance.matrix import Matrix, load

_PLUGIN = "trainmon-acceptance"


def pytest_configure(config: pytest.Config) -> None:
    # A plugin object and not hooks of this file: those would see the tests of this directory only.
    config.pluginmanager.register(SessionOutcomes(Path(__file__).with_name("test_named_tests.py")), _PLUGIN)


@pytest.fixture(scope="session")
def outcomes(pytestconfig: pytest.Config) -> SessionOutcomes:
    plugin = pytestconfig.pluginmanager.get_plugin(_PLUGIN)
    assert isinstance(plugin, SessionOutcomes)
    return plugin


@pytest.fixture(scope="session")
def matrix() -> Matrix:
    return load()
