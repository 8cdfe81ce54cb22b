"""JSON Lines and their reader."""

from __future__ import annotations

import json
import math
import os

import ml_dtypes
import numpy as np
import pytest

from tests.sinks.make import message, run_info, snapshot
from trainmon.sinks.base import plain
from trainmon.sinks.jsonl import JsonlSink, read_jsonl


def write(directory, *snapshots, messages=(), every=1, **facts):
    sink = JsonlSink(every=every)
    sink.open(run_info(directory, **facts))
    for shown in snapshots:
        sink.write(shown)
    for shown in messages:
        sink.message(shown)
    sink.flush()
    sink.close()
    return directory / f"rank_{facts.get('rank', 0)}" / "scalars.jsonl"


def test_one_object_a_step(tmp_path):
    first = snapshot(1, loss__global=2.5, grad__norm=None, optim__lr=math.nan)
    second = snapshot(2, a=math.inf, b=-math.inf, c=5e-324, d=1 / 3, e=-0.0)
    path = write(tmp_path, first, second, rank=3, world=8, units={"loss/global": "nat/token"})
    life, one, two = path.read_text().splitlines()
    assert json.loads(life) == {
        "record": "run",
        "run": "demo",
        "life": 1,
        "resumed_step": 0,
        "time": json.loads(life)["time"],
        "rank": 3,
        "world": 8,
        "units": {"loss/global": "nat/token"},
    }
    null = {"step": 1, "time": 1.7e9, "loss/global": 2.5, "grad/norm": None, "optim/lr": "NaN"}
    assert json.loads(one) == null
    assert list(json.loads(one)) == list(null)
    assert json.loads(two)["a"] == "Infinity" and json.loads(two)["b"] == "-Infinity"

    read = read_jsonl(path)
    assert read[1]["grad/norm"] is None and math.isnan(read[1]["optim/lr"])
    assert [read[2][k] for k in "abcd"] == [math.inf, -math.inf, 5e-324, 1 / 3]
    assert math.copysign(1, read[2]["e"]) == -1


def test_resume_says_where_the_second_life_begins(tmp_path):
    write(tmp_path, *(snapshot(step, loss__global=float(step)) for step in range(1, 7)))
    path = write(
        tmp_path,
        *(snapshot(step, loss__global=100.0 + step) for step in range(4, 9)),
        life=2,
        resumed_step=3,
    )
    everything = read_jsonl(path)
    assert [r.get("step", r.get("record")) for r in everything] == ["run", *range(1, 7), "run", *range(4, 9)]
    assert (everything[7]["life"], everything[7]["resumed_step"]) == (2, 3)
    latest = [r for r in read_jsonl(path, latest=True) if "record" not in r]
    assert [(r["step"], r["loss/global"]) for r in latest] == [
        *((step, float(step)) for step in range(1, 4)),
        *((step, 100.0 + step) for step in range(4, 9)),
    ]


def test_values_of_any_scalar_type(tmp_path):
    torch = pytest.importorskip("torch")
    values = {
        "loss": np.float32(0.1),
        "norm": np.float64(2.5),
        "tokens": np.int64(3),
        "flag": np.bool_(True),
        "lr": torch.tensor(1.5, dtype=torch.bfloat16),
        "small": ml_dtypes.bfloat16(1.5),
        "eight": ml_dtypes.float8_e4m3fn(0.5),
        "half": np.float16("nan"),
        "array": np.array([[1.0, np.inf]], np.float32),
        "nested": {"a": (np.int8(-6), [None, True])},
        "path": tmp_path,
        "huge": 2**80,
    }
    path = write(tmp_path, snapshot(1, **values), messages=[message("types", **values)])
    record = read_jsonl(path)[1]
    event = read_jsonl(path.with_name("events.jsonl"))[1]
    for found in (record, event["data"]):
        assert found["loss"] == 0.10000000149011612
        assert (found["norm"], found["tokens"], found["flag"], found["lr"]) == (2.5, 3, True, 1.5)
        assert (found["small"], found["eight"], found["huge"]) == (1.5, 0.5, 2**80)
        assert math.isnan(found["half"])
        assert found["nested"] == {"a": [-6, [None, True]]}
        assert found["path"] == str(tmp_path)
    assert event["data"]["array"] == [[1.0, math.inf]]
    for file in path.parent.iterdir():
        assert "np." not in file.read_text() and "tensor(" not in file.read_text()


def test_what_no_json_can_hold_is_its_text():
    assert plain(object).startswith("<class")
    assert plain({1: {2}}) == {"1": [2]}
    assert plain(1 + 2j) == "(1+2j)"


def test_messages(tmp_path):
    text = 'experts[/0].w "quoted"\nnew line \udc80 \u2028 é'
    path = write(tmp_path, messages=[message(text, step=7, level="error", where="w[bold]x", value=math.nan)])
    lines = path.with_name("events.jsonl").read_bytes().split(b"\n")
    assert len(lines) == 3 and lines[2] == b""
    event = read_jsonl(path.with_name("events.jsonl"))[1]
    assert event["text"] == text
    assert (event["step"], event["level"], event["kind"]) == (7, "error", "test")
    assert event["data"]["where"] == "w[bold]x" and math.isnan(event["data"]["value"])


def test_every_shows_the_first_step_and_the_multiples(tmp_path):
    path = write(tmp_path, *(snapshot(step) for step in range(3, 21)), every=5)
    assert [r["step"] for r in read_jsonl(path)[1:]] == [3, 5, 10, 15, 20]
    for wrong in (0, -1, True, 1.0, "2"):
        with pytest.raises(ValueError, match="every must be an integer of at least 1"):
            JsonlSink(every=wrong)


def test_a_torn_line_is_ended_before_the_next_record(tmp_path):
    path = write(tmp_path, snapshot(1), snapshot(2))
    os.truncate(path, path.stat().st_size - 5)
    write(tmp_path, snapshot(2), life=2, resumed_step=1)
    assert [r.get("step", "run") for r in read_jsonl(path)] == ["run", 1, "run", 2]
    # A whole file gets no empty line.
    write(tmp_path, snapshot(3), life=3, resumed_step=2)
    assert b"\n\n" not in path.read_bytes()
    assert [r.get("step", "run") for r in read_jsonl(path)] == ["run", 1, "run", 2, "run", 3]


def test_reading_passes_over_what_is_no_record(tmp_path):
    path = tmp_path / "scalars.jsonl"
    path.write_bytes(b'{"step": 1}\n[1]\n\xff\xfe\n\n{"step": 2, "x": "Infini')
    assert read_jsonl(path) == [{"step": 1}]
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "none.jsonl")
