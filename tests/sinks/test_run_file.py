"""run.json: lives, their ends, and damage."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.sinks.make import finish, start
from trainmon.sinks.run_file import RunFile, read_run


def test_a_run_and_its_lives(tmp_path):
    directory = tmp_path / "runs" / "demo"
    assert read_run(directory) is None
    config = {"every": np.int64(10), "path": Path("x"), "factor": float("nan")}
    run = RunFile.begin(
        directory, name="demo", config=config, versions={"numpy": "2"}, units={"time/step": "s"}
    )
    assert run.life == 1
    record = read_run(directory)
    assert record["run"] == "demo" and record["schema"] == 1
    assert record["config"] == {"every": 10, "path": "x", "factor": "NaN"}
    assert (record["versions"], record["units"]) == ({"numpy": "2"}, {"time/step": "s"})
    assert record["lives"][0]["status"] == "running"

    run.end("completed", last_step=150, counters={"dropped": np.int64(3)})
    run.end("failed", last_step=1)
    ended = read_run(directory)["lives"][0]
    assert (ended["status"], ended["last_step"], ended["counters"]) == ("completed", 150, {"dropped": 3})
    assert ended["started"] <= ended["ended"]

    second = RunFile.begin(directory, name="other", resumed_step=150)
    assert second.life == 2
    record = read_run(directory)
    assert record["run"] == "demo" and record["config"]["every"] == 10
    assert [life["resumed_step"] for life in record["lives"]] == [0, 150]
    assert os.listdir(directory) == ["run.json"]


def test_a_life_that_left_no_word_is_unknown(tmp_path):
    script = """
    from trainmon.sinks.run_file import RunFile
    RunFile.begin(directory, name="demo")
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert finish(start(script, tmp_path))[0] == -signal.SIGKILL
    assert read_run(tmp_path)["lives"][0]["status"] == "running"
    RunFile.begin(tmp_path, name="demo", resumed_step=7)
    assert [life["status"] for life in read_run(tmp_path)["lives"]] == ["unknown", "running"]


@pytest.mark.parametrize(
    "content", [b"", b'{"lives": [{"li', b"[]", b'{"lives": 3}', b'{"lives": [{"life": "1"}]}', b"\xff\xfe{}"]
)
def test_a_damaged_file_is_set_aside(tmp_path, content, caplog):
    for number in (1, 2):
        (tmp_path / "run.json").write_bytes(content)
        with pytest.raises(ValueError, match="is damaged"):
            read_run(tmp_path)
        assert RunFile.begin(tmp_path, name="demo", resumed_step=4).life == 1
        assert read_run(tmp_path)["lives"][0]["resumed_step"] == 4
        aside = tmp_path / ("run.json.damaged" if number == 1 else "run.json.damaged2")
        assert aside.read_bytes() == content
        assert aside.name in caplog.text


def test_a_reader_never_sees_half_a_file(tmp_path):
    script = """
    from trainmon.sinks.run_file import RunFile
    print("ready", flush=True)
    while True:
        RunFile.begin(directory, name="demo", config={"filler": "x" * 100_000})
    """
    process = start(script, tmp_path)
    assert process.stdout.readline() == "ready\n"
    seen = set()
    while len(seen) < 20:
        assert process.poll() is None
        record = read_run(tmp_path)
        if record is not None:
            seen.add(len(record["lives"]))
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert json.loads((tmp_path / "run.json").read_text())["lives"]


def test_a_directory_that_cannot_be_written_is_the_callers_to_know(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        RunFile.begin(tmp_path / "file" / "run", name="demo")
