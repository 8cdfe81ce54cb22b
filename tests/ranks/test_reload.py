"""A configuration file that is edited while several ranks train: all of them take it at one step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.ranks.gloo import on_ranks


def train(directory: str) -> list[list[int]]:
    """Steps in which this rank looked at weights, and what it has of the file."""
    import torch
    import torch.distributed as distributed

    import trainmon

    path = Path(directory) / "c.yaml"
    rank = distributed.get_rank()
    head = "run_name: r\nsinks: {log: false}\nhealth: false\n"
    if rank == 0:
        path.write_text(head + "weights: false\n")
    distributed.barrier()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    looked = []
    with trainmon.attach(model, optimizer, str(path), output_dir=directory) as mon:
        for step in range(1, 9):
            if step == 3 and rank == 0:
                path.write_text(head + "weights: {every: 1}\ngradients: false\n")
                os.utime(path, ns=(1, 1))
            if step == 6 and rank == 0:
                path.write_text(head + "weights: {evry: 1}\n")
                os.utime(path, ns=(2, 2))
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            mon.micro_end(loss, 2)
            optimizer.step()
            mon.step_end()
            config: Any = mon.monitor.config
            looked.append([step, config.weights is not None, config.gradients is not None])
    return looked


def test_all_ranks_take_it_at_one_step_and_none_takes_a_wrong_one(tmp_path: Path) -> None:
    found = on_ranks(2, train, str(tmp_path))
    assert found[0] == found[1]
    assert found[0][1] == [2, False, True] and found[0][-1] == [8, True, False]
    from trainmon.sinks.jsonl import read_jsonl

    place = tmp_path / "r/rank_0"
    records = [record for record in read_jsonl(place / "scalars.jsonl") if "step" in record]
    assert [record["step"] for record in records] == list(range(1, 9))
    (changed,) = [e for e in read_jsonl(place / "events.jsonl") if e.get("kind") == "config_changed"]
    first = changed["step"]
    for record in records:
        assert ("weight/norm" in record) == (record["step"] >= first)
        assert ("grad/norm" in record) == (record["step"] < first)
        if "weight/norm" in record:
            assert record["weight/norm"] > 0
    (said,) = [e for e in read_jsonl(place / "events.jsonl") if e.get("kind") == "config_ignored"]
    assert "evry" in said["text"]
