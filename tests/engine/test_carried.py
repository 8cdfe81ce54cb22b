"""What a run carries over to its next life: ages and windows of experts, rules, and the file that holds them."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch adapter needs torch")

from torch import nn  # noqa: E402

import trainmon  # noqa: E402
from tests.ranks.gloo import on_ranks  # noqa: E402
from trainmon.carried import read_state, write_state  # noqa: E402
from trainmon.sinks.jsonl import read_jsonl  # noqa: E402

E, SPAN = 4, 5


def attach(directory: Path, *, resumed: int = 0, **moe: Any) -> Any:
    model = nn.Linear(2, 1)
    keys = {
        "output_dir": str(directory),
        "run_name": "r",
        "sinks": ["csv", "jsonl"],
        "moe": {"per_expert": True, "placement": True, "span": SPAN, "hold": 2, **moe},
    }
    return trainmon.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), keys, resumed_step=resumed)


def counts_of(step: int, layer: int = 0) -> list[int]:
    """Expert 3 has nothing from step 4 on, the others what chance gives them."""
    draws = np.random.default_rng([step, layer]).integers(10, 100, E)
    draws[3] *= step < 4
    return draws.tolist()


def train(mon: Any, steps: range, layers: int = 2, experts: int = E) -> None:
    for step in steps:
        for layer in range(layers):
            moved = np.roll(np.arange(experts), step // 3).tolist()
            counts = (counts_of(step, layer) * 2)[:experts]
            mon.experts(f"layers.{layer}", counts=counts, num_experts=experts, placement=moved)
        mon.micro_end(loss=1.0 if step != 7 else math.nan, tokens=1)
        mon.step_end()


def seen(directory: Path, first: int = 1) -> tuple[dict[int, Any], dict[Any, Any]]:
    """Scalars of moe and health by step, rows of tables by step and name."""
    place = directory / "r/rank_0"
    scalars = {
        record["step"]: {
            name: value for name, value in record.items() if name.startswith(("moe/", "health/"))
        }
        for record in read_jsonl(place / "scalars.jsonl")
        if record.get("step", 0) >= first
    }
    rows: dict[Any, Any] = {}
    for path in sorted((place / "tensors").glob("moe_*.csv")):
        with path.open(newline="") as stream:
            for row in csv.DictReader(stream):
                if int(row["step"]) >= first:
                    rows[int(row["step"]), row["name"]] = row
    return scalars, rows


def said(directory: Path) -> dict[str, str]:
    events = read_jsonl(directory / "r/rank_0/events.jsonl")
    return {event["kind"]: event["text"] for event in events if "kind" in event}


def test_a_life_that_goes_on_is_as_one_that_never_ended(tmp_path: Path) -> None:
    with attach(tmp_path / "whole") as mon:
        train(mon, range(1, 16))
    file = tmp_path / "checkpoints/10/trainmon.state"
    with attach(tmp_path / "cut") as mon:
        train(mon, range(1, 11))
        assert mon.save_state(file)
        state = json.loads(json.dumps(mon.state_dict()))  # plain data: any checkpoint can hold it
        train(mon, range(11, 13))  # and is killed
    for name, load in (
        ("file", lambda mon: mon.load_state(file)),
        ("dict", lambda mon: mon.load_state_dict(state)),
    ):
        with attach(tmp_path / name, resumed=10) as mon:
            assert load(mon) in (True, None)
            train(mon, range(11, 16))
        expected, found = seen(tmp_path / "whole", 11), seen(tmp_path / name, 11)
        assert found == expected
        assert found[0][11]["moe/migration/layers.0"] is not None, "against the placement of the last life"
        assert found[1][15, "layers.0/3"]["moe/dead_age"] == "12.0"
        assert found[0][15]["health/nonfinite_steps"] == 1
        kinds = said(tmp_path / name)
        assert "ages, windows and shares of 2 layers go on" in kinds["moe_restored"]
        assert "health_restored" in kinds and "state_of_another_step" not in kinds
        assert "dead_experts" not in kinds, "told in the last life"
    assert "dead_experts" in said(tmp_path / "whole")


def test_a_state_that_has_not_met_its_layers_yet_is_kept(tmp_path: Path) -> None:
    with attach(tmp_path / "a") as mon:
        train(mon, range(1, 9))
        first = mon.state_dict()
    with attach(tmp_path / "b", resumed=8) as mon:
        mon.load_state_dict(first)
        second = mon.state_dict()
    assert second["probes"] == first["probes"]


def test_layers_that_changed_are_dropped_and_others_go_on(tmp_path: Path) -> None:
    with attach(tmp_path / "a") as mon:
        train(mon, range(1, 9), layers=3)
        state = mon.state_dict()
    state["probes"]["moe"]["layers"]["layers.1"] = {
        **state["probes"]["moe"]["layers"]["layers.1"],
        "experts": 2 * E,
    }
    with attach(tmp_path / "refused", resumed=8) as mon:
        mon.load_state_dict(state)
        train(mon, range(9, 10))
    assert "damaged" in said(tmp_path / "refused")["moe_not_restored"]
    with attach(tmp_path / "wide") as mon:
        train(mon, range(1, 9), layers=1, experts=2 * E)
        wide = mon.state_dict()["probes"]["moe"]["layers"]["layers.0"]
    state["probes"]["moe"]["layers"]["layers.1"] = wide
    with attach(tmp_path / "b", resumed=8) as mon:
        mon.load_state_dict(state)
        train(mon, range(9, 15))
    kinds = said(tmp_path / "b")
    assert "the state of layers.1 is of 8 experts, and it has 4 now" in kinds["experts_changed"]
    assert (
        "has 1 layers of experts that this run hasn't: layers.2; they are dropped" in kinds["experts_unmet"]
    )
    rows = seen(tmp_path / "b")[1]
    assert rows[9, "layers.0/3"]["moe/dead_age"] == "6.0"
    assert rows[9, "layers.1/3"]["moe/dead_age"] == "1.0"


def test_another_window_keeps_ages_and_begins_its_window_anew(tmp_path: Path) -> None:
    with attach(tmp_path / "a") as mon:
        train(mon, range(1, 9))
        state = mon.state_dict()
    with attach(tmp_path / "b", resumed=8, span=3) as mon:
        mon.load_state_dict(state)
        train(mon, range(9, 10))
    scalars, rows = seen(tmp_path / "b")
    assert rows[9, "layers.0/3"]["moe/dead_age"] == "6.0"
    assert scalars[9]["moe/max_vio_window/layers.0"] == scalars[9]["moe/max_vio/layers.0"]
    assert scalars[9]["moe/max_vio_global/layers.0"] != scalars[9]["moe/max_vio/layers.0"]


def test_an_edited_section_goes_on_from_what_it_was(tmp_path: Path) -> None:
    path, model = tmp_path / "c.yaml", nn.Linear(2, 1)
    text = "run_name: r\nsinks: {log: false}\nmoe: {per_expert: true, span: 5, hold: %d}\n"
    path.write_text(text % 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainmon.attach(model, optimizer, str(path), output_dir=str(tmp_path)) as mon:
        train(mon, range(1, 7))
        path.write_text(text % 3 + "# edited\n")
        train(mon, range(7, 13))
    kinds = said(tmp_path)
    assert "config_changed" in kinds and "ages, windows and shares of 2 layers go on" in kinds["moe_restored"]
    assert seen(tmp_path)[1][12, "layers.0/3"]["moe/dead_age"] == "9.0"


def test_a_state_of_another_step_is_said(tmp_path: Path) -> None:
    with attach(tmp_path / "a") as mon:
        train(mon, range(1, 9))
        state = mon.state_dict()
    with attach(tmp_path / "b", resumed=5) as mon:
        mon.load_state_dict(state)
        train(mon, range(6, 8))
    assert "taken in step 9, and this life is in step 6" in said(tmp_path / "b")["state_of_another_step"]


def _damaged(content: bytes, how: str) -> bytes:
    middle = len(content) // 2
    match how:
        case "cut":
            return content[:middle]
        case "cut in the header":
            return content[:20]
        case "one bit":
            return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        case "another format":
            return content.replace(b'"format": 1', b'"format": 7', 1)
        case _:
            return b""


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("cut", "cut off"),
        ("cut in the header", "its beginning is damaged"),
        ("one bit", "its bytes are not those that were written"),
        ("another format", "format 7, this trainmon reads 1"),
        ("empty", "its beginning is damaged"),
        ("missing", "No such file"),
        ("directory", "Is a directory"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_and_training_goes_on(tmp_path: Path, how: str, text: str) -> None:
    file = tmp_path / "state"
    with attach(tmp_path / "a") as mon:
        train(mon, range(1, 6))
        mon.save_state(file)
    content = file.read_bytes()
    file.unlink()
    if how == "directory":
        file.mkdir()
    elif how != "missing":
        file.write_bytes(_damaged(content, how))
    with attach(tmp_path / "b", resumed=5) as mon:
        assert mon.load_state(file) is False
        train(mon, range(6, 9))
    (message,) = [text for kind, text in said(tmp_path / "b").items() if kind == "state_not_read"]
    assert text in message and str(file) in message and "they start anew" in message
    assert seen(tmp_path / "b")[1][8, "layers.0/3"]["moe/dead_age"] == "3.0"


def test_a_state_within_a_checkpoint_may_be_damaged_too(tmp_path: Path) -> None:
    with attach(tmp_path / "a") as mon:
        train(mon, range(1, 6))
        whole = json.dumps(mon.state_dict())
    for number, damage in enumerate(("total", "ring", "dead_age", "steps", "placement", "experts")):
        state = json.loads(whole)
        layer = state["probes"]["moe"]["layers"]["layers.1"]
        layer[damage] = layer[damage][:-8] if isinstance(layer[damage], str) else None
        directory = tmp_path / f"b{number}"
        with attach(directory, resumed=5) as mon:
            mon.load_state_dict(state)
            train(mon, range(6, 7))
        kinds = said(directory)
        assert "damaged" in kinds["moe_not_restored"] and "it begins anew" in kinds["moe_not_restored"]
        assert "health_restored" in kinds, "each for itself"
        assert seen(directory)[1][6, "layers.0/3"]["moe/dead_age"] == "1.0"


def test_a_file_that_cannot_be_written_is_said_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with attach(tmp_path / "a") as mon:
        train(mon, range(1, 3))
        assert mon.save_state(tmp_path / "file" / "state") is False
        train(mon, range(3, 4))
    assert "can't be written" in said(tmp_path / "a")["state_not_written"]
    assert max(seen(tmp_path / "a")[0]) == 3


_WRITER = """
import sys
from trainmon.carried import write_state
text = "x" * 2_000_000
number = 0
while True:
    number += 1
    write_state(sys.argv[1], {"number": number, "text": text, "again": number})
    if number == 1:
        print("ready", flush=True)
