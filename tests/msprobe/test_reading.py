"""Tables of both of msProbe's monitors, read back."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.msprobe import golden
from trainmon.backend.statistics import COLUMNS, host_readings
from trainmon.msprobe import read, reading
from trainmon.msprobe.tables import Rows, table_bytes
from trainmon.msprobe.trees import metric_of, time_of

HEADER = "vpp_stage,step,module_name,scope,norm,nans\r\n"


def plant(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


#: What the older monitor of msProbe writes, as its guide has it: rank 0 was started twice.
OLDER: dict[str, str | bytes] = {
    "Dec03_21-34-40-rank0-0a1b2c3d/actv_0-1.csv": (
        "vpp_stage,name,step,micro_step,min,norm,shape,dtype\n"
        '0,layers.0.input,0,0,-1.5,2.25,"(2, 4)",torch.bfloat16\n'
        '0,layers.0.input,0,1,,nan,"(2, 4)",torch.bfloat16\n'
        '1,layers.0.input,1,0,-inf,inf,"(2, 4)",torch.bfloat16\n'
    ),
    "Dec03_21-34-40-rank0-0a1b2c3d/grad_reduced_0-1.csv": (
        'vpp_stage,name,step,norm,shape,dtype\n0,w,0,0.5,"(3,)",torch.float32\n'
    ),
    "Dec03_21-34-41-rank1-ffffffff/actv_0-1.csv": (
        'vpp_stage,name,step,micro_step,min,norm,shape,dtype\n0,layers.0.input,0,0,-3.0,4.0,"(2, 4)",torch.bfloat16\n'
    ),
    "Dec04_01-00-00-rank0-00000000/actv_0-1.csv": (
        'vpp_stage,name,step,micro_step,min,norm,shape,dtype\n0,layers.0.input,0,0,-7.0,8.0,"(2, 4)",torch.bfloat16\n'
    ),
    "Dec04_01-00-00-rank0-00000000/linear_hook_0-1.csv": "vpp_stage,name,step,sr\n0,fc,1,1.25\n",
}


@pytest.mark.parametrize("parser", ["arrow", "python"])
@pytest.mark.parametrize("kind", ["expected", "true"])
def test_every_recorded_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, parser: str) -> None:
    if parser == "arrow":
        pytest.importorskip("pyarrow")
        monkeypatch.setattr(reading, "_SMALL", 0)
    else:
        monkeypatch.setattr(reading, "_by_arrow", lambda *_: None)
    seen = 0
    for name in golden.recordings():
        files = golden.recorded(name, kind)
        if not any(files.values()) or name == "restart_other_ops":
            continue
        root = plant(tmp_path / name, dict(files))
        tree = read(root / next(iter(files)).rpartition("rank_")[0])
        assert tree.problems == () and tree.layouts == {"v2"}
        wanted: dict[str, list[tuple[object, ...]]] = {}
        for path in sorted(files, key=lambda path: (path.split("/")[-2], steps_of(path))):
            rank = int(path.split("/")[-2].removeprefix("rank_"))
            slug = path.split("/")[-1].rsplit("_step", 1)[0]
            for cells in csv.DictReader(io.StringIO(files[path].decode(), newline="")):
                stats = {op: text for op, text in cells.items() if op in golden.OPS}
                key = (rank, int(cells["step"]), cells["module_name"], cells["scope"])
                more = (int(cells.get("micro_step") or -1), int(cells["vpp_stage"] or -1))
                wanted.setdefault(slug.lower(), []).append(
                    (*key, *more, repr({k: float(v) for k, v in stats.items()}))
                )
        assert set(tree.tables) == set(wanted)
        for monitor, rows in wanted.items():
            table = tree[monitor]
            got = [
                (one.rank, one.step, one.name, one.scope, one.micro_step, one.vpp_stage, repr(one.stats))
                for one in table
            ]
            assert got == rows, (name, monitor)
            assert table.step.dtype == np.int64 and all(
                one.dtype == np.float64 for one in table.stats.values()
            )
            seen += len(rows)
    assert seen > 3000


def steps_of(path: str) -> int:
    return int(path.rsplit("_step", 1)[1].split("-", maxsplit=1)[0])


def test_columns_that_shift_are_left_out(tmp_path: Path) -> None:
    """msProbe's own restart with other columns: rows without a header of theirs."""
    files = golden.recorded("restart_other_ops", "expected")
    tree = read(plant(tmp_path, dict(files)))
    lengths = {len(row) for data in files.values() for row in golden.rows(data)}
    assert len(lengths) == 2 and tree.problems
    left_out = sum(problem.rows for problem in tree.problems)
    assert len(tree["param"]) + left_out == sum(len(golden.rows(data)) - 1 for data in files.values())
    assert "don't fit their header, the first is line" in str(tree.problems[0])


