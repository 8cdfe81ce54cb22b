"""Real trainings of a tiny Llama by MindFormers' GRAPH trainer on a CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hosts.mindformers.graph.trainings import EXAMPLE, Training

LINES = Path(__file__).with_name("state_monitor_lines.txt")
HOST_LINE = re.compile(r"(Epoch:\[ *\d+/ *\d+\], step:\[ *\d+/ *\d+\] [a-z]\S*): (.+)")


def norm(arrays: Any) -> float:
    return float(np.sqrt(sum(np.square(np.asarray(one, np.float64)).sum() for one in arrays)))


def host_lines(text: str) -> dict[str, float]:
    """``Epoch: ..., step: ... tag`` and the value of each line in the form of the host's own monitor."""
    return {match[1]: float(match[2]) for match in HOST_LINE.finditer(text)}


def test_the_yaml_alone_makes_the_monitor(watched: Training) -> None:
    assert watched.error is None
    assert [record["step"] for record in watched.steps()] == [1, 2, 3, 4, 5, 6]
    (life,) = watched.lives()
    assert life["status"] == "completed" and life["last_step"] == 6
    assert all(record["time/step"] > 0 for record in watched.steps()) and watched.steps()[-1]["time/eta"] == 0
    order = json.loads((watched.folder / "order.json").read_text())
    assert order[1:] == ["MFLossMonitor", "GraphMonitor", "Order", "Truth"]
    assert [event["text"] for event in watched.events() if event["level"] != "info"] == []


def test_loss_rate_scale_and_norm_are_what_the_step_returns(watched: Training) -> None:
    truth = watched.truth()
    for index, record in enumerate(watched.steps()):
        assert record["loss/global"] == float(truth["loss"][index][0])
        assert record["optim/lr"] == float(truth["rate"][index])
        assert record["optim/loss_scale"] == 1.0 and record["optim/overflow"] == 0.0
        np.testing.assert_allclose(record["grad/norm"], float(truth["norm"][index][0]), rtol=1e-6)
        coefficient = min(1.0, 1.0 / (record["grad/norm"] + 1e-6))
        np.testing.assert_allclose(record["grad/clip_coef"], coefficient, rtol=1e-12)
        assert record["data/consumed_samples"] == 2 * (index + 1) and record["data/tokens"] == 32 * (
            index + 1
        )


def test_local_norms_are_the_hosts_to_the_last_bit(watched: Training) -> None:
    truth, rows = watched.truth(), watched.table("gradients")
    names = truth["names"][0].tolist()
    assert len(names) == 21
    for step in range(6):
        squares = truth["squares"][step].astype(np.float64)
        for name, square in zip(names, squares.tolist(), strict=True):
            assert float(rows[step + 1, name]["grad/norm_local"]) == np.sqrt(square)
            assert float(rows[step + 1, name]["grad/norm"]) == np.sqrt(square)
        record = watched.steps()[step]
        np.testing.assert_allclose(record["grad/norm_device"], np.sqrt(squares.sum()), rtol=1e-14)
        assert record["grad/nonfinite"] == 0


def test_weights_and_moments_equal_numpy_on_copies(watched: Training) -> None:
    truth, weights, moments = watched.truth(), watched.table("weights"), watched.table("moments")
    names = truth["names"][0].tolist()
    for step, record in enumerate(watched.steps()):
        for kind, series in (
            ("weight", "weight/norm"),
            ("exp_avg", "moment/norm/exp_avg"),
            ("exp_avg_sq", "moment/norm/exp_avg_sq"),
        ):
            arrays = [truth[f"{kind} {name}"][step] for name in names]
            np.testing.assert_allclose(record[series], norm(arrays), rtol=1e-13)
            rows = weights if kind == "weight" else moments
            for name, array in zip(names, arrays, strict=True):
                np.testing.assert_allclose(float(rows[step + 1, name][series]), norm([array]), rtol=1e-13)


def test_stable_rank_and_eigenvalue_are_right(watched: Training) -> None:
    """Within the interval's tolerance of what an exact decomposition says; the host's own would be off by far more."""
    truth, rows = watched.truth(), watched.table("spectral")
    matrices = [name for name in truth["names"][0].tolist() if truth[f"weight {name}"].ndim == 3]
    assert len(matrices) == 16
    for name in matrices:
        for step in (1, 6):
            matrix = truth[f"weight {name}"][step - 1].astype(np.float64)
            largest = np.linalg.svd(matrix, compute_uv=False)[0] ** 2
            row = rows[step, name]
            np.testing.assert_allclose(float(row["spectral/eigenvalue"]), largest, rtol=0.02)
            rank = np.square(matrix).sum() / largest
            np.testing.assert_allclose(float(row["spectral/stable_rank"]), rank, rtol=0.02)
    assert not any(
        "norm.weight" in name for _, name in rows
    )  # one dimension: no matrix, and no warning of each


def test_graph_and_pynative_context_agree(watched: Training, in_pynative_context: Training) -> None:
    assert in_pynative_context.error is None
    ours, theirs = watched.steps(), in_pynative_context.steps()
    assert len(theirs) == 6
    series = [
        *("loss/global", "grad/norm", "grad/norm_device", "weight/norm", "optim/lr", "optim/loss_scale"),
        *("moment/norm/exp_avg", "moment/norm/exp_avg_sq", "grad/nonfinite", "data/tokens"),
    ]
    for one, other in zip(ours, theirs, strict=True):
        for name in series:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5, err_msg=name)
    rows, others = watched.table("gradients"), in_pynative_context.table("gradients")
    assert rows.keys() == others.keys()
    for key, row in rows.items():
        for column in ("grad/norm", "grad/norm_local"):
            np.testing.assert_allclose(float(row[column]), float(others[key][column]), rtol=1e-5)


