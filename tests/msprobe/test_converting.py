"""Tables of both of msProbe's monitors as TensorBoard files."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.msprobe import golden
from tests.msprobe.test_reading import HEADER, OLDER, plant
from trainmon.cli import main
from trainmon.msprobe import csv2tensorboard_by_step, read


def shown(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads of a directory."""
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return {tag: [(one.step, one.value) for one in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def same(found: Any, wanted: Any) -> bool:
    return repr(found) == repr(wanted)  # NaN too


def test_the_older_monitors_tree(tmp_path: Path) -> None:
    plant(tmp_path, OLDER)
    out = csv2tensorboard_by_step(tmp_path, time_end="Dec03_23-00-00", output_dirpath=tmp_path / "out")
    found = shown(out / "rank0" / "actv")
    assert found.keys() == {
        f"vp{stage}:layers.0.input:micro{micro}/{op}"
        for stage, micro in ((0, 0), (0, 1), (1, 0))
        for op in ("min", "norm")
    }
    assert found["vp0:layers.0.input:micro0/norm"] == [(0, 2.25)]
    assert same(found["vp0:layers.0.input:micro1/min"], [(0, math.nan)])
    assert found["vp1:layers.0.input:micro0/min"] == [(1, -math.inf)]
    assert shown(out / "rank0" / "grad_reduced") == {"vp0:w/norm": [(0, 0.5)]}
    assert shown(out / "rank1" / "actv")["vp0:layers.0.input:micro0/norm"] == [(0, 4.0)]


def test_a_tree_of_monitor_v2_in_two_processes(tmp_path: Path) -> None:
    plant(tmp_path, dict(golden.recorded("ddp_all", "expected")))
    out = csv2tensorboard_by_step(tmp_path, process_num=2, output_dirpath=tmp_path / "out")
    for rank in (0, 1):
        table = read(tmp_path, ranks=[rank])["weight_grad"]
        found = shown(out / f"rank{rank}" / "grad_reduced")
        reduced = table.where(table.scope == "reduced")
        assert len(reduced) and sum(map(len, found.values())) == len(reduced) * len(table.stats)
        for row in reduced:
            for op, value in row.stats.items():
                points = dict(found[f"vp-1:{row.name}:micro{row.micro_step}/{op}"])
                assert same(points[row.step], float(golden.float32_text(repr(value))))


def test_only_the_metrics_that_are_asked_for(tmp_path: Path) -> None:
    plant(tmp_path, OLDER)
    out = csv2tensorboard_by_step(tmp_path, data_type_list=["grad_reduced"])
    assert re.fullmatch(r"[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d-csv2tensorboard_by_step", out.name)
    assert sorted(str(one.relative_to(out)) for one in out.rglob("*") if one.is_dir()) == [
        "rank0",
        "rank0/grad_reduced",
    ]
    with pytest.raises(ValueError, match=r"\['loss'\]; there are actv, actv_grad"):
        csv2tensorboard_by_step(tmp_path, data_type_list=["actv", "loss"])
    with pytest.raises(ValueError, match="process_num"):
        csv2tensorboard_by_step(tmp_path, process_num=0)
    with pytest.raises(ValueError, match="after time_end"):
        csv2tensorboard_by_step(tmp_path, "Dec04_00-00-00", "Dec03_00-00-00")


def test_the_last_of_equal_rows_wins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = "-1,0,w,param_origin,1.0,0.0\r\n-1,1,w,param_origin,2.0,0.0\r\n-1,0,w,param_origin,3.0,0.0\r\n"
    plant(tmp_path, {"rank_0/param_step0-9.csv": HEADER + rows + "-1,"})
    with caplog.at_level(logging.WARNING):
        out = csv2tensorboard_by_step(tmp_path)
    assert shown(out / "rank0" / "param_origin")["vp-1:w/norm"] == [(0, 3.0), (1, 2.0)]
    assert "1 values stood more than once" in caplog.text and "not finished" in caplog.text


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(tmp_path, OLDER)
    out = tmp_path / "out"
    words = [
        "msprobe",
        "tensorboard",
        str(tmp_path),
        "--out",
        str(out),
        "--type",
        "actv",
        "--start",
        "Dec04_00-00-00",
    ]
    assert main(words) == 0
    assert str(out) in capsys.readouterr().out
    assert shown(out / "rank0" / "actv")["vp0:layers.0.input:micro0/norm"] == [(0, 8.0)]
    assert not (out / "rank1").exists()
    assert main(["msprobe", "tensorboard", str(tmp_path / "nowhere")]) == 2
    assert "there is no" in capsys.readouterr().err
