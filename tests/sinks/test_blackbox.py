"""The black box: what it holds after any death, and what a damaged one still gives."""

from __future__ import annotations

import errno
import faulthandler
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sinks.make import ROOT, finish, message, run_info, snapshot, start
from trainmon.cli import main
from trainmon.events import (
    ExceptionRaised,
    Layout,
    MicroEnd,
    OptimizerBegin,
    OptimizerEnd,
    StepBegin,
    StepEnd,
    TrainBegin,
    TrainEnd,
)
from trainmon.monitor import TrainMonitor
from trainmon.sinks.blackbox import BlackBox, Box, find_boxes, merge_boxes, read_box
from trainmon.sinks.blackbox.layout import HEADER
from trainmon.sinks.blackbox.phases import PHASES, code_of
from trainmon.sinks.jsonl import read_jsonl

CODE = {phase.name: code for code, phase in PHASES.items()}


def box_at(directory: Path, **options: Any) -> BlackBox:
    facts = {
        key: options.pop(key) for key in ("rank", "world", "life", "name", "resumed_step") if key in options
    }
    return BlackBox(directory, run_info(None, **facts), **options)


def run_steps(box: BlackBox, steps: int, first: int = 1, micros: int = 2) -> None:
    for step in range(first, first + steps):
        box.mark(CODE["step_begin"], step)
        for micro in range(micros):
            box.mark(CODE["micro_end"], step, micro)
        box.mark(CODE["step_end"], step)
        box.frame(snapshot(step, loss__global=1.0 / step, grad__norm=None, optim__lr=math.nan))


def test_everything_comes_back(tmp_path: Path) -> None:
    before = time.time()
    box = box_at(tmp_path, rank=3, world=8, life=2, name='a"\n[b]', resumed_step=4)
    run_steps(box, 3, first=5)
    box.message(message("gradient of é[/x]\udc80 is not finite", step=7, level="error"))
    found = read_box(tmp_path / "blackbox.bin")
    assert (found.run, found.rank, found.life, found.facts["world"]) == ('a"\n[b]', 3, 2, 8)
    assert (found.facts["pid"], found.facts["resumed_step"]) == (os.getpid(), 4)
    assert [(m.step, m.phase, m.micro) for m in found.marks[:5]] == [
        (5, "step_begin", 0),
        (5, "micro_end", 0),
        (5, "micro_end", 1),
        (5, "step_end", 0),
        (6, "step_begin", 0),
    ]
    times = [mark.time for mark in found.marks]
    assert times == sorted(times) and before - 0.1 <= times[0] <= times[-1] <= time.time() + 0.1
    assert found.last_complete_step == 7
    assert [frame.step for frame in found.frames] == [5, 6, 7]
    values = found.frames[-1].values
    assert values["loss/global"] == 1 / 7 and values["grad/norm"] is None and math.isnan(values["optim/lr"])  # type: ignore[arg-type]
    (said,) = found.messages
    assert (said.level, said.step) == (
        "error",
        7,
    ) and said.text == "test: gradient of é[/x]\\udc80 is not finite"
    look = found.last_look
    assert look is not None and look.resident is not None and look.available is not None
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert look.threads == int(status["Threads"])
    assert 0.3 < look.resident / (int(status["VmRSS"].split()[0]) * 1024) < 3
    assert found.torn == {} and found.end is None and found.state() == "running"
    box.end("completed", step=7)
    box.end("failed", step=9)
    box.mark(1, 99)
    found = read_box(tmp_path / "blackbox.bin")
    assert found.end is not None and (found.end["status"], found.end["step"]) == ("completed", 7)
    assert found.state() == "ended" and found.marks[-1].step == 7


def test_the_rings_keep_the_newest(tmp_path: Path) -> None:
    box = box_at(tmp_path, frames=5, events=16)
    run_steps(box, 100)
    found = read_box(box.path)
    assert [frame.step for frame in found.frames] == [96, 97, 98, 99, 100]
    assert [mark.number for mark in found.marks] == list(range(385, 401))
    assert found.torn == {} and found.last_complete_step == 100
    box.end("completed", step=100)