"""


def test_whenever_the_writer_is_killed_there_is_a_whole_state(tmp_path: Path) -> None:
    file, last = tmp_path / "state", 0
    write_state(file, {"number": 0, "again": 0})
    chance = random.Random(0)
    for _ in range(6):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(file)], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0.0, 0.05))
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        state = json.loads(read_state(file))
        assert state["number"] == state["again"]
        last = max(last, state["number"])
    assert last > 0, "some were written"


def _life(directory: str, first: int, steps: int, load: str | None, save: str | None) -> Any:
    import torch.distributed as distributed

    rank, world = distributed.get_rank(), distributed.get_world_size()
    with attach(Path(directory), resumed=first - 1, placement=False) as mon:
        loaded = None if load is None else mon.load_state(load if rank == 0 else "/nowhere")
        for step in range(first, first + steps):
            share = np.array(counts_of(step)) // world
            rest = np.array(counts_of(step)) - share * world
            mon.experts("moe", counts=share + rest * (rank == 0), num_experts=E)
            mon.micro_end(loss=1.0 if step != 3 or rank else math.nan, tokens=1)
            mon.step_end()
        if save is not None:
            assert mon.save_state(save)
        state = mon.state_dict()
    return loaded, json.dumps(state)


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """One rank reads the file for all; the report that was on its way is not in it."""
    file = str(tmp_path / "state")
    found = on_ranks(2, _life, str(tmp_path / "two"), 1, 8, None, file)
    assert found[0][1] == found[1][1], "the same on every rank"
    found = on_ranks(3, _life, str(tmp_path / "three"), 9, 4, file, None)
    assert {loaded for loaded, _ in found.values()} == {True}
    assert len({state for _, state in found.values()}) == 1
    kinds = said(tmp_path / "three")
    assert (
        "ages, windows and shares of 1 layers go on" in kinds["moe_restored"] and "health_restored" in kinds
    )
    scalars, rows = seen(tmp_path / "three")
    assert scalars[12]["health/nonfinite_steps"] == 1
    # Dead from step 4 on: up to step 7 in the state; step 9 tells the ranks of the layer, which counts from step 10 on.
    assert [rows[step, "moe/3"]["moe/dead_age"] for step in (10, 11, 12)] == ["5.0", "6.0", "7.0"]
    bad = tmp_path / "bad"
    bad.write_bytes((tmp_path / "state").read_bytes()[:-1])
    found = on_ranks(2, _life, str(tmp_path / "bad_two"), 9, 4, str(bad), None)
    assert {loaded for loaded, _ in found.values()} == {False}
    assert "cut off" in said(tmp_path / "bad_two")["state_not_read"]
