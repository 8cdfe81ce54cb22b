"""Two ranks under msrun, data parallel, with MindSpore's own collectives."""

from __future__ import annotations

import csv
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
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402

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
        assert one["grad/norm"] == pytest.approx(other["grad/norm"], rel=1e-4)
        assert one["grad/nonfinite"] == 0
    assert not {"gradients_unreduced", "ranks_not_merged"} & {event["kind"] for event in events_of(two, mode)}
    assert ended(two, mode)["status"] == "completed"
    assert left(two)[0][f"{mode} weights"] == left(two)[1][f"{mode} weights"]


def test_a_cell_that_reduces_by_itself_and_a_rule_that_stops_both(two: Path) -> None:
    records = steps_of(two, "own")
    # Of 32: reports are read a step later.
    assert [record["data/consumed_samples"] for record in records] == [8, 16]
    assert all(record["grad/norm"] is None and record["weight/norm"] > 0 for record in records)
    assert "gradients_unreduced" in {event["kind"] for event in events_of(two, "own")}
    assert ended(two, "own")["status"] == "stopped"
    assert all((two / f"rank_{rank}.json").exists() for rank in range(2))


def table(folder: Path, name: str) -> list[list[dict[str, str]]]:
    """A table of the drop-in for msProbe's Monitor V2, by rank."""
    found = []
    for rank in range(2):
        (file,) = (folder / "rows" / f"rank_{rank}").glob(f"{name}_step*.csv")
        with file.open(newline="") as lines:
            found.append(list(csv.DictReader(lines)))
    return found


def test_rows_of_collectives(two: Path) -> None:
    """``mine`` is [1, 3] on the first rank and [2, 6] on the second."""
    for rank, those in enumerate(table(two, "cc")):
        assert [(row["module_name"], row["min"], row["max"], row["mean"]) for row in those] == [
            (f"all_reduce/rank{rank}/post_0_0", "3.0", "9.0", "6.0"),
            (f"all_reduce/rank{rank}/post_1_0", "6.0", "18.0", "12.0"),
            (f"all_reduce/rank{rank}/post_2_0", "12.0", "36.0", "24.0"),
            (f"all_gather/rank{rank}/post_0_0", "12.0", "36.0", "24.0"),
            (f"all_gather/rank{rank}/post_0_1", "12.0", "36.0", "24.0"),
            (f"broadcast/rank{rank}/post_0_0", "12.0", "36.0", "24.0"),
        ]


def test_rows_of_gradients_before_and_after_they_are_reduced(two: Path) -> None:
    before, after = [], []
    for those in table(two, "weight_grad"):
        by_scope = {
            scope: [row for row in those if row["scope"] == scope] for scope in ("unreduced", "reduced")
        }
        before.append({(row["step"], row["module_name"]): row for row in by_scope["unreduced"]})
        after.append(by_scope["reduced"])
    assert after[0] == after[1] and before[0] != before[1] and len(before[0]) == len(after[0]) == 2 * 6
    for row in after[0]:
        halves = [float(one[row["step"], row["module_name"]]["mean"]) for one in before]
        assert float(row["mean"]) == pytest.approx(sum(halves) / 2, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("mode", MODES)
def test_losses_of_each_rank(two: Path, mode: str) -> None:
    """Side by side; their mean is the loss of all."""
    steps = {
        one["step"]: one["series"] for one in read_jsonl(two / mode / "rank_0/ranks.jsonl") if "step" in one
    }
    for record in steps_of(two, mode):
        loss = steps[record["step"]]["loss/device"]
        assert loss["known"] == 2 and loss["low"] < record["loss/global"] < loss["high"]
        assert (loss["low"] + loss["high"]) / 2 == pytest.approx(record["loss/global"], rel=1e-6)
