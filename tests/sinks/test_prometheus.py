"""Prometheus, read back with the official parser."""

from __future__ import annotations

import importlib.util
import math
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from dataclasses import replace

import pytest

from tests.sinks.make import ROOT, finish, message, run_info, snapshot, start, table
from trainmon.config import ConfigError, load_config
from trainmon.events import TrainBegin
from trainmon.run import Run
from trainmon.series import catalogue
from trainmon.sinks.prometheus import PrometheusSink, metric_of
from trainmon.spread import RankSpread

pytest.importorskip("prometheus_client", reason="the extra `prometheus` is not installed")
from prometheus_client.parser import text_string_to_metric_families

MISSING = "the prometheus sink needs the package prometheus_client: pip install trainmon[prometheus]"


def opened(run_directory, *, rank=0, world=1, name="demo", **options):
    sink = PrometheusSink(**{"interval": 0.0, **options})
    sink.open(run_info(run_directory, rank=rank, world=world, name=name))
    return sink


def parse(text):
    """Values by metric and labels (`run` and `rank` left out); a sample must not come twice."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("run", "rank")}
            key = (sample.name, *sorted(labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def textfile(directory, rank=0):
    return parse((directory / f"rank_{rank}" / "metrics.prom").read_text(encoding="utf-8"))


def test_values_null_and_nonfinite(tmp_path):
    sink = opened(tmp_path)
    sink.write(snapshot(1, loss__global=1 / 3, grad__norm=2.5, optim__lr=math.nan, time__step=math.inf))
    first = textfile(tmp_path)
    assert first["trainmon_loss_global",] == 1 / 3 and first["trainmon_time_step_seconds",] == math.inf
    assert math.isnan(first["trainmon_optim_lr",])
    assert (first["trainmon_step",], first["trainmon_step_timestamp_seconds",]) == (1, 1.7e9)
    # Null takes the value away; what was not due keeps its last one.
    sink.write(snapshot(2, loss__global=None, optim__lr=-math.inf))
    second = textfile(tmp_path)
    assert ("trainmon_loss_global",) not in second
    assert second["trainmon_optim_lr",] == -math.inf and second["trainmon_grad_norm",] == 2.5
    assert second["trainmon_running",] == 1
    sink.close()
    assert textfile(tmp_path) == {**second, ("trainmon_running",): 0}


def test_subjects_and_ranks_are_labels(tmp_path):
    awkward = 'a"b\\c\nd{e="f"}, é'
    values = {"optim__lr": 1.0, f"optim__lr__{awkward}": 2.0, "loss__part__mtp": 3.0, "no__such[/x]": 4.0}
    sink = opened(tmp_path, rank=3, world=8, name='r"\n1')
    sink.write(snapshot(1, moe__max_vio=5.0, moe__max_vio__decoder__0=6.0, **values))
    text = (tmp_path / "rank_3" / "metrics.prom").read_text(encoding="utf-8")
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert {(s.labels["run"], s.labels["rank"]) for s in samples} == {('r"\n1', "3")}
    found = parse(text)
    assert found["trainmon_optim_lr",] == 1 and found["trainmon_moe_max_vio",] == 5
    assert found["trainmon_optim_lr_by_group", ("group", awkward)] == 2
    assert found["trainmon_loss_part_by_part", ("part", "mtp")] == 3
    assert found["trainmon_moe_max_vio_by_layer", ("layer", "decoder/0")] == 6
    assert found["trainmon_value", ("name", "no/such[/x]")] == 4
    sink.close()


def test_no_two_series_share_a_metric_and_each_has_a_valid_name():
    metrics = [metric_of(name) for name in catalogue()]
    names = [m.name for m in metrics] + [f"{m.name}_quantile" for m in metrics]
    names += [f"trainmon_rank_{word}" for word in ("value", "holder", "outlier", "nonfinite")]
    names += ["trainmon_value", "trainmon_messages", "trainmon_messages_total"]
    names += ["trainmon_running", "trainmon_life", "trainmon_step", "trainmon_step_timestamp_seconds"]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)
    labels = {label for m in metrics for label in m.labels}
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in labels)
    assert not labels & {"run", "rank", "quantile", "le"}


def test_every_series_of_the_catalogue_reads_back(tmp_path):
    concrete = {
        re.sub("<([a-z]+)>", r"x_\1", name).replace("/", "__"): float(n)
        for n, name in enumerate(catalogue(), 1)
    }
    sink = opened(tmp_path)
    sink.write(snapshot(1, **concrete))
    found = textfile(tmp_path)
    assert sorted(
        v for k, v in found.items() if k[0] != "trainmon_value" and v in range(2, len(catalogue()) + 1)
    ) == [float(n) for n in range(2, len(catalogue()) + 1)]
    sink.close()


def test_tables_are_quantiles_and_single_tensors_where_asked(tmp_path):
    shown = {"a": 1.0, "b": None, "c/d": math.nan, "e": 3.0, "f": math.inf, "g": 2.0}
    for per_tensor in (False, True):
        sink = opened(tmp_path, per_tensor=per_tensor)
        sink.write(
            snapshot(1, table(shown), table({"0": 1.0, "1": 2.0}, "loss/micro", "loss"), grad__norm=9.0)
        )
        found = textfile(tmp_path)
        quantile = {
            k[1][1]: v for k, v in found.items() if k[0] == "trainmon_grad_norm_by_parameter_quantile"
        }
        assert quantile["0.5"] == 3.0 and math.isnan(quantile["1"]) and len(quantile) == 3
        assert found["trainmon_loss_micro_quantile", ("quantile", "1")] == 2.0
        assert found["trainmon_grad_norm",] == 9.0
        single = {k[1][1]: v for k, v in found.items() if k[0] == "trainmon_grad_norm_by_parameter"}
        assert set(single) == ({"a", "c/d", "e", "f", "g"} if per_tensor else set())
        # A tensor that is null now, or gone, is no old value.
        sink.write(snapshot(2, table({"a": None, "e": 4.0})))
        single = {
            k[1][1]: v for k, v in textfile(tmp_path).items() if k[0] == "trainmon_grad_norm_by_parameter"
        }
        assert single == ({"e": 4.0} if per_tensor else {})
        sink.close()


def test_tables_whose_name_gives_a_label(tmp_path):
    shown = [
        table({"w": n, "a/b": 2 * n}, f"moment/norm/{state}/<p>", "moments")
        for state, n in (("m", 1.0), ("v", 4.0))
    ]
    sink = opened(tmp_path, per_tensor=True)
    sink.write(snapshot(1, *shown, table({"w": 7.0}, "no/such/<p>"), moment__norm__m=9.0))
    found = {
        key: value for key, value in textfile(tmp_path).items() if "moment" in key[0] or "value" in key[0]
    }
    name = "trainmon_moment_norm_by_state_parameter"
    expected = {("trainmon_moment_norm_by_state", ("state", "m")): 9.0}
    for state, n in (("m", 1.0), ("v", 4.0)):
        for share, value in (("0.5", n), ("0.95", 2 * n), ("1", 2 * n)):
            expected[f"{name}_quantile", ("quantile", share), ("state", state)] = value
        for parameter, value in (("w", n), ("a/b", 2 * n)):
            expected[name, ("parameter", parameter), ("state", state)] = value
    for share in ("0.5", "0.95", "1"):
        expected["trainmon_value_quantile", ("name", "no/such/<p>"), ("quantile", share)] = 7.0
    assert found == expected
    sink.close()


def test_ranks_side_by_side(tmp_path):
    spread = RankSpread(1.0, 2, 9.0, 5, 1.5, 8.0, 7, outliers=(5,), nonfinite=(3, 6))
    nothing = RankSpread(math.nan, -1, math.nan, -1, math.nan, math.nan, 0, outliers=(), nonfinite=(0,))
    sink = opened(tmp_path, world=8)
    sink.write(replace(snapshot(1), ranks={"grad/norm": spread, "loss/device": nothing}))
    sink.write(snapshot(2))  # not compared in this step: the last comparison stands
    found = {key: value for key, value in textfile(tmp_path).items() if key[0].startswith("trainmon_rank")}
    norm = ("series", "grad/norm")
    assert found == {
        ("trainmon_rank_value", norm, ("which", "low")): 1.0,
        ("trainmon_rank_value", norm, ("which", "median")): 1.5,
        ("trainmon_rank_value", norm, ("which", "high")): 9.0,
        ("trainmon_rank_holder", norm, ("which", "low")): 2.0,
        ("trainmon_rank_holder", norm, ("which", "high")): 5.0,
        ("trainmon_rank_outlier", ("outlier", "5"), norm): 1.0,
        ("trainmon_rank_nonfinite", ("outlier", "3"), norm): 1.0,
        ("trainmon_rank_nonfinite", ("outlier", "6"), norm): 1.0,
        ("trainmon_rank_nonfinite", ("outlier", "0"), ("series", "loss/device")): 1.0,
    }
    # Compared anew, nobody stands out.
    well = replace(spread, outliers=(), nonfinite=())
    sink.write(replace(snapshot(3), ranks={"grad/norm": well}))
    found = textfile(tmp_path)
    assert not [key for key in found if key[0] in ("trainmon_rank_outlier", "trainmon_rank_nonfinite")]
    assert found["trainmon_rank_value", norm, ("which", "high")] == 9.0
    sink.close()


def test_messages_are_counted(tmp_path):
    sink = opened(tmp_path)
    for level in ("warning", "warning", "error"):
        sink.message(message("x", level=level))
    sink.flush()
    found = textfile(tmp_path)
    assert found["trainmon_messages_total", ("kind", "test"), ("level", "warning")] == 2
    assert found["trainmon_messages_total", ("kind", "test"), ("level", "error")] == 1
    sink.close()


def test_the_endpoint_answers_while_the_run_lives(tmp_path):
    sink = opened(None, port=0)
    sink.write(snapshot(1, loss__global=1.5))
    url = f"http://127.0.0.1:{sink.bound}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert parse(answer.read().decode())["trainmon_loss_global",] == 1.5
    sink.write(snapshot(2, loss__global=math.nan))
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert math.isnan(parse(answer.read().decode())["trainmon_loss_global",])
    sink.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=10)
    sink.close()


def test_scrapes_and_steps_do_not_meet(tmp_path):
    """Every scrape shows one step, whole, while steps go on in another thread."""
    sink = opened(None, port=0)
    sink.write(snapshot(1, loss__global=1.0, grad__norm=1.0))
    stop = threading.Event()

    def run():
        step = 1
        while not stop.is_set():
            step += 1
            sink.write(snapshot(step, loss__global=float(step), grad__norm=float(step)))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(30):
            with urllib.request.urlopen(f"http://127.0.0.1:{sink.bound}/", timeout=10) as answer:
                found = parse(answer.read().decode())
            assert found["trainmon_loss_global",] == found["trainmon_grad_norm",] >= 1
    finally:
        stop.set()
        thread.join()
        sink.close()


def test_a_port_that_is_taken_costs_the_endpoint_only(tmp_path, caplog):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        sink = opened(tmp_path, rank=1, world=2, port=taken - 1)
        assert sink.bound is None and f"127.0.0.1:{taken} can't be opened" in caplog.text
        sink.write(snapshot(1, loss__global=1.0))
        assert textfile(tmp_path, rank=1)["trainmon_loss_global",] == 1
        sink.close()
        with pytest.raises(OSError):
            opened(tmp_path, textfile=False, port=taken)
    with pytest.raises(OSError, match="is no port"):
        opened(None, rank=9, world=10, port=65530)


def test_a_directory_of_the_collector(tmp_path):
    collector = tmp_path / "collector"
    for rank in (0, 1):
        sink = opened(tmp_path / "run", rank=rank, world=2, name="a b/é", directory=str(collector))
        sink.write(snapshot(1, loss__global=1.0))
        sink.close()
    assert sorted(path.name for path in collector.iterdir()) == [
        "trainmon_a_b___rank0.prom",
        "trainmon_a_b___rank1.prom",
    ]
    assert not (tmp_path / "run").exists()


def test_the_file_waits_for_the_interval_and_is_never_half(tmp_path):
    sink = opened(tmp_path, interval=1000.0)
    for step in (1, 2, 3):
        sink.write(snapshot(step))
    assert ("trainmon_step",) not in textfile(tmp_path)
    sink.flush()
    assert textfile(tmp_path)["trainmon_step",] == 3
    sink.close()

    script = """
    from trainmon.sinks.prometheus import PrometheusSink
    sink = PrometheusSink(interval=0.0)
    sink.open(run_info(directory))
    for step in range(1, 10**6):
        sink.write(snapshot(step, loss__global=float(step)))
    """
    process = start(script, tmp_path)
    seen = set()
    while len(seen) < 50:
        assert process.poll() is None
        found = textfile(tmp_path)
        assert found.get(("trainmon_step",)) == found.get(("trainmon_loss_global",))
        seen.add(found.get(("trainmon_step",)))
    process.kill()
    finish(process)
    assert textfile(tmp_path)


def test_through_the_configuration(tmp_path):
    config = load_config(
        {"output_dir": str(tmp_path), "run_name": "r", "sinks": [{"type": "prometheus", "interval": 0}]}
    )
    run = Run(config, TrainBegin(), {}, "torch")
    run.writer.put(snapshot(1, loss__global=1.0))
    run.end("completed", last_step=1, reason=None, counters={})
    assert textfile(tmp_path / "r")["trainmon_loss_global",] == 1


def test_a_missing_package_is_one_clear_sentence(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "prometheus_client" else real(name, *a)
    )
    with pytest.raises(ImportError) as caught:
        PrometheusSink()
    assert str(caught.value) == MISSING
    with pytest.raises(ConfigError, match=r"sinks\.prometheus: the prometheus sink needs"):
        Run(load_config({"sinks": ["prometheus"]}), TrainBegin(), {}, "torch")


def test_nothing_heavy_is_loaded():
    code = (
        "import sys\nfrom trainmon.sinks.prometheus import PrometheusSink\nPrometheusSink()\n"
        "print('prometheus_client' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "False\n"
