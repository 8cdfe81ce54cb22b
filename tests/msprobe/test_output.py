"""How rows get to disk: the writer thread of `async_write`, disks that are slow or full, one transfer a step."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.msprobe import golden  # noqa: E402
from tests.msprobe.loops import FOUR, MODES, adam, clean, config, model, rows, train  # noqa: E402
from trainmon.msprobe import TrainerMonitorV2, output  # noqa: E402
from trainmon.msprobe.tables import TableFiles  # noqa: E402

REPOSITORY = Path(__file__).parents[2]


def writers() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "trainmon-writer"}


@pytest.mark.parametrize("mode", MODES)
def test_the_thread_writes_the_same_bytes(tmp_path: Path, mode: str) -> None:
    """T-42: all rows are there after stop(), in order; the thread is gone."""
    trees, others = [], writers()  # those that other tests have left to the end of the process
    for asynchronous in (False, True):
        net = model()
        optimizer = adam(net)
        out = tmp_path / str(asynchronous)
        mon = TrainerMonitorV2(
            config(out, *FOUR, mode=mode, step_count_per_record=7, async_write=asynchronous)
        )
        mon.start(net, optimizer)
        train(net, optimizer, 20)
        assert len(writers() - others) == asynchronous
        mon.stop()
        assert writers() <= others
        trees.append(golden.tree(out))
    assert trees[0] == trees[1] and len(trees[0]) == 4 * 3
    steps = [
        row["step"] for a in (0, 7, 14) for row in golden.dicts(trees[1][f"rank_0/param_step{a}-{a + 6}.csv"])
    ]
    assert steps == [str(step) for step in range(20) for _ in range(8)]


class Disk:
    """Stands still until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on = threading.Event()
        append = TableFiles.append

        def slow(files: TableFiles, *given: Any) -> None:
            assert self.goes_on.wait(30)
            append(files, *given)

        monkeypatch.setattr(TableFiles, "append", slow)


@pytest.mark.parametrize("mode", MODES)
def test_a_disk_that_stands_still_stops_nobody(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """T-42: the queue has a bound, what it loses is counted and said, the rest is in order."""
    disk = Disk(monkeypatch)
    monkeypatch.setattr(output, "WAITING", 5)
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "param", mode=mode, async_write=True))
    mon.start(net, optimizer)
    begun = time.monotonic()
    train(net, optimizer)
    deadline = time.monotonic() + 10
    while (
        mon._output._writer._head is None and mon._output._writer._snapshots
    ):  # until the thread has the first
        assert time.monotonic() < deadline
        time.sleep(0.001)
    train(net, optimizer, 19)
    assert time.monotonic() - begun < 20  # the disk is still standing
    assert mon.write_errors == 14
    disk.goes_on.set()
    mon.stop()
    assert mon.write_errors == 14
    steps = [int(row["step"]) for row in rows(tmp_path, "param")]
    assert sorted(set(steps)) == [0, *range(15, 20)]
    assert "dropped" in caplog.text


def test_rows_of_a_step_are_on_disk_when_the_step_is_over(tmp_path: Path) -> None:
    """Without `async_write`."""
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "param"))
    mon.start(net, optimizer)
    train(net, optimizer)
    assert len(rows(tmp_path, "param")) == 8
    mon.stop()


