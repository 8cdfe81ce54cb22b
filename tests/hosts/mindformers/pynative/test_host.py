"""Doors, lines, event files and ends of real trainings with MindFormers' PyNative trainer."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hosts.mindformers.pynative.runs import Runs
from tests.hosts.mindformers.pynative.scenarios import VERSIONS, sequences

#: How a line of the host's log ends.
_NORM = re.compile(
    r'\{ "(local_norm|local_norm_increment|device_norm)": ([\w.]+): +(-?[\d.]+(?:e[-+]\d+)?) \}$'
)


def ours(runs: Runs, name: str) -> list[str]:
    """The lines of trainmon in the host's log, without what the logger puts in front."""
    return [line.partition(" - INFO - ")[2] for line in runs.lines(name, "lines.py")]


# -- doors ----------------------------------------------------------------------------------------------------------


def test_an_entry_of_the_yaml(any_runs: Runs) -> None:
    """``auto_register`` finds the class, in every version; the run is that of the one in code."""
    one, other = any_runs.records("entry"), any_runs.records("everything")
    assert [record["step"] for record in one] == [1, 2, 3]
    losses = [record["loss/global"] for record in other]
    assert [record["loss/global"] for record in one] == pytest.approx(losses, rel=1e-6)
    assert any_runs.life("entry")["status"] == "completed"
    assert any_runs.truth("entry")["version"] in VERSIONS


def test_the_top_level_section(runs: Runs) -> None:
    """With an entry that has nothing but its type: the name is known once the adapter is imported."""
    assert runs.records("top")[0]["weight/norm"] > 0
    assert runs.life("top")["status"] == "completed"


def test_a_file_that_the_entry_names(runs: Runs) -> None:
    assert runs.records("file")[0]["weight/norm"] > 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("misspelt", "gradientz: unknown key; did you mean 'gradients'?"),
        (
            "both",
            "trainmon: the entry TrainMonitor under callbacks: has keys of its own, too; keep one of them",
        ),
        ("cant", "skip_step"),
    ],
)
def test_wrong_configurations_are_errors_before_the_first_step(runs: Runs, name: str, text: str) -> None:
    found = runs.truth(name)
    assert found["error"].startswith("ConfigError") and text in found["error"]
    assert found["steps"] == [] and not (runs.folder / name / "rank_0").exists()


# -- lines ----------------------------------------------------------------------------------------------------------


def test_lines_of_the_training_state(runs: Runs) -> None:
    """A header for each micro-batch, then one for the step; names and values as NumPy has them."""
    lines, truth = ours(runs, "followed"), runs.truth("followed")["steps"]
    found: dict[tuple[int, int, str, str], float] = {}
    step = micro = 0
    for line in lines:
        if '"step"' in line:
            header = json.loads(line)
            step, micro = header["step"], header.get("micro_step", 0)
            continue
        match = _NORM.fullmatch(line)
        assert match, line
        found[step, micro, match[1], match[2]] = float(match[3])
    expected: dict[tuple[int, int, str, str], float] = {}
    for true in truth:
        for name, norms in true["micro"].items():
            sums = true["sums"][name]
            expected[true["step"], 0, "device_norm", name] = sums[-1]
            for index, norm in enumerate(norms):
                expected[true["step"], index + 1, "local_norm", name] = norm
                growth = sums[index] - (sums[index - 1] if index else 0.0)
                expected[true["step"], index + 1, "local_norm_increment", name] = growth
    assert found.keys() == expected.keys() and len(found) == 3 * (4 + 2 * 2 * 4)
    for place, value in expected.items():
        assert found[place] == pytest.approx(value, abs=6e-7), place
    headers = [json.loads(line) for line in lines if '"step"' in line][:3]
    assert headers == [{"step": 1, "micro_step": 1}, {"step": 1, "micro_step": 2}, {"step": 1}]


