"""TensorBoard files, read back with TensorBoard's own reader."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.sinks.make import ROOT, finish, run_info, snapshot, start, table
from trainmon.sinks.base import tag
from trainmon.sinks.tensorboard import TensorBoardSink

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def write(directory, *snapshots, every=1, worst=5, exclude=(), **facts):
    sink = TensorBoardSink(every=every, worst=worst, exclude=exclude)
    sink.open(run_info(directory, **facts))
    for shown in snapshots:
        sink.write(shown)
    sink.flush()
    sink.close()


def read(directory):
    reader = event_accumulator.EventAccumulator(
        str(directory / "rank_0" / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}
    )
    return reader.Reload()


def scalars(reader, name):
    return [(event.step, event.value) for event in reader.Scalars(name)]


def test_the_same_values_as_the_log(tmp_path):
    shown = [
        snapshot(1, loss__global=2.5, grad__norm=None, big=1e300),
        snapshot(2, loss__global=math.nan, grad__norm=math.inf, big=-1e300),
    ]
    write(tmp_path, *shown)
    reader = read(tmp_path)
    assert sorted(reader.Tags()["scalars"]) == ["big", "grad/norm", "loss/global"]
    (first, second) = reader.Scalars("loss/global")
    assert (first.step, first.value, first.wall_time) == (1, 2.5, 1.7e9)
    assert second.step == 2 and math.isnan(second.value)
    # Null is not a value: the series begins where it is defined.
    assert scalars(reader, "grad/norm") == [(2, math.inf)]
    # Event files hold float32.
    assert scalars(reader, "big") == [(1, math.inf), (2, -math.inf)]


def test_series_that_are_left_out(tmp_path):
    local = table({"w": 1.0}, series="grad/norm_local/<p>")
    shown = snapshot(1, table({"w": 1.0}), local, loss__global=1.0, loss__device=2.0)
    write(tmp_path, shown, exclude=[re.compile("^loss/device$"), re.compile("^grad/norm_local$")])
    tags = read(tmp_path).Tags()["scalars"]
    assert "loss/global" in tags and "grad/norm/max" in tags
    assert not [tag for tag in tags if "device" in tag or "local" in tag]


@pytest.mark.parametrize("clock", [0.0, -3600.0])
def test_each_step_once_after_a_resume(tmp_path, monkeypatch, clock):
    import time

    write(tmp_path, *(snapshot(step, loss__global=float(step)) for step in range(1, 7)))
    now = time.time()
    monkeypatch.setattr("trainmon.sinks.tensorboard.time.time", lambda: now + clock)
    write(
        tmp_path,
        *(snapshot(step, loss__global=100.0 + step) for step in range(4, 9)),
        life=2,
        resumed_step=3,
    )
    assert scalars(read(tmp_path), "loss/global") == [
        *((step, float(step)) for step in range(1, 4)),
        *((step, 100.0 + step) for step in range(4, 9)),
    ]
    assert len(os.listdir(tmp_path / "rank_0" / "tensorboard")) == 2


def test_a_run_begun_again_replaces_the_old_one(tmp_path):
    write(tmp_path, *(snapshot(step) for step in range(1, 7)))
    write(tmp_path, *(snapshot(step, loss__global=50.0) for step in range(1, 3)))
    assert scalars(read(tmp_path), "loss/global") == [(1, 50.0), (2, 50.0)]


def test_tables_become_a_fixed_number_of_tags(tmp_path):
    rng = np.random.default_rng(0)
    names = [f"layer.{n}[/w]" for n in range(500)]
    values = {step: dict(zip(names, rng.permutation(500).astype(float), strict=True)) for step in (1, 2, 3)}
    write(tmp_path, *(snapshot(step, table(values[step])) for step in values), worst=3)
    reader = read(tmp_path)
    tags = reader.Tags()
    assert sorted(t for t in tags["scalars"] if t.startswith("grad")) == [
        *("grad/norm/max", "grad/norm/p50", "grad/norm/p95"),
        *("grad/norm/worst_1", "grad/norm/worst_2", "grad/norm/worst_3"),
    ]
    assert scalars(reader, "grad/norm/p50") == [(step, 249.0) for step in values]
    assert scalars(reader, "grad/norm/p95") == [(step, 474.0) for step in values]
    assert scalars(reader, "grad/norm/worst_3") == [(step, 497.0) for step in values]
    assert tags["tensors"] == ["grad/norm/worst"]
    for event in reader.Tensors("grad/norm/worst"):
        shown = values[event.step]
        largest = sorted(shown, key=shown.__getitem__)[:-4:-1]
        text = event.tensor_proto.string_val[0].decode()
        assert text == "\n".join(f"    {rank}. {name}" for rank, name in enumerate(largest, 1))


def test_tables_with_nonfinite_and_null_values(tmp_path):
    shown = {"a": 1.0, "b": None, "c": math.nan, "d": 3.0, "e": math.inf, "f": 2.0}
    write(tmp_path, snapshot(1, table(shown)), snapshot(2, table({"a": None})), worst=2)
    reader = read(tmp_path)
    # Of 1, 2, 3, Inf, NaN: one NaN does not hide the rest.
    assert scalars(reader, "grad/norm/p50") == [(1, 3.0)]
    assert math.isnan(reader.Scalars("grad/norm/max")[0].value)
    assert scalars(reader, "grad/norm/worst_2") == [(1, math.inf)]


def test_the_names_of_the_worst_are_said_when_they_change(tmp_path):
    one, two = {"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 2.0}
    write(tmp_path, *(snapshot(s, table(two if s == 4 else one)) for s in range(1, 6)), worst=1)
    assert [event.step for event in read(tmp_path).Tensors("grad/norm/worst")] == [1, 4, 5]


def test_tables_of_modules_and_states(tmp_path):
    shown = table({"a": 1.0}, "activation/norm/<module>"), table({"a": 1.0}, "moment/norm/exp_avg/<p>")
    write(tmp_path, snapshot(1, *shown, table({"0": 1.0}, "loss/micro")), worst=0)
    tags = [name.removesuffix("/max") for name in read(tmp_path).Tags()["scalars"] if name.endswith("/max")]
    assert sorted(tags) == ["activation/norm", "loss/micro", "moment/norm/exp_avg"]


def test_no_worst(tmp_path):
    write(tmp_path, snapshot(1, table({"a": 1.0})), worst=0)
    tags = read(tmp_path).Tags()
    assert sorted(t for t in tags["scalars"] if "grad" in t) == [
        "grad/norm/max",
        "grad/norm/p50",
        "grad/norm/p95",
    ]
    assert tags["tensors"] == []


@pytest.mark.parametrize(
    ("style", "tags"),
    [
        ("slash", ["grad/norm", "loss/global", "optim/lr", "optim/loss_scale", "perf/mfu"]),
        ("megatron", ["grad-norm", "lm loss", "learning-rate", "loss-scale", "perf/mfu"]),
        ("mindformers", ["grad-norm", "loss", "learning-rate", "loss-scale", "perf/mfu"]),
    ],
)
def test_tag_styles(tmp_path, style, tags):
    values = {
        "grad__norm": 1.0,
        "loss__global": 1.0,
        "optim__lr": 1.0,
        "optim__loss_scale": 1.0,
        "perf__mfu": 1.0,
    }
    write(tmp_path, snapshot(1, **values), tag_style=style)
    assert read(tmp_path).Tags()["scalars"] == tags


def test_tags_of_subjects():
    assert tag("moment/norm/exp_avg/w", "mindformers") == "adam_m_norm/w"
    assert tag("grad/norm_local/w", "mindformers") == "local_norm/w"
    assert tag("grad/norm/w", "mindformers") == "grad/norm/w"
    with pytest.raises(ValueError, match="slash, megatron, mindformers"):
        tag("grad/norm", "flat")


def test_styled_tables(tmp_path):
    write(tmp_path, snapshot(1, table({"w": 1.0}, "grad/norm_local/<p>")), tag_style="mindformers", worst=0)
    assert "local_norm/max" in read(tmp_path).Tags()["scalars"]


def test_every(tmp_path):
    write(tmp_path, *(snapshot(step) for step in range(1, 8)), every=3)
    assert [step for step, _ in scalars(read(tmp_path), "loss/global")] == [1, 3, 6]


def test_a_missing_package_is_one_clear_sentence(monkeypatch):
    real = importlib.util.find_spec

    def without(name, *rest):
        return None if name == "tensorboard" else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(ImportError) as caught:
        TensorBoardSink()
    assert str(caught.value) == (
        "the tensorboard sink needs the package tensorboard: pip install trainmon[tensorboard]"
    )
    with pytest.raises(ValueError, match="worst"):
        TensorBoardSink(worst=-1)


def test_nothing_heavy_is_loaded():
    code = (
        "import sys, pathlib, tempfile\n"
        "from trainmon.sinks.tensorboard import TensorBoardSink\n"
        "from trainmon.sinks.base import RunInfo\n"
        "early = 'tensorboard' in sys.modules\n"
        "run = RunInfo(pathlib.Path(tempfile.mkdtemp()), 'demo')\n"
        "sink = TensorBoardSink(); sink.open(run); sink.close()\n"
        "print(early, 'tensorboard' in sys.modules, 'tensorflow' in sys.modules, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "False True False False\n"


def test_a_kill_leaves_a_file_that_reads(tmp_path):
    script = """
    from trainmon.sinks.tensorboard import TensorBoardSink
    writer = Writer([TensorBoardSink()], run_info(directory))
    for step in range(1, 50):
        writer.put(snapshot(step))
    assert writer.flush(60)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    status, _, err = finish(start(script, tmp_path))
    assert status == -9, err
    assert [step for step, _ in scalars(read(tmp_path), "loss/global")] == list(range(1, 50))
