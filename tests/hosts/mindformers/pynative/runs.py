"""What trainings in processes of their own have left: records, tables, messages, printed lines, and NumPy's numbers."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trainmon
from tests.hosts.mindformers.pynative.scenarios import FILES, NEWEST, SCENARIOS
from trainmon.sinks.jsonl import read_jsonl

__all__ = ["Runs", "train"]

ROOT = Path(__file__).parents[4]


class Runs:
    """What the trainings of one version have left.

    Attributes:
        folder: where they ran.
        output: what they printed.
        ended: the exit status of the process.
    """

    def __init__(self, folder: Path, output: str, ended: int) -> None:
        self.folder, self.output, self.ended = folder, output, ended

    def truth(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.json").read_text())

    def records(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name / "rank_0/scalars.jsonl"
        return [record for record in read_jsonl(file) if "step" in record]

    def events(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name / "rank_0/events.jsonl"
        return [one for one in read_jsonl(file) if "kind" in one]

    def kinds(self, name: str) -> list[str]:
        return [one["kind"] for one in self.events(name)]

    def life(self, name: str, which: int = -1) -> Any:
        return json.loads((self.folder / name / "run.json").read_text())["lives"][which]

    def table(self, name: str, probe: str = "gradients") -> dict[tuple[int, str], dict[str, float | None]]:
        (file,) = (self.folder / name / "rank_0/tensors").glob(f"{probe}_*.csv")
        with file.open(newline="") as lines:
            return {
                (int(row["step"]), row["name"]): {
                    key: float(value) if value else None
                    for key, value in row.items()
                    if key not in ("step", "name")
                }
                for row in csv.DictReader(lines)
            }

    def lines(self, name: str, of: str = "") -> list[str]:
        """What the process printed while it trained so, if it holds the text."""
        _, _, rest = self.output.partition(f"=== {name}\n")
        return [line for line in rest.partition("\n=== ")[0].splitlines() if of in line]


def place_of(version: str) -> Path | None:
    """Where a version is that is not the environment's own; None: it is that one."""
    return None if version == NEWEST else Path(sys.prefix) / f"mindformers-{version}"


def train(version: str, folder: Path) -> Runs:
    older = place_of(version)
    if importlib.util.find_spec("mindformers" if older is None else "mindspore") is None:
        pytest.skip("MindFormers has an environment of its own: make mindspore")
    if older is not None and not older.is_dir():
        pytest.skip(f"MindFormers {version} is not there: make mindspore")
    (folder / "scenarios.json").write_text(json.dumps(SCENARIOS[version]))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    paths = [str(ROOT)] if older is None else [str(older), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-u", "-m", "tests.hosts.mindformers.pynative.training", "scenarios.json"],
        cwd=folder,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "REGISTER_PATH": trainmon.register_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return Runs(folder, done.stdout, done.returncode)