def test_losses_are_printed_where_the_host_prints_none(runs_of: Any) -> None:
    """1.9.0 parses the keys, and has nothing that prints them."""
    runs = runs_of("1.9.0")
    lines, truth = ours(runs, "lines"), runs.truth("lines")["steps"]
    losses = [json.loads(line) for line in lines if "_loss" in line]
    expected: list[dict[str, Any]] = []
    for step, true in enumerate(truth, 1):
        expected.append({"step": step, "micro_step": 1, "local_loss": pytest.approx(true["loss"])})
        expected.append({"step": step, "micro_step": 1, "device_loss": pytest.approx(true["loss"])})
    assert losses == expected
    assert sum('"local_norm"' in line for line in lines) == 3 * 4
    for line in lines:
        if '"step"' in line:
            json.loads(line)
    newer = ours(runs_of("2.0.0"), "lines")
    assert not any("_loss" in line for line in newer) and any('"local_norm"' in line for line in newer)


def test_names_are_substrings_and_not_patterns(runs: Runs) -> None:
    """``tab.e`` is no name's part, though it would match ``table``."""
    names = {match[2] for line in ours(runs, "substrings") if (match := _NORM.fullmatch(line))}
    assert names == {"inner"}
    assert {name.partition("@")[0] for _, name in runs.table("substrings")} == {"inner"}


