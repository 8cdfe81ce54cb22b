"""The bridge to real trackers, offline, read back from the files that they leave.

`make trackers` installs them in a virtual environment of their own; elsewhere what is missing is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = {1: 1.0, 2: math.nan, 3: math.inf, 5: 5.0}

#: Trains five steps; the loss of step 4 is null. BEGIN may begin a run of the user's own.
SCRIPT = """
import math, sys
from trainmon.events import MicroEnd, StepBegin, StepEnd, TrainBegin, TrainEnd
from trainmon.monitor import TrainMonitor
directory, given = sys.argv[1], None
{begin}
sinks = {{"log": False, "bridge": {bridge}}}
mon = TrainMonitor({{"output_dir": directory, "run_name": "demo", "sinks": sinks}}, bridge=given)
mon.begin(TrainBegin())
for step, loss in enumerate((1.0, math.nan, math.inf, None, 5.0), 1):
    mon.handle(StepBegin(step, float(step)))
    mon.handle(MicroEnd(step, 0, 1.0 if loss is None else loss, 0 if loss is None else 1))
    mon.handle(StepEnd(step, step + 1.0))
mon.handle(TrainEnd(5, "completed"))
mon.close()
print("switched off:", mon.summary().switched_off)
{end}
"""


def train(directory: Path, bridge: dict[str, object], begin: str = "", end: str = "") -> str:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "SWANLAB_"))
    }
    home = {"HOME": str(directory), "TRACKIO_DIR": str(directory / "trackio"), "PYTHONPATH": str(ROOT)}
    script = SCRIPT.format(begin=begin, end=end, bridge=bridge)
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory / "runs")],
        cwd=directory,
        env={**environment, **home},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "switched off: ()" in done.stdout, done.stdout + done.stderr
    return done.stdout


def same(found: dict[int, float]) -> bool:
    return found.keys() == EXPECTED.keys() and all(
        value == EXPECTED[step] or (math.isnan(value) and math.isnan(EXPECTED[step]))
        for step, value in found.items()
    )


def installed(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed; `make trackers` installs it")


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Records of a W&B file: 7 bytes, then leveldb's log format in blocks of 32 KiB."""
    at, whole = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # full, last
            yield whole
            whole = b""


def wandb_losses(directory: Path) -> dict[int, float]:
    from wandb.proto import wandb_internal_pb2

    (path,) = directory.rglob("run-*.wandb")
    found = {}
    for content in wandb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            row = {
                item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item
            }
            if "loss/global" in row:
                found[row["_step"]] = float(row["loss/global"])
    return found


@installed("wandb")
def test_wandb_offline_begun_by_the_bridge(tmp_path: Path) -> None:
    train(tmp_path, {"to": "wandb"})
    assert same(wandb_losses(tmp_path / "runs" / "demo"))


@installed("wandb")
@pytest.mark.parametrize("how", ["active", "given"])
def test_a_run_of_wandb_that_the_user_began(tmp_path: Path, how: str) -> None:
    begin = "import wandb\nrun = wandb.init(mode='offline', project='own')"
    if how == "given":
        begin += "\ngiven = run"
    # The user's run stays open: it is the user's to finish.
    train(tmp_path, {"to": "wandb"} if how == "active" else {}, begin, "run.log({'own': 1.0}); run.finish()")
    assert not list((tmp_path / "runs").rglob("*.wandb"))
    assert same(wandb_losses(tmp_path))


def swanlab_losses(directory: Path) -> dict[int, float]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (path,) = directory.rglob("*.swanlab")
    reader = DataStoreReader()
    reader.open(path)
    found = {}
    while (content := reader.scan()) is not None:
        record = Record.FromString(content)
        if record.WhichOneof("record_type") == "scalar" and record.scalar.key == "loss/global":
            found[record.scalar.step] = record.scalar.value.number
    return found


@installed("swanlab")
@pytest.mark.parametrize("how", ["begun here", "active"])
def test_swanlab_offline(tmp_path: Path, how: str) -> None:
    if how == "active":
        begin = "import swanlab\nrun = swanlab.init(mode='offline', project='own', logdir='own')"
        train(tmp_path, {"to": "swanlab"}, begin, "swanlab.log({'own': 1.0}); swanlab.finish()")
        assert not list((tmp_path / "runs").rglob("*.swanlab"))
    else:
        train(tmp_path, {"to": "swanlab"})
    assert same(swanlab_losses(tmp_path))


def trackio_losses(directory: Path, project: str, name: str) -> dict[int, float]:
    code = (
        "import json, sys\nfrom trackio.sqlite_storage import SQLiteStorage as Storage\n"
        "print(json.dumps(Storage.get_logs(sys.argv[1], sys.argv[2])))\n"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(directory / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", code, project, name],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(done.stdout.splitlines()[-1])
    return {row["step"]: float(row["loss/global"]) for row in rows if "loss/global" in row}


@installed("trackio")
@pytest.mark.parametrize("how", ["begun here", "active"])
def test_trackio(tmp_path: Path, how: str) -> None:
    if how == "active":
        begin = "import trackio\nrun = trackio.init(project='own', name='mine', embed=False)"
        train(tmp_path, {"to": "trackio"}, begin, "trackio.log({'own': 1.0}, step=9); trackio.finish()")
        assert same(trackio_losses(tmp_path, "own", "mine"))
    else:
        train(tmp_path, {"to": "trackio"})
        assert same(trackio_losses(tmp_path, "trainmon", "demo"))