def test_series_that_come_and_go_keep_their_names(tmp_path: Path) -> None:
    box = box_at(tmp_path)
    shown = [
        {"a": 1.0},
        {"b": 2.0, "a": 3.0},
        {"c" * 70: None},
        {"a": 4.0},
        {f"s{n}": float(n) for n in range(600)},
        {"b": 5.0},
    ]
    for step, scalars in enumerate(shown, 1):
        box.frame(snapshot(step, **scalars))
    found = [frame.values for frame in read_box(box.path).frames]
    assert found[:4] + found[5:] == shown[:4] + shown[5:]
    # A frame has room for 512 values; so many are far above what a step publishes.
    assert len(found[4]) == 512 and found[4].items() <= shown[4].items()
    # Names beyond the room for them are left out, and nothing else is.
    for step in range(7, 20):
        box.frame(snapshot(step, **{f"{step}{'x' * 900}{n}": 1.0 for n in range(10)}, a=6.0))
    last = read_box(box.path).frames[-1]
    assert last.values["a"] == 6.0 and box.problem is None
    box.end("completed", step=20)


def numbers_of(box: Box) -> dict[str, list[int]]:
    rings = {"events": box.marks, "frames": box.frames, "host": box.host, "messages": box.messages}
    return {name: [record.number for record in records] for name, records in rings.items()}  # type: ignore[attr-defined]


def test_a_record_that_is_not_whole_is_known_for_it(tmp_path: Path) -> None:
    """Any byte of any record changed, as by a death in the middle of a copy: that record goes, all others stay."""
    box = box_at(tmp_path, frames=4, events=16)
    run_steps(box, 3, micros=0)
    box.message(message("hello"))
    content = bytearray(box.path.read_bytes())
    whole = numbers_of(read_box(box.path))
    rng = random.Random(0)
    sizes = {"events": 32, "host": 68, "frames": 40 + 3 * 11 + 4, "messages": 24 + len("test: hello") + 4}
    for name, ring in box._rings.items():
        for number in range(1, box._event + 1 if name == "events" else box._numbers[name] + 1):
            at, size = ring.at(number), sizes[name]
            for offset in range(size) if name == "events" else rng.sample(range(size), 12):
                spoilt = bytearray(content)
                spoilt[at + offset] ^= 1 << rng.randrange(8)
                (tmp_path / "spoilt.bin").write_bytes(spoilt)
                found = read_box(tmp_path / "spoilt.bin")
                assert found.torn == {name: 1}, (name, number, offset)
                expected = {
                    other: [n for n in numbers if (other, n) != (name, number)]
                    for other, numbers in whole.items()
                }
                assert numbers_of(found) == expected
    box.end("completed", step=3)


def test_reading_what_is_no_box_is_a_clear_error_and_never_another(tmp_path: Path) -> None:
    box = box_at(tmp_path, frames=2, events=16)
    run_steps(box, 2)
    content = box.path.read_bytes()
    path = tmp_path / "x.bin"
    for spoilt in (b"", b"TMBLACK1", b"\xff" * 4096, bytes(len(content)), content[:100], b"x" + content[1:]):
        path.write_bytes(spoilt)
        with pytest.raises(ValueError, match="no black box"):
            read_box(path)
    # Cut anywhere behind the description, or with noise over it: what is there is read.
    rng = random.Random(1)
    for _ in range(40):
        path.write_bytes(content[: rng.randrange(HEADER, len(content))])
        read_box(path)
        noisy = bytearray(content)
        at = rng.randrange(HEADER, len(content) - 2000)
        noisy[at : at + 2000] = rng.randbytes(2000)
        path.write_bytes(noisy)
        read_box(path)
    box.end("completed", step=2)