def test_tokens_of_each_expert_are_recorded(runs: Runs) -> None:
    """In Megatron's layout, one record for each layer and micro-batch, by the router and by the layer's own counter."""
    records = [json.loads(line) for line in ours(runs, "experts")]
    assert len(records) == 2 * 2 * 2
    assert all(list(one) == ["iter", "step", "micro_step", "block", "layer", "tpe"] for one in records)
    places = [(one["iter"], one["step"], one["micro_step"], one["layer"]) for one in records]
    assert sorted(places) == [(i, (i + 1) // 2, 2 - i % 2, layer) for i in range(1, 5) for layer in (0, 1)]
    totals = {0: 0, 1: 0}
    ids = [row for row, _ in sequences(8)]
    for one in records:
        (counts,) = one["tpe"]
        mine = np.concatenate(ids[2 * (one["iter"] - 1) : 2 * one["iter"]])
        chosen = mine % 4 if one["layer"] == 0 else np.concatenate([mine % 4, mine // 2 % 4])
        assert counts == np.bincount(chosen, minlength=4).tolist()
        totals[one["layer"]] += sum(counts)
    assert totals == {0: 4 * 12, 1: 4 * 24}
    record = runs.records("experts")[-1]
    assert record["moe/max_vio/decoder.layers.1.mlp"] is not None
    assert record["moe/drop_forecast/decoder.layers.1.mlp"] > 0
    assert {record["moe/hot/decoder.layers.1.mlp"], record["moe/cold/decoder.layers.1.mlp"]} <= {
        0.0,
        1.0,
        2.0,
    }
    assert record["moe/dead"] == 0
    assert record["moe/bias_span/decoder.layers.1.mlp"] == pytest.approx(0.3)
    load = runs.table("experts", "moe")
    second = [one["tpe"][0] for one in records if one["step"] == 2 and one["layer"] == 1]
    assert [load[2, f"decoder.layers.1.mlp/{expert}"]["moe/load"] for expert in range(4)] == np.sum(
        second, axis=0
    ).tolist()


def test_every_third_micro_batch_of_the_layers_that_are_named(runs: Runs) -> None:
    records = [json.loads(line) for line in ours(runs, "layers")]
    assert [(one["iter"], one["step"], one["micro_step"], one["layer"]) for one in records] == [
        (3, 2, 1, 1),
        (6, 3, 2, 1),
    ]
    assert "decoder.layers.7 is not a MoE layer" in " ".join(event["text"] for event in runs.events("layers"))


def test_logits_that_the_model_keeps(runs: Runs) -> None:
    """Read before the host's own monitor puts them back; its lines and ours hold the same."""
    records = runs.records("logits")
    assert [record["attention/max_logit"] for record in records] == [2.0, 4.0, 6.0]
    assert all(record.get("attention/mean_sum") is None for record in records)
    assert runs.kinds("logits").count("attention_logits") == 1
    assert not ours(runs, "logits")
    theirs = [line.partition(" - INFO - ")[2] for line in runs.lines("logits", "max_attention_logit/")]
    own = [line for line in ours(runs, "resets") if "max_attention_logit/" in line]
    assert own[3:6] == theirs and len(own) == 9
    assert [record["attention/max_logit"] for record in runs.records("resets")] == [2.0, 4.0, 6.0]
    assert runs.kinds("resets").count("logits_reset") == 1
    # Where nobody asks for attention, nothing is printed or put back.
    assert (
        not runs.lines("tracked", "max_attention_logit")
        and runs.truth("tracked")["weights"]["kept"][0] == 4.0
    )


# -- event files ----------------------------------------------------------------------------------------------------


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboardX.proto import event_pb2

    (file,) = folder.iterdir()
    content, at, found = file.read_bytes(), 0, dict[str, list[tuple[int, float]]]()
    while at < len(content):
        (size,) = struct.unpack("<Q", content[at : at + 8])
        event: Any = event_pb2.Event()
        event.ParseFromString(content[at + 12 : at + 12 + size])
        at += 16 + size
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_numbers_go_through_the_hosts_event_files(runs: Runs) -> None:
    found, records = scalars(runs.folder / "events"), runs.records("followed")
    for name in ("grad/norm_device", "loss/global", "optim/lr"):
        assert [step for step, _ in found[name]] == [1, 2, 3]
        values = [record[name] for record in records]
        assert [value for _, value in found[name]] == pytest.approx(values, rel=1e-6)
        assert [step for step, _ in found[f"{name}_vs_samples"]] == [4, 8, 12]
    # The host's own stay its own.
    assert [value for _, value in found["batch-size"]] == [4.0, 4.0, 4.0]


# -- ends -----------------------------------------------------------------------------------------------------------


def test_a_callback_that_raises_ends_the_run_as_failed(runs: Runs) -> None:
    """The host tells nobody; where the program ends by it, the reason is known, and all steps are there."""
    assert runs.ended == 1 and "a callback of the user" in runs.output
    life = runs.life("dies")
    assert (life["status"], life["last_step"]) == ("failed", 2)
    assert life["reason"] == "RuntimeError: a callback of the user"
    assert [record["step"] for record in runs.records("dies")] == [1, 2]
    # Where somebody has caught it and trains again, no more is known than that it is over.
    assert runs.truth("raised")["error"] == "RuntimeError: a callback of the user"
    assert runs.life("raised")["status"] == "unfinished"
    assert [record["step"] for record in runs.records("raised")] == [1, 2]


def test_what_fails_inside_never_reaches_the_host(runs: Runs) -> None:
    assert "error" not in runs.truth("broken")
    assert runs.truth("broken")["weights"] == runs.truth("unwatched")["weights"]
    assert any("broken within" in event["text"] for event in runs.events("broken"))


def test_a_run_goes_on_from_a_checkpoint(runs: Runs) -> None:
    assert [record["step"] for record in runs.records("first")] == [1, 2, 3, 4, 5]
    assert [record["data/consumed_samples"] for record in runs.records("first")] == [4, 8, 12, 16, 20]
    assert (runs.life("first")["resumed_step"], runs.life("first")["last_step"]) == (3, 5)


def test_deterministic_computation_is_recorded(runs: Runs) -> None:
    record = json.loads((runs.folder / "deterministic/run.json").read_text())
    found = json.dumps(record)
    assert '"mindspore.get_context deterministic": "ON"' in found and '"HCCL_DETERMINISTIC": "true"' in found


def test_steps_that_the_host_skips(runs: Runs) -> None:
    """With ``use_skip_step_on_nan`` the step is there, its update isn't."""
    records = runs.records("skipped")
    assert [record["optim/overflow"] for record in records] == [0, 1, 0]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert math.isnan(float(records[1]["grad/norm"])) and float(records[2]["grad/norm"]) > 0
    assert runs.kinds("skipped").count("step_skipped") == 1
    assert all(np.isfinite(np.array(one)).all() for one in runs.truth("skipped")["weights"].values())
