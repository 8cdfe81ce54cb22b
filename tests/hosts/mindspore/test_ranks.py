"""Two ranks under msrun, data parallel, with MindSpore's own collectives."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mindspore = pytest.importorskip("mindspore", reason="MindSpore has an environment of its own: make mindspore")

from mindspore.train import Model  # noqa: E402

from tests.hosts.mindspore.training import (  # noqa: E402
    MODES,
    Mean,
    adam,
    data,
    ended,
    events_of,
    monitor,
    network,
    rows,
    steps_of,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both ranks have left."""
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = Path(sys.executable).with_name("msrun")
    command = [
        *(str(launcher), "--worker_num=2", "--local_worker_num=2", "--master_addr=127.0.0.1"),
        *(f"--master_port={port}", "--log_dir=log", "--join=True", "--cluster_time_out=120"),
        *(str(ROOT / "tests/hosts/mindspore/ranks.py"), str(folder)),
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(
        command, cwd=folder, env=env, timeout=500, capture_output=True, text=True, check=False
    )
    logs = "".join(log.read_text(errors="replace")[-3000:] for log in (folder / "log").glob("worker_*.log"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + logs
    return folder


def left(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


def test_collectives_are_exact_and_alike(two: Path) -> None:
    first, second = left(two)
    for one, other in zip(first["maxima"], second["maxima"], strict=True):
        assert one == other or (math.isnan(one) and math.isnan(other))
    assert math.isnan(first["maxima"][0]) and first["maxima"][1:] == [-math.inf, 5.0]
    exact = np.array([0.1, 1e300, -1e-300, float(2**53 - 1), np.pi])
    assert first["sums"] == second["sums"] == (exact + exact * 2).tolist()
    assert first["gathered"] == second["gathered"] == [[0.1], [1.1]]
    assert first["texts"] == second["texts"] == ["größer", "xxxxxgrößer"]
    assert first["nothing"] == [0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_the_numbers_of_one_process(two: Path, mode: str, tmp_path: Path) -> None:
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    net = network()
    Model(net, Mean(), adam(net)).train(
        1, data(lambda: rows(16), 8), callbacks=[monitor(tmp_path)], dataset_sink_mode=False
    )
    merged, single = steps_of(two, mode), steps_of(tmp_path)
    assert len(merged) == len(single) == 2
    for one, other in zip(merged, single, strict=True):
        for key in ("loss/global", "weight/norm", "moment/norm/exp_avg", "update/norm"):
            assert one[key] == pytest.approx(other[key], rel=1e-4), key
        assert one["data/consumed_samples"] == other["data/consumed_samples"]
        if mode == "pynative":
            assert one["grad/norm"] == pytest.approx(other["grad/norm"], rel=1e-4)
        else:
            assert one["grad/norm"] is None
    told = [event["kind"] for event in events_of(two, mode)]
    assert ("gradients_unreduced" in told) == (mode == "graph") and "ranks_not_merged" not in told
    assert ended(two, mode)["status"] == "completed"
    assert left(two)[0][f"{mode} weights"] == left(two)[1][f"{mode} weights"]
