"""What msProbe's older monitor has beside rows, in the drop-in on MindSpore."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mindspore = pytest.importorskip("mindspore", reason="MindSpore has an environment of its own: make mindspore")

from mindspore import Tensor  # noqa: E402

from tests.hosts.mindspore.test_msprobe import Micro, monitor  # noqa: E402
from trainmon.msprobe import analyse_anomalies, read  # noqa: E402


@pytest.fixture(autouse=True)
def pynative() -> None:
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)


def trained(folder: Path, *names: str, steps: int = 2, **keys: Any) -> Micro:
    train = Micro()
    mon = monitor(folder, *names, **keys)
    mon.start(train.net, train.optimizer, grad_acc_steps=2)
    train.run(steps)
    mon.stop()
    return train


def test_alerts_and_their_order(tmp_path: Path) -> None:
    train = Micro()
    rules = {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}
    mon = monitor(tmp_path, "weight_grad", "param", alert=rules)
    mon.start(train.net, train.optimizer, grad_acc_steps=2)
    train.run(1)
    parameter = train.net.hidden.weight
    array = parameter.asnumpy().copy()
    array.reshape(-1)[0] = math.nan
    parameter.set_data(Tensor(array))
    train.run(1)
    mon.stop()
    found = analyse_anomalies(tmp_path, top_k=100)
    assert {one["step"] for one in found} == {1}
    endings = [one["tag_name"].rpartition("/")[2] for one in found]
    assert endings[0] in ("pre_grad", "post_grad") and endings[-1] == "param_updated"
    assert endings == sorted(endings, key=["pre_grad", "post_grad", "param_origin", "param_updated"].index)


def test_structure_and_stacks(tmp_path: Path) -> None:
    train = trained(tmp_path, "module", print_struct=True, stack_info=True)
    shown = json.loads((tmp_path / "module_struct/rank0/module_struct.json").read_text())
    called = {name for name, _ in train.net.cells_and_names()}
    assert "" in shown and set(shown) <= called and len(shown) > 2
    assert all(own["output"]["config"] == "tensor" for own in shown.values())
    assert any("size=" in own.get("output_grad", {}).get("0", "") for own in shown.values())
    with (tmp_path / "rank_0/stack_info.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["module_name"] for row in rows} == set(shown)
    assert any("test_msprobe.py[" in row["stack_info"] for row in rows)


def test_directions_columns_and_names(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "param": {"enabled": True, "ops": ["norm", "zeros", "shape", "dtype"], "eps": 0.1}
    }
    train = trained(tmp_path, extended=True, monitors=keys, mg_direction=True, ndigits=3)
    found = read(tmp_path)
    names = [name for name, _ in train.net.parameters_and_names()]
    first = train.truth[0]
    origin = found["param"].where((found["param"].scope == "param_origin") & (found["param"].step == 0))
    assert origin.name.tolist() == names and set(origin.texts["dtype"]) == {"Float32"}
    assert origin.texts["shape"].tolist() == [str(one.shape) for one in first["before"]]
    zeros = [round(float((np.abs(one) < 0.1).mean()), 3) for one in first["before"]]
    assert origin.stats["zeros"].tolist() == zeros
    directions = found["mg_direction"]
    second = directions.where(directions.step == 1)
    assert len(second) == len(train.optimizer.parameters)
    pairs = zip(train.truth[1]["given"], first["exp_avg"], strict=True)
    wanted = [round(float(((np.sign(g) * np.sign(m)).mean() + 1) / 2), 3) for g, m in pairs]
    assert second.stats["mg_direction"].tolist() == pytest.approx(wanted, abs=2e-3)


def test_what_is_not_built_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, "param", recording_l2_features=True)
    assert "recording_l2_features: not built for this framework" in caplog.text
    assert read(tmp_path).tables.keys() == {"param"}
