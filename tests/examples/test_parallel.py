"""The examples of many ranks as a person runs them: torchrun, two processes, real text."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trainmon
from trainmon.sinks.jsonl import read_jsonl
from trainmon.sinks.run_file import read_run

pytest.importorskip("torch", reason="the examples train with torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "parallel"
STEPS = 20


def run(name: str, directory: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """The steps that the example left."""
    package = Path(str(trainmon.__file__)).parent.parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(EXAMPLES / f"{name}.py"), str(directory)],
        env={**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = directory.iterdir()
    record = read_run(folder)
    assert record is not None and record["lives"][-1]["status"] == "completed"
    events = read_jsonl(folder / "rank_0/events.jsonl")
    assert not [event for event in events if event.get("level") == "error"]
    return [record for record in read_jsonl(folder / "rank_0/scalars.jsonl") if "step" in record]


@pytest.mark.parametrize(("name", "shares"), [("ddp", 2), ("fsdp2", 2), ("tensor_parallel", 1)])
def test_it_trains_and_leaves_the_numbers_of_all_ranks(name: str, shares: int, tmp_path: Path) -> None:
    steps = run(name, tmp_path)
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["loss/global"] < steps[0]["loss/global"] - 0.3, "it learns"
    assert all(record["grad/norm"] > 0 and record["grad/nonfinite"] == 0 for record in steps)
    # Windows are at most 64 bytes, and few are shorter.
    assert 0.8 < steps[-1]["data/tokens"] / (STEPS * shares * 8 * 64) <= 1
    assert steps[-1]["data/consumed_samples"] == STEPS * shares * 8


def test_a_mixture_of_experts_over_two_ranks(tmp_path: Path) -> None:
    steps = run("moe", tmp_path)
    assert steps[-1]["loss/global"] < steps[0]["loss/global"] - 0.3, "it learns"
    for record in steps:
        assert 0 <= record["moe/max_vio"] <= 3 and record["moe/dead"] == 0
        for layer in ("blocks.0.mlp_in", "blocks.1.mlp_in"):
            assert record["moe/max_vio"] >= record[f"moe/max_vio/{layer}"] >= 0
            assert record[f"moe/ep_load_vio/{layer}"] <= 1
    (path,) = (tmp_path / "moe/rank_0/tensors").glob("moe_*.csv")
    with path.open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["step"] == "1" and row["moe/load"]]
    assert len(rows) == 2 * 4
    # Every byte of both ranks' windows goes to two experts of each layer; counted targets are few less.
    windows = sum(float(row["moe/load"]) for row in rows) / 2 / 2
    assert steps[0]["data/tokens"] <= windows <= 2 * 8 * 64
    assert [("attention/max_logit" in record) for record in steps[:6]] == [True, *[False] * 3, True, False]