def test_an_older_life_stays_readable(tmp_path: Path) -> None:
    first = box_at(tmp_path)
    run_steps(first, 6)
    second = box_at(tmp_path, life=2, resumed_step=3)
    run_steps(second, 2, first=4)
    # The older process still writes into its own file.
    first.mark(CODE["step_begin"], 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blackbox.bin", "blackbox_life1.bin"]
    old, new = read_box(tmp_path / "blackbox_life1.bin"), read_box(tmp_path / "blackbox.bin")
    assert (old.life, old.last_complete_step, old.marks[-1].step) == (1, 6, 7)
    assert (new.life, new.last_complete_step) == (2, 5)
    verdict = merge_boxes([old, new])
    assert (verdict.life, verdict.lives) == (2, [1, 2])
    assert merge_boxes([old, new], 1).ranks[0].box.last_complete_step == 6
    with pytest.raises(ValueError, match="no box of life 3; there are boxes of 1, 2"):
        merge_boxes([old, new], 3)
    for box in (first, second):
        box.end("completed", step=7)
    # A file that is no box is set aside like one; a crash loop keeps the newest few.
    (tmp_path / "blackbox.bin").write_bytes(b"rubbish")
    for life in range(3, 15):
        box_at(tmp_path, life=life).end("completed", step=0)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 9 and {f"blackbox_life{n}.bin" for n in range(6, 14)} < set(names)


def test_a_disk_without_room_is_said_before_anything_is_mapped(tmp_path: Path) -> None:
    """The box is allocated whole: a store into it never finds the disk full, which would be a SIGBUS."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        script = """
        from trainmon.events import MicroEnd, StepBegin, StepEnd, TrainBegin
        from trainmon.monitor import TrainMonitor
        def train(name, steps=300):
            mon = TrainMonitor({"output_dir": str(directory), "run_name": name, "sinks": {"log": False}})
            mon.begin(TrainBegin())
            for step in range(1, steps + 1):
                mon.handle(StepBegin(step, float(step)))
                mon.handle(MicroEnd(step, 0, 1.0, 1))
                mon.handle(StepEnd(step, step + 1.0))
            return mon
        mon = train("fits")
        # Now the disk is filled to the last byte, and the box goes on being written.
        with open(directory / "ballast", "wb") as ballast:
            try:
                while True:
                    os.write(ballast.fileno(), bytes(4096))
            except OSError:
                pass
        for step in range(301, 5000):
            mon.handle(StepBegin(step, float(step)))
            mon.handle(StepEnd(step, step + 1.0))
        mon.close()
        os.truncate(directory / "ballast", os.path.getsize(directory / "ballast") - 100_000)
        other = train("none", 3)
        other.close()
        print("survived", other.summary().steps)
        """
        status, out, err = finish(start(script, disk), timeout=120)
        assert (status, out) == (0, "survived 3\n"), err
        assert read_box(disk / "fits/rank_0/blackbox.bin").last_complete_step == 4999
        (said,) = [
            e for e in read_jsonl(disk / "none/rank_0/events.jsonl") if e.get("kind") == "blackbox_off"
        ]
        assert "no black box in" in said["text"] and "No space left on device" in said["text"]
        assert not list((disk / "none").rglob("*.bin")) and not list((disk / "none").rglob(".*.tmp"))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_file_size_limit_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    script = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    from trainmon.events import StepBegin, StepEnd, TrainBegin
    from trainmon.monitor import TrainMonitor
    mon = TrainMonitor({"output_dir": str(directory), "run_name": "r", "sinks": {"log": False}})
    mon.begin(TrainBegin())
    mon.handle(StepBegin(1, 0.0)); mon.handle(StepEnd(1, 1.0))
    mon.close()
    """
    assert resource.RLIMIT_FSIZE
    assert finish(start(script, tmp_path))[0] == 0
    (said,) = [e for e in read_jsonl(tmp_path / "r/rank_0/events.jsonl") if e.get("kind") == "blackbox_off"]
    assert "File too large (training goes on)" in said["text"]
    assert not list(tmp_path.rglob("*blackbox*"))


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, None])
def test_a_file_system_that_cannot_promise_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    def refuse(*arguments: int) -> None:
        raise AttributeError if number is None else OSError(number, "not here")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    box = box_at(tmp_path)
    run_steps(box, 3)
    assert read_box(box.path).last_complete_step == 3
    status = box.path.stat()
    assert status.st_blocks * 512 >= status.st_size, "all of it has room on the disk"
    box.end("completed", step=3)


