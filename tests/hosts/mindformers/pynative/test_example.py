"""The example, as a user runs it, with the stand-in for hyper_parallel and the operators that a CPU lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.hosts.mindformers.pynative.runs import ROOT
from trainmon.sinks.jsonl import read_jsonl

EXAMPLE = ROOT / "examples/mindformers_pynative"
STAND_IN = """
import runpy, sys
from tests.hosts.mindformers.pynative import hyper_parallel, operators
hyper_parallel.install()
operators.install()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_example(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STAND_IN, EXAMPLE / "train.py", EXAMPLE / "train.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "STEPS": "6"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    records = [one for one in read_jsonl(tmp_path / "runs/tiny/rank_0/scalars.jsonl") if "step" in one]
    assert [record["step"] for record in records] == list(range(1, 7))
    assert records[-1]["loss/global"] < records[0]["loss/global"]
    assert records[0]["weight/norm"] > 0 and records[4]["moment/norm/exp_avg"] > 0
    assert json.loads((tmp_path / "runs/tiny/run.json").read_text())["lives"][0]["status"] == "completed"
    lines = [line for line in done.stdout.splitlines() if "lines.py" in line]
    assert sum('"device_norm": layers.0.' in line for line in lines) == 6 * 2
    assert not any("layers.1" in line for line in lines)
    shares = [record["perf/monitor_overhead"] for record in records[2:]]
    assert sorted(shares)[1] < 0.1, shares
    assert list((tmp_path / "tensorboard").iterdir())
