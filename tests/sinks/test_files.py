"""Whole records on full disks, and files published by rename."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from tests.sinks.make import finish, run_info, snapshot, start, table
from trainmon.sinks.base import RecordFile, publish
from trainmon.sinks.csv import CsvSink
from trainmon.sinks.jsonl import JsonlSink, read_jsonl


def test_a_record_that_does_not_fit_is_cut_off_again(tmp_path):
    script = """
    import resource
    from trainmon.sinks.base import RecordFile
    file = RecordFile(directory / "records")
    file.write(b"a" * 99 + b"\\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, resource.RLIM_INFINITY))
    try:
        file.write(b"b" * 99 + b"\\n")
    except OSError as error:
        print(error.errno)
    file.write(b"c" * 9 + b"\\n")
    file.close()
    file.close()
    """
    assert finish(start(script, tmp_path)) == (0, f"{errno.EFBIG}\n", "")
    assert (tmp_path / "records").read_bytes() == b"a" * 99 + b"\n" + b"c" * 9 + b"\n"


def test_a_full_device_is_an_error_with_its_number(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    file = RecordFile(tmp_path / "full")
    with pytest.raises(OSError) as caught:
        file.write(b"x\n")
    assert caught.value.errno == errno.ENOSPC
    file.close()


def test_a_disk_that_fills_up_and_empties_keeps_whole_lines(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        script = """
        from trainmon.sinks.csv import CsvSink
        from tests.sinks.make import table
        writer = Writer([JsonlSink(), CsvSink()], run_info(directory), capacity=10**6)
        ballast = directory / "ballast"
        ballast.write_bytes(bytes(40_000))
        values = {f"layer.{n}": float(n) for n in range(5)}
        for step in range(1, 401):
            writer.put(snapshot(step, table(values)))
        assert writer.flush(60)
        lost = dict(writer.lost)
        ballast.unlink()
        for step in range(401, 411):
            writer.put(snapshot(step, table(values)))
        assert writer.close(60)
        assert writer.lost == lost and writer.failed == {} and writer.switched_off == ()
        print(sorted(lost))
        """
        status, out, err = finish(start(script, disk))
        assert (status, out) == (0, "['csv', 'jsonl']\n"), err
        content = (disk / "rank_0" / "scalars.jsonl").read_bytes()
        records = read_jsonl(disk / "rank_0" / "scalars.jsonl")
        assert len(records) == content.count(b"\n")
        numbers = [r["step"] for r in records[1:]]
        assert numbers[0] == 1 and numbers[-10:] == list(range(401, 411)) and len(numbers) < 410
        kinds = [r.get("kind") for r in read_jsonl(disk / "rank_0" / "events.jsonl")]
        assert "disk_room" in kinds and kinds[-1] == "sink_losses"
        (tables,) = (disk / "rank_0" / "tensors").iterdir()
        rows = tables.read_text().splitlines()
        assert all(row.count(",") == 2 for row in rows)
        assert len(rows) % 5 == 1
    finally:
        subprocess.run(["umount", disk], check=True)


def test_published_files_are_old_or_new_and_leave_nothing_behind(tmp_path):
    path = tmp_path / "run.json"
    publish(path, b"old")
    publish(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["run.json"]
    with pytest.raises(TypeError):
        publish(path, None)  # type: ignore[arg-type]
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["run.json"]


def test_sinks_without_a_directory_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for sink in (JsonlSink(), CsvSink()):
        sink.open(run_info(None))
        sink.write(snapshot(1, table({"w": 1.0})))
        sink.flush()
        sink.close()
    assert os.listdir(tmp_path) == []
