"""Tables of both of msProbe's monitors in one SQLite file."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.msprobe import golden
from tests.msprobe.test_reading import OLDER, plant
from trainmon.cli import main
from trainmon.msprobe import data2db, read


def asked(path: Path, question: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(question).fetchall()
    finally:
        connection.close()


TREND = """SELECT rank, step, target_name, vpp_stage, micro_step, metric_name, norm FROM trend_data
    JOIN monitoring_targets USING (target_id) JOIN monitoring_metrics USING (metric_id)
    ORDER BY metric_name, rank, step, target_name, micro_step"""


def test_a_database_of_the_older_monitors_tree(tmp_path: Path) -> None:
    for name, content in OLDER.items():
        if name.startswith("Dec03"):
            plant(tmp_path / "data", {name: content})
    path = data2db(tmp_path / "data", tmp_path / "db")
    assert path == tmp_path / "db" / "monitor_data.trend.db"
    # Step 0 has two micro-batches, so step 1 begins at 2.
    assert asked(path, TREND) == [
        (0, 0, "layers.0.input", 0, 0, "actv", 2.25),
        (0, 1, "layers.0.input", 0, 0, "actv", None),
        (0, 2, "layers.0.input", 1, 0, "actv", 1e9 + 1),
        (1, 0, "layers.0.input", 0, 0, "actv", 4.0),
        (0, 0, "w", 0, 0, "grad_reduced", 0.5),
    ]
    assert asked(path, 'SELECT "min" FROM trend_data WHERE step = 2') == [(-1e9 - 1,)]
    assert asked(path, "SELECT * FROM global_stats") == [(0, 2, 1, "min,norm", "norm")]
    assert [one[1] for one in asked(path, "PRAGMA table_info(global_stats)")][3:] == ["actv", "grad_reduced"]
    tags = "SELECT DISTINCT tag_name, category, target_name FROM monitoring_tags JOIN tag_target_mapping USING (tag_id) "
    tags += "JOIN monitoring_targets USING (target_id) ORDER BY category, tag_name"
    assert asked(path, tags) == [
        ("layers.0", "layer", "layers.0.input"),
        ("layers.0.input", "module", "layers.0.input"),
        ("w", "module", "w"),
    ]


def test_the_axis_of_micro_batches_that_count_from_one(tmp_path: Path) -> None:
    head = "vpp_stage,step,module_name,scope,micro_step,norm\r\n"
    rows = "".join(
        f"-1,{step},w,unreduced,{micro},{step}.{micro}\r\n" for step in (3, 4) for micro in (1, 2, 3)
    )
    more = "-1,3,w,unreduced,1,9.0\r\n-1,4,w,unreduced,1,9.5\r\n"  # a rank with fewer of them
    plant(
        tmp_path / "data",
        {"rank_0/weight_grad_step0-9.csv": head + rows, "rank_1/weight_grad_step0-9.csv": head + more},
    )
    found = asked(
        data2db(tmp_path / "data", tmp_path), "SELECT rank, step, norm FROM trend_data ORDER BY rank, step"
    )
    assert found == [(0, at, value) for at, value in enumerate([3.1, 3.2, 3.3, 4.1, 4.2, 4.3])] + [
        (1, 0, 9.0),
        (1, 3, 9.5),
    ]


def test_steps_as_they_are_and_other_names(tmp_path: Path) -> None:
    plant(tmp_path / "data", OLDER)
    words = tmp_path / "words.json"
    words.write_text('{"layers.": "block"}')
    path = data2db(tmp_path / "data", tmp_path, mapping=words, micro_step=False)
    rows = [row[:6] for row in asked(path, TREND) if row[5] == "actv" and row[0] == 0]
    assert rows == [
        (0, 0, "block0.input", 0, 0, "actv"),
        (0, 0, "block0.input", 0, 1, "actv"),
        (0, 1, "block0.input", 1, 0, "actv"),
    ]


def test_a_database_of_monitor_v2(tmp_path: Path) -> None:
    plant(tmp_path / "data", dict(golden.recorded("ddp_all", "expected")))
    path = data2db(tmp_path / "data", tmp_path, process_num=2)
    tree = read(tmp_path / "data")
    norms = tree["weight_grad"].stats["norm"].tolist()
    question = "SELECT norm FROM trend_data JOIN monitoring_metrics USING (metric_id) "
    question += "WHERE metric_name GLOB 'grad_*reduced'"
    assert sorted(one for (one,) in asked(path, question)) == sorted(norms) and len(norms) > 8
    assert asked(path, "SELECT max_rank FROM global_stats") == [(1,)]
    assert min(asked(path, "SELECT step FROM trend_data")) == (0,)


def test_a_database_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path / "data", OLDER)
    path = data2db(tmp_path / "data", tmp_path)
    before = path.read_bytes()

    def broken(*_arguments: Any) -> Any:
        raise sqlite3.OperationalError("disk full")

    monkeypatch.setattr("trainmon.msprobe.database._Database._rows", broken)
    with pytest.raises(sqlite3.OperationalError):
        data2db(tmp_path / "data", tmp_path)
    assert path.read_bytes() == before and not list(tmp_path.glob(".monitor*"))
    words = tmp_path / "words.json"
    words.write_text("[]")
    with pytest.raises(ValueError, match="object of texts"):
        data2db(tmp_path / "data", tmp_path, mapping=words)


def test_the_verb_for_databases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(tmp_path / "data", OLDER)
    words = [
        "msprobe",
        "db",
        "--data",
        str(tmp_path / "data"),
        "--db",
        str(tmp_path),
        "--micro_step",
        "false",
    ]
    assert main(words) == 0
    path = capsys.readouterr().out.strip()
    assert asked(Path(path), "SELECT max_step FROM global_stats") == [(1,)]
