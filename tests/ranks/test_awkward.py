"""What loops of many ranks do beside the straight way: accumulation without synchronisation, empty shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.gloo import on_ranks
from trainmon.sinks.jsonl import read_jsonl

STEPS, BATCH, WIDTH = 3, 6, 5


def train(directory: str, kind: str) -> list[dict[str, Any]]:
    """Three steps of two micro-batches each; the run's scalars (rank 0's). `kind`: single, no_sync, fsdp2."""
    import contextlib

    import torch
    import torch.distributed as distributed
    from torch import nn

    import trainmon

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 1))
    rank, world = (0, 1) if kind == "single" else (distributed.get_rank(), distributed.get_world_size())
    if kind == "no_sync":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(STEPS, 2, BATCH, WIDTH)
    share = BATCH // world
    mine = slice(rank * share, (rank + 1) * share)
    keys = {
        "output_dir": directory,
        "run_name": "r",
        "sinks": {"log": False},
        "weights": {"every": 1},
        "moments": {"every": 1},
        "updates": {"every": 1},
    }
    with trainmon.attach(model, optimizer, keys) as mon:
        for step in range(STEPS):
            for micro in range(2):
                alone = kind == "no_sync" and micro == 0
                with model.no_sync() if alone else contextlib.nullcontext():
                    loss = model(inputs[step, micro, mine]).square().mean()
                    (loss / 2).backward()
                mon.micro_end(loss, share)
            mon.grads_ready(clip_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            mon.step_end()
    if rank:
        return []
    place = Path(directory) / "r/rank_0"
    assert not [event for event in read_jsonl(place / "events.jsonl") if event.get("level") == "error"]
    return [record for record in read_jsonl(place / "scalars.jsonl") if "step" in record]


@pytest.mark.parametrize(("kind", "ranks"), [("no_sync", 2), ("fsdp2", 3)])
def test_the_numbers_of_a_single_process(kind: str, ranks: int, tmp_path: Path) -> None:
    """On three ranks the rows of the last layer, one, leave two of them with an empty shard."""
    expected = train(str(tmp_path / "single"), "single")
    found = on_ranks(ranks, train, str(tmp_path / kind), kind)[0]
    for ours, theirs in zip(found, expected, strict=True):
        for name in (
            "loss/global",
            "loss/gap",
            "grad/norm",
            "grad/clip_coef",
            "weight/norm",
            "moment/norm/exp_avg",
            "moment/norm/exp_avg_sq",
            "update/norm",
            "update/ratio",
        ):
            wanted = theirs[name]
            assert ours[name] == (None if wanted is None else pytest.approx(wanted, rel=5e-6, abs=1e-9)), (
                kind,
                name,
            )
