"""The numbers of real trainings with MindFormers' PyNative trainer, against NumPy on copies."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.hosts.mindformers.pynative.runs import Runs


def approx(value: float, rel: float = 1e-6) -> object:
    return pytest.approx(value, rel=rel, abs=1e-12)


def test_norms_are_those_of_numpy(any_runs: Runs) -> None:
    truth, records = any_runs.truth("everything")["steps"], any_runs.records("everything")
    assert [record["step"] for record in records] == [1, 2, 3]
    table = any_runs.table("everything")
    for true, record in zip(truth, records, strict=True):
        assert record["loss/global"] == approx(true["loss"])
        assert record["optim/lr"] == true["rate"]  # the update's own: the host prints the next one's
        assert record["grad/norm"] == approx(true["device"], 1e-5)
        assert record["grad/norm_device"] == approx(true["device"])
        assert record["grad/norm_clipped"] == approx(true["clipped"], 1e-9)
        assert record["weight/norm"] == approx(true["weights"], 1e-12)
        assert record["moment/norm/exp_avg"] == approx(true["first_moment"], 1e-12)
        assert record["moment/norm/exp_avg_sq"] == approx(true["second_moment"], 1e-12)
        assert record["grad/nonfinite"] == 0
        assert record["perf/samples_per_second"] == pytest.approx(4 / record["time/step"])
        assert record["perf/tokens_per_second"] == pytest.approx(24 / record["time/step"])
        assert set(true["micro"]) == {"table", "inner", "shift", "outer"}
        for name, norms in true["micro"].items():
            sums, step = true["sums"][name], record["step"]
            assert table[step, name]["grad/norm"] == approx(sums[-1], 1e-5)
            assert table[step, name]["grad/norm_local"] == approx(sums[-1])
            for micro, norm in enumerate(norms):
                row = table[step, f"{name}@{micro}"]
                assert row["grad/norm_micro"] == approx(norm, 1e-9)
                before = sums[micro - 1] if micro else 0.0
                assert row["grad/norm_increment"] == pytest.approx(sums[micro] - before, rel=1e-5, abs=1e-7)


def test_steps_of_several_micro_batches(runs: Runs) -> None:
    """Losses are the micro-batches' own; the step's is their mean, as the host prints it."""
    losses = runs.table("everything", "loss")
    for true in runs.truth("everything")["steps"]:
        micro = [losses[true["step"], str(index)]["loss/micro"] for index in range(2)]
        assert len(true["micro"]["inner"]) == 2
        assert np.mean(micro) == approx(true["loss"])
        assert micro[0] != micro[1]


def test_a_monitored_training_ends_with_the_same_weights(any_runs: Runs) -> None:
    plain = any_runs.truth("unwatched")["weights"]
    for name in ("everything", "entry"):
        assert any_runs.truth(name)["weights"] == plain
    assert all(np.isfinite(np.array(weights)).all() for weights in plain.values())


def test_the_frames_of_model_train(runs: Runs) -> None:
    """The same model, data and optimizer in MindSpore's own loop, with the whole batch in one pass and no clipping."""
    timed = ("time", "perf/", "data/tokens")
    for one, other in zip(runs.records("comparable"), runs.records("model_train"), strict=True):
        for key in one.keys() & other.keys():
            if key.startswith(timed) or key in ("grad/clip_coef", "grad/norm_clipped", "grad/norm_device"):
                continue
            same = one[key] == other[key] or one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-9)
            assert same, (one["step"], key, one[key], other[key])
        assert one["data/tokens"] == 24 * one["step"]
    rows, others = runs.table("comparable"), runs.table("model_train")
    common = [place for place in others if others[place]["grad/norm"]]
    assert len(common) == 12
    for place in common:
        assert rows[place]["grad/norm"] == pytest.approx(others[place]["grad/norm"], rel=1e-5), place


def test_parameters_of_16_bits_are_read_as_they_are(runs: Runs) -> None:
    """Squares are added in float64; weights are the host's float32 copies, which it updates."""
    truth, records, table = runs.truth("half")["steps"], runs.records("half"), runs.table("half")
    for true, record in zip(truth, records, strict=True):
        assert record["grad/norm_device"] == approx(true["device"], 1e-4)
        for name, norms in true["micro"].items():
            for micro, norm in enumerate(norms):
                assert table[record["step"], f"{name}@{micro}"]["grad/norm_micro"] == approx(norm, 1e-9)
        # The copies of 16 bits hold 11 bits of each weight.
        assert record["weight/norm"] == pytest.approx(true["weights"], rel=1e-3)
        assert record["moment/norm/exp_avg"] == approx(true["first_moment"], 1e-12)
        assert "moment/norm/fp32_params" not in record
    assert records[-1]["update/norm"] > 0


def test_counted_samples_and_micro_batches_of_a_ramp_up(runs: Runs) -> None:
    """The host's batch grows from 2 to 4 sequences: from one micro-batch to two."""
    truth, records = runs.truth("rampup")["steps"], runs.records("rampup")
    assert [record["data/consumed_samples"] for record in records] == [true["samples"] for true in truth]
    micros = [len(true["micro"]["inner"]) for true in truth]
    assert set(micros) == {1, 2}
    names = {(step, name) for step, name in runs.table("rampup") if "@" in name}
    for true, count in zip(truth, micros, strict=True):
        assert ((true["step"], "inner@1") in names) == (count == 2)


def test_a_loss_that_is_not_a_number_stops_the_run(any_runs: Runs) -> None:
    records, truth = any_runs.records("nan"), any_runs.truth("nan")
    assert "error" not in truth
    bad = records[-1]["step"]
    assert bad == (3 if truth["version"].startswith("1.") else 2)
    assert math.isnan(float(records[-1]["loss/global"]))
    life = any_runs.life("nan")
    assert life["status"] == "stopped" and f"loss is nan in micro-batch 0 of step {bad}" in life["reason"]
