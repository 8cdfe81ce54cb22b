"""Monitoring switched on and off by editing the configuration."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from trainmon.msprobe import TrainerMonitorV2, read  # noqa: E402
from trainmon.msprobe.trees import find_tables  # noqa: E402

PARAM = {"param": {"enabled": True}}


class Run:
    def __init__(self, directory: Path, rank: int = 0, **config: Any) -> None:
        self.directory = directory
        self.file = directory / "config.json"
        if rank == 0:
            self.edit(**config)
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.monitor = TrainerMonitorV2(str(self.file))
        self.monitor.start(self.model, self.optimizer)

    def edit(self, **config: Any) -> None:
        self.write(
            json.dumps({"output_dir": str((self.directory / "out").absolute()), "monitors": PARAM, **config})
        )

    def write(self, text: str) -> None:
        temporary = self.file.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(self.file)

    def steps(self, count: int) -> Run:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 2)).sum().backward()
            self.optimizer.step()
        return self

    def written(self, monitor: str = "param", rank: int = 0) -> list[int]:
        if not any((self.directory / "out" / f"rank_{rank}").glob(f"{monitor}_step*")):
            return []
        return sorted(set(read(self.directory / "out", ranks=[rank])[monitor].step.tolist()))

    @property
    def on(self) -> Any:
        return json.loads(self.file.read_text()).get("dynamic_on")


@pytest.fixture(autouse=True)
def dynamic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")


def test_off_until_the_file_says_on(tmp_path: Path) -> None:
    run = Run(tmp_path, monitors={"module": {}}).steps(2)
    assert not run.model._forward_hooks and run.written("module") == []
    run.edit(monitors={"module": {}}, dynamic_on=True, collect_times=2, start_step=50)
    run.steps(1)
    assert run.model._forward_hooks
    run.steps(3)
    assert run.written("module") == [3, 4] and run.on is False and not run.model._forward_hooks
    run.steps(2)
    assert run.written("module") == [3, 4]


def test_on_from_the_start_is_on_from_the_second_step(tmp_path: Path) -> None:
    assert Run(tmp_path, dynamic_on=True).steps(3).written() == [1, 2]


def test_without_the_variable_the_key_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAMIC_MONITOR")
    run = Run(tmp_path, dynamic_on=False).steps(2)
    run.edit(dynamic_on=True, step_interval=5)
    assert run.steps(2).written() == [0, 1, 2, 3]


def test_intervals_and_files_begin_with_the_edit(tmp_path: Path) -> None:
    run = Run(tmp_path).steps(3)
    run.edit(dynamic_on=True, step_interval=2, step_count_per_record=4, collect_times=3)
    run.steps(8)
    assert run.written() == [4, 6, 8]
    assert [(one.first, one.last) for one in find_tables(tmp_path / "out")] == [(4, 7), (8, 11)]
    assert run.monitor.start_step == 4 and run.monitor.collect_times == 3


def test_an_edit_while_it_runs_begins_anew(tmp_path: Path) -> None:
    run = Run(tmp_path, dynamic_on=True, collect_times=3).steps(3)
    assert run.written() == [1, 2]
    run.edit(dynamic_on=True, collect_times=2, monitors={"optimizer": {"enabled": True, "ops": ["norm"]}})
    run.steps(1)  # of the old configuration
    assert run.written() == [1, 2, 3]
    run.steps(4)
    assert run.written() == [1, 2, 3] and run.written("optimizer") == [4, 5] and run.on is False


def test_it_is_switched_off_and_on_again(tmp_path: Path) -> None:
    run = Run(tmp_path, dynamic_on=True).steps(3)
    run.write(run.file.read_text().replace('"dynamic_on": true', '"dynamic_on": false'))
    run.steps(3)
    assert run.written() == [1, 2, 3]
    run.write(run.file.read_text().replace('"dynamic_on": false', '"dynamic_on": true'))
    run.steps(3)
    assert run.written() == [1, 2, 3, 7, 8]


def test_it_is_switched_off_by_hand_after_it_has_ended_by_itself(tmp_path: Path) -> None:
    run = Run(tmp_path, dynamic_on=True, collect_times=1).steps(3)
    assert run.written() == [1] and run.on is False
    text = run.file.read_text().replace('"collect_times": 1', '"collect_times": 9')
    run.write(text.replace('"dynamic_on": false', '"dynamic_on": true'))
    run.steps(2)
    run.write(text)
    run.steps(3)
    assert run.written() == [1, 4, 5]


def test_no_times_are_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path, dynamic_on=True).steps(3)
    run.edit(dynamic_on=True, collect_times=0)
    run.steps(3)
    assert run.written() == [1, 2, 3] and run.on is False


def test_stopped_and_started_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(Path(), dynamic_on=True).steps(2)
    monkeypatch.chdir("/")
    run.directory = tmp_path
    run.file = tmp_path / "config.json"
    run.monitor.stop()
    run.steps(1)
    run.monitor.start(run.model, run.optimizer)
    run.steps(3)  # the optimizer's steps were not counted while it was stopped
    assert run.written() == [1, 3, 4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "can't be read"),
        ("[]", "must be a JSON object"),
        ('{"dynamic_on": "yes"}', "dynamic_on must be true or false"),
        ('{"dynamic_on": true, "step_interval": 0}', "step_interval must be an integer"),
        ('{"dynamic_on": true, "collect_tims": 3}', "did you mean 'collect_times'?"),
        ('{"dynamic_on": true, "monitors": {"param": {"enabled": true, "ops": ["nrom"]}}}', "nrom"),
        ('{"dynamic_on": true, "format": "tensorboard"}', "format"),
        ('{"dynamic_on": true, "ndigits": 99}', "ndigits"),
        ('{"dynamic_on": true, "alert": {"rules": [{"rule_name": "X"}]}}', "rule_name"),
    ],
)
def test_a_wrong_edit_is_one_line_and_changes_nothing(
    tmp_path: Path, text: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, dynamic_on=True).steps(2)
    with caplog.at_level(logging.WARNING):
        run.write(text)
        run.steps(3)
    (record,) = [one for one in caplog.records if one.name == "trainmon.msprobe"]
    assert (
        record.levelno == logging.ERROR
        and said in record.message
        and "the old configuration goes on" in record.message
    )
    assert run.written() == [1, 2, 3, 4]
    run.edit(dynamic_on=False)
    assert run.steps(3).written() == [1, 2, 3, 4, 5]


def test_what_needs_a_model_is_refused_without_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, dynamic_on=True)
    run.monitor.stop()
    run.monitor = TrainerMonitorV2(str(run.file))
    run.monitor.start(None, run.optimizer)
    run.steps(2)
    assert "Model must be provided" in caplog.text and run.written() == []


def test_what_a_running_training_cannot_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, dynamic_on=True).steps(2)
    run.edit(dynamic_on=True, output_dir=str(tmp_path / "elsewhere"), rank=[3], print_struct="exit")
    run.steps(2)
    assert run.written() == [1, 2, 3] and not (tmp_path / "elsewhere").exists()
    assert "output_dir can't be changed" in caplog.text and "rank can't be changed" in caplog.text
    assert 'print_struct "exit"' in caplog.text and (tmp_path / "out/module_struct").exists()


def test_an_unchanged_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, dynamic_on=True).steps(1)
    reads = []
    original = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (reads.append(path), original(path))[1])
    run.steps(5)
    assert run.file not in reads
    os.utime(run.file)
    run.steps(1)
    assert reads.count(run.file) == 1


def test_the_file_keeps_its_form_and_rights(tmp_path: Path) -> None:
    run = Run(tmp_path)
    text = f"""{{"output_dir": "{tmp_path}/out",
      "collect_times" : 1,   "dynamic_on" :  true,
    "monitors": {json.dumps(PARAM)}}}
