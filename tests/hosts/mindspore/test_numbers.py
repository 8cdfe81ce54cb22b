"""The numbers of real trainings with ``Model.train``, in both modes, against NumPy on copies."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mindspore = pytest.importorskip("mindspore", reason="MindSpore has an environment of its own: make mindspore")

from mindspore import nn  # noqa: E402
from mindspore.train import Model  # noqa: E402

from tests.hosts.mindspore.training import (  # noqa: E402
    MODES,
    Mean,
    Truth,
    adam,
    data,
    monitor,
    network,
    norm,
    steps_of,
    train,
    true_gradients,
)


def test_norms_are_those_of_numpy(mode: str, tmp_path: Path) -> None:
    truth = Truth()
    train(truth, monitor(tmp_path))
    records = steps_of(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    gradients = true_gradients(6)
    for index, record in enumerate(records):
        assert record["loss/global"] == truth.losses[index]
        assert record["optim/lr"] == truth.rates[index]
        assert record["weight/norm"] == pytest.approx(truth.weights[index], rel=1e-12)
        assert record["moment/norm/exp_avg"] == pytest.approx(truth.moments[index][0], rel=1e-12)
        assert record["moment/norm/exp_avg_sq"] == pytest.approx(truth.moments[index][1], rel=1e-12)
        assert record["update/norm"] == pytest.approx(truth.updates[index], rel=1e-12)
        assert record["grad/norm"] == pytest.approx(norm(gradients[index].values()), rel=1e-4)
        assert record["grad/nonfinite"] == 0 and record["grad/norm_clipped"] is None
        assert record["perf/samples_per_second"] == pytest.approx(4 / record["time/step"])
    rows = _gradient_rows(tmp_path)
    for index in range(6):
        for name, gradient in gradients[index].items():
            expected = norm([gradient])
            if expected == 0.0:  # a parameter that takes no part
                assert rows.get((index + 1, name), 0.0) in (0.0, None)
            else:
                assert rows[index + 1, name] == pytest.approx(expected, rel=2e-3, abs=1e-7), name


def _gradient_rows(folder: Path, run: str = "r") -> dict[tuple[int, str], float | None]:
    (file,) = (folder / run / "rank_0/tensors").glob("gradients_*.csv")
    with file.open(newline="") as lines:
        return {
            (int(row["step"]), row["name"]): float(row["grad/norm"]) if row["grad/norm"] else None
            for row in csv.DictReader(lines)
        }


def test_both_modes_give_the_same_frames(tmp_path: Path) -> None:
    for name, value in MODES.items():
        mindspore.set_context(mode=value)
        train(monitor(tmp_path, name))
    graph, pynative = steps_of(tmp_path, "graph"), steps_of(tmp_path, "pynative")
    timed = ("time", "perf/", "data/")
    for one, other in zip(graph, pynative, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            if not key.startswith(timed):
                same = value == other[key] or value == pytest.approx(other[key], rel=1e-5)
                assert same, (one["step"], key, value, other[key])
    rows, others = _gradient_rows(tmp_path, "graph"), _gradient_rows(tmp_path, "pynative")
    for place in rows.keys() & others.keys():
        if rows[place]:
            assert rows[place] == pytest.approx(others[place], rel=1e-5, abs=1e-9), place


def test_a_monitored_training_ends_with_the_same_weights(mode: str, tmp_path: Path) -> None:
    plain, plain_optimizer = train()
    seen, seen_optimizer = train(monitor(tmp_path))
    pairs = [
        *zip(plain.trainable_params(), seen.trainable_params(), strict=True),
        *zip(plain_optimizer.moment2, seen_optimizer.moment2, strict=True),
    ]
    for one, other in pairs:
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy(), err_msg=one.name)


def test_the_rate_is_that_of_the_step(mode: str, tmp_path: Path) -> None:
    rates = [0.01, 0.02, 0.03, 0.04, 0.05, 0.06]
    train(monitor(tmp_path), optimizer=lambda net: adam(net, rates))
    assert [record["optim/lr"] for record in steps_of(tmp_path)] == pytest.approx(rates, rel=1e-6)


def test_groups_have_rates_of_their_own(mode: str, tmp_path: Path) -> None:
    def grouped(net: Any) -> Any:
        norms = [one for one in net.trainable_params() if "norm" in one.name]
        others = [one for one in net.trainable_params() if "norm" not in one.name]
        schedule = nn.ExponentialDecayLR(0.1, 0.5, 1)
        return nn.Adam(
            [{"params": norms, "lr": schedule}, {"params": others}], learning_rate=0.02, use_amsgrad=True
        )

    train(monitor(tmp_path), optimizer=grouped)
    records = steps_of(tmp_path)
    assert [record["optim/lr/0"] for record in records] == pytest.approx([0.1 * 0.5**n for n in range(6)])
    assert [record["optim/lr/1"] for record in records] == pytest.approx([0.02] * 6)
    assert [record["optim/lr"] for record in records] == pytest.approx(
        [max(0.1 * 0.5**n, 0.02) for n in range(6)]
    )
    assert records[-1]["moment/norm/max_exp_avg_sq"] > 0
    (file,) = (tmp_path / "r/rank_0/tensors").glob("gradients_*.csv")
    assert "norm.gamma" in file.read_text()


def test_a_fixed_loss_scale_is_taken_off(mode: str, tmp_path: Path) -> None:
    train(monitor(tmp_path, "plain"))
    net = network()
    manager = mindspore.amp.FixedLossScaleManager(1024.0, drop_overflow_update=False)
    model = Model(net, Mean(), adam(net, loss_scale=1024.0), loss_scale_manager=manager, amp_level="O0")
    model.train(2, data(), callbacks=[monitor(tmp_path, "scaled")], dataset_sink_mode=False)
    plain, scaled = steps_of(tmp_path, "plain"), steps_of(tmp_path, "scaled")
    for one, other in zip(plain, scaled, strict=True):
        assert other["grad/norm"] == pytest.approx(one["grad/norm"], rel=1e-3)
        assert other["optim/loss_scale"] == 1024


class Checked(nn.TrainOneStepWithLossScaleCell):
    """MindSpore's cell, looking for overflow by operators that a CPU has."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ascend_910b_target, self.enable_allfinite = True, False