def test_a_signal_that_ends_the_run_is_told(tmp_path: Path) -> None:
    script = """
    from trainmon.events import StepBegin, StepEnd, TrainBegin
    from trainmon.monitor import TrainMonitor
    mon = TrainMonitor({"output_dir": str(directory), "run_name": "r", "sinks": {"log": False}})
    mon.begin(TrainBegin())
    for step in range(1, 10**9):
        mon.handle(StepBegin(step, float(step))); mon.handle(StepEnd(step, step + 1.0))
        if step == 5:
            print("go", flush=True)
    """
    process = start(script, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "go\n"
    process.terminate()
    assert finish(process)[0] == -signal.SIGTERM
    found = read_box(tmp_path / "r/rank_0/blackbox.bin")
    assert found.end is not None and (found.end["status"], found.end["reason"]) == ("terminated", "SIGTERM")
    assert merge_boxes([found]).summary.endswith("(ended as terminated: SIGTERM)")


@pytest.mark.parametrize(
    ("kill", "words", "status"),
    [
        ("import faulthandler; faulthandler._sigsegv()", "Segmentation fault", -signal.SIGSEGV),
        ("os.abort()", "Aborted", -signal.SIGABRT),
    ],
)
def test_a_fatal_signal_is_told_with_its_stacks(tmp_path: Path, kill: str, words: str, status: int) -> None:
    script = f"""
    from trainmon.events import StepBegin, StepEnd, TrainBegin
    from trainmon.monitor import TrainMonitor
    mon = TrainMonitor({{"output_dir": str(directory), "run_name": "r", "sinks": {{"blackbox": {{"faults": True}}}}}})
    mon.begin(TrainBegin(resumed_step=int(sys.argv[2])))
    mon.handle(StepBegin(1, 1.0))
    def the_culprit():
        {kill}
    if sys.argv[2] == "0":
        the_culprit()
    mon.close()
    """
    assert finish(start(script, tmp_path, 0))[0] == status
    found = read_box(tmp_path / "r/rank_0/blackbox.bin")
    assert found.fault == words and "the_culprit" in found.faults
    assert merge_boxes([found]).summary == f"stopped at step 1: step begun ({words})"
    # The next life begins with an empty file and leaves none behind; the older life's stays with its box.
    assert finish(start(script, tmp_path, 1))[0] == 0
    assert read_box(tmp_path / "r/rank_0/blackbox_life1.bin").fault == words
    assert read_box(tmp_path / "r/rank_0/blackbox.bin").fault is None
    names = sorted(path.name for path in (tmp_path / "r/rank_0").iterdir() if "faults" in path.name)
    assert names == ["faults_life1.txt"]


def test_a_fault_handler_in_use_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "own.txt").open("w") as own:
        was = faulthandler.is_enabled()
        faulthandler.enable(own)
        try:
            box = box_at(tmp_path / "box", faults=True)
            box.end("completed", step=0)
            assert faulthandler.is_enabled() and [path.name for path in (tmp_path / "box").iterdir()] == [
                "blackbox.bin"
            ]
        finally:
            faulthandler.disable()
            if was:
                faulthandler.enable(sys.__stderr__)


