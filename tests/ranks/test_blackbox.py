"""Black boxes of several ranks: one directory, one life, and the rank that stopped first."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.gloo import on_ranks
from trainmon.sinks.blackbox import find_boxes, merge_boxes, read_box
from trainmon.sinks.jsonl import read_jsonl

pytest.importorskip("torch")


def _train(directory: str, dies: int | None = None, resumed_step: int = 0, **keys: Any) -> str:
    """Three steps; rank `dies` kills itself in the second, before its optimizer. Returns the run's directory."""
    import torch
    import torch.distributed as distributed

    import trainmon

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"output_dir": directory, "sinks": {"log": False}, "ranks": "all", **keys}
    with trainmon.attach(model, optimizer, config, resumed_step=resumed_step) as mon:
        for step in (1, 2, 3):
            loss = model(torch.ones(4, 3)).square().mean()
            loss.backward()
            mon.micro_end(loss, tokens=4)
            mon.grads_ready()
            if step == 2 and distributed.get_rank() == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            mon.step_end()
        return str(mon.summary().directory)


def test_the_rank_that_was_killed_stopped_first(tmp_path: Path) -> None:
    # Without a name each rank would make one from its own clock: rank 0's counts.
    found = on_ranks(3, _train, str(tmp_path), 1, silent=(1,))
    (directory,) = tmp_path.iterdir()
    assert set(found.values()) == {str(directory)}
    verdict = merge_boxes([read_box(path) for path in find_boxes([directory])])
    assert [view.box.rank for view in verdict.ranks] == [0, 1, 2] and verdict.missing == []
    assert [view.state for view in verdict.ranks] == ["ended", "gone", "ended"]
    assert [view.box.last_complete_step for view in verdict.ranks] == [3, 1, 3]
    assert verdict.first == verdict.behind == [1]
    assert verdict.summary == "rank 1 stopped first, at step 2: gradients ready (left no word)"
    marks = [mark.phase for mark in verdict.ranks[0].box.marks if mark.step == 2]
    assert marks[-2:] == ["step_end", "merge"] or marks[-3:] == ["step_end", "merge", "merged"]


def test_all_ranks_count_one_life(tmp_path: Path) -> None:
    for life in (1, 2):
        on_ranks(2, _train_named, str(tmp_path), 2 * life - 2)
    for rank in (0, 1):
        folder = tmp_path / "r" / f"rank_{rank}"
        assert read_box(folder / "blackbox.bin").life == 2
        older = read_box(folder / "blackbox_life1.bin")
        assert (older.life, older.last_complete_step) == (1, 3)
        lives = [record for record in read_jsonl(folder / "scalars.jsonl") if "record" in record]
        assert [(record["life"], record["resumed_step"]) for record in lives] == [(1, 0), (2, 2)]


def _train_named(directory: str, resumed_step: int) -> str:
    return _train(directory, None, resumed_step, run_name="r")
