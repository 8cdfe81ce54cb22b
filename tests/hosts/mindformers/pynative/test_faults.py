"""What MindFormers' PyNative trainer gets wrong, and trainmon right: each on a real training that shows both."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from tests.hosts.mindformers.pynative.runs import Runs

_NORM = re.compile(r'\{ "(local_norm|device_norm)": ([\w.]+): +([\d.einf+-]+) \}$')


def theirs(runs: Runs, name: str, kind: str) -> list[float]:
    """Norms as the host prints them, in the order of its lines."""
    lines = [line.partition(" - INFO - ")[2] for line in runs.lines(name, "tools/monitor.py")]
    return [float(match[3]) for line in lines if (match := _NORM.fullmatch(line)) and match[1] == kind]


def test_the_device_norm_is_not_that_of_the_last_micro_batch(runs: Runs) -> None:
    truth, host = runs.truth("followed")["steps"], theirs(runs, "followed", "device_norm")
    last = [norms[-1] for true in truth for norms in true["micro"].values()]
    whole = [sums[-1] for true in truth for sums in true["sums"].values()]
    assert sorted(host) == pytest.approx(sorted(last), abs=1e-6)
    table = runs.table("followed")
    ours = [table[true["step"], name]["grad/norm_local"] for true in truth for name in true["sums"]]
    assert ours == pytest.approx(whole, rel=1e-6)
    assert all(one > other * 1.2 for one, other in zip(whole, last, strict=True))


def test_norms_of_16_bits_keep_their_digits(runs: Runs) -> None:
    """The host squares and adds in the gradient's own format."""
    truth = runs.truth("half")["steps"]
    names = list(truth[0]["micro"])
    right = sorted(norm for true in truth for name in names for norm in true["micro"][name])
    host = sorted(theirs(runs, "half", "local_norm"))
    assert len(host) == len(right)
    worst = max(abs(one / other - 1) for one, other in zip(host, right, strict=True))
    assert worst > 1e-4
    table = runs.table("half")
    ours = sorted(row["grad/norm_micro"] or 0.0 for place, row in table.items() if "@" in place[1])
    assert ours == pytest.approx(right, rel=1e-9)


def test_local_losses_are_the_micro_batches_own(runs: Runs) -> None:
    """``local_loss`` is divided by their number; ``loss/micro`` is what the model said."""
    lines = [line.partition(" - INFO - ")[2] for line in runs.lines("followed", "tools/monitor.py")]
    found = [json.loads(line) for line in lines if '"local_loss"' in line]
    printed = {(one["step"], one["micro_step"]): one["local_loss"] for one in found}
    assert len(printed) == 6
    losses = runs.table("followed", "loss")
    for (step, micro), value in printed.items():
        assert losses[step, str(micro - 1)]["loss/micro"] == pytest.approx(2 * value, rel=1e-6)


def test_the_rate_is_not_that_of_the_next_step(runs: Runs) -> None:
    lines = [re.search(r"lr: ([\d.e+-]+)", line) for line in runs.lines("followed", "loss_callback")]
    printed = [float(match[1]) for match in lines if match]
    rates = [record["optim/lr"] for record in runs.records("followed")]
    assert printed == pytest.approx([0.005, 0.01, 0.01]) and rates == pytest.approx([0.0, 0.005, 0.01])


def test_a_limit_of_zero_is_said_and_is_no_norm_of_zero(runs: Runs) -> None:
    """Documented to be off, it multiplies every gradient by 0."""
    (record,) = runs.records("zero")
    assert record["grad/norm"] == pytest.approx(runs.truth("zero")["steps"][0]["device"], rel=1e-5)
    assert record["grad/norm_clipped"] in (None, 0.0)
    assert all(row["grad/norm"] is None for row in runs.table("zero").values())
    assert runs.kinds("zero").count("max_norm_zero") == 1


def test_gradients_of_the_wrong_parameters_are_said(runs: Runs) -> None:
    """A parameter without a gradient drops out, and the optimizer goes on by position."""
    event = next(one for one in runs.events("idle") if one["kind"] == "gradients_misaligned")
    assert event["level"] == "error" and "1 parameters have no gradient (idle)" in event["text"]
    truth, table = runs.truth("idle")["steps"][0], runs.table("idle")
    for name, sums in truth["sums"].items():
        assert table[1, name]["grad/norm"] == pytest.approx(sums[-1], rel=1e-5)
    assert table[1, "idle"]["grad/norm"] is None


def test_a_norm_that_is_not_a_number_does_not_pass_unseen(runs: Runs) -> None:
    """The host clips nothing then and steps with it."""
    assert any(np.isnan(np.array(one)).any() for one in runs.truth("nan")["weights"].values())
    bad = runs.records("nan")[-1]
    assert bad["step"] == 2 and math.isnan(float(bad["grad/norm"])) and bad["grad/nonfinite"] > 0
    assert "then gradient of" in runs.life("nan")["reason"]


def test_spikes_are_found(runs: Runs) -> None:
    found = [event for event in runs.events("spikes") if event["kind"] == "alarm"]
    assert [event["step"] for event in found] == [3]


def test_weights_have_spectra(runs: Runs) -> None:
    """Against an exact decomposition of the weights as the training left them, which are rounded to 11 bits."""
    table = runs.table("half", "spectral")
    for name in ("table", "inner", "outer"):
        values = np.linalg.svd(np.array(runs.truth("half")["weights"][name]), compute_uv=False)
        row = table[3, name]
        assert row["spectral/stable_rank"] == pytest.approx(np.sum(values**2) / values[0] ** 2, rel=0.02)
        assert row["spectral/sigma"] == pytest.approx(values[0], rel=0.02)


def test_logits_of_steps_that_the_hosts_monitor_passes_over(runs: Runs) -> None:
    """Every second step is printed by it; each is seen, and each begins anew."""
    steps = [re.search(r"step:\[ *(\d+)/", line) for line in runs.lines("logits", "max_attention_logit/max")]
    assert [match[1] for match in steps if match] == ["2"]
    assert [record["attention/max_logit"] for record in runs.records("logits")] == [2.0, 4.0, 6.0]


def test_a_run_that_is_left_by_an_exception_is_whole(runs: Runs) -> None:
    """The host closes nothing then."""
    for name in ("raised", "dies"):
        assert [record["step"] for record in runs.records(name)] == [1, 2]
