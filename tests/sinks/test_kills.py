"""Kill -9 at random moments, and the out-of-memory killer: the black box still says which step was the last."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.campaign import size
from tests.sinks.make import ROOT
from trainmon.sinks.blackbox import merge_boxes, read_box

ACK = struct.Struct("<q")


def loss_of(step: int) -> float:
    return 1.0 + 1.0 / step


def train(directory: str, ack: str, resumed_step: int) -> None:
    """Steps without end, each acknowledged once the monitor has returned from it."""
    from trainmon.events import (
        GradsReady,
        MicroEnd,
        OptimizerBegin,
        StepBegin,
        StepEnd,
        TensorView,
        TrainBegin,
    )
    from trainmon.monitor import TrainMonitor

    with open(ack, "r+b") as file:
        done = mmap.mmap(file.fileno(), ACK.size)
    sinks = {"log": False, "blackbox": {"frames": 8, "events": 64, "host_every": 0}}
    mon = TrainMonitor({"output_dir": directory, "run_name": "r", "sinks": sinks, "gradients": False})
    mon.begin(TrainBegin(resumed_step=resumed_step))
    for step in range(resumed_step + 1, 10**9):
        mon.handle(StepBegin(step, float(step)))
        for micro in range(2):
            mon.handle(MicroEnd(step, micro, loss_of(step), 1))
        mon.handle(GradsReady(step, TensorView([], []), "reduced"))
        mon.handle(OptimizerBegin(0.0))
        mon.handle(StepEnd(step, step + 1.0))
        ACK.pack_into(done, 0, step)


@pytest.mark.soak
def test_the_last_complete_step_is_readable_after_every_kill(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainmon.monitor", __name__])
    rng = random.Random(os.environ.get("TRAINMON_SEED", "0"))
    kills, lives, torn, without_box = size(25, 1000), 5, 0, 0
    reached = []
    for kill in range(kills):
        directory = tmp_path / str(kill // lives)
        directory.mkdir(exist_ok=True)
        path = directory / "r" / "rank_0" / "blackbox.bin"
        before = read_box(path) if path.exists() else None
        # Goes on three steps before the last one, as from a checkpoint.
        resumed = max(0, (before.last_complete_step or 0) - 3) if before is not None else 0
        ack = directory / "ack"
        ack.write_bytes(ACK.pack(0))
        child = context.Process(target=train, args=(str(directory), str(ack), resumed), daemon=True)
        child.start()
        # A part of the kills falls into the start, most into the steps.
        if kill % 5:
            while ACK.unpack(ack.read_bytes())[0] == 0 and child.is_alive():
                time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.05 if kill % 5 else 0.4))
        child.kill()
        child.join(30)
        assert child.exitcode == -9
        (acknowledged,) = ACK.unpack(ack.read_bytes())
        box = read_box(path) if path.exists() else None
        if box is None or (before is not None and box.life == before.life):
            # Killed before the box was there: the one of the life before is still in its place, or was just set aside.
            assert acknowledged == 0
            without_box += 1
            continue
        assert box.state() == "gone" and box.end is None
        last = box.last_complete_step or 0
        # The step after may have ended when the kill came between its last mark and the acknowledgement.
        assert last in (acknowledged, acknowledged + 1) if acknowledged else last in (0, resumed + 1)
        torn += sum(box.torn.values())
        # A kill interrupts at most the copy of one record.
        assert sum(box.torn.values()) <= 1
        if acknowledged:
            values = {frame.step: frame.values for frame in box.frames}
            assert values[acknowledged]["loss/global"] == loss_of(acknowledged)
            assert merge_boxes([box]).ranks[0].place >= (acknowledged, 0, 0)
        numbers = [mark.number for mark in box.marks]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else not acknowledged
        reached.append(last)
        if before is not None:
            older = read_box(path.with_name(f"blackbox_life{before.life}.bin"))
            assert (older.last_complete_step, older.torn) == (before.last_complete_step, before.torn)
    print(f"{kills} kills: {without_box} before the box, {torn} torn records, up to {max(reached)} steps")
    assert sum(step > 0 for step in reached) >= kills // 2


def control_group() -> tuple[Path, str]:
    """A new control group with a memory limit, and the file that sets it; skips where none can be made."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"trainmon_test_{os.getpid()}"
        try:
            group.mkdir()
            if (group / limit).exists():
                return group, limit
            group.rmdir()
        except OSError:
            continue
    pytest.skip("no control group with a memory limit can be made here")


def test_after_the_out_of_memory_killer_the_box_is_there_and_says_so(tmp_path: Path) -> None:
    group, limit = control_group()
    script = """
import sys
print("ready", flush=True)
sys.stdin.readline()
from trainmon.events import MicroEnd, StepBegin, StepEnd, TrainBegin
from trainmon.monitor import TrainMonitor
sinks = {"log": False, "blackbox": {"host_every": 0}}
mon = TrainMonitor({"output_dir": sys.argv[1], "run_name": "r", "sinks": sinks, "gradients": False})
mon.begin(TrainBegin())
hoard = []
for step in range(1, 1000):
    mon.handle(StepBegin(step, float(step)))
    hoard.append(bytearray(b"x" * (2 << 20)))
    mon.handle(MicroEnd(step, 0, 1.0 / step, 1))
    mon.handle(StepEnd(step, step + 1.0))
    print(step, flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        try:
            (group / limit).write_text(str(160 << 20))
            (group / "cgroup.procs").write_text(str(process.pid))
        except OSError as error:
            pytest.skip(f"the control group can't be used: {error}")
        process.stdin.write("go\n")
        process.stdin.flush()
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)
    if process.returncode == 0:
        pytest.skip("the limit of the control group is not enforced here")
    assert process.returncode == -9
    acknowledged = int(out.split()[-1])
    box = read_box(tmp_path / "r/rank_0/blackbox.bin")
    assert box.last_complete_step in (acknowledged, acknowledged + 1) and box.state() == "gone"
    looks = [look.resident for look in box.host if look.resident is not None]
    assert looks[-1] > looks[0] + (20 << 20)
    assert merge_boxes([box]).summary.endswith(
        "(left no word); likely out of memory: its control group was at its limit"
    )
    assert box.frames[-1].values["loss/global"] == 1.0 / box.frames[-1].step
