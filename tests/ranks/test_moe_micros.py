"""moe/max_vio_micro: a micro-batch's counts are those of all ranks, whatever each of them has of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks.gloo import on_ranks

EXPERTS, STEPS = 6, 4


def _counts(step: int, micro: int, data_rank: int) -> Any:
    return np.random.default_rng([step, micro, data_rank]).integers(0, 9, EXPERTS)


def _micros(kind: str, step: int, data_rank: int) -> int:
    """How many micro-batches a rank has in a step."""
    if kind == "many":
        return 5 if step == 2 and data_rank == 1 else 2
    return 1 + (step + data_rank) % 3 if kind == "differ" else 3


def _train(kind: str, directory: str) -> list[list[dict[str, Any]]]:
    """Steps of counts that are handed over; what rank 0's files say."""
    import torch
    import torch.distributed as distributed

    import trainmon
    from trainmon.sinks.jsonl import read_jsonl

    rank, world = distributed.get_rank(), distributed.get_world_size()
    data_rank = rank // 2 if kind == "twice" else rank
    model = torch.nn.Linear(1, 1)
    config = {
        "output_dir": directory,
        "run_name": "r",
        "sinks": ["jsonl"],
        "moe": {"micros": 3},
    }
    told = {"data_rank": data_rank} if kind == "twice" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with trainmon.attach(model, optimizer, config, **told) as monitor:
        for step in range(STEPS):
            for micro in range(_micros(kind, step, data_rank)):
                if kind == "own":  # after dispatch: this rank's experts, of everybody's tokens
                    share = EXPERTS // world
                    total = sum(_counts(step, micro, other) for other in range(world))
                    mine = total[rank * share : (rank + 1) * share]
                    monitor.experts("x", counts=mine, first_expert=rank * share, num_experts=EXPERTS)
                else:
                    half = _counts(step, micro, data_rank) // 2  # two calls of the layer
                    monitor.experts("x", counts=half, num_experts=EXPERTS)
                    monitor.experts("x", counts=_counts(step, micro, data_rank) - half)
                monitor.micro_end()
            monitor.step_end()
    if rank:
        return []
    place = Path(directory) / "r/rank_0"
    scalars = [one for one in read_jsonl(place / "scalars.jsonl") if "step" in one]
    return [scalars, [one for one in read_jsonl(place / "events.jsonl") if "level" in one]]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("alike", 2), ("alike", 4), ("differ", 2), ("differ", 4), ("twice", 4), ("own", 2), ("many", 2)],
)
def test_counts_of_a_micro_batch_are_those_of_all_ranks(kind: str, ranks: int, tmp_path: Path) -> None:
    scalars, events = on_ranks(ranks, _train, kind, str(tmp_path), timeout=60)[0]
    data = ranks // 2 if kind == "twice" else ranks
    assert len(scalars) == STEPS
    for step, record in enumerate(scalars[1:], start=1):  # a layer has its place from the second report on
        micros = [_micros(kind, step, rank) for rank in range(data)]
        sums = [
            sum(_counts(step, micro, rank) for rank in range(data) if micro < micros[rank])
            for micro in range(max(micros))
        ]
        total = np.sum(sums, axis=0)
        assert record["moe/max_vio/x"] == pytest.approx(total.max() / total.mean() - 1), step
        if len(sums) > 3:
            assert record.get("moe/max_vio_micro/x") is None, "of some there are no counts"
            continue
        expected = max(counts.max() / counts.mean() - 1 for counts in sums)
        assert record["moe/max_vio_micro/x"] == pytest.approx(expected), step
    said = [one["text"] for one in events if one["kind"] == "micro_batches_not_told_apart"]
    assert not [one for one in events if one["kind"] in ("internal_error", "probe_failed", "ranks_lost")]
    if kind == "many":
        (text,) = said
        assert "steps have 5 micro-batches and moe.micros is 3" in text
    else:
        assert not said