def test_a_directory_that_vanishes_costs_the_box_only(tmp_path: Path) -> None:
    local = tmp_path / "node"
    mon = monitor(tmp_path / "runs", blackbox={"directory": str(local)})
    mon.begin(TrainBegin())
    step_once(mon, 1)
    for path in sorted(local.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    for step in range(2, 50):
        step_once(mon, step)
    mon.close()
    (said,) = [
        e for e in read_jsonl(tmp_path / "runs/r/rank_0/events.jsonl") if e.get("kind") == "blackbox_lost"
    ]
    assert "was removed while the run went on" in said["text"]
    records = [r for r in read_jsonl(tmp_path / "runs/r/rank_0/scalars.jsonl") if "step" in r]
    assert len(records) == 49


def monitor(directory: Path, **sinks: Any) -> TrainMonitor:
    return TrainMonitor({"output_dir": str(directory), "run_name": "r", "sinks": {"log": False, **sinks}})


def step_once(mon: TrainMonitor, step: int) -> None:
    mon.handle(StepBegin(step, float(step)))
    mon.handle(MicroEnd(step, 0, 1.0 / step, 1))
    mon.handle(OptimizerBegin(0.0))
    mon.handle(OptimizerEnd(0.0))
    mon.handle(StepEnd(step, step + 1.0))


def test_the_engine_writes_it(tmp_path: Path) -> None:
    mon = monitor(tmp_path)
    mon.begin(TrainBegin(total_steps=9))
    step_once(mon, 1)
    step_once(mon, 2)
    mon.handle(StepBegin(3, 3.0))
    mon.handle(ExceptionRaised(3, "step", RuntimeError("boom")))
    mon.close()
    found = read_box(tmp_path / "r/rank_0/blackbox.bin")
    step = ["step_begin", "micro_end", "optimizer_begin", "optimizer_end", "step_end"]
    assert [mark.phase for mark in found.marks] == [*step, *step, "step_begin", "exception"]
    assert (
        found.end is not None
        and found.end["status"] == "failed"
        and found.end["reason"] == "RuntimeError: boom"
    )
    record = next(r for r in read_jsonl(tmp_path / "r/rank_0/scalars.jsonl") if r.get("step") == 2)
    frame = found.frames[-1]
    assert frame.values == {k: v for k, v in record.items() if k not in ("step", "time")}
    assert (frame.step, frame.total_steps, frame.time) == (2, 9, record["time"])


def test_every_phase_of_the_events_has_a_place() -> None:
    assert set(code_of.values()) <= PHASES.keys()
    orders = [phase.order for phase in PHASES.values()]
    assert len(set(orders)) == len(orders) and len({phase.name for phase in PHASES.values()}) == len(PHASES)


def test_it_can_be_off_and_a_rank_without_files_has_one(tmp_path: Path) -> None:
    mon = monitor(tmp_path / "off", blackbox=False)
    mon.begin(TrainBegin())
    step_once(mon, 1)
    mon.close()
    assert not list((tmp_path / "off").rglob("blackbox*"))
    mon = monitor(tmp_path / "on")
    mon.begin(TrainBegin(layout=Layout(rank=5, world=8)))
    step_once(mon, 1)
    mon.close()
    assert [
        str(path.relative_to(tmp_path / "on")) for path in (tmp_path / "on").rglob("*") if path.is_file()
    ] == ["r/rank_5/blackbox.bin"]


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    box = box_at(tmp_path)
    box.mark(CODE["step_begin"], 1)
    child = os.fork()
    if child == 0:
        box.mark(CODE["step_begin"], 77)
        box.frame(snapshot(77))
        box.message(message("from the child"))
        box.end("completed", step=77)
        os._exit(0)
    os.waitpid(child, 0)
    box.mark(CODE["step_end"], 1)
    found = read_box(box.path)
    assert [mark.step for mark in found.marks] == [1, 1] and found.end is None and not found.messages
    box.end("completed", step=1)


def test_a_failure_in_it_stops_it_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mon = monitor(tmp_path)
    mon.begin(TrainBegin())
    step_once(mon, 1)
    box = mon._voice.box
    assert box is not None and box._map is not None
    box._map.close()
    for step in (2, 3):
        step_once(mon, step)
    mon.close()
    assert caplog.text.count("the black box") == 1
    events = read_jsonl(tmp_path / "r/rank_0/events.jsonl")
    assert [e["kind"] for e in events if "kind" in e].count("blackbox_lost") == 1
    assert [r["step"] for r in read_jsonl(tmp_path / "r/rank_0/scalars.jsonl") if "step" in r] == [1, 2, 3]


def ranks(directory: Path, *reached: tuple[int, str, int] | None, end: str | None = None) -> None:
    """Boxes of as many ranks, each stopped where `reached` says; None: no box."""
    for rank, where in enumerate(reached):
        if where is None:
            continue
        box = box_at(directory / f"rank_{rank}", rank=rank, world=len(reached))
        step, phase, micro = where
        run_steps(box, step - 1, micros=4)
        box.mark(CODE["step_begin"], step)
        if CODE[phase] >= CODE["forward_end"]:
            for done in range(micro if micro else 0):
                box.mark(CODE["micro_end"], step, done)
        if phase != "step_begin":
            box.mark(CODE[phase], step, micro)
        box._map = None  # as a kill leaves it


def forget_process(path: Path) -> None:
    """Gives the boxes below a process that is no more."""
    from zlib import crc32

    from trainmon.sinks.blackbox.layout import LENGTH, MAGIC

    for file in path.rglob("blackbox.bin"):
        content = bytearray(file.read_bytes())
        length, _ = LENGTH.unpack_from(content, len(MAGIC))
        start_at = len(MAGIC) + LENGTH.size
        facts = json.loads(content[start_at : start_at + length])
        text = json.dumps({**facts, "process_start": 1}).encode()
        head = MAGIC + LENGTH.pack(len(text), crc32(text)) + text
        content[: len(head)] = head
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("reached", "first", "behind", "summary"),
    [
        ([(7, "merge", 0), (7, "merge", 0), (7, "micro_end", 1), (7, "merge", 0)], [2], [2],
         "rank 2 stopped first, at step 7: micro-batch 1 done (left no word); ranks 0, 1, 3 wait for the others' values"),
        ([(7, "step_begin", 0), (6, "optimizer_begin", 0)], [1], [1],
         "rank 1 stopped first, at step 6: in the optimizer (left no word)"),
        ([(3, "micro_end", 0), (3, "micro_end", 3), (3, "data_begin", 0)], [0], [0, 2], None),
        ([(5, "step_end", 0), (5, "step_end", 0)], [0, 1], [],
         "all ranks stopped at the same place, step 5: step done (left no word)"),
        ([(5, "step_end", 0), None, (5, "step_end", 0), None], [0, 2], [],
         "all ranks stopped at the same place, step 5: step done (left no word); no box of rank 1, 3"),
        ([(9, "exception", 0)], [0], [], "stopped at step 9: left by an exception (left no word)"),
    ],
)  # fmt: skip
def test_who_stopped_first(
    tmp_path: Path, reached: Any, first: list[int], behind: list[int], summary: str | None
) -> None:
    ranks(tmp_path, *reached)
    forget_process(tmp_path)
    verdict = merge_boxes([read_box(path) for path in find_boxes([tmp_path])])
    if summary is None:  # data after micro-batch 0 is ahead of micro-batch 0, behind micro-batch 3
        assert [view.place[1] for view in verdict.ranks] == [0, 3, 0]
    else:
        assert (verdict.first, verdict.behind, verdict.summary) == (first, behind, summary)


