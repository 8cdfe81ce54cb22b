"""Trainings of the example's model, each in a process and a folder of its own, and what they leave behind."""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trainmon
from trainmon.sinks.jsonl import read_jsonl

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "mindformers_graph"
PATIENCE = 180  # seconds until a process counts as hung

#: Everything in every step.
EVERYTHING: dict[str, Any] = {
    "type": "TrainMonitor",
    "output_dir": "runs",
    "run_name": "r",
    "sinks": {"log": False},
    "gradients": {"per_parameter": True, "local": True, "device": True},
    "weights": {"every": 1, "per_parameter": True},
    "moments": {"every": 1, "per_parameter": True},
}


def environment() -> dict[str, str]:
    package = Path(str(trainmon.__file__)).parent.parent
    return {**os.environ, "PYTHONPATH": str(package), "REGISTER_PATH": trainmon.register_path()}


def write(folder: Path, callbacks: list[dict[str, Any]], **changes: Any) -> Path:
    """The example's YAML with other callbacks; ``a__b=1`` changes the key ``a.b``."""
    import yaml

    config = yaml.safe_load((EXAMPLE / "train.yaml").read_text())
    config["callbacks"] = [{"type": "MFLossMonitor", "per_print_times": 1}, *callbacks]
    for name, value in {"tensorboard": None, **changes}.items():
        place, keys = config, name.split("__")
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


@dataclass(frozen=True)
class Training:
    """What a training has left in its folder."""

    folder: Path
    output: str

    @property
    def error(self) -> str | None:
        found: str | None = json.loads((self.folder / "ended.json").read_text())["error"]
        return found

    def steps(self, run: str = "r") -> list[dict[str, Any]]:
        path = self.folder / "runs" / run / "rank_0/scalars.jsonl"
        return [record for record in read_jsonl(path) if "step" in record]

    def events(self, run: str = "r") -> list[dict[str, Any]]:
        path = self.folder / "runs" / run / "rank_0/events.jsonl"
        return [record for record in read_jsonl(path) if "kind" in record]

    def lives(self, run: str = "r") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((self.folder / "runs" / run / "run.json").read_text())[
            "lives"
        ]
        return found

    def table(self, probe: str, run: str = "r", rank: int = 0) -> dict[tuple[int, str], Mapping[str, str]]:
        """Rows by step and subject."""
        rows = {}
        for path in sorted((self.folder / "runs" / run / f"rank_{rank}/tensors").glob(f"{probe}_step*.csv")):
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    rows[int(row["step"]), row["name"]] = row
        return rows

    def truth(self) -> Mapping[str, Any]:
        import numpy as np

        return dict(np.load(self.folder / "truth.npz"))


def train_two(folder: Path, file: Path, steps: int, *callbacks: str) -> Training:
    """On two ranks, data parallel, under msrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = Path(sys.executable).parent
    options = {"file": file.name, "steps": steps, "callbacks": callbacks, "ranks": True}
    command = [
        *(str(here / "msrun"), "--worker_num=2", "--local_worker_num=2", "--master_addr=127.0.0.1"),
        *(f"--master_port={port}", "--log_dir=log", "--join=True", "--cluster_time_out=120"),
        *(str(Path(__file__).with_name("driver.py")), json.dumps(options)),
    ]
    env = {**environment(), "PATH": f"{here}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=folder, env=env, timeout=500, capture_output=True, text=True, check=False
    )
    logs = "".join(log.read_text(errors="replace")[-3000:] for log in (folder / "log").glob("worker_*.log"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + logs
    return Training(folder, logs)


def train(folder: Path, file: Path, steps: int, *callbacks: str, watch: bool = False) -> Training:
    """Runs a training to its end, whatever that is."""
    options = {"file": file.name, "steps": steps, "callbacks": callbacks, "watch": watch}
    driver = Path(__file__).with_name("driver.py")
    command = [sys.executable, str(driver), json.dumps(options)]
    (folder / "ended.json").unlink(missing_ok=True)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return Training(folder, done.stdout)


def run_example(folder: Path, steps: int) -> Training:
    """The example as a person runs it."""
    environ = {**environment(), "STEPS": str(steps)}
    environ.pop("REGISTER_PATH")
    command = [sys.executable, str(EXAMPLE / "train.py"), str(EXAMPLE / "train.yaml")]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return Training(folder, done.stdout)
