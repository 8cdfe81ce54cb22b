"""Alerts and anomalies, as msProbe's older monitor has them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainmon.backend.base import STATISTICS
from trainmon.backend.statistics import finished, host_readings
from trainmon.cli import main
from trainmon.msprobe import analyse_anomalies
from trainmon.msprobe.alerts import Alert, Alerts, read_alerts
from trainmon.msprobe.anomalies import Anomaly, AnomalyFiles, order, tag_of
from trainmon.msprobe.tables import Rows


def rules(*named: tuple[str, dict[str, Any]]) -> Any:
    read = read_alerts({"alert": {"rules": [{"rule_name": name, "args": args} for name, args in named]}})
    assert read is not None
    return read.rules


def watch(
    *named: tuple[str, dict[str, Any]], ops: tuple[str, ...] = ("norm",), monitor: str = "weight_grad"
) -> Alerts:
    return Alerts(rules(*named), monitor, ops)


def look(alerts: Alerts, *tensors: tuple[str, Any], scope: str = "reduced") -> list[Alert]:
    rows = Rows()
    arrays = [np.atleast_1d(np.asarray(values, np.float64)) for _, values in tensors]
    readings = host_readings(arrays)
    for (name, _), reading in zip(tensors, readings, strict=True):
        rows.add(name, scope, -1, 1, reading)
    return alerts.look(rows, finished(readings, None))


def test_turbulence_is_that_of_msprobe_value_by_value() -> None:
    """Starts at the first size, looks before it follows, and follows what it flags."""
    random.seed(5)
    values = {name: [random.uniform(-1, 1) * (9 if i % 7 == 0 else 1) for i in range(60)] for name in "ab"}
    alerts = watch(("AnomalyTurbulence", {"threshold": 0.5, "warmup": 0}), ops=("mean",))
    averages: dict[str, float] = {}
    flagged = 0
    for i in range(60):
        found = {one.tag: one for one in look(alerts, *((name, values[name][i]) for name in "ab"))}
        for name in "ab":
            size = abs(values[name][i])
            average = averages.setdefault(name, size)
            tag = f"{name}/post_grad"
            assert (tag in found) == (size > average * 1.5)
            if tag in found:
                assert found[tag].average == pytest.approx(average, rel=1e-12)
                assert found[tag].value == values[name][i] and found[tag].statistic == "mean"
                flagged += 1
            averages[name] = 0.99 * average + 0.01 * size
    assert flagged > 5


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_the_warm_up_goes_by_before_anything_is_judged(warmup: int) -> None:
    alerts = watch(("AnomalyTurbulence", {"threshold": 0.1, "warmup": warmup}))
    told = [bool(look(alerts, ("w", 2.0**i))) for i in range(7)]
    assert told == [i >= max(warmup, 1) for i in range(7)]


def test_the_warm_up_is_ten_unless_it_is_given() -> None:
    alerts = watch(("AnomalyTurbulence", {"threshold": 0.1}))
    assert [bool(look(alerts, ("w", 2.0**i))) for i in range(12)] == [False] * 10 + [True] * 2


def test_a_nan_poisons_no_average() -> None:
    alerts = watch(("AnomalyNan", {}), ("AnomalyTurbulence", {"threshold": 0.5, "warmup": 2}))
    seen = [look(alerts, ("w", value)) for value in (1.0, 1.0, math.nan, 1.0, 5.0)]
    assert [[one.rule for one in found] for found in seen] == [
        [],
        [],
        ["AnomalyNan"],
        [],
        ["AnomalyTurbulence"],
    ]
    (last,) = seen[4]
    assert last.average == pytest.approx(1.0)
    assert last.text(7) == "AnomalyTurbulence: norm of w/post_grad is 5 at step 7, average 1"


def test_infinities_break_a_threshold_and_an_average() -> None:
    for name, arguments, told in (
        ("AnomalyNan", {}, False),
        ("AnomalyNan", {"threshold": 1e30}, True),
        ("AnomalyTurbulence", {"threshold": 1.0}, True),
    ):
        alerts = watch((name, arguments))
        look(alerts, ("w", 1.0))
        assert bool(look(alerts, ("w", -math.inf))) == told, name


@pytest.mark.parametrize(("value", "told"), [(2.0, False), (-2.5, True), (2.0000001, True)])
def test_the_threshold_of_nan_is_of_sizes_and_not_itself(value: float, told: bool) -> None:
    alerts = watch(("AnomalyNan", {"threshold": 2.0}), ops=("mean",))
    assert bool(look(alerts, ("w", value))) == told


def test_averages_are_of_norm_and_mean_alone() -> None:
    alerts = watch(("AnomalyTurbulence", {"threshold": 0.5, "warmup": 1}), ops=("min", "max", "mean", "norm"))
    assert look(alerts, ("w", [-1.0, 1.0, 1.0])) == []
    (found,) = look(alerts, ("w", [-1.0, 9.0, 1.0]))
    assert found.statistic == "mean"


def test_one_alert_a_row_by_the_first_statistic_and_rule() -> None:
    alerts = watch(
        ("AnomalyNan", {"threshold": 3.0}),
        ("AnomalyTurbulence", {"threshold": 0.5, "warmup": 1}),
        ops=("norm", "mean"),
    )
    look(alerts, ("w", 1.0))
    (found,) = look(alerts, ("w", 5.0))
    assert (found.rule, found.statistic) == ("AnomalyNan", "norm")
    (found,) = look(alerts, ("w", 2.0))
    assert (found.rule, found.statistic) == ("AnomalyTurbulence", "norm")


def test_forward_and_backward_have_averages_of_their_own() -> None:
    alerts = watch(("AnomalyTurbulence", {"threshold": 0.5, "warmup": 1}), monitor="module")
    look(alerts, ("m.input.0", 1.0), scope="forward")
    assert look(alerts, ("m.input.0", 100.0), scope="backward") == []
    (found,) = look(alerts, ("m.input.0", 2.0), scope="forward")
    assert found.tag == "m.input.0/actv"


def test_calls_of_one_step_are_judged_one_after_the_other() -> None:
    alerts = watch(("AnomalyTurbulence", {"threshold": 0.5, "warmup": 2}), monitor="module")
    found = look(alerts, *(("m.output.0", value) for value in (1.0, 1.0, 5.0, 1.0)), scope="forward")
    assert [(one.row, one.occurrence) for one in found] == [(2, (2, 4))]
    found = look(alerts, ("other", 1.0), ("m.output.0", 7.0), scope="forward")
    assert [(one.row, one.occurrence) for one in found] == [(1, (0, 1))]


def test_what_a_tensor_does_not_have_is_no_alert() -> None:
    alerts = watch(("AnomalyNan", {"threshold": 1.0}), ops=("min", "max", "mean", "norm", "nans"))
    assert look(alerts, ("empty", []), ("w", 0.5)) == []
    assert [one.tag for one in look(alerts, ("empty", []), ("w", math.nan))] == ["w/post_grad"]
    rows = Rows()
    rows.add("complex", "reduced", -1, 1, host_readings([np.ones(1)])[0])
    table = np.array([[1, math.nan, math.nan, 0.5, 0.5, 0.0]])
    assert STATISTICS == ("n", "min", "max", "mean", "norm", "nans") and alerts.look(rows, table) == []


def test_the_rules_beside_msprobes() -> None:
    random.seed(1)
    noise = [1 + random.gauss(0, 0.01) for _ in range(200)]
    for name, arguments, after, told in (
        ("AnomalyRobust", {}, 1.2, True),
        ("AnomalyRobust", {}, 0.8, False),
        ("AnomalyDrop", {}, 0.8, True),
        ("AnomalyDrop", {}, 1.2, False),
        ("AnomalyRobust", {"threshold": 1e6}, 1.2, False),
    ):
        alerts = watch((name, arguments))
        assert not any(look(alerts, ("w", value)) for value in noise), name
        assert bool(look(alerts, ("w", after))) == told, (name, after)


@pytest.mark.parametrize(
    ("alert", "said"),
    [
        ([], "alert must be an object"),
        ({"rules": {}}, "alert.rules must be a list"),
        ({"rules": [], "dump": "yes"}, "alert.dump must be true or false"),
        ({"rules": ["AnomalyNan"]}, r"alert.rules\[0\] must be an object"),
        ({"rules": [{"rule_name": "Nan"}]}, "must be one of AnomalyTurbulence, AnomalyNan"),
        ({"rules": [{"rule_name": "AnomalyTurbulence"}]}, "threshold is missing"),
        ({"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": -1}}]}, "at least 0, not -1"),
        ({"rules": [{"rule_name": "AnomalyNan", "args": {"threshold": "1"}}]}, "at least 0, not '1'"),
        ({"rules": [{"rule_name": "AnomalyNan", "args": {"threshold": True}}]}, "at least 0, not True"),
        ({"rules": [{"rule_name": "AnomalyNan", "args": 3}]}, "args must be an object"),
        (
            {"rules": [{"rule_name": "AnomalyRobust", "args": {"threshold": 0}}]},
            r"alert.rules\[0\].args: mad",
        ),
        ({"rules": [{"rule_name": "AnomalyRobust", "args": {"warmup": 500}}]}, "warmup"),
    ],
)
def test_what_is_no_rule(alert: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        read_alerts({"alert": alert})


def test_no_rules() -> None:
    assert read_alerts({}) is read_alerts({"alert": {"rules": []}}) is None


# -- anomalies ------------------------------------------------------------------------------------------------------


def anomaly(tag: str = "w/post_grad", **facts: int) -> Anomaly:
    given = {"rank": 0, "step": 0, "micro_step": 0, "pp_stage": 0, "vpp_stage": 0, "call_id": 0, **facts}
    return Anomaly(tag_name=tag, message="m", **given)


def plant(directory: Path, rank: int, *anomalies: Anomaly, plain: bool = False) -> None:
    folder = directory / "anomaly_detected" / f"rank{rank}"
    folder.mkdir(parents=True)
    files = AnomalyFiles(folder)
    files.add(anomalies)
    files.finish()
    if plain:  # as msProbe's older monitor leaves them
        (folder / "anomaly.jsonl").unlink()


#: Each line comes before the next, whatever the rank and whatever comes first in a file.
IN_ORDER = [
    {"tag": "m/actv", "step": 1, "micro_step": 0, "vpp_stage": 0, "pp_stage": 0, "call_id": 10},
    {"tag": "m/actv", "step": 1, "micro_step": 0, "vpp_stage": 0, "pp_stage": 1, "call_id": 9},
    {"tag": "m/actv", "step": 1, "micro_step": 0, "vpp_stage": 1, "pp_stage": 0, "call_id": 7},
    {"tag": "m/actv", "step": 1, "micro_step": 0, "vpp_stage": 1, "pp_stage": 0, "call_id": 8},
    {"tag": "m/actv_grad", "step": 1, "micro_step": 0, "vpp_stage": 1, "pp_stage": 1, "call_id": 6},
    {"tag": "w/pre_grad", "step": 1, "micro_step": 0, "vpp_stage": 1, "pp_stage": 0, "call_id": 5},
    {"tag": "w/acc_grad", "step": 1, "micro_step": 0, "vpp_stage": 0, "pp_stage": 1, "call_id": 4},
    {"tag": "w/post_grad", "step": 1, "micro_step": 0, "vpp_stage": 0, "pp_stage": 0, "call_id": 3},
    {"tag": "w/exp_avg", "step": 1, "micro_step": 0, "vpp_stage": 1, "pp_stage": 1, "call_id": 2},
    {"tag": "w/exp_avg_sq", "step": 1, "micro_step": 0, "vpp_stage": 0, "pp_stage": 0, "call_id": 1},
    {"tag": "m/actv", "step": 1, "micro_step": 1, "vpp_stage": 0, "pp_stage": 0, "call_id": 0},
    {"tag": "m/actv", "step": 2, "micro_step": 0, "vpp_stage": 0, "pp_stage": 0, "call_id": 0},
]


def test_the_order_is_that_of_the_computation() -> None:
    keys = [order({**one, "tag_name": one["tag"]}) for one in IN_ORDER]
    assert keys == sorted(keys) and len(set(keys)) == len(keys)
    assert tag_of("weight_grad", "w", "unreduced") == "w/pre_grad"
    assert tag_of("optimizer", "w", "exp_avg") == "w/exp_avg"


@pytest.mark.parametrize("plain", [False, True])
def test_the_first_of_all_ranks(tmp_path: Path, plain: bool) -> None:
    numbered = [anomaly(**one) for one in IN_ORDER]  # type: ignore[arg-type]
    shuffled = [numbered[at] for at in np.random.default_rng(3).permutation(len(numbered))]
    for rank in (0, 1):
        own = [Anomaly(**{**record(one), "rank": rank}) for one in shuffled[rank::2]]
        plant(tmp_path, rank, *own, plain=plain)
    found = analyse_anomalies(tmp_path, top_k=20)
    assert [one["tag_name"] for one in found] == [one["tag"] for one in IN_ORDER]
    assert [one["call_id"] for one in found] == [one["call_id"] for one in IN_ORDER]
    written = json.loads((tmp_path / "anomaly_analyse.json").read_text())
    assert list(written.values()) == found and next(iter(written)).endswith("m/actv_step_1_call_10")
    assert len(analyse_anomalies(tmp_path)) == 8
    out = tmp_path / "deep" / "er"
    only = analyse_anomalies(tmp_path / "anomaly_detected", out, 3, steps=[2])
    assert [one["step"] for one in only] == [2] and (out / "anomaly_analyse.json").exists()


def record(one: Anomaly) -> dict[str, Any]:
    return json.loads(json.dumps(one, default=lambda it: {n: getattr(it, n) for n in it.__slots__}))


def test_records_have_the_fields_of_msprobe(tmp_path: Path) -> None:
    files = AnomalyFiles(tmp_path)
    files.add([anomaly(step=3, call_id=7, rank=2)])
    loaded = json.loads((tmp_path / "anomaly.json").read_text())
    assert loaded == {
        "w/post_grad_step_3_call_7": {
            "rank": 2,
            "step": 3,
            "micro_step": 0,
            "pp_stage": 0,
            "vpp_stage": 0,
            "call_id": 7,
            "tag_name": "w/post_grad",
            "message": "m",
            "group_mates": [],
        }
    }


def test_the_object_is_written_seldom_and_is_whole_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainmon.msprobe import anomalies

    written = []
    publish = anomalies.publish
    monkeypatch.setattr(anomalies, "publish", lambda path, data: (written.append(path), publish(path, data)))
    files = AnomalyFiles(tmp_path)
    for step in range(100):
        files.add([anomaly(step=step)])
    assert len(written) == 7  # 1, 2, 4, ... 64
    files.finish()
    files.finish()
    assert len(written) == 8 and len(json.loads((tmp_path / "anomaly.json").read_text())) == 100
    AnomalyFiles(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_that_were_cut_off_are_read_as_far_as_they_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plant(tmp_path, 0, anomaly(step=1), anomaly(step=2))
    lines = tmp_path / "anomaly_detected" / "rank0" / "anomaly.jsonl"
    lines.write_bytes(lines.read_bytes()[:-9])
    broken = tmp_path / "anomaly_detected" / "rank1" / "anomaly.json"
    broken.parent.mkdir()
    broken.write_text('{"w_step_0": {"rank": 1, ')
    assert [one["step"] for one in analyse_anomalies(tmp_path)] == [1]
    assert "rank1" in caplog.text


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(tmp_path, 0, anomaly(step=3), anomaly(step=1, call_id=1))
    assert main(["msprobe", "anomalies", "-d", str(tmp_path), "-k", "1"]) == 0
    assert "step 1" in capsys.readouterr().out
    assert main(["msprobe", "anomalies", "-d", str(tmp_path), "-s", "[3]"]) == 0
    assert "step 3" in capsys.readouterr().out
    for words in (["-k", "0"], ["-s", "x"]):
        assert main(["msprobe", "anomalies", "-d", str(tmp_path), *words]) == 2
    assert main(["msprobe", "anomalies", "-d", str(tmp_path / "nowhere")]) == 2
    assert "there is no" in capsys.readouterr().err


def test_no_records(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no rank"):
        analyse_anomalies(tmp_path)