"""
    run.write(text)
    run.file.chmod(0o640)
    run.steps(4)
    assert run.file.read_text().rstrip() == text.replace(":  true", ":  false").rstrip()
    assert run.file.stat().st_mode & 0o777 == 0o640 and run.written() == [1]


def test_an_edit_at_the_very_end_is_not_overwritten(tmp_path: Path) -> None:
    run = Run(tmp_path, dynamic_on=True, collect_times=1).steps(1)
    run.edit(dynamic_on=True, collect_times=2)  # seen when the one step is over
    run.steps(4)
    assert run.written() == [1, 2, 3] and run.on is False


def test_anomalies_of_the_same_run_are_kept(tmp_path: Path) -> None:
    rules = {"rules": [{"rule_name": "AnomalyNan", "args": {"threshold": 0.0}}], "dump": True}
    run = Run(tmp_path, dynamic_on=True, alert=rules).steps(2)
    run.edit(dynamic_on=True, alert=rules, step_interval=2)
    run.steps(3)
    run.monitor.stop()
    found = json.loads((tmp_path / "out/anomaly_detected/rank0/anomaly.json").read_text())
    assert {one["step"] for one in found.values()} == {1, 2, 3}


def ranked(directory: str) -> list[Any]:
    """On one of two ranks: first the one, then the other is two steps ahead when it comes to the end."""
    import torch.distributed as distributed

    os.environ["DYNAMIC_MONITOR"] = "True"
    rank = distributed.get_rank()
    found = []
    for first in (0, 1):
        run = Run(Path(directory) / str(first), rank)
        distributed.barrier()
        if rank == 0:
            run.edit(dynamic_on=True, collect_times=3)
        distributed.barrier()
        ahead = 2 * (rank == first)
        run.steps(2 + ahead)
        distributed.barrier()
        halfway = run.on
        distributed.barrier()
        run.steps(4 - ahead)
        distributed.barrier()
        found.append([run.written(rank=rank), halfway, run.on])
    return found


def test_two_ranks_and_one_who_writes(tmp_path: Path) -> None:
    from tests.ranks.gloo import on_ranks

    for first in ("0", "1"):
        (tmp_path / first).mkdir()
        out = str(tmp_path / first / "out")
        (tmp_path / first / "config.json").write_text(json.dumps({"output_dir": out, "monitors": PARAM}))
    found = on_ranks(2, ranked, str(tmp_path), timeout=60)
    # The first rank that is watched says that it is over; the other one has all its steps all the same.
    assert found[0] == found[1] == [[[1, 2, 3], False, False], [[1, 2, 3], True, False]]