def test_parts_are_read_with_their_columns(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "rank_0/param_step0-9.csv": HEADER + "-1,0,w,param_origin,1.5,0.0\r\n",
            "rank_0/param_step0-9.part2.csv": "vpp_stage,step,module_name,scope,min\r\n-1,3,w,param_origin,-2.0\r\n",
            "rank_0/param_step10-19.csv": HEADER + "-1,10,w,param_origin,2.5,0.0\r\n",
        },
    )
    table = read(tmp_path)["param"]
    assert table.step.tolist() == [0, 3, 10]
    assert [row.stats for row in table] == [
        {"norm": 1.5, "nans": 0.0},
        {"min": -2.0},
        {"norm": 2.5, "nans": 0.0},
    ]
    assert table.valid["min"].tolist() == [False, True, False]
    assert math.isnan(table.stats["min"][0])


@pytest.mark.parametrize("size", [1, 3000])
def test_a_last_line_that_was_cut_off(tmp_path: Path, size: int) -> None:
    rows = "".join(f"-1,{step},w,param_origin,{step}.5,0.0\r\n" for step in range(size))
    plant(tmp_path, {"rank_3/param_step0-99999.csv": HEADER + rows + "-1,7,w,param_orig"})
    tree = read(tmp_path)
    assert len(tree["param"]) == size
    assert set(tree["param"].rank.tolist()) == {3}
    (problem,) = tree.problems
    assert problem.rows == 1 and "not finished" in str(problem) and problem.path.name in str(problem)


def test_a_header_in_the_middle_holds_for_what_follows(tmp_path: Path) -> None:
    content = HEADER + "-1,0,w,s,1.0,0.0\r\n" + "vpp_stage,step,module_name,scope,min\r\n-1,1,w,s,-4.0\r\n"
    table = read(plant(tmp_path, {"rank_0/param_step0-9.csv": content}))["param"]
    assert [row.stats for row in table] == [{"norm": 1.0, "nans": 0.0}, {"min": -4.0}]


def test_lines_that_are_no_rows(tmp_path: Path) -> None:
    content = HEADER + "-1,0,w,s,1.0,0.0\r\n-1,x,w,s,1.0,0.0\r\n\r\n-1,2,w,s,1.0\r\n-1,3,w,s,,0.0\r\n"
    tree = read(
        plant(
            tmp_path,
            {
                "rank_0/param_step0-9.csv": content,
                "rank_0/cc_step0-0.csv": "-1,0,w,s,1.0,0.0\r\n",
                "rank_0/optimizer_step0-0.csv": "",
                "rank_0/notes.csv": "a,b\n",
            },
        )
    )
    assert tree["param"].step.tolist() == [0, 3]
    assert math.isnan(tree["param"].stats["norm"][1])
    texts = sorted(map(str, tree.problems))
    assert "no header" in texts[0] and "2 lines don't fit their header, the first is line 3" in texts[1]


@pytest.mark.parametrize("parser", ["arrow", "python"])
def test_names_with_commas_quotes_and_ends_of_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parser: str
) -> None:
    if parser == "arrow":
        pytest.importorskip("pyarrow")
    monkeypatch.setattr(reading, "_SMALL", 0 if parser == "arrow" else 1 << 60)
    names = ["a,b", 'c"d', "new\nline", "é"]
    stream = io.StringIO(newline="")
    csv.writer(stream).writerows([[-1, 0, name, "s", 1.0, 0.0] for name in names])
    table = read(plant(tmp_path, {"rank_0/param_step0-0.csv": HEADER + stream.getvalue()}))["param"]
    assert table.name.tolist() == names


