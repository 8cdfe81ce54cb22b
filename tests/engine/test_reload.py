"""A configuration file that is edited while the run goes on: taken at one step, or reported and ignored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="hooks come and go on a real model")

import trainmon  # noqa: E402
from trainmon.config import ConfigError, ConfigWatch, load_config  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402
from trainmon.sinks.run_file import read_run  # noqa: E402

HEAD = "run_name: r\nsinks: {log: false}\nhealth: false\n"


def write(path: Path, text: str) -> None:
    """Replaces the file as an editor does, with a time of its own."""
    new = path.with_suffix(".new")
    new.write_text(text)
    stamp = path.stat().st_mtime_ns + 10_000_000 if path.exists() else 1_700_000_000_000_000_000
    os.utime(new, ns=(stamp, stamp))
    new.replace(path)


def train(
    path: Path, edits: dict[int, str], steps: int = 8
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Any]:
    """A run whose file is edited before some of its steps; its records, its messages, and the model's hooks by step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = []
    with trainmon.attach(model, optimizer, str(path), output_dir=str(path.parent)) as mon:
        for step in range(1, steps + 1):
            if step in edits:
                write(path, edits[step])
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            mon.micro_end(loss, 2)
            mon.grads_ready()
            optimizer.step()
            optimizer.zero_grad()
            mon.step_end()
            hooks.append(sum(len(module._forward_hooks) for module in model.modules()))
    place = path.parent / "r/rank_0"
    records = [record for record in read_jsonl(place / "scalars.jsonl") if "step" in record]
    return records, read_jsonl(place / "events.jsonl"), hooks


def test_sections_come_and_go_and_the_others_keep_their_state(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    write(path, HEAD + "weights: false\n")
    edits = {
        3: HEAD + "weights: {every: 1}\nactivations: {every: 1}\n",
        6: HEAD + "weights: {every: 1}\ngradients: {every: 4}\n",
    }
    records, events, hooks = train(path, edits)
    assert ["weight/norm" in record for record in records] == [False] * 3 + [True] * 5
    assert ["grad/norm" in record for record in records] == [True] * 8, "first step and multiples of 4"
    assert hooks[:3] == [0, 0, hooks[2]] and hooks[4] > 0 and hooks[-1] == 0
    assert [record["data/tokens"] for record in records] == [2.0 * step for step in range(1, 9)]
    changed = [event for event in events if event.get("kind") == "config_changed"]
    assert [event["step"] for event in changed] == [4, 7]
    assert changed[0]["data"]["changed"] == ["weights", "activations"]
    run = read_run(tmp_path / "r")
    assert run is not None and run["config"]["gradients"]["every"] == 4


def test_a_wrong_edit_is_said_with_its_place_and_the_old_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    write(path, HEAD + "weights: {every: 2}\n")
    edits = {2: HEAD + "weights: {evry: 1}\n", 4: HEAD + "weights: [\n", 6: HEAD + "weights: {every: 1}\n"}
    records, events, _ = train(path, edits)
    said = [event for event in events if event.get("kind") == "config_ignored"]
    assert [event["step"] for event in said] == [2, 4]
    assert f"{path}:4:11: weights.evry" in said[0]["text"] and "did you mean 'every'" in said[0]["text"]
    assert ["weight/norm" in record for record in records] == [
        True,
        True,
        False,
        True,
        False,
        True,
        True,
        True,
    ]


def test_what_a_run_cannot_change_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    write(path, HEAD)
    records, events, _ = train(
        path, {2: HEAD.replace("log: false", "jsonl: false") + "tag_style: megatron\n"}
    )
    (said,) = [event for event in events if event.get("kind") == "config_fixed"]
    assert "sinks, tag_style" in said["text"]
    assert len(records) == 8, "the files go on"
    assert not [event for event in events if event.get("kind") == "config_changed"]


def test_a_touched_file_that_says_the_same_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    write(path, HEAD)
    _, events, _ = train(path, {2: HEAD + "# a word\n", 4: HEAD})
    assert not [event for event in events if str(event.get("kind")).startswith("config")]


def test_the_file_that_config_names_is_watched_and_code_still_beats_it(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    write(path, "every: 2\ntarget: a\n")
    source = {"config": str(path), "target": "b"}
    watch = ConfigWatch(source, {"every": 3}, load_config(source, every=3))
    assert watch.poll() is None
    write(path, "every: 5\ntarget: c\ninvert: true\n")
    new = watch.poll()
    assert new is not None and new.every == 3 and new.invert
    assert new.target is not None and new.target[0].pattern == "b"
    path.unlink()
    assert watch.poll() is None, "between an editor's two files there is none"
    write(path, "invert: x\n")
    os.utime(path, ns=(1, 1))
    with pytest.raises(ConfigError, match="expected true or false"):
        watch.poll()
    assert watch.poll() is None, "said once"
