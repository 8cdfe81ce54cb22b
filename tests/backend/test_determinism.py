"""The switch of deterministic computation, each time in a process of its own: settings are the process's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]


def child(code: str, **environment: str) -> Any:
    """What the code left in ``result``."""
    text = textwrap.dedent(code) + "\nimport json; print(json.dumps(result))"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**kept, "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path]), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


TRAINED = """
    import random
    import numpy, torch, trainmon
    said = trainmon.deterministic(17)
    draws = [random.random(), float(numpy.random.rand()), torch.rand(1).item()]
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step(); optimizer.zero_grad()
    result = [draws, [parameter.double().sum().item() for parameter in model.parameters()], said.problems]
"""


def test_two_processes_draw_and_train_alike() -> None:
    pytest.importorskip("torch")
    first, second = child(TRAINED, PYTHONHASHSEED="0"), child(TRAINED, PYTHONHASHSEED="0")
    assert first == second
    assert first[2] == [], "nothing is left open on this machine"
    other = child(TRAINED.replace("17", "18"), PYTHONHASHSEED="0")
    assert other[0] != first[0] and other[1] != first[1]


def test_every_switch_is_on_and_reported() -> None:
    pytest.importorskip("torch")
    settings, problems, environment = child(
        """
        import os, torch, trainmon
        said = trainmon.deterministic(3, warn_only=True)
        assert torch.are_deterministic_algorithms_enabled()
        names = ("CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC")
        assert "seed 3" in str(said) and "may differ" in str(said)
        result = [dict(said.settings), said.problems, [os.environ[name] for name in names]]
        """
    )
    assert settings["torch.initial_seed"] == 3
    assert settings["torch.are_deterministic_algorithms_enabled"] is True
    assert settings["torch.is_deterministic_algorithms_warn_only_enabled"] is True
    assert settings["torch.backends.cudnn.deterministic"] is True
    assert settings["torch.backends.cudnn.benchmark"] is False
    assert environment == [":4096:8", "true"]
    assert any("PYTHONHASHSEED=0" in problem for problem in problems)
    assert any("warn_only" in problem for problem in problems)


def test_what_the_user_set_stays_and_no_seed_leaves_the_generators_alone() -> None:
    pytest.importorskip("torch")
    result = child(
        """
        import os, torch, trainmon
        torch.manual_seed(5)
        said = trainmon.deterministic()
        result = [torch.initial_seed(), said.seed, os.environ["CUBLAS_WORKSPACE_CONFIG"]]
        """,
        CUBLAS_WORKSPACE_CONFIG=":16:8",
    )
    assert result == [5, None, ":16:8"]


def test_frameworks_that_are_not_in_use_are_not_loaded() -> None:
    result = child(
        """
        import sys, trainmon
        said = trainmon.deterministic(1)
        result = [sorted(said.settings), [name in sys.modules for name in ("torch", "mindspore")]]
        """
    )
    assert not any(name.startswith(("torch", "mindspore")) for name in result[0])
    assert result[1] == [False, False]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seed": -1}, "from 0 to 4294967295, not -1"),
        ({"seed": 2**32}, "not 4294967296"),
        ({"frameworks": ("jax",)}, "not 'jax'"),
    ],
)
def test_bad_arguments_change_nothing(arguments: dict[str, Any], words: str) -> None:
    import trainmon

    before = dict(os.environ)
    with pytest.raises(ValueError, match=words):
        trainmon.deterministic(**arguments)
    assert dict(os.environ) == before


@pytest.mark.parametrize("seed", ["7", 1.5, True])
def test_a_seed_that_is_no_integer_is_told_so(seed: Any) -> None:
    import trainmon

    with pytest.raises(TypeError, match=r"seed must be an integer from 0 to 4294967295 or None, not"):
        trainmon.deterministic(seed)


def test_mindspore_is_seeded_and_switched() -> None:
    pytest.importorskip("mindspore", reason="MindSpore is in the environment of its hosts")
    settings = child(
        """
        import mindspore, trainmon
        result = dict(trainmon.deterministic(9).settings)
        """
    )
    assert settings["mindspore.get_seed"] == 9
    assert settings["mindspore.get_context deterministic"] == "ON"


def test_a_run_records_what_it_would_take_to_repeat_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import torch

    import trainmon
    from trainmon.sinks.run_file import read_run

    torch.manual_seed(11)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = {"output_dir": str(tmp_path), "run_name": "r", "sinks": {"log": False}}
    with trainmon.attach(model, optimizer, keys) as mon:
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        mon.step_end()
    record = read_run(tmp_path / "r")
    assert record is not None
    recorded = record["lives"][0]["reproduction"]
    assert recorded["torch.initial_seed"] == 11
    assert recorded["torch.__version__"] == str(torch.__version__)
    assert recorded["torch.are_deterministic_algorithms_enabled"] is False
    assert "PYTHONHASHSEED" in recorded
