"""The demo as a user runs it: a program of its own, real text, real files, real signals."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainmon.sinks.jsonl import read_jsonl

pytest.importorskip("torch", reason="the demo trains with torch")

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples/gpt/train.py"
TINY = [
    "--set",
    "model.width=32",
    "--set",
    "model.layers=1",
    "--set",
    "model.heads=2",
    "--set",
    "model.context=32",
    "--set",
    "train.threads=1",
]
YAML = """callbacks:
  - type: TrainMonitor
    output_dir: {output}
    run_name: r
    gradients: {{per_parameter: true}}
    sinks: {{tensorboard: true}}
"""


def start(tmp_path: Path, *arguments: str, yaml: str | None = None) -> subprocess.Popen[str]:
    config = tmp_path / "c.yaml"
    config.write_text(YAML.format(output=tmp_path / "runs") if yaml is None else yaml)
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(config), *TINY, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def steps_of(tmp_path: Path) -> list[dict[str, float]]:
    return [record for record in read_jsonl(tmp_path / "runs/r/rank_0/scalars.jsonl") if "step" in record]


def test_it_trains_and_leaves_a_run(tmp_path: Path) -> None:
    program = start(tmp_path, "--steps", "25")
    output, errors = program.communicate(timeout=120)
    assert program.returncode == 0, errors
    records = steps_of(tmp_path)
    assert [record["step"] for record in records] == list(range(1, 26))
    assert abs(records[0]["loss/global"] - math.log(256)) < 0.5
    assert records[-1]["loss/global"] < records[0]["loss/global"] - 0.2
    for name in ("loss/global", "grad/norm", "optim/lr", "perf/tokens_per_second", "time/step"):
        assert all(math.isfinite(record[name]) and record[name] > 0 for record in records), name
    rank = tmp_path / "runs/r/rank_0"
    assert list(rank.glob("tensors/gradients_*.csv")) and list(rank.glob("tensorboard/*"))
    assert "What trainmon saw" in output and "scalars.jsonl" in output and "held-out loss" in output
    assert "step 25/25" in errors


def test_wrong_configuration_is_one_message(tmp_path: Path) -> None:
    program = start(tmp_path, yaml="callbacks:\n  - type: TrainMonitor\n    gradiants: true\n")
    _, errors = program.communicate(timeout=120)
    assert program.returncode == 2 and "c.yaml:3:5" in errors and "Traceback" not in errors


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_signals_leave_whole_files(tmp_path: Path, number: signal.Signals, status: int) -> None:
    program = start(tmp_path, "--steps", "100000")
    path = tmp_path / "runs/r/rank_0/scalars.jsonl"
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not (path.exists() and path.read_bytes().count(b"\n") > 5):
        time.sleep(0.05)
    program.send_signal(number)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == status and "Traceback" not in errors, errors
    assert path.read_bytes().endswith(b"\n") and len(steps_of(tmp_path)) >= 5
    word = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[number]
    assert word in (tmp_path / "runs/r/run.json").read_text()


def test_unwritable_output_directory_is_said_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    program = start(tmp_path, "--steps", "2")
    output, errors = program.communicate(timeout=120)
    assert program.returncode == 0 and errors.count("can't be written") == 1 and "held-out loss" in output
