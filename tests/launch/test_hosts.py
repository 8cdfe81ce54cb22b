"""HyperParallel's trainers of all generations, from a YAML with our entry, which the host by itself refuses."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.hyperparallel import config_g3, config_lm
from tests.launch.started import LAUNCH, ROOT, copies, run, soon

HOSTS = ROOT / "tests" / "hosts" / "hyperparallel"
ENTRY = "callbacks:\n  - type: TrainMonitor\n    run_name: here\n    output_dir: runs\n    overhead: false\n"


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    package = HOSTS / f"package_{request.param}"
    shutil.copy(package / "train.py", tmp_path)
    (tmp_path / "tiny.yaml").write_text((package / "tiny.yaml").read_text() + ENTRY)
    (tmp_path / "package").symlink_to(package)
    return tmp_path


def start(folder: Path, *words: str) -> Any:
    path = os.pathsep.join([str(folder / "package"), str(ROOT)])
    return run(list(words), folder, PYTHONPATH=path, OMP_NUM_THREADS="1", HYPER_PARALLEL_PLATFORM="torch")


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "runs" / "here" / "rank_0" / "scalars.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("folder", ["g1", "g2", "g3"], indirect=True)
def test_each_generation_is_monitored(folder: Path, request: pytest.FixtureRequest) -> None:
    generation = request.node.callspec.params["folder"]
    parse = (config_g3 if generation == "g3" else config_lm).parse_args
    with pytest.raises(ValueError, match="callbacks"):
        parse([str(folder / "tiny.yaml")])
    done = start(folder, *LAUNCH, "--", "train.py", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    assert "configures the monitor" in done.stderr and copies(folder) == []
    found = records(folder)[1:]
    assert [record["step"] for record in found] == [1, 2, 3]
    assert all(record["loss/global"] > 0 and record["grad/norm"] > 0 for record in found)
    facts = json.loads((folder / "runs" / "here" / "run.json").read_text())
    assert facts["lives"][-1]["status"] == "completed"


@pytest.mark.parametrize("folder", ["g1"], indirect=True)
def test_two_ranks_under_torchrun(folder: Path) -> None:
    (folder / "more.yaml").write_text("run_name: here\nranks: all\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    words = ["--", "--monitor", "more.yaml", "train.py", "tiny.yaml", "--train.max_steps=2"]
    done = start(folder, *torchrun, "trainmon.launch", *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("configures the monitor") == 1
    run_record, *steps = records(folder)
    assert run_record["world"] == 2 and [record["step"] for record in steps] == [1, 2]
    assert soon(lambda: copies(folder) == [])