def test_who_is_behind_while_the_run_goes_on(tmp_path: Path) -> None:
    ranks(tmp_path, (7, "merge", 0), (7, "step_begin", 0), (7, "merge", 0))
    verdict = merge_boxes([read_box(path) for path in find_boxes([tmp_path])])
    assert verdict.summary == (
        "running; rank 1 is behind (step 7: step begun); ranks 0, 2 wait for the others' values"
    )
    assert verdict.first == verdict.behind == [1]


def test_of_ranks_at_one_place_the_wordless_went_first(tmp_path: Path) -> None:
    ranks(tmp_path, (4, "step_begin", 0), (4, "step_begin", 0))
    forget_process(tmp_path)
    third = box_at(tmp_path / "rank_2", rank=2, world=3)
    run_steps(third, 3)
    third.mark(CODE["step_begin"], 4)
    third.end("failed", step=3, reason="RuntimeError: connection closed by peer")
    verdict = merge_boxes([read_box(path) for path in find_boxes([tmp_path])])
    assert verdict.first == [0, 1]
    assert verdict.summary == "ranks 0, 1 stopped first, at step 4: step begun (left no word)"


def test_boxes_of_other_nodes_and_runs(tmp_path: Path) -> None:
    for node, rank in (("a", 0), ("b", 1)):
        box_at(tmp_path / node / "run" / f"rank_{rank}", rank=rank, world=2).end("completed", step=0)
    paths = find_boxes([tmp_path / "a", tmp_path / "b", tmp_path / "a" / "run" / "rank_0" / "blackbox.bin"])
    assert len(paths) == 2
    assert merge_boxes([read_box(path) for path in paths]).summary == "all 2 ranks completed"
    box_at(tmp_path / "other", name="another").end("completed", step=0)
    with pytest.raises(ValueError, match="boxes of 2 runs"):
        merge_boxes([read_box(path) for path in find_boxes([tmp_path])])


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    ranks(tmp_path, (7, "merge", 0), (7, "micro_end", 1))
    box = read_box(tmp_path / "rank_0" / "blackbox.bin")
    assert box.marks
    forget_process(tmp_path)
    (tmp_path / "rank_9").mkdir()
    (tmp_path / "rank_9" / "blackbox.bin").write_bytes(b"rubbish")
    assert main(["blackbox", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "rank 1 stopped first, at step 7: micro-batch 1 done (left no word)" in shown.out
    assert "left out: " in shown.err and "0.16667" in shown.out
    assert main(["blackbox", "--json", str(tmp_path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["stopped_first"] == [1] and [entry["last_complete_step"] for entry in facts["ranks"]] == [
        6,
        6,
    ]
    values = facts["ranks"][0]["values"]
    assert values["step"] == 6 and values["values"] == {
        "loss/global": 1 / 6,
        "grad/norm": None,
        "optim/lr": "NaN",
    }
    assert main(["blackbox", "--rank", "1", str(tmp_path)]) == 0
    assert "micro_end" in capsys.readouterr().out
    for wrong, text in (
        ([str(tmp_path / "none")], "no such file or directory"),
        ([str(tmp_path / "rank_9")], "is no black box"),
        ([str(tmp_path), "--life", "5"], "no box of life 5"),
        ([str(tmp_path), "--rank", "5"], "no box of rank 5"),
    ):
        assert main(["blackbox", *wrong]) == 2
        assert text in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["blackbox", str(tmp_path / "empty")]) == 2
    assert "no black box in" in capsys.readouterr().err


def test_of_many_ranks_the_command_shows_those_that_matter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    for rank in range(40):
        box = box_at(tmp_path / f"rank_{rank}", rank=rank, world=40, frames=1, events=16)
        box.mark(CODE["step_begin"], 3 if rank == 38 else 4)
        box._map = None
    forget_process(tmp_path)
    assert main(["blackbox", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    shown = [
        int(line.split("│")[1])
        for line in out.splitlines()
        if line.startswith("│") and line.split("│")[1].strip()
    ]
    assert shown == [*range(31), 38] and "8 more ranks; --rank R" in out
    assert "rank 38 stopped first, at step 3: step begun" in out


def test_names_are_data_in_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    box = box_at(tmp_path, name="[red]a\x1b[2J</b>")
    box.frame(snapshot(1, **{"[/b]w[bold]": 1.0}))
    box.message(message("[/b]\x1b]0;x\x07 bad"))
    box.end("failed", step=1, reason="[/x]")
    assert main(["blackbox", str(tmp_path), "--rank", "0"]) == 0
    out = capsys.readouterr().out
    assert "[red]a\\x1b[2J</b>" in out and "[/b]w[bold]" in out and "[/b]\\x1b]0;x\\x07 bad" in out
    assert "\x1b]" not in out and "\x1b[2J" not in out


def test_reading_needs_no_framework_and_no_extension() -> None:
    code = (
        "import sys\nfrom trainmon.sinks.blackbox.reader import read_box\n"
        "print([name for name in ('torch', 'pyarrow', 'tensorboard') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


def test_train_end_is_told(tmp_path: Path) -> None:
    mon = monitor(tmp_path)
    mon.begin(TrainBegin())
    step_once(mon, 1)
    mon.handle(TrainEnd(1, "completed"))
    mon.close()
    found = read_box(tmp_path / "r/rank_0/blackbox.bin")
    assert found.marks[-1].phase == "train_end" and merge_boxes([found]).summary == "the run completed"