def test_overflow_and_the_scale_of_the_step(mode: str, tmp_path: Path) -> None:
    net = network()
    inner = nn.WithLossCell(net, Mean())
    # 2^127 overflows float32, half of it does not.
    scale = nn.DynamicLossScaleUpdateCell(loss_scale_value=2.0**127, scale_factor=2, scale_window=1000)
    model = Model(Checked(inner, adam(net), scale))
    model.train(1, data(), callbacks=[monitor(tmp_path, clips=False)], dataset_sink_mode=False)
    records = steps_of(tmp_path)
    overflows = [record["optim/overflow"] for record in records]
    scales = [record["optim/loss_scale"] for record in records]
    assert set(overflows) <= {0.0, 1.0}
    assert scales[0] == 2.0**127
    for overflow, before, after in zip(overflows, scales, scales[1:], strict=False):
        assert after == (before / 2 if overflow else before)
    for record in records:
        assert record["loss/global"] == pytest.approx(2.4, rel=0.2)
        if not record["optim/overflow"]:
            assert record["grad/norm"] == pytest.approx(1.0, rel=0.9)


def test_parameters_in_bfloat16_are_read_as_they_are(tmp_path: Path) -> None:
    from trainmon.adapters.mindspore_parts.parameters import ParameterList, host_view
    from trainmon.backend.mindspore import MindSporeBackend

    values = np.linspace(-3, 3, 35, dtype=np.float32).reshape(5, 7)
    half = mindspore.Parameter(mindspore.Tensor(values, mindspore.bfloat16), name="half")
    full = half.astype(mindspore.float32).asnumpy()
    view = host_view(half)
    assert not view.flags.writeable and view.base is not None
    assert view.ctypes.data == half.asnumpy().ctypes.data

    class Holder(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.half = half

    weights = ParameterList(Holder(), None, True).weights()
    table = MindSporeBackend().summaries(weights.tensors).finish()
    assert table[0, 0] == pytest.approx(np.square(full.astype(np.float64)).sum(), rel=1e-12)
    assert table[0, 1] == 3.0


def test_stable_ranks(mode: str, tmp_path: Path) -> None:
    net, _ = train(monitor(tmp_path, spectral={"every": 6, "eigenvalue": True}))
    (file,) = (tmp_path / "r/rank_0/tensors").glob("spectral_*.csv")
    with file.open(newline="") as lines:
        rows = {row["name"]: row for row in csv.DictReader(lines) if row["step"] == "6"}
    matrices = {one.name: one.asnumpy() for one in net.trainable_params() if one.ndim == 2}
    assert rows.keys() == matrices.keys()
    for name, matrix in matrices.items():
        values = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
        rank = np.square(values).sum() / values[0] ** 2
        assert float(rows[name]["spectral/sigma"]) == pytest.approx(values[0], rel=1e-2), name
        assert float(rows[name]["spectral/eigenvalue"]) == pytest.approx(values[0] ** 2, rel=2e-2), name
        assert float(rows[name]["spectral/stable_rank_low"]) <= rank * (1 + 1e-9)
        assert float(rows[name]["spectral/stable_rank"]) == pytest.approx(rank, rel=2e-2), name