def test_logits_and_denominators_of_attention(in_pynative_context: Training) -> None:
    """In PyNative context layers can be looked into: largest logits and mean_sum against NumPy."""
    truth = np.load(in_pynative_context.folder / "logits.npz")
    names = truth["names"].tolist()
    assert names == ["model.layers.0.attention", "model.layers.1.attention"]
    for record, layers in zip(in_pynative_context.steps(), truth["values"], strict=True):
        for name, (largest, denominator) in zip(names, layers.tolist(), strict=True):
            np.testing.assert_allclose(record[f"attention/max_logit/{name}"], largest, rtol=1e-5)
            np.testing.assert_allclose(record[f"attention/mean_sum/{name}"], denominator, rtol=1e-5)
        assert record["attention/sampled"] == 1.0


@pytest.mark.parametrize("mode", ["graph", "pynative context"])
def test_a_watched_training_ends_with_the_same_weights(mode: str, request: pytest.FixtureRequest) -> None:
    name = "watched" if mode == "graph" else "in_pynative_context"
    seen = request.getfixturevalue(name).truth()
    plain = request.getfixturevalue("unwatched" if mode == "graph" else "watched").truth()
    for key in plain:
        if mode == "graph":
            np.testing.assert_array_equal(seen[key], plain[key])
        elif key != "names":
            np.testing.assert_allclose(seen[key], plain[key], rtol=1e-3, atol=1e-6)


def test_numbers_go_to_the_hosts_event_files(watched: Training) -> None:
    (file,) = (watched.folder / "board/rank_0").glob("events.out.tfevents.*")
    content = file.read_bytes()
    for tag in (b"loss/global", b"grad/norm", b"weight/norm", b"spectral/stable_rank/p50", b"learning-rate"):
        assert tag in content


def test_in_the_hosts_place_lines_and_tags_are_the_hosts(replaced: Training) -> None:
    """Those that the host's own monitor wrote of the same training, and the local norms that it has none of here."""
    theirs, ours = host_lines(LINES.read_text()), host_lines(replaced.output)
    second = {key.replace("/    4]", "/    6]"): v for key, v in theirs.items() if "step:[    2/" in key}
    assert len(second) == 54
    for key, value in second.items():
        if "throughput" not in key:
            np.testing.assert_allclose(ours[key], value, rtol=0.02 if "weight_" in key else 1e-5, err_msg=key)
        assert key in ours
    more = {key.split("] ")[-1] for key in ours if "step:[    2/" in key} - {
        k.split("] ")[-1] for k in second
    }
    assert len(more) == 11 and all(tag.startswith(("local_norm/", "device_local_norm")) for tag in more)
    assert not any("step:[    1/" in key or "step:[    3/" in key for key in ours)
    content = next((replaced.folder / "board/rank_0").glob("events.out.tfevents.*")).read_bytes()
    assert b"weight_stable_rank/lm_head.weight" in content and b"weight_norm" in content
    assert b"adam_m_norm" not in content  # asked for in the log alone
    order = json.loads((replaced.folder / "order.json").read_text())
    assert order[1:] == ["MFLossMonitor", "TrainingStateMonitor", "Order", "Poison"]


def test_hooks_see_what_the_host_sums_up(replaced: Training, watched: Training) -> None:
    rows, others = replaced.table("gradients"), watched.table("gradients")
    assert len(rows) >= 30
    for (step, name), row in rows.items():
        if step <= 2 and row["grad/norm"]:
            np.testing.assert_allclose(
                float(row["grad/norm"]), float(others[step, name]["grad/norm"]), rtol=1e-5
            )


def test_check_for_nan_ends_the_training_on_its_step(replaced: Training) -> None:
    assert replaced.error is not None and replaced.error.startswith("TrainingStopped")
    (life,) = replaced.lives()
    assert life["status"] == "stopped" and life["last_step"] == 4
    assert "check_for_nan_in_loss_and_grad" in life["reason"]
    assert [np.isnan(record["loss/global"]) for record in replaced.steps()] == [False] * 3 + [True]


def test_a_rule_stops_and_a_resumed_training_goes_on(resumed: list[Training], watched: Training) -> None:
    first, second = resumed
    assert first.error is None
    assert [record["step"] for record in first.steps()] == [1, 2]
    assert first.lives()[-1]["status"] == "stopped"
    assert [record["step"] for record in second.steps()] == [1, 2, 3, 4]
    assert second.lives()[-1]["resumed_step"] == 2
    samples = [record["data/consumed_samples"] for record in second.steps()]
    assert samples == [2, 4, 6, 8]
    np.testing.assert_allclose(second.steps()[2]["loss/global"], watched.steps()[2]["loss/global"], rtol=1e-5)


def test_a_raising_callback_is_the_runs_end(resumed: list[Training]) -> None:
    _, second = resumed
    assert second.error is not None and second.error.startswith("ZeroDivisionError")
    life = second.lives()[-1]
    assert life["status"] == "failed" and "the host's own" in life["reason"] and life["last_step"] == 4


def test_the_example(tmp_path: Path) -> None:
    from tests.hosts.mindformers.graph.trainings import run_example

    run = run_example(tmp_path, steps=5)
    (directory,) = (tmp_path / "runs").iterdir()
    assert json.loads((directory / "run.json").read_text())["lives"][-1]["status"] == "completed"
    assert "step 5/5" in run.output and (tmp_path / "tensorboard/rank_0").is_dir()
    assert EXAMPLE.name == "mindformers_graph"