@pytest.mark.parametrize("end", ["", "raise RuntimeError('the run')"])
def test_what_waits_is_written_at_the_end_of_the_process(tmp_path: Path, end: str) -> None:
    """Without stop(): the script just ends, or fails."""
    script = f"""
from pathlib import Path
from tests.msprobe.loops import *
from trainmon.msprobe import TrainerMonitorV2
net = model(); optimizer = adam(net)
mon = TrainerMonitorV2(config(Path({str(tmp_path)!r}), "param", async_write=True))
mon.start(net, optimizer)
train(net, optimizer, 9)
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, timeout=120, capture_output=True, check=False
    )
    assert done.returncode == (1 if end else 0)
    assert len(rows(tmp_path, "param")) == 9 * 8


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_counted_and_said(
    tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """T-08."""
    full = threading.Event()
    append = TableFiles.append

    def appended(files: TableFiles, *given: Any) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")
        append(files, *given)

    monkeypatch.setattr(TableFiles, "append", appended)
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "param", async_write=asynchronous))
    mon.start(net, optimizer)

    def steps(count: int) -> None:
        train(net, optimizer, count)
        if asynchronous:
            mon._output._writer.flush()

    steps(1)
    full.set()
    steps(2)
    full.clear()
    steps(1)
    mon.stop()
    assert mon.write_errors == 2
    assert caplog.text.count("can't be written: [Errno 28]") == 1
    assert caplog.text.count("written again; 2 tables were lost") == 1
    assert {row["step"] for row in rows(tmp_path, "param")} == {"0", "3"}


def test_started_again_it_writes_again(tmp_path: Path) -> None:
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, "param", async_write=True))
    for _ in range(2):
        mon.start(net, optimizer)
        train(net, optimizer)
        mon.stop()
    assert [row["step"] for row in rows(tmp_path, "param")] == ["0"] * 8 + ["1"] * 8
    assert clean(net, optimizer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("some", [False, True])
def test_one_transfer_a_step_from_a_device(
    tmp_path: Path, mode: str, some: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T-39, T-11: whatever monitors are on; matrices on a device and vectors on the host make rows of one table."""
    from trainmon.adapters.torch_rows import meter

    plain = meter._is_plain
    monkeypatch.setattr(meter, "_is_on_device", lambda one: plain(one) and (one.dim() > 1 or not some))
    monkeypatch.setattr(meter, "_is_plain", lambda one: plain(one) and not meter._is_on_device(one))
    made: list[Any] = []
    for device in (True, False):
        if not device:
            monkeypatch.undo()
        net = model()
        optimizer = adam(net)
        mon = TrainerMonitorV2(config(tmp_path / str(device), *FOUR, mode=mode, step_interval=2))
        mon.start(net, optimizer)
        reads = []
        for _ in range(4):
            train(net, optimizer)
            backend = mon._host.backend
            reads.append(0 if backend is None else backend.reads)
        made.append(reads)
        mon.stop()
    assert made == [[1, 1, 2, 2], [0, 0, 0, 0]]
    for monitor in FOUR:
        got, want = rows(tmp_path / "True", monitor), rows(tmp_path / "False", monitor)
        assert [row["module_name"] for row in got] == [row["module_name"] for row in want]
        for ours, theirs in zip(got, want, strict=True):
            for name in golden.OPS:
                assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_each_tensor_is_read_once(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fused read a row, whatever its columns."""
    from trainmon.backend import statistics

    read: list[int] = []
    original = statistics.tensor_stats

    def counted(tensors: Any, *given: Any) -> Any:
        read.append(len(tensors))
        return original(tensors, *given)

    monkeypatch.setattr(statistics, "tensor_stats", counted)
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, *FOUR, mode=mode))
    mon.start(net, optimizer)
    train(net, optimizer)
    mon.stop()
    assert sum(read) == sum(len(rows(tmp_path, monitor)) for monitor in FOUR) > 30


def test_hooks_are_few_and_go_when_the_window_closes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """T-37: two a module, one a parameter, two on the optimizer; then those on the optimizer alone."""
    net = model()
    optimizer = adam(net)
    mon = TrainerMonitorV2(config(tmp_path, *FOUR, collect_times=2))
    with caplog.at_level(logging.INFO):
        mon.start(net, optimizer)

    def hooks() -> tuple[int, int, int]:
        modules = sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in net.modules())
        parameters = sum(len(one._post_accumulate_grad_hooks or ()) for one in net.parameters())
        steps = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
        return modules, parameters, steps

    assert hooks() == (2 * len(list(net.modules())), len(list(net.parameters())), 2)
    train(net, optimizer, 2)
    assert hooks() == (0, 0, 2)
    mon.stop()
    assert hooks() == (0, 0, 0)
