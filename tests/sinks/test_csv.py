"""Per-tensor tables, read back with Python's csv module."""

from __future__ import annotations

import csv
import math

import pytest

from tests.sinks.make import run_info, snapshot, table
from trainmon.sinks.csv import CsvSink, read_csv


def write(directory, *snapshots, life=1, resumed_step=0, **options):
    sink = CsvSink(**options)
    sink.open(run_info(directory, life=life, resumed_step=resumed_step))
    for shown in snapshots:
        sink.write(shown)
    sink.close()


def files(directory):
    """Rows by file name; every row must have the header's length."""
    found = {}
    for path in sorted((directory / "rank_0" / "tensors").iterdir()):
        with path.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.reader(stream))
        assert {len(row) for row in rows} == {len(rows[0])}
        found[path.name] = rows
    return found


def test_names_and_values_come_back(tmp_path):
    norms = {"a,b.weight": 1 / 3, 'c"d': math.nan, "e\nf": None, "g": math.inf, "h[/0]": -math.inf, "é": 0.0}
    sums = {"g": 2.5, "only here": 1e-300}
    shown = snapshot(1, table(norms), table(sums, "grad/norm_local/<p>"))
    write(tmp_path, shown)
    assert files(tmp_path) == {
        "gradients_step1-1000.csv": [
            ["step", "name", "grad/norm", "grad/norm_local"],
            ["1", "a,b.weight", "0.3333333333333333", ""],
            ["1", 'c"d', "nan", ""],
            ["1", "e\nf", "", ""],
            ["1", "g", "inf", "2.5"],
            ["1", "h[/0]", "-inf", ""],
            ["1", "é", "0.0", ""],
            ["1", "only here", "", "1e-300"],
        ]
    }


def test_one_file_a_probe_and_rotation(tmp_path):
    norms = table({"w": 1.0})
    weights = table({"w": 2.0}, "weight/norm/<p>", "weights")
    write(
        tmp_path,
        *(snapshot(s, *([norms, weights] if s % 2 else [norms])) for s in range(1, 8)),
        steps_per_file=3,
    )
    steps = {name: [row[0] for row in rows[1:]] for name, rows in files(tmp_path).items()}
    assert steps == {
        "gradients_step1-3.csv": ["1", "2", "3"],
        "gradients_step4-6.csv": ["4", "5", "6"],
        "gradients_step7-9.csv": ["7"],
        "weights_step1-3.csv": ["1", "3"],
        "weights_step5-6.csv": ["5"],
        "weights_step7-9.csv": ["7"],
    }


def test_rotation_by_rows(tmp_path):
    shown = [snapshot(step, table({"a": 1.0, "b": 2.0})) for step in range(1, 6)]
    write(tmp_path, *shown, rows_per_file=3)
    assert {name: len(rows) - 1 for name, rows in files(tmp_path).items()} == {
        "gradients_step1-1000.csv": 4,
        "gradients_step3-1000.csv": 4,
        "gradients_step5-1000.csv": 2,
    }


def test_a_resumed_run_overwrites_nothing(tmp_path):
    write(tmp_path, *(snapshot(step, table({"w": float(step)})) for step in (1, 2, 3)))
    before = files(tmp_path)
    for life in (2, 2, 3):
        write(tmp_path, snapshot(1, table({"w": 100.0})), life=life)
    after = files(tmp_path)
    assert after["gradients_step1-1000.csv"] == before["gradients_step1-1000.csv"]
    assert sorted(after) == [
        "gradients_step1-1000.csv",
        "gradients_step1-1000_life2.csv",
        "gradients_step1-1000_life2_2.csv",
        "gradients_step1-1000_life3.csv",
    ]
    assert [
        row["grad/norm"] for row in read_csv(tmp_path / "rank_0" / "tensors", "gradients", latest=True)
    ] == [100.0]


def test_each_step_once_after_a_resume(tmp_path):
    first = [snapshot(step, table({"a,b": float(step), 'c"d': None})) for step in range(1, 7)]
    later = [snapshot(step, table({"a,b": 100.0 + step})) for step in range(4, 9)]
    write(tmp_path, *first, steps_per_file=4)
    write(tmp_path, *later, life=2, resumed_step=3)
    assert sorted(files(tmp_path)) == [
        "gradients_step1-4.csv",
        "gradients_step4-1000_life2.csv",
        "gradients_step5-8.csv",
    ]
    folder = tmp_path / "rank_0" / "tensors"
    assert len(read_csv(folder, "gradients")) == 12 + 5
    latest = read_csv(folder, "gradients", latest=True)
    assert [(row["step"], row["grad/norm"]) for row in latest if row["name"] == "a,b"] == [
        *((step, float(step)) for step in range(1, 4)),
        *((step, 100.0 + step) for step in range(4, 9)),
    ]
    assert [row["grad/norm"] for row in latest if row["name"] == 'c"d'] == [None] * 3
    # A life whose first step is not shown replaces it all the same.
    write(tmp_path, snapshot(8, table({"a,b": 0.0})), life=3, resumed_step=2, every=4)
    latest = read_csv(folder, "gradients", latest=True)
    assert [row["step"] for row in latest if row["name"] == "a,b"] == [1, 2, 8]
    assert read_csv(folder, "weights") == []


def test_a_step_that_goes_back_and_a_new_column_begin_a_file(tmp_path):
    one, two = table({"w": 1.0}), table({"w": 2.0}, "grad/norm_local/<p>")
    write(tmp_path, snapshot(5, one, two), snapshot(6, two), snapshot(4, one), snapshot(7, one, two))
    assert files(tmp_path) == {
        "gradients_step5-1000.csv": [
            ["step", "name", "grad/norm", "grad/norm_local"],
            ["5", "w", "1.0", "2.0"],
            ["6", "w", "", "2.0"],
        ],
        "gradients_step4-1000.csv": [["step", "name", "grad/norm"], ["4", "w", "1.0"]],
        "gradients_step7-1000.csv": [
            ["step", "name", "grad/norm", "grad/norm_local"],
            ["7", "w", "1.0", "2.0"],
        ],
    }


def test_rows_are_there_while_the_run_lives(tmp_path):
    sink = CsvSink(every=2)
    sink.open(run_info(tmp_path))
    for step in (1, 2, 3, 4):
        sink.write(snapshot(step, table({"w": float(step)})))
    assert [row[0] for row in files(tmp_path)["gradients_step1-1000.csv"]] == ["step", "1", "2", "4"]
    sink.close()


def test_without_tables_there_are_no_files(tmp_path):
    write(tmp_path, snapshot(1))
    assert not (tmp_path / "rank_0").exists()


@pytest.mark.parametrize("options", [{"every": 0}, {"steps_per_file": 0}, {"rows_per_file": 1.5}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        CsvSink(**options)
