"""Per-tensor tables, read back with pyarrow."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.sinks.make import ROOT, finish, run_info, snapshot, start, table
from trainmon.config import ConfigError
from trainmon.run import Run
from trainmon.sinks.parquet import ParquetSink, read_parquet
from trainmon.sinks.writer import Writer

pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
parquet = pytest.importorskip("pyarrow.parquet")


def write(directory, *snapshots, life=1, resumed_step=0, **options):
    sink = ParquetSink(**options)
    sink.open(run_info(directory, life=life, resumed_step=resumed_step))
    for shown in snapshots:
        sink.write(shown)
    sink.close()


def files(directory):
    folder = directory / "rank_0" / "tensors"
    return {path.name: parquet.ParquetFile(path).read() for path in sorted(folder.iterdir())}


def test_names_and_values_come_back(tmp_path):
    norms = {
        "a,b.weight": 1 / 3,
        'c"d': math.nan,
        "e\nf": None,
        "g": math.inf,
        "h[/0]": -math.inf,
        "é": 5e-324,
    }
    sums = {"g": 2.5, "only here": 1e-300}
    write(
        tmp_path,
        snapshot(1, table(norms), table(sums, "grad/norm_local/<p>")),
        snapshot(2, table({"g": -0.0})),
    )
    (name, found), *others = files(tmp_path).items()
    assert name == "gradients_step1-2.parquet" and not others
    assert found.schema.names == ["step", "name", "grad/norm", "grad/norm_local"]
    rows = found.to_pylist()
    assert [row["name"] for row in rows] == [*norms, "only here", "g"]
    assert [row["step"] for row in rows] == [1] * 7 + [2]
    shown = [row["grad/norm"] for row in rows]
    # Null and NaN are two things here.
    assert math.isnan(shown[1]) and found["grad/norm"].null_count == 2
    assert shown[:1] + shown[2:7] == [1 / 3, None, math.inf, -math.inf, 5e-324, None]
    assert math.copysign(1, shown[7]) == -1
    assert [row["grad/norm_local"] for row in rows] == [None, None, None, 2.5, None, None, 1e-300, None]
    facts = json.loads(found.schema.metadata[b"trainmon"])
    assert facts == {
        "run": "demo",
        "life": 1,
        "resumed_step": 0,
        "rank": 0,
        "world": 1,
        "units": {"grad/norm": "tensor", "grad/norm_local": "tensor"},
    }


def test_a_file_has_so_many_steps_or_rows(tmp_path):
    shown = [snapshot(step, table({"a": 1.0, "b": float(step)})) for step in range(1, 12)]
    write(tmp_path / "steps", *shown, steps_per_file=4, every=2)
    assert {name: found["step"].to_pylist()[::2] for name, found in files(tmp_path / "steps").items()} == {
        "gradients_step1-6.parquet": [1, 2, 4, 6],
        "gradients_step8-10.parquet": [8, 10],
    }
    write(tmp_path / "rows", *shown, rows_per_file=9)
    assert {name: found.num_rows for name, found in files(tmp_path / "rows").items()} == {
        "gradients_step1-5.parquet": 10,
        "gradients_step11-11.parquet": 2,
        "gradients_step6-10.parquet": 10,
    }


def test_thousands_of_rows_a_step_keep_their_bits(tmp_path):
    rng = np.random.default_rng(0)
    names = [f"layers.{n}.weight" for n in range(3000)]
    values = {step: rng.standard_normal(3000).view(np.int64).view(np.float64) for step in (1, 2)}
    shown = [snapshot(s, table(dict(zip(names, values[s].tolist(), strict=True)))) for s in values]
    write(tmp_path, *shown, compression="snappy")
    ((_, found),) = files(tmp_path).items()
    assert np.array_equal(found["grad/norm"].to_numpy(), np.concatenate(list(values.values())))
    assert found["name"].to_pylist() == names * 2


def test_a_step_that_goes_back_begins_a_file(tmp_path):
    write(tmp_path, *(snapshot(step, table({"w": float(step)})) for step in (5, 6, 4, 5)))
    assert {name: found["grad/norm"].to_pylist() for name, found in files(tmp_path).items()} == {
        "gradients_step5-6.parquet": [5.0, 6.0],
        "gradients_step4-5.parquet": [4.0, 5.0],
    }


def test_each_step_once_after_a_resume(tmp_path):
    write(tmp_path, *(snapshot(step, table({"w": float(step)})) for step in range(1, 7)), steps_per_file=4)
    later = [snapshot(step, table({"w": 100.0 + step, "new": 1.0})) for step in range(4, 9)]
    write(tmp_path, *later, life=2, resumed_step=3)
    before = files(tmp_path)
    assert sorted(before) == [
        "gradients_step1-4.parquet",
        "gradients_step4-8_life2.parquet",
        "gradients_step5-6.parquet",
    ]
    folder = tmp_path / "rank_0" / "tensors"
    assert read_parquet(folder, "gradients").num_rows == 6 + 10
    latest = read_parquet(folder, "gradients", latest=True).to_pylist()
    assert [(row["step"], row["grad/norm"]) for row in latest if row["name"] == "w"] == [
        *((step, float(step)) for step in range(1, 4)),
        *((step, 100.0 + step) for step in range(4, 9)),
    ]
    # The same life again, as after a kill that left no run.json: nothing is overwritten.
    write(tmp_path, *later, life=2, resumed_step=3)
    after = files(tmp_path)
    assert after.pop("gradients_step4-8_life2_2.parquet").equals(after["gradients_step4-8_life2.parquet"])
    assert after.keys() == before.keys() and all(after[name].equals(before[name]) for name in before)
    assert read_parquet(folder, "weights").num_rows == 0


def test_a_resumed_run_whose_first_step_is_not_shown_still_replaces_it(tmp_path):
    write(tmp_path, *(snapshot(step, table({"w": 1.0})) for step in range(1, 7)))
    write(tmp_path, snapshot(6, table({"w": 2.0})), life=2, resumed_step=3)
    latest = read_parquet(tmp_path / "rank_0" / "tensors", "gradients", latest=True)
    assert latest["step"].to_pylist() == [1, 2, 3, 6]


def test_flush_shows_what_waits(tmp_path):
    sink = ParquetSink()
    sink.open(run_info(tmp_path))
    sink.write(snapshot(1, table({"w": 1.0})))
    assert not (tmp_path / "rank_0").exists()
    sink.flush()
    sink.flush()
    assert list(files(tmp_path)) == ["gradients_step1-1.parquet"]
    sink.close()
    assert list(files(tmp_path)) == ["gradients_step1-1.parquet"]


def test_a_full_disk_loses_counted_steps_and_no_more(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(60_000))
        writer = Writer([ParquetSink(steps_per_file=5)], run_info(disk), capacity=10**6)
        for step in range(1, 48):
            writer.put(snapshot(step, table({f"layer.{n}": float(step) for n in range(100)})))
        assert writer.flush(60)
        assert writer.failed == {} and writer.switched_off == ()
        ballast.unlink()
        for step in range(48, 51):
            writer.put(snapshot(step, table({"w": 1.0})))
        assert writer.close(60)
        steps = set(read_parquet(disk / "rank_0" / "tensors", "gradients")["step"].to_pylist())
        # A flush is a last chance, so all of the first 47 are lost; each is counted once.
        assert writer.lost == {"parquet": 50 - len(steps)} and {48, 49, 50} <= steps
        assert all(path.suffix == ".parquet" for path in (disk / "rank_0" / "tensors").iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)


def test_steps_wait_for_room_up_to_a_bound(tmp_path, monkeypatch):
    sink = ParquetSink(steps_per_file=2)
    sink.open(run_info(tmp_path))
    lost, full = 0, OSError(28, "No space left on device")

    def refuse(path, content):
        raise full

    monkeypatch.setattr("trainmon.sinks.parquet.publish", refuse)
    for step in range(1, 21):
        try:
            sink.write(snapshot(step, table({"w": 1.0})))
        except OSError as error:
            assert error.errno == 28
            lost += error.records
    monkeypatch.undo()
    sink.close()
    steps = read_parquet(tmp_path / "rank_0" / "tensors", "gradients")["step"].to_pylist()
    assert steps == list(range(lost + 1, 21)) and 0 < len(steps) <= 8


def test_a_kill_leaves_whole_files_only(tmp_path):
    script = """
    from tests.sinks.make import table
    from trainmon.sinks.parquet import ParquetSink
    writer = Writer([ParquetSink(steps_per_file=3)], run_info(directory), on_full="block")
    for step in range(1, 10**6):
        writer.put(snapshot(step, table({"w": float(step)})))
    """
    process = start(script, tmp_path)
    folder = tmp_path / "rank_0" / "tensors"
    while not folder.exists() or len(list(folder.glob("*.parquet"))) < 10:
        assert process.poll() is None, process.communicate()
    process.kill()
    assert finish(process)[0] == -9
    steps = read_parquet(folder, "gradients")["step"].to_pylist()
    assert steps == list(range(1, len(steps) + 1)) and len(steps) % 3 == 0


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sink = ParquetSink()
    sink.open(run_info(None))
    sink.write(snapshot(1, table({"w": 1.0})))
    sink.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("options", [{"every": 0}, {"steps_per_file": 0}, {"rows_per_file": 1.5}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ParquetSink(**options)


def test_a_missing_package_is_one_clear_sentence(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "pyarrow" else real(name, *a)
    )
    with pytest.raises(ImportError) as caught:
        ParquetSink()
    assert str(caught.value) == "the parquet sink needs the package pyarrow: pip install trainmon[parquet]"

    from trainmon.config import load_config
    from trainmon.events import TrainBegin

    with pytest.raises(ConfigError, match=r"sinks\.parquet: the parquet sink needs the package pyarrow"):
        Run(load_config({"sinks": ["parquet"]}), TrainBegin(), {}, "torch")


def test_nothing_heavy_is_loaded():
    code = (
        "import sys\nfrom trainmon.sinks.parquet import ParquetSink\nParquetSink()\n"
        "print('pyarrow' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "False\n"