CELLS = st.floats() | st.sampled_from([0.1, 1e-300, 5e-324, 1.7976931348623157e308])
NAMES = st.text(st.characters(exclude_categories=("Cs", "Cc")) | st.sampled_from(',"\n'), max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(NAMES, st.integers(-1, 5), st.integers(0, 2**40), CELLS, CELLS), min_size=1, max_size=9
    )
)
def test_what_is_written_comes_back_by_both_parsers(rows: list[tuple[Any, ...]]) -> None:
    """Bit for bit."""
    made = Rows()
    for name, stage, _, _, _ in rows:
        made.add(name, "s", stage, 0, host_readings([np.zeros(1)])[0])
    table = np.zeros((len(rows), 6))
    table[:, COLUMNS.index("norm")], table[:, COLUMNS.index("mean")] = (
        [row[at] for row in rows] for at in (3, 4)
    )
    ops = ("mean", "norm")
    data = table_bytes(Rows(), table[:0], 0, ops, header=True) + table_bytes(made, table, rows[0][2], ops)
    header = ["vpp_stage", "step", "module_name", "scope", "mean", "norm"]
    problems: list[Any] = []
    found = [*reading._by_hand(Path(), data, problems), reading._by_arrow(data, header)]
    assert problems == []
    for columns in [one for one in found if one is not None]:
        assert columns["module_name"].tolist() == [row[0] for row in rows]
        assert columns["vpp_stage"].tolist() == [row[1] for row in rows]
        assert set(columns["step"].tolist()) == {rows[0][2]}
        for at, name in ((3, "norm"), (4, "mean")):
            assert [repr(one) for one in columns[name].tolist()] == [repr(row[at]) for row in rows]


def test_the_older_monitors_tree(tmp_path: Path) -> None:
    tree = read(plant(tmp_path, OLDER))
    assert tree.layouts == {"v1"} and tree.problems == ()
    module = tree["module"]
    assert module.rank.tolist() == [0, 0, 0, 0, 1]
    assert module.run.tolist() == [0, 0, 0, 1, 0]
    assert set(module.scope) == {"forward"} and set(module.name) == {"layers.0.input"}
    assert module.micro_step.tolist() == [0, 1, 0, 0, 0]
    assert module.vpp_stage.tolist() == [0, 0, 1, 0, 0]
    assert np.array_equal(module.stats["min"], [-1.5, np.nan, -np.inf, -7.0, -3.0], equal_nan=True)
    assert set(module.texts["shape"]) == {"(2, 4)"} and set(module.texts["dtype"]) == {"torch.bfloat16"}
    assert [row.scope for row in tree["weight_grad"]] == ["reduced"]
    assert tree["linear_hook"].stats["sr"].tolist() == [1.25]
    assert metric_of("module", "forward") == "actv" and metric_of("cc", "comm") == "comm"


def test_only_what_is_asked_for(tmp_path: Path) -> None:
    plant(tmp_path, OLDER)
    assert set(read(tmp_path, ranks=[1]).tables) == {"module"}
    assert set(read(tmp_path, monitors=["weight_grad"]).tables) == {"weight_grad"}
    assert read(tmp_path, steps=range(1, 2))["module"].stats["norm"].tolist() == [math.inf]
    assert read(tmp_path, time_start="Dec04_00-00-00")["module"].stats["norm"].tolist() == [8.0]
    assert len(read(tmp_path, time_end="Dec03_21-34-40")["module"]) == 3
    one = read(tmp_path / "Dec03_21-34-41-rank1-ffffffff")
    assert one["module"].rank.tolist() == [1]
    file = read(tmp_path / "Dec03_21-34-41-rank1-ffffffff" / "actv_0-1.csv")
    assert file["module"].stats["norm"].tolist() == [4.0]


def test_the_last_of_equal_rows(tmp_path: Path) -> None:
    rows = "".join(f"-1,{step},w,s,{value},0.0\r\n" for step, value in ((0, 1.0), (1, 2.0), (0, 3.0)))
    table = read(plant(tmp_path, {"rank_0/param_step0-9.csv": HEADER + rows}))["param"]
    last, others = table.latest()
    assert others == 1
    assert last.step.tolist() == [1, 0] and last.stats["norm"].tolist() == [2.0, 3.0]
    assert last.latest() == (last, 0)


def test_what_is_no_tree(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no tables of msProbe's monitors: neither rank_<r>"):
        read(tmp_path)
    plant(tmp_path, OLDER)
    with pytest.raises(ValueError, match="of that time"):
        read(tmp_path, time_end="Jan01_00-00-00")
    with pytest.raises(ValueError, match="is after time_end"):
        read(tmp_path, time_start="Dec04_00-00-00", time_end="Dec03_00-00-00")
    with pytest.raises(ValueError, match="of the form Dec03_21-34-40"):
        time_of("yesterday")
